//! A redis-server and a client of its protocol: enough to fill it with known data and to ask for proofs.

use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::pages::Mib;
use crate::program::{Proc, Program, poll_until, tool};
use crate::stage::Stage;

/// Longest wait for one reply: DEBUG DIGEST reads everything.
const REPLY_LIMIT: Duration = Duration::from_secs(120);
/// Bytes of one string value.
const VALUE_BYTES: usize = 4000;
/// Longest reply accepted.
const REPLY_BYTES_MAX: usize = 512 << 20;

/// A reply of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// `+OK` and the like.
    Simple(String),
    /// A number.
    Number(i64),
    /// Bytes; `None` for no such key.
    Bulk(Option<Vec<u8>>),
    /// A list.
    List(Vec<Reply>),
}

impl Reply {
    /// As text, whatever it is.
    pub fn text(&self) -> String {
        match self {
            Reply::Simple(text) => text.clone(),
            Reply::Number(number) => number.to_string(),
            Reply::Bulk(bytes) => {
                String::from_utf8_lossy(bytes.as_deref().unwrap_or_default()).into_owned()
            }
            Reply::List(list) => list.iter().map(Reply::text).collect::<Vec<_>>().join("\n"),
        }
    }
}

/// A client connected to a server.
pub struct Redis {
    socket: PathBuf,
    reader: BufReader<UnixStream>,
    writer: BufWriter<UnixStream>,
}

impl Redis {
    /// The server's command line: no snapshots by itself, on a socket in the directory of `stage`.
    pub fn server(stage: &Stage, name: &str) -> (Program, PathBuf) {
        let socket = stage.path(&format!("{name}.sock"));
        let argv = [
            tool("redis-server").into(),
            "--port".into(),
            "0".into(),
            "--unixsocket".into(),
            socket.clone().into_os_string(),
        ];
        let dump = format!("{name}.rdb");
        let program = Program::new(argv)
            .args([
                "--save",
                "",
                "--appendonly",
                "no",
                "--enable-debug-command",
                "yes",
                "--dbfilename",
                &dump,
                "--dir",
            ])
            .args([stage.dir().display()])
            .dir(stage.dir())
            .limit(Duration::from_secs(300));
        (program, socket)
    }

    /// Connects to the server that `proc` runs, once it answers.
    pub fn connect(proc: &mut Proc, socket: &Path) -> Redis {
        let stream = poll_until("redis-server to listen", Duration::from_secs(20), || {
            if proc.poll().is_some() {
                proc.fail("redis-server ended at once");
            }
            UnixStream::connect(socket).ok()
        });
        stream.set_read_timeout(Some(REPLY_LIMIT)).expect("a time-out");
        stream.set_write_timeout(Some(REPLY_LIMIT)).expect("a time-out");
        let reader = BufReader::new(stream.try_clone().expect("a second descriptor"));
        let mut redis = Redis {
            socket: socket.into(),
            reader,
            writer: BufWriter::with_capacity(1 << 20, stream),
        };
        poll_until("redis-server to load its data", REPLY_LIMIT, || {
            (redis.ask(&["PING"]).text() == "PONG").then_some(())
        });
        redis
    }

    fn send(&mut self, words: &[&[u8]]) -> std::io::Result<()> {
        write!(self.writer, "*{}\r\n", words.len())?;
        for word in words {
            write!(self.writer, "${}\r\n", word.len())?;
            self.writer.write_all(word)?;
            self.writer.write_all(b"\r\n")?;
        }
        Ok(())
    }

    /// Errors of the server come as simple replies.
    fn receive(&mut self) -> std::io::Result<Reply> {
        let mut line = String::new();
        self.reader.read_line(&mut line)?;
        let wrong = || std::io::Error::other(format!("not a reply of redis: {line:?}"));
        let (kind, rest) = line.trim_end().split_at_checked(1).ok_or_else(wrong)?;
        let number = || rest.parse::<i64>().map_err(|_| wrong());
        Ok(match kind {
            "+" | "-" => Reply::Simple(rest.to_string()),
            ":" => Reply::Number(number()?),
            "$" if number()? < 0 => Reply::Bulk(None),
            "$" => {
                let length = usize::try_from(number()?).map_err(|_| wrong())?;
                assert!(length <= REPLY_BYTES_MAX, "a reply of {length} bytes");
                let mut bytes = vec![0; length + 2];
                self.reader.read_exact(&mut bytes)?;
                bytes.truncate(length);
                Reply::Bulk(Some(bytes))
            }
            "*" => Reply::List((0..number()?).map(|_| self.receive()).collect::<Result<_, _>>()?),
            _ => return Err(wrong()),
        })
    }

    /// One command and its reply.
    pub fn ask(&mut self, words: &[&str]) -> Reply {
        let words: Vec<&[u8]> = words.iter().map(|word| word.as_bytes()).collect();
        self.send(&words)
            .and_then(|()| self.writer.flush())
            .and_then(|()| self.receive())
            .unwrap_or_else(|error| {
                panic!(
                    "redis {:?}: {error}",
                    words.iter().map(|w| String::from_utf8_lossy(w)).collect::<Vec<_>>()
                )
            })
    }

    /// Fills it with strings, hashes, lists and sorted sets which depend on nothing but `size`.
    pub fn fill(&mut self, size: Mib) {
        let count = size.bytes() / (VALUE_BYTES as u64 + 96);
        let mut sent = 0;
        for i in 0..count {
            let (key, value) = (key(i), value(i));
            self.send(&[b"SET", key.as_bytes(), &value]).expect("redis SET");
            sent += 1;
            if i % 16 == 0 {
                let (group, score) = (format!("group:{}", i % 7), i.to_string());
                self.send(&[b"HSET", format!("h{group}").as_bytes(), key.as_bytes(), &value[..32]])
                    .expect("redis HSET");
                self.send(&[b"RPUSH", format!("l{group}").as_bytes(), &value[..64]])
                    .expect("redis RPUSH");
                self.send(&[
                    b"ZADD",
                    format!("z{group}").as_bytes(),
                    score.as_bytes(),
                    key.as_bytes(),
                ])
                .expect("redis ZADD");
                sent += 3;
            }
            if i % 256 == 255 || i + 1 == count {
                self.writer.flush().expect("redis");
                for _ in 0..std::mem::take(&mut sent) {
                    let reply = self.receive().expect("reply of redis");
                    assert!(
                        matches!(&reply, Reply::Number(_)) || reply.text() == "OK",
                        "redis: {reply:?}"
                    );
                }
            }
        }
    }

    /// Reads `samples` of the strings that [`Redis::fill`] wrote, all over the place, and compares them.
    pub fn check(&mut self, size: Mib, samples: u64) {
        let count = size.bytes() / (VALUE_BYTES as u64 + 96);
        for n in 0..samples {
            let i = n.wrapping_mul(0x9E37_79B9_7F4A_7C15) % count;
            let reply = self.ask(&["GET", &key(i)]);
            assert_eq!(reply, Reply::Bulk(Some(value(i))), "value of {}", key(i));
        }
    }

    /// DEBUG DIGEST: a checksum over every key and value.
    pub fn digest(&mut self) -> String {
        let digest = self.ask(&["DEBUG", "DIGEST"]).text();
        assert!(digest.len() == 40 && digest.contains(|c| c != '0'), "no digest: {digest}");
        digest
    }

    /// BGSAVE, waited for. Panics if the snapshot failed.
    pub fn background_save(&mut self) {
        self.ask(&["BGSAVE"]);
        let info = poll_until("BGSAVE to end", REPLY_LIMIT, || {
            let info = self.ask(&["INFO", "persistence"]).text();
            info.contains("rdb_bgsave_in_progress:0").then_some(info)
        });
        assert!(
            info.contains("rdb_last_bgsave_status:ok") && info.contains("rdb_saves:1"),
            "{info}"
        );
    }

    /// redis-benchmark against database 1, which is emptied afterwards.
    pub fn benchmark(&mut self, requests: u32) {
        let argv =
            [tool("redis-benchmark").into(), "-s".into(), self.socket.clone().into_os_string()];
        Program::new(argv)
            .args([
                "-q",
                "--dbnum",
                "1",
                "-t",
                "set,get,incr,lpush,rpop,sadd,hset,zadd,mset",
                "-r",
                "20000",
                "-n",
            ])
            .args([requests])
            .finish()
            .expect_code(0);
        for command in [&["SELECT", "1"][..], &["FLUSHDB"], &["SELECT", "0"]] {
            assert_eq!(self.ask(command).text(), "OK");
        }
    }

    /// Ends the server. It closes the connection instead of answering.
    pub fn shut_down(mut self) {
        let sent = self.send(&[b"SHUTDOWN", b"NOSAVE"]).and_then(|()| self.writer.flush());
        sent.expect("redis SHUTDOWN");
    }
}

fn key(i: u64) -> String {
    format!("key:{i:08}")
}

fn value(i: u64) -> Vec<u8> {
    let mut state = i.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut bytes = Vec::with_capacity(VALUE_BYTES);
    while bytes.len() < VALUE_BYTES {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes
}
