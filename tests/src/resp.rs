//! A client of redis's protocol (RESP 2), for tests and benchmarks: requests are gathered and sent together, replies come in their order.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

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

/// A connection to a server.
pub struct Connection {
    from: BufReader<UnixStream>,
    to: UnixStream,
    batch: Vec<u8>,
}

impl Connection {
    /// To a socket in the file system. No reply may take longer than the limit.
    pub fn open(socket: &Path, limit: Duration) -> io::Result<Connection> {
        let to = UnixStream::connect(socket)?;
        to.set_read_timeout(Some(limit))?;
        to.set_write_timeout(Some(limit))?;
        Ok(Connection { from: BufReader::new(to.try_clone()?), to, batch: Vec::new() })
    }

    /// Adds a request to those that are sent next.
    pub fn request(&mut self, words: &[&[u8]]) {
        self.begin(words.len());
        words.iter().for_each(|word| self.word(&[word]));
    }

    /// Begins a request of so many words, each of which is added by [`Connection::word`].
    pub fn begin(&mut self, words: usize) {
        self.batch.extend_from_slice(format!("*{words}\r\n").as_bytes());
    }

    /// Adds a word, which may be in parts.
    pub fn word(&mut self, parts: &[&[u8]]) {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        self.batch.extend_from_slice(format!("${length}\r\n").as_bytes());
        parts.iter().for_each(|part| self.batch.extend_from_slice(part));
        self.batch.extend_from_slice(b"\r\n");
    }

    /// Sends the requests.
    pub fn send(&mut self) -> io::Result<()> {
        self.to.write_all(&self.batch)?;
        self.batch.clear();
        Ok(())
    }

    /// The next reply. Errors of the server come as simple ones.
    pub fn reply(&mut self) -> io::Result<Reply> {
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        let wrong = || io::Error::other(format!("not a reply of redis: {line:?}"));
        let (kind, rest) = line.trim_end().split_at_checked(1).ok_or_else(wrong)?;
        let number = || rest.parse::<i64>().map_err(|_| wrong());
        Ok(match kind {
            "+" | "-" => Reply::Simple(rest.to_string()),
            ":" => Reply::Number(number()?),
            "$" if number()? < 0 => Reply::Bulk(None),
            "$" => {
                let length = usize::try_from(number()?).map_err(|_| wrong())?;
                if length > REPLY_BYTES_MAX {
                    return Err(wrong());
                }
                let mut bytes = vec![0; length + 2];
                self.from.read_exact(&mut bytes)?;
                bytes.truncate(length);
                Reply::Bulk(Some(bytes))
            }
            "*" => Reply::List((0..number()?).map(|_| self.reply()).collect::<Result<_, _>>()?),
            _ => return Err(wrong()),
        })
    }

    /// The next bytes of the replies, as they come: as many as there is room for.
    pub fn take(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.from.read_exact(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn requests_and_replies_are_those_of_the_protocol() {
        let socket = std::env::temp_dir().join(format!("gms-resp-{}", std::process::id()));
        let server = UnixListener::bind(&socket).expect("a socket");
        let mut client = Connection::open(&socket, Duration::from_secs(10)).expect("connected");
        std::fs::remove_file(&socket).expect("removed");
        let mut peer = server.accept().expect("accepted").0;
        client.request(&[b"GET", b"a b"]);
        client.begin(1);
        client.word(&[b"PI", b"NG"]);
        client.send().expect("sent");
        let mut seen = [0; 36];
        peer.read_exact(&mut seen).expect("all of it");
        assert_eq!(&seen, b"*2\r\n$3\r\nGET\r\n$3\r\na b\r\n*1\r\n$4\r\nPING\r\n");
        let replies =
            b"+OK\r\n-ERR no\r\n:-7\r\n$-1\r\n$4\r\na\r\nb\r\n*2\r\n:1\r\n$0\r\n\r\n?\r\n";
        peer.write_all(replies).expect("written");
        let bulk = |bytes: &[u8]| Reply::Bulk(Some(bytes.to_vec()));
        for expected in [
            Reply::Simple("OK".into()),
            Reply::Simple("ERR no".into()),
            Reply::Number(-7),
            Reply::Bulk(None),
            bulk(b"a\r\nb"),
            Reply::List(vec![Reply::Number(1), bulk(b"")]),
        ] {
            assert_eq!(client.reply().expect("a reply"), expected);
        }
        assert!(client.reply().is_err(), "it is none");
        drop(peer);
        assert!(client.reply().is_err(), "it has ended");
    }
}
