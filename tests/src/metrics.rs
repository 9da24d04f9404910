//! What agents tell of themselves over HTTP.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

/// A port that was free a moment ago; agents have no other way to be told "any" for metrics and to say which.
pub fn free_port() -> u16 {
    let socket = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    socket.expect("a free port").port()
}

/// The value of a metric without labels, or the sum over its labels.
pub fn metric(port: u16, name: &str) -> Option<f64> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.take(1 << 20).read_to_string(&mut text).ok()?;
    let of_name = |line: &str| {
        let rest = line.strip_prefix(name)?;
        let value = rest.starts_with([' ', '{']).then(|| rest.rsplit(' ').next())??;
        value.parse::<f64>().ok()
    };
    let values: Vec<f64> = text.lines().filter_map(of_name).collect();
    (!values.is_empty()).then(|| values.iter().sum())
}
