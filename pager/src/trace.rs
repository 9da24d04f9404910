//! Where the time of a remote fault goes: time stamps of sampled faults, for `--trace FILE` and `gms-bench fault`.
//!
//! One fault is followed at a time, and only each [`EVERY`]th begins to be. All stamps are CLOCK_MONOTONIC in ns, so that a program on the
//! same machine can compare them with its own.

use std::io::{self, BufWriter, Write};
use std::path::Path;

use nix::time::{ClockId, clock_gettime};

use crate::output::Output;
use crate::tables::Place;

/// Of so many remote faults one is followed.
const EVERY: u32 = 4;
/// Most faults kept; later ones are not followed.
const SAMPLES_MAX: usize = 1 << 18;
/// First line of the file; units are ns but for the address.
const HEADER: &str = "page,read,looked_up,sent,received,queue,service,opened,installed";

/// Stamps of one fault.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    /// Address of the page.
    page: u64,
    /// Its message had been read.
    read: u64,
    /// The tables had told what to do.
    looked_up: u64,
    /// The request had been given to the kernel.
    sent: u64,
    /// The last look for packets before the reply came began.
    received: u64,
    /// The agent's queue delay, as it says.
    queue: u64,
    /// The agent's service time, as it says.
    service: u64,
    /// The page had been decrypted and its checksum been found right.
    opened: u64,
    /// The page had been installed.
    installed: u64,
}

/// The stamps of a session.
pub struct Trace {
    output: Output,
    samples: Vec<Sample>,
    /// The fault that is being followed.
    open: Option<(Place, Sample)>,
    count: u32,
    read: u64,
    received: u64,
}

impl Trace {
    /// A trace to be written to this file, which is tested.
    pub fn create(path: &Path) -> io::Result<Trace> {
        let output = Output::open(path)?;
        Ok(Trace { output, samples: Vec::new(), open: None, count: 0, read: 0, received: 0 })
    }

    /// Messages have been read.
    pub fn read(&mut self) {
        self.read = now();
    }

    /// A page is to be fetched for a thread that waits.
    pub fn looked_up(&mut self, place: Place) {
        self.count += 1;
        if self.open.is_none() && self.count >= EVERY && self.samples.len() < SAMPLES_MAX {
            let page = place.1.get();
            let sample = Sample { page, read: self.read, looked_up: now(), ..Sample::default() };
            (self.open, self.count) = (Some((place, sample)), 0);
        }
    }

    /// What was queued has been sent.
    pub fn sent(&mut self) {
        if let Some((_, sample)) = &mut self.open
            && sample.sent == 0
        {
            sample.sent = now();
        }
    }

    /// Packets are looked for.
    pub fn receiving(&mut self) {
        if self.open.is_some() {
            self.received = now();
        }
    }

    /// The agent has answered for this page.
    pub fn answered(&mut self, place: Place, queue_ns: u32, service_ns: u32) {
        if let Some((_, sample)) = self.open.as_mut().filter(|open| open.0 == place) {
            sample.received = self.received;
            (sample.queue, sample.service) = (queue_ns.into(), service_ns.into());
        }
    }

    /// The page's bytes are there.
    pub fn opened(&mut self, place: Place) {
        if let Some((_, sample)) = self.open.as_mut().filter(|open| open.0 == place) {
            sample.opened = now();
        }
    }

    /// The page has been installed, or (false) not by this fetch: then it is not counted.
    pub fn installed(&mut self, place: Place, done: bool) {
        if let Some((_, mut sample)) = self.open.take_if(|open| open.0 == place)
            && done
        {
            sample.installed = now();
            self.samples.push(sample);
        }
    }

    /// Writes the file: a line of names, and a line for each fault.
    pub fn write(self) -> io::Result<()> {
        let samples = self.samples;
        self.output.write(|out| {
            let mut out = BufWriter::new(out);
            writeln!(out, "{HEADER}")?;
            for s in &samples {
                let agent = format_args!("{},{}", s.queue, s.service);
                let before = format_args!("{},{},{},{}", s.read, s.looked_up, s.sent, s.received);
                writeln!(out, "{},{before},{agent},{},{}", s.page, s.opened, s.installed)?;
            }
            out.flush()
        })
    }
}

fn now() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("a clock that every Linux has");
    time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use gms_policy::ids::{PageAddr, SpaceId};

    #[test]
    fn one_fault_in_so_many_is_followed_to_its_end() {
        let path = std::env::temp_dir().join(format!("gms-trace-test-{}", std::process::id()));
        let mut trace = Trace::create(&path).unwrap();
        for n in 0..3 * EVERY {
            let place = (SpaceId(1), PageAddr::containing(u64::from(n) << 12));
            trace.read();
            trace.looked_up(place);
            trace.sent();
            trace.receiving();
            trace.answered(place, 7, 9);
            trace.opened(place);
            trace.installed(place, n != EVERY - 1);
        }
        trace.write().unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let mut lines = text.lines();
        assert_eq!(lines.next(), Some(HEADER));
        let rows: Vec<Vec<u64>> =
            lines.map(|line| line.split(',').map(|n| n.parse().unwrap()).collect()).collect();
        assert_eq!(rows.len(), 2, "the fault that was not installed counts");
        for row in rows {
            assert_eq!((row[5], row[6]), (7, 9));
            let stamps = [1, 2, 3, 4, 7, 8].map(|at| row[at]);
            assert!(stamps.is_sorted() && stamps[0] > 0, "{row:?}");
        }
    }
}
