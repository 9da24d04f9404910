//! Throughput of gms-transport with exchanges as large as they come, and nothing behind it.

use std::path::Path;
use std::time::Instant;

use gms_transport::message::{PAGE_LEN, PAGES_MAX, PageDescriptor, Status, WorkloadId};
use gms_transport::{Control, Event, Transport};

use super::quic::{Requester, failed, unexpected};
use crate::error::{BenchError, Trying};
use crate::placement::{Pinned, Placement};

/// Exchanges under way at once.
const IN_FLIGHT: usize = 4;
/// Bytes of the pages of one exchange.
const PAGES_LEN: usize = PAGES_MAX * PAGE_LEN;

/// More memory than caches hold, as gms's pages come from memory too: a multiple of the pages of an exchange.
const SOURCE_LEN: usize = 64 << 20;

/// Pages to send.
pub struct Pages(Vec<u8>);

impl Pages {
    /// All bytes of all pages are 7.
    pub fn new() -> Pages {
        Pages(vec![7; SOURCE_LEN])
    }

    /// `count` pages for exchange `number`: each time other ones.
    pub fn of(&self, number: u64, count: usize) -> &[u8] {
        let at = number as usize % (SOURCE_LEN / PAGES_LEN) * PAGES_LEN;
        &self.0[at..at + count * PAGE_LEN]
    }
}

/// Which way the pages go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bulk {
    /// To the requester, as in a scan.
    Get,
    /// From the requester, as in write-back.
    Put,
}

impl Bulk {
    /// For the report.
    pub fn name(self) -> &'static str {
        match self {
            Bulk::Get => "QUIC bulk, gets of 64 pages",
            Bulk::Put => "QUIC bulk, puts of 64 pages",
        }
    }
}

/// MB/s of `count` exchanges, after a tenth as many to warm up.
pub fn throughput(
    placement: &Placement,
    keys: &Path,
    bulk: Bulk,
    count: usize,
) -> Result<f64, BenchError> {
    let (mut end, _peer) = Requester::start(placement, keys)?;
    let _pinned = Pinned::to(placement.cpus.map(|cpus| cpus.0))?;
    let link = end.link;
    let descriptors = [0; PAGES_MAX * PageDescriptor::LEN];
    let pages = Pages::new();
    let warm_up = count / 10;
    let (mut asked, mut done, mut bytes) = (0, 0, 0);
    let mut start = Instant::now();
    while done < warm_up + count {
        let now = Instant::now();
        while asked < warm_up + count && asked - done < IN_FLIGHT {
            let (number, workload) = (asked as u64, WorkloadId([1; 16]));
            let sent = match bulk {
                Bulk::Get => {
                    let get = Control::get_many(number, workload, PAGES_MAX as u16);
                    end.quic.request(now, link, &get, &[&descriptors])
                }
                Bulk::Put => {
                    let put = Control::put(number, workload, PAGES_MAX as u16);
                    end.quic.request(now, link, &put, &[&descriptors, pages.of(number, PAGES_MAX)])
                }
            };
            sent.map_err(failed)?;
            asked += 1;
            end.quic.flush(now).trying("cannot send")?;
        }
        match end.event(now)? {
            Event::Control { control, .. } if control.status == Status::Ok => {}
            Event::Payload { bytes: part, .. } => bytes += part.len(),
            Event::Complete { .. } => {
                done += 1;
                if done == warm_up {
                    start = Instant::now();
                }
            }
            other => return Err(unexpected(&other)),
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let due = if bulk == Bulk::Get { done * (descriptors.len() + PAGES_LEN) } else { 0 };
    if bytes != due {
        return Err(BenchError::WrongBytes(format!("{bytes} bytes of payload instead of {due}")));
    }
    Ok((count * PAGES_LEN) as f64 / seconds / 1e6)
}
