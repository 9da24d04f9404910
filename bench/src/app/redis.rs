//! redis, and a client which asks for some keys much more often than for others. The client's own memory is not limited.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use gms_tests::{Connection, Dice, mix};
use xxhash_rust::xxh3::Xxh3;

use crate::error::{BenchError, Trying};

/// Bytes of a value.
pub(super) const VALUE: usize = 1024;
/// Bytes of text of which values are parts.
const TEXT: usize = 1 << 16;
/// Requests that are sent together.
const BATCH: usize = 16;
/// Requests whose replies may be awaited: so many that neither end waits for the other to wake.
const AWAITED_MAX: usize = 64;
/// Of so many requests one is a SET.
const SET_EVERY: usize = 10;
/// The skew of YCSB.
const THETA: f64 = 0.99;
/// Lines which a server may print before it listens.
const LINES_MAX: usize = 100;
/// Longest that a reply may take.
const REPLY_LIMIT: Duration = Duration::from_secs(600);

/// A server's job.
pub(crate) struct Job {
    /// redis-server.
    pub program: PathBuf,
    /// Where it listens.
    pub socket: PathBuf,
    /// Keys.
    pub keys: usize,
    /// Requests that are timed, after a third of so many to warm up.
    pub requests: usize,
}

impl Job {
    /// The server's command line.
    pub(crate) fn server(&self) -> Vec<OsString> {
        let options = ["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"];
        let mut line = vec![self.program.clone().into()];
        line.extend(options.map(OsString::from));
        line.push(self.socket.clone().into());
        line
    }

    /// Loads a server which has just been started, asks it, and ends it: time and digest of the replies.
    pub(crate) fn talk(&self, server: &mut Child) -> Result<(f64, u64), BenchError> {
        let printed = server.stdout.take().map(BufReader::new);
        let mut printed = printed.ok_or_else(|| failed("has no output".into()))?;
        let ready = |line: &String| line.to_lowercase().contains("ready to accept");
        let lines = printed.by_ref().lines().take(LINES_MAX).map_while(Result::ok);
        if !{ lines }.any(|line| ready(&line)) {
            return Err(failed("did not say that it is ready".into()));
        }
        let mut client = Client::connect(&self.socket, self.keys)?;
        client.load()?;
        let zipf = Zipf::new(self.keys);
        client.ask(&zipf, self.requests / 3)?;
        let start = Instant::now();
        client.ask(&zipf, self.requests)?;
        let seconds = start.elapsed().as_secs_f64();
        client.end()?;
        Ok((seconds, client.digest.digest()))
    }
}

fn failed(problem: String) -> BenchError {
    BenchError::Program { program: "redis-server".into(), problem }
}

/// A request whose reply is awaited.
#[derive(Clone, Copy)]
enum Request {
    Set,
    Get { key: usize, version: u32 },
}

struct Client {
    server: Connection,
    text: Vec<u8>,
    /// How often each key was set.
    versions: Vec<u32>,
    digest: Xxh3,
    dice: Dice,
    /// Requests that are to be sent together.
    batched: usize,
    awaited: VecDeque<Request>,
}

impl Client {
    fn connect(socket: &Path, keys: usize) -> Result<Client, BenchError> {
        let server = Connection::open(socket, REPLY_LIMIT).trying("cannot reach redis-server")?;
        let mut dice = Dice::of_thread(1, 0);
        let mut text = String::with_capacity(TEXT + VALUE);
        while text.len() < TEXT + VALUE {
            // Compresses to a half, as text does.
            let _ = write!(
                text,
                "{{\"name\": \"{:012x}\", \"n\": {}}}, ",
                dice.bits() >> 16,
                text.len()
            );
        }
        let text = text.into_bytes();
        let versions = vec![0; keys];
        let (digest, awaited) = (Xxh3::new(), VecDeque::new());
        Ok(Client { server, text, versions, digest, dice, batched: 0, awaited })
    }

    fn load(&mut self) -> Result<(), BenchError> {
        (0..self.versions.len()).try_for_each(|key| self.set(key))?;
        self.settle()
    }

    fn ask(&mut self, zipf: &Zipf, requests: usize) -> Result<(), BenchError> {
        for _ in 0..requests {
            let key = zipf.key(&mut self.dice);
            match self.dice.place(SET_EVERY) {
                0 => self.set(key)?,
                _ => self.get(key)?,
            }
        }
        self.settle()
    }

    fn set(&mut self, key: usize) -> Result<(), BenchError> {
        self.versions[key] += 1;
        let head = head(key, self.versions[key]);
        let body = &self.text[place(key, self.versions[key])..][..VALUE - head.len()];
        self.server.begin(3);
        self.server.word(&[b"SET"]);
        self.server.word(&[name(key).as_bytes()]);
        self.server.word(&[head.as_bytes(), body]);
        self.queue(Request::Set)
    }

    fn get(&mut self, key: usize) -> Result<(), BenchError> {
        self.server.request(&[b"GET", name(key).as_bytes()]);
        self.queue(Request::Get { key, version: self.versions[key] })
    }

    fn queue(&mut self, request: Request) -> Result<(), BenchError> {
        self.awaited.push_back(request);
        self.batched += 1;
        if self.batched < BATCH {
            return Ok(());
        }
        self.send()?;
        self.receive(AWAITED_MAX - BATCH)
    }

    fn send(&mut self) -> Result<(), BenchError> {
        self.server.send().trying("cannot send to redis-server")?;
        self.batched = 0;
        Ok(())
    }

    /// Sends what is left and awaits all replies.
    fn settle(&mut self) -> Result<(), BenchError> {
        self.send()?;
        self.receive(0)
    }

    /// Checks replies until no more than `left` are awaited.
    fn receive(&mut self, left: usize) -> Result<(), BenchError> {
        while self.awaited.len() > left
            && let Some(request) = self.awaited.pop_front()
        {
            match request {
                Request::Set => self.expect(b"+OK\r\n")?,
                Request::Get { key, version } => {
                    self.expect(format!("${VALUE}\r\n").as_bytes())?;
                    let head = head(key, version);
                    self.expect(head.as_bytes())?;
                    let (at, len) = (place(key, version), VALUE - head.len());
                    let body = self.text[at..at + len].to_vec();
                    self.expect(&body)?;
                    self.expect(b"\r\n")?;
                }
            }
        }
        Ok(())
    }

    fn expect(&mut self, expected: &[u8]) -> Result<(), BenchError> {
        let mut reply = [0; VALUE];
        let reply = &mut reply[..expected.len()];
        self.server.take(reply).trying("redis-server does not answer")?;
        self.digest.update(reply);
        match reply == expected {
            true => Ok(()),
            false => Err(BenchError::WrongBytes(format!(
                "redis answered {:?} instead of {:?}",
                String::from_utf8_lossy(reply),
                String::from_utf8_lossy(expected)
            ))),
        }
    }

    /// Ends the server, which closes the connection.
    fn end(&mut self) -> Result<(), BenchError> {
        self.server.request(&[b"SHUTDOWN", b"NOSAVE"]);
        self.send()?;
        match self.server.reply() {
            Ok(reply) => Err(failed(format!("does not end: {}", reply.text()))),
            Err(_) => Ok(()),
        }
    }
}

fn name(key: usize) -> String {
    format!("key:{key:08}")
}

/// Begins the value of a key.
fn head(key: usize, version: u32) -> String {
    format!("{key:08}:{version:08}:")
}

/// Where in the text the rest of the value is.
fn place(key: usize, version: u32) -> usize {
    mix((key as u64) << 32 | u64::from(version)) as usize % TEXT
}

/// Numbers of which the few first come often (Gray and others 1994, as in YCSB).
struct Zipf {
    count: usize,
    zeta: f64,
    eta: f64,
    /// The key of each rank: each key has one.
    keys: Vec<u32>,
}

impl Zipf {
    fn new(count: usize) -> Zipf {
        let zeta = |n: usize| (1..=n).map(|i| (i as f64).powf(-THETA)).sum::<f64>();
        let all = zeta(count);
        let eta = (1.0 - (2.0 / count as f64).powf(1.0 - THETA)) / (1.0 - zeta(2) / all);
        let mut keys: Vec<u32> = (0..count as u32).collect();
        Dice::new(count as u64).shuffle(&mut keys);
        Zipf { count, zeta: all, eta, keys }
    }

    /// 0 comes most often.
    fn rank(&self, dice: &mut Dice) -> usize {
        let chance = (dice.bits() >> 11) as f64 / (1u64 << 53) as f64;
        let place = chance * self.zeta;
        if place < 1.0 {
            return 0;
        }
        if place < 1.0 + 0.5f64.powf(THETA) {
            return 1;
        }
        let rank = (self.eta * chance - self.eta + 1.0).powf(1.0 / (1.0 - THETA));
        ((self.count as f64 * rank) as usize).min(self.count - 1)
    }

    /// The same, with the frequent keys anywhere among the others.
    fn key(&self, dice: &mut Dice) -> usize {
        self.keys[self.rank(dice)] as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_keys_come_often() {
        let (zipf, mut dice) = (Zipf::new(10_000), Dice::of_thread(3, 0));
        let mut counts = vec![0u32; 10_000];
        (0..100_000).for_each(|_| counts[zipf.rank(&mut dice)] += 1);
        // 1 / zeta(10 000) is 0.1.
        assert!((8_500..11_500).contains(&counts[0]), "{}", counts[0]);
        assert!(counts[..100].iter().sum::<u32>() > 45_000);
        assert!(counts[5_000..].iter().sum::<u32>() > 3_000, "all come");
        let mut keys: Vec<u32> = zipf.keys.clone();
        keys.sort_unstable();
        assert!(keys.into_iter().eq(0..10_000), "each key has a rank");
    }
}
