//! Serves the counters over HTTP: `GET /metrics`, one client at a time, each with a deadline.
//!
//! Written out rather than taken from a library: it is one fixed answer, and the small servers which were looked at
//! (tiny_http) have no deadline for slow clients.

use crate::limits::{METRICS_REQUEST_MAX, METRICS_TIMEOUT};
use crate::stats::Stats;
use crate::stop::Stop;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A thread which serves metrics until it is asked to stop.
#[derive(Debug)]
pub struct Metrics {
    /// Where it listens.
    pub addr: SocketAddr,
    thread: JoinHandle<()>,
}

impl Metrics {
    /// Listens on `addr`.
    pub fn spawn(addr: SocketAddr, stats: Arc<Stats>, stop: Arc<Stop>) -> io::Result<Self> {
        let listener = TcpListener::bind(addr)?;
        listener.set_nonblocking(true)?;
        let addr = listener.local_addr()?;
        let serve = move || {
            if let Err(error) = serve(&listener, &stats, &stop) {
                tracing::error!(%error, "metrics ended");
            }
        };
        let thread = std::thread::Builder::new().name("metrics".into()).spawn(serve)?;
        Ok(Self { addr, thread })
    }

    /// Waits for its end, after the request to stop.
    pub fn join(self) {
        if self.thread.join().is_err() {
            tracing::error!("the metrics thread panicked");
        }
    }
}

fn serve(listener: &TcpListener, stats: &Stats, stop: &Stop) -> io::Result<()> {
    while stop.requested().is_none() {
        let mut fds = [listener.as_fd(), stop.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        match listener.accept() {
            Ok((stream, peer)) => {
                if let Err(error) = answer(stream, stats, Instant::now() + METRICS_TIMEOUT) {
                    tracing::debug!(%peer, %error, "metrics not sent");
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // Out of descriptors, or the client is gone: the next one may do better, but not at once.
            Err(error) => {
                tracing::warn!(%error, "cannot accept a metrics client");
                let mut fds = [PollFd::new(stop.as_fd(), PollFlags::POLLIN)];
                poll(&mut fds, 100u8)?;
            }
        }
    }
    Ok(())
}

fn answer(mut stream: TcpStream, stats: &Stats, deadline: Instant) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    let request = read_request(&mut stream, deadline)?;
    let line = request.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|&byte| byte == b' ');
    let (status, body) = match (words.next(), words.next()) {
        (Some(b"GET"), Some(b"/metrics")) => ("200 OK", stats.prometheus()),
        (Some(b"GET"), Some(_)) => ("404 Not Found", "The metrics are at /metrics.\n".into()),
        _ => ("405 Method Not Allowed", "Only GET is served.\n".into()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
         Allow: GET\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.set_write_timeout(Some(left(deadline)?))?;
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

/// Reads up to the empty line which ends a request's head.
fn read_request(stream: &mut TcpStream, deadline: Instant) -> io::Result<Vec<u8>> {
    let (mut request, mut chunk) = (Vec::new(), [0; 1024]);
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        stream.set_read_timeout(Some(left(deadline)?))?;
        let read = stream.read(&mut chunk)?;
        request.extend_from_slice(&chunk[..read]);
        if read == 0 || request.len() > METRICS_REQUEST_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "no HTTP request"));
        }
    }
    Ok(request)
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(addr: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(addr).expect("connect");
        stream.write_all(request.as_bytes()).expect("write");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("read");
        answer
    }

    #[test]
    fn metrics_are_served_and_slow_clients_dropped() {
        let (stats, stop) = (Arc::new(Stats::default()), Arc::new(Stop::new().expect("eventfd")));
        stats.puts.add(3);
        let metrics =
            Metrics::spawn(([127, 0, 0, 1], 0).into(), stats, stop.clone()).expect("listen");
        // Says nothing: is waited for until its deadline, and no longer.
        let silent = TcpStream::connect(metrics.addr).expect("connect");
        let good = ask(metrics.addr, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(
            good.starts_with("HTTP/1.1 200 OK\r\n")
                && good.contains("\ngms_agent_page_puts_total 3\n")
        );
        assert!(ask(metrics.addr, "GET / HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 404"));
        assert!(ask(metrics.addr, "POST /metrics HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 405"));
        drop(silent);
        stop.request(Duration::ZERO);
        metrics.join();
    }
}
