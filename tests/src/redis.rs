//! A redis-server: filled with known data, and asked for proofs.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::dice::Dice;
use crate::mib::Mib;
use crate::program::{Proc, Program, poll_until, tool};
use crate::resp::{Connection, Reply};
use crate::stage::Stage;

/// Longest wait for one reply: DEBUG DIGEST reads everything.
const REPLY_LIMIT: Duration = Duration::from_secs(120);
/// Bytes of one string value.
const VALUE_BYTES: usize = 4000;

/// Ends the client when it is dropped.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A client connected to a server.
pub struct Redis {
    socket: PathBuf,
    connection: Connection,
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
        let connection = poll_until("redis-server to listen", Duration::from_secs(20), || {
            if proc.poll().is_some() {
                proc.fail("redis-server ended at once");
            }
            Connection::open(socket, REPLY_LIMIT).ok()
        });
        let mut redis = Redis { socket: socket.into(), connection };
        poll_until("redis-server to load its data", REPLY_LIMIT, || {
            (redis.ask(&["PING"]).text() == "PONG").then_some(())
        });
        redis
    }

    /// One command and its reply.
    pub fn ask(&mut self, words: &[&str]) -> Reply {
        let bytes: Vec<&[u8]> = words.iter().map(|word| word.as_bytes()).collect();
        self.connection.request(&bytes);
        let reply = self.connection.send().and_then(|()| self.connection.reply());
        reply.unwrap_or_else(|error| panic!("redis {words:?}: {error}"))
    }

    /// Fills it with strings, hashes, lists and sorted sets which depend on nothing but `size`.
    pub fn fill(&mut self, size: Mib) {
        let count = size.bytes() / (VALUE_BYTES as u64 + 96);
        let mut sent = 0;
        for i in 0..count {
            let (key, value) = (key(i), value(i));
            self.connection.request(&[b"SET", key.as_bytes(), &value]);
            sent += 1;
            if i % 16 == 0 {
                let (group, score) = (format!("group:{}", i % 7), i.to_string());
                let named = |kind: &str| format!("{kind}{group}").into_bytes();
                let key = key.as_bytes();
                self.connection.request(&[b"HSET", &named("h"), key, &value[..32]]);
                self.connection.request(&[b"RPUSH", &named("l"), &value[..64]]);
                self.connection.request(&[b"ZADD", &named("z"), score.as_bytes(), key]);
                sent += 3;
            }
            if i % 256 == 255 || i + 1 == count {
                self.connection.send().expect("redis");
                for _ in 0..std::mem::take(&mut sent) {
                    let reply = self.connection.reply().expect("reply of redis");
                    let well = matches!(&reply, Reply::Number(_)) || reply.text() == "OK";
                    assert!(well, "redis: {reply:?}");
                }
            }
        }
    }

    /// Reads `samples` of the strings that [`Redis::fill`] wrote, all over the place, and compares them.
    pub fn check(&mut self, size: Mib, samples: u64) {
        let count = size.bytes() / (VALUE_BYTES as u64 + 96);
        let mut dice = Dice::new(samples);
        for _ in 0..samples {
            let i = dice.below(count);
            let reply = self.ask(&["GET", &key(i)]);
            assert_eq!(reply, Reply::Bulk(Some(value(i))), "value of {}", key(i));
        }
    }

    /// Reads strings that [`Redis::fill`] wrote while `work` is done, all over the place, and compares them. Returns how long the slowest reply took.
    pub fn check_while(&mut self, size: Mib, work: impl FnOnce()) -> Duration {
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let client = scope.spawn(|| self.check_until(size, &over));
            // Also if the work fails.
            let client_ends = Over(&over);
            work();
            drop(client_ends);
            client.join().expect("a client that finds nothing wrong")
        })
    }

    fn check_until(&mut self, size: Mib, over: &AtomicBool) -> Duration {
        let count = size.bytes() / (VALUE_BYTES as u64 + 96);
        let (mut dice, mut slowest) = (Dice::new(count), Duration::ZERO);
        while !over.load(Ordering::Relaxed) {
            let (i, asked) = (dice.below(count), Instant::now());
            let reply = self.ask(&["GET", &key(i)]);
            slowest = slowest.max(asked.elapsed());
            assert_eq!(reply, Reply::Bulk(Some(value(i))), "value of {}", key(i));
        }
        slowest
    }

    /// DEBUG DIGEST: a checksum over every key and value.
    pub fn digest(&mut self) -> String {
        let digest = self.ask(&["DEBUG", "DIGEST"]).text();
        assert!(digest.len() == 40 && digest.contains(|c| c != '0'), "no digest: {digest}");
        digest
    }

    /// BGSAVE, waited for. Panics if the snapshot failed.
    pub fn background_save(&mut self) {
        let before = self.saves();
        self.ask(&["BGSAVE"]);
        let info = poll_until("BGSAVE to end", REPLY_LIMIT, || {
            let info = self.ask(&["INFO", "persistence"]).text();
            info.contains("rdb_bgsave_in_progress:0").then_some(info)
        });
        assert!(info.contains("rdb_last_bgsave_status:ok"), "{info}");
        assert_eq!(self.saves(), before + 1, "{info}");
    }

    /// How many snapshots were made.
    pub fn saves(&mut self) -> u64 {
        let info = self.ask(&["INFO", "persistence"]).text();
        let saves = info.lines().find_map(|line| line.strip_prefix("rdb_saves:"));
        saves.and_then(|saves| saves.trim().parse().ok()).unwrap_or_else(|| panic!("{info}"))
    }

    /// The digest of data of this size ([`Redis::fill`]), by a server without gms.
    pub fn digest_without_gms(stage: &Stage, size: Mib) -> String {
        let (server, socket) = Redis::server(stage, "native");
        let mut proc = server.spawn();
        let mut redis = Redis::connect(&mut proc, &socket);
        redis.fill(size);
        let digest = redis.digest();
        redis.shut_down();
        proc.finish().expect_code(0);
        digest
    }

    /// The digest of the snapshot that the server of this name has made last, by another one, without gms, which loads it.
    pub fn digest_of_snapshot(stage: &Stage, name: &str) -> String {
        let (server, _) = Redis::server(stage, name);
        let socket = stage.path("reader.sock");
        let server = server.args(["--unixsocket".to_string(), socket.display().to_string()]);
        let mut proc = server.spawn();
        let mut redis = Redis::connect(&mut proc, &socket);
        let digest = redis.digest();
        redis.shut_down();
        proc.finish().expect_code(0);
        digest
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
        self.connection.request(&[b"SHUTDOWN", b"NOSAVE"]);
        self.connection.send().expect("redis SHUTDOWN");
    }
}

fn key(i: u64) -> String {
    format!("key:{i:08}")
}

fn value(i: u64) -> Vec<u8> {
    let mut dice = Dice::new(i);
    (0..VALUE_BYTES / 8).flat_map(|_| dice.bits().to_le_bytes()).collect()
}
