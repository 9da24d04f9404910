//! Serves the counters over HTTP: `GET /metrics`, to several clients at a time, each with a deadline.
//!
//! Written out rather than taken from a library: it is one fixed answer, and the small servers which were looked at
//! (tiny_http) have no deadline for slow clients. One thread polls all of them, so that whoever says nothing, or
//! reads nothing, delays nobody.

use crate::limits::{METRICS_CLIENTS_MAX, METRICS_REQUEST_MAX, METRICS_TIMEOUT};
use crate::stats::{Format, Report};
use crate::stop::Stop;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Pause after the system had no descriptor for another client.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// A thread which serves metrics until it is asked to stop.
#[derive(Debug)]
pub struct Metrics {
    /// Where it listens.
    pub addr: SocketAddr,
    stop: Arc<Stop>,
    thread: JoinHandle<()>,
}

impl Metrics {
    /// Listens on `addr`.
    pub fn spawn(addr: SocketAddr, report: Report) -> io::Result<Self> {
        let stop = Arc::new(Stop::new()?);
        let stopped = stop.clone();
        let listener = TcpListener::bind(addr)?;
        listener.set_nonblocking(true)?;
        let addr = listener.local_addr()?;
        let serve = move || {
            if let Err(error) = serve(&listener, &report, &stopped) {
                tracing::error!(%error, "metrics ended");
            }
        };
        let thread = std::thread::Builder::new().name("metrics".into()).spawn(serve)?;
        Ok(Self { addr, stop, thread })
    }

    /// Ends it.
    pub fn end(self) {
        self.stop.request(Duration::ZERO);
        if self.thread.join().is_err() {
            tracing::error!("the metrics thread panicked");
        }
    }
}

/// A client, from its connection to the end of its answer.
struct Client {
    stream: TcpStream,
    deadline: Instant,
    request: Vec<u8>,
    /// What is left to be sent, once the request has come.
    answer: Option<(Vec<u8>, usize)>,
}

/// Whether a client is still to be served.
#[derive(PartialEq, Eq)]
enum Progress {
    Waits,
    Over,
}

fn serve(listener: &TcpListener, report: &Report, stop: &Stop) -> io::Result<()> {
    // The oldest first.
    let mut clients: VecDeque<Client> = VecDeque::new();
    let mut accept_at = Instant::now();
    while stop.requested().is_none() {
        wait(listener, &clients, stop, accept_at)?;
        let now = Instant::now();
        if now >= accept_at && !accept(listener, &mut clients, now)? {
            accept_at = now + ACCEPT_RETRY;
        }
        clients.retain_mut(|client| {
            let progress = match now < client.deadline {
                true => client.proceed(report),
                false => Err(io::ErrorKind::TimedOut.into()),
            };
            if let Err(error) = &progress {
                tracing::debug!(%error, "metrics not sent");
            }
            matches!(progress, Ok(Progress::Waits))
        });
    }
    Ok(())
}

/// Waits for a client that can go on, a new one, the next deadline or the request to stop.
fn wait(
    listener: &TcpListener,
    clients: &VecDeque<Client>,
    stop: &Stop,
    accept_at: Instant,
) -> io::Result<()> {
    let now = Instant::now();
    let mut fds = vec![PollFd::new(stop.as_fd(), PollFlags::POLLIN)];
    if now >= accept_at {
        fds.push(PollFd::new(listener.as_fd(), PollFlags::POLLIN));
    }
    fds.extend(clients.iter().map(|client| PollFd::new(client.stream.as_fd(), client.wants())));
    let retry = (now < accept_at).then_some(accept_at);
    let deadline = clients.iter().map(|client| client.deadline).chain(retry).min();
    let timeout = deadline.map_or(PollTimeout::NONE, |deadline| {
        // Rounded up, so that it is over when the wait is.
        let ms = deadline.saturating_duration_since(now).as_millis() + 1;
        PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX)
    });
    match poll(&mut fds, timeout) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Takes in all who wait; if there are too many, the oldest must go. False if the system has no descriptor now.
fn accept(
    listener: &TcpListener,
    clients: &mut VecDeque<Client>,
    now: Instant,
) -> io::Result<bool> {
    for _ in 0..METRICS_CLIENTS_MAX {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(true)?;
                if clients.len() >= METRICS_CLIENTS_MAX {
                    clients.pop_front();
                }
                let deadline = now + METRICS_TIMEOUT;
                clients.push_back(Client { stream, deadline, request: Vec::new(), answer: None });
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept a metrics client");
                return Ok(false);
            }
        }
    }
    Ok(true)
}

impl Client {
    fn wants(&self) -> PollFlags {
        if self.answer.is_some() { PollFlags::POLLOUT } else { PollFlags::POLLIN }
    }

    /// Reads and writes as much as is possible now.
    fn proceed(&mut self, report: &Report) -> io::Result<Progress> {
        loop {
            let moved = match &mut self.answer {
                None => self.receive(report),
                Some((answer, sent)) if *sent < answer.len() => {
                    self.stream.write(&answer[*sent..]).map(|written| *sent += written)
                }
                Some(_) => {
                    // What it may still have to say is not read: no reset may overtake the answer.
                    let _ = self.stream.shutdown(std::net::Shutdown::Write);
                    return Ok(Progress::Over);
                }
            };
            match moved {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(Progress::Waits);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Reads up to the empty line which ends a request's head, and makes the answer then.
    fn receive(&mut self, report: &Report) -> io::Result<()> {
        let mut chunk = [0; 1024];
        let read = self.stream.read(&mut chunk)?;
        self.request.extend_from_slice(&chunk[..read]);
        if self.request.windows(4).any(|end| end == b"\r\n\r\n") {
            self.answer = Some((answer(&self.request, report), 0));
        } else if read == 0 || self.request.len() > METRICS_REQUEST_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "no HTTP request"));
        }
        Ok(())
    }
}

/// The answer to a request's head.
fn answer(request: &[u8], report: &Report) -> Vec<u8> {
    let text = String::from_utf8_lossy(request);
    let mut lines = text.split("\r\n");
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = target.split('?').next().unwrap_or_default();
    let format = match lines.any(accepts_open_metrics) {
        true => Format::OpenMetrics,
        false => Format::Prometheus,
    };
    let plain = |text: &str| ("text/plain; charset=utf-8", text.to_owned());
    let (status, (content_type, body)) = match (method, path) {
        ("GET" | "HEAD", "/metrics") => ("200 OK", (format.content_type(), report.text(format))),
        ("GET" | "HEAD", _) => ("404 Not Found", plain("The metrics are at /metrics.\n")),
        _ => ("405 Method Not Allowed", plain("Only GET and HEAD are served.\n")),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\nAllow: GET, HEAD\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    let body = if method == "HEAD" { "" } else { &body };
    [head.as_bytes(), body.as_bytes()].concat()
}

/// Whether a header says that OpenMetrics is understood.
fn accepts_open_metrics(header: &str) -> bool {
    header.split_once(':').is_some_and(|(name, value)| {
        name.eq_ignore_ascii_case("accept") && value.contains("application/openmetrics-text")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Stats;

    fn spawn(stats: Arc<Stats>) -> Metrics {
        let report = Report::of(Arc::default(), vec![stats]);
        Metrics::spawn(([127, 0, 0, 1], 0).into(), report).expect("listen")
    }

    fn ask(addr: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(addr).expect("connect");
        stream.write_all(request.as_bytes()).expect("write");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("read");
        answer
    }

    #[test]
    fn idle_clients_delay_nobody() {
        let stats = Arc::new(Stats::default());
        stats.puts.add(3);
        let metrics = spawn(stats);
        let idle: Vec<TcpStream> = (0..METRICS_CLIENTS_MAX + 6)
            .map(|_| TcpStream::connect(metrics.addr).expect("connect"))
            .collect();
        let good = ask(metrics.addr, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        // The one that came before it is still waited for.
        let mut last = idle.last().expect("many");
        last.set_nonblocking(true).expect("a socket");
        let read = last.read(&mut [0; 10]).map_err(|error| error.kind());
        assert_eq!(read, Err(io::ErrorKind::WouldBlock));
        last.set_nonblocking(false).expect("a socket");
        assert!(good.starts_with("HTTP/1.1 200 OK\r\n"), "{good}");
        assert!(good.contains("\ngms_agent_page_puts_total 3\n"), "{good}");
        // Each is waited for until its deadline, and no longer.
        for mut stream in idle {
            stream.set_read_timeout(Some(METRICS_TIMEOUT * 3)).expect("a time-out");
            // Closed, or reset.
            assert!(!matches!(stream.read(&mut [0; 10]), Ok(1..)));
        }
        metrics.end();
    }

    #[test]
    fn heads_and_queries_are_understood() {
        let stats = Arc::new(Stats::default());
        let metrics = spawn(stats);
        let ask = |request: &str| ask(metrics.addr, &format!("{request}\r\n\r\n"));
        let (whole, head) = (ask("GET /metrics HTTP/1.0"), ask("HEAD /metrics HTTP/1.0"));
        assert!(head.starts_with("HTTP/1.1 200") && head.ends_with("\r\n\r\n"), "{head}");
        let length = |answer: &str| {
            answer.lines().find(|line| line.starts_with("Content-Length")).map(str::to_owned)
        };
        assert_eq!(length(&whole), length(&head));
        assert!(ask("GET /metrics?name[]=up HTTP/1.1").contains("\ngms_agent_frames 0\n"));
        assert!(ask("GET / HTTP/1.0").starts_with("HTTP/1.1 404"));
        assert!(ask("POST /metrics HTTP/1.0").starts_with("HTTP/1.1 405"));
        let open =
            ask("GET /metrics HTTP/1.1\r\naccept: application/openmetrics-text;version=1.0.0");
        assert!(open.contains("Content-Type: application/openmetrics-text;"), "{open}");
        assert!(open.ends_with("# EOF\n"), "{open}");
        metrics.end();
    }
}
