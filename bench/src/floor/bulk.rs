//! Throughput of gms-transport with exchanges as large as they come, and nothing behind it.

use std::path::Path;
use std::time::Instant;

use gms_transport::message::{PAGES_MAX, PageDescriptor, Status, WorkloadId};
use gms_transport::{Control, Event, Transport};

use super::pages::{PAGE_BYTE, PAGES_LEN, Pages};
use super::quic::{Requester, failed, unexpected};
use crate::error::{BenchError, Trying};
use crate::network::Network;
use crate::placement::{Pinned, Placement};
use crate::procfs::Meter;

/// Exchanges under way at once.
const IN_FLIGHT: usize = 4;
/// What the pages of an exchange are called.
const DESCRIPTORS: [u8; PAGES_MAX * PageDescriptor::LEN] = [0; PAGES_MAX * PageDescriptor::LEN];

/// Which way the pages go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bulk {
    /// To the requester, as in a scan.
    Get,
    /// From the requester, as in write-back.
    Put,
}

impl Bulk {
    /// For the report.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Bulk::Get => "QUIC bulk, gets of 64 pages",
            Bulk::Put => "QUIC bulk, puts of 64 pages",
        }
    }
}

/// What exchanges of many pages achieve.
pub(crate) struct Throughput {
    /// MB/s.
    pub rate: f64,
    /// CPU time of both ends for each page, in us.
    pub cpu_us: f64,
}

/// Of `count` exchanges, after a tenth as many to warm up.
pub(crate) fn throughput(
    network: &Network,
    placement: &Placement,
    keys: &Path,
    bulk: Bulk,
    count: usize,
) -> Result<Throughput, BenchError> {
    let (mut end, peer) = Requester::start(network, placement, keys)?;
    let _pinned = Pinned::to(placement.cpus.map(|cpus| cpus.0))?;
    let pages = Pages::new();
    let warm_up = count / 10;
    let (mut asked, mut done, mut bytes) = (0, 0, 0);
    let mut start = Instant::now();
    let mut meter = Meter::start(Some(peer.pid()))?;
    while done < warm_up + count {
        let now = Instant::now();
        while asked < warm_up + count && asked - done < IN_FLIGHT {
            ask(&mut end, now, bulk, asked as u64, &pages)?;
            asked += 1;
        }
        match end.event(now)? {
            Event::Control { control, .. } if control.status() == Status::Ok => {}
            Event::Payload { offset, bytes: part, .. } => {
                bytes += part.len();
                let in_pages = offset as usize + part.len() > DESCRIPTORS.len();
                if in_pages && part.last() != Some(&PAGE_BYTE) {
                    return Err(BenchError::WrongBytes("of a page".into()));
                }
            }
            Event::Complete { .. } => {
                done += 1;
                if done == warm_up {
                    start = Instant::now();
                    meter = Meter::start(Some(peer.pid()))?;
                }
            }
            other => return Err(unexpected(&other)),
        }
    }
    let (seconds, cpu_us) = (start.elapsed().as_secs_f64(), meter.us()?);
    let due = if bulk == Bulk::Get { done * (DESCRIPTORS.len() + PAGES_LEN) } else { 0 };
    if bytes != due {
        return Err(BenchError::WrongBytes(format!("{bytes} bytes of payload instead of {due}")));
    }
    let rate = (count * PAGES_LEN) as f64 / seconds / 1e6;
    Ok(Throughput { rate, cpu_us: cpu_us / (count * PAGES_MAX) as f64 })
}

/// Sends request `number`.
fn ask(
    end: &mut Requester,
    now: Instant,
    bulk: Bulk,
    number: u64,
    pages: &Pages,
) -> Result<(), BenchError> {
    let (link, workload, count) = (end.link, WorkloadId([1; 16]), PAGES_MAX as u16);
    let sent = match bulk {
        Bulk::Get => {
            let get = Control::get_many(number, workload, count);
            end.quic.request(now, link, &get, &[&DESCRIPTORS])
        }
        Bulk::Put => {
            let put = Control::put(number, workload, count);
            end.quic.request(now, link, &put, &[&DESCRIPTORS, pages.of(number, PAGES_MAX)])
        }
    };
    sent.map_err(failed)?;
    end.quic.flush(now).trying("cannot send")
}
