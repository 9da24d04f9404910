//! An agent's cores without sockets: simulated links and time, and what a client asks of them.

#![allow(clippy::result_large_err, reason = "a refusal is the reply itself")]

use gms_agent::core::{Answer, At, Core};
use gms_agent::limits::{DISCARD_STEP, FRAME_LEN, PAGE_LEN_MAX, SWEEP_PAUSE};
use gms_agent::shared::Shared;
use gms_agent::slab::Slab;
use gms_agent::stats::Stats;
use gms_agent::store::Store;
use gms_policy::Bytes;
use gms_transport::message::{Control, Op, PageDescriptor, PagesReply, Status, WorkloadId};
use gms_transport::{CloseCode, ExchangeId, Fingerprint, LinkId, PeerId, PeerIdentity};
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// The cores of an agent, one a thread, their simulated time, and ids for exchanges.
pub(crate) struct Bed {
    pub(crate) cores: Vec<Core>,
    /// Which core serves a link.
    pub(crate) homes: HashMap<LinkId, usize>,
    pub(crate) stats: Arc<Stats>,
    pub(crate) now: Instant,
    pub(crate) exchanges: u64,
}

/// A reply, with its payload in one piece.
pub(crate) struct Got {
    pub(crate) control: Control,
    pub(crate) payload: Vec<u8>,
}

impl Bed {
    pub(crate) fn new(frames: u64) -> Self {
        Self::of(1, frames)
    }

    pub(crate) fn of(threads: usize, frames: u64) -> Self {
        // What a test listens to and another meets first, at the same moment, would be taken for what nobody listens to.
        static LISTENED: Once = Once::new();
        LISTENED.call_once(|| {
            let silent = tracing_subscriber::fmt().with_writer(io::sink).finish();
            tracing::subscriber::set_global_default(silent).expect("the first");
        });
        let slab = Slab::new(Bytes(frames * FRAME_LEN as u64), false).expect("memory");
        let (stats, now) = (Arc::new(Stats::default()), Instant::now());
        let shared = Arc::new(Shared::new(now, Store::new(slab, threads).expect("memory")));
        let core = |thread| Core::new(now, shared.clone(), thread, stats.clone());
        let cores = (0..threads).map(core).collect();
        Self { cores, homes: HashMap::new(), stats, now, exchanges: 0 }
    }

    /// The only core, or the first.
    pub(crate) fn core(&mut self) -> &mut Core {
        &mut self.cores[0]
    }

    pub(crate) fn complete(&mut self, id: ExchangeId) -> Answer<'_> {
        let at = self.at();
        self.core_of(id.link).handle_complete(at, id)
    }

    pub(crate) fn core_of(&mut self, link: LinkId) -> &mut Core {
        &mut self.cores[self.homes[&link]]
    }

    pub(crate) fn connect(&mut self, index: u32, client: u8) -> LinkId {
        self.try_connect(index, client).expect("a link")
    }

    /// A link, or the code with which it was refused.
    pub(crate) fn try_connect(&mut self, index: u32, client: u8) -> Result<LinkId, CloseCode> {
        let link = LinkId::new(index, 0);
        let addr = ([127, 0, 0, 1], 7).into();
        // No two certificates are the same: a client is known by its id.
        let fingerprint = Fingerprint([index as u8; 32]);
        let peer =
            PeerIdentity { id: PeerId::Issued([client; 16]), fingerprint, addr, is_node: false };
        let home = index as usize % self.cores.len();
        self.homes.insert(link, home);
        match self.cores[home].handle_connected(self.now, link, peer) {
            Answer::Nothing => Ok(link),
            Answer::Close(code) => Err(code),
            reply => panic!("{reply:?}"),
        }
    }

    pub(crate) fn at(&self) -> At {
        At { now: self.now, received: self.now }
    }

    pub(crate) fn begin(
        &mut self,
        link: LinkId,
        control: &mut Control,
        payload: &[u8],
    ) -> Result<ExchangeId, Got> {
        self.exchanges += 1;
        control.payload_len = payload.len() as u32;
        let (id, at) = (ExchangeId::new(link, self.exchanges), self.at());
        match self.core_of(link).handle_control(at, id, *control) {
            Answer::Nothing => Ok(id),
            answer => Err(got(answer)),
        }
    }

    pub(crate) fn pay(&mut self, id: ExchangeId, payload: &[u8], chunk: usize) {
        for (index, part) in payload.chunks(chunk.max(1)).enumerate() {
            let answer =
                self.core_of(id.link).handle_payload(id, (index * chunk.max(1)) as u32, part);
            assert!(matches!(answer, Answer::Nothing));
        }
    }

    pub(crate) fn ask(
        &mut self,
        link: LinkId,
        mut control: Control,
        payload: &[u8],
        chunk: usize,
    ) -> Got {
        let id = match self.begin(link, &mut control, payload) {
            Ok(id) => id,
            Err(refused) => return refused,
        };
        self.pay(id, payload, chunk);
        // A discard is done in steps; others have only the last.
        let is_discard = control.op() == Some(Op::Discard);
        let steps =
            if is_discard { usize::from(control.count()).div_ceil(DISCARD_STEP) } else { 1 };
        for _ in 1..steps {
            assert!(self.core_of(link).discards_part(id));
            assert_eq!(self.core_of(link).poll_unfinished(), Some(id));
        }
        assert!(!self.core_of(link).discards_part(id));
        let reply = got(self.complete(id));
        let mut sent = reply.control;
        sent.payload_len = reply.payload.len() as u32;
        assert_eq!((sent.check(), control.check_reply(&sent)), (Ok(()), Ok(())));
        reply
    }

    /// When the housekeeping of a core is due next, and whose.
    pub(crate) fn due(&mut self) -> Option<(Instant, usize)> {
        let now = self.now;
        let deadlines = self.cores.iter_mut().enumerate();
        deadlines.filter_map(|(n, core)| Some((core.deadline(now)?, n))).min()
    }

    /// Lets the housekeeping run until nothing is due, nor after a pause.
    pub(crate) fn settle(&mut self) {
        for _ in 0..1000 {
            match self.due() {
                Some((deadline, core)) if deadline <= self.now + SWEEP_PAUSE => {
                    self.now = self.now.max(deadline);
                    self.cores[core].handle_timeout(self.now);
                }
                _ => return,
            }
        }
        panic!("housekeeping does not end");
    }

    /// Time goes on, housekeeping with it.
    pub(crate) fn advance(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some((deadline, core)) = self.due().filter(|&(deadline, _)| deadline <= end) {
            self.now = self.now.max(deadline);
            self.cores[core].handle_timeout(self.now);
            while self.cores[core].poll_stalled(self.now).is_some() {}
        }
        self.now = end;
    }
}

pub(crate) fn got(answer: Answer<'_>) -> Got {
    let Answer::Reply(reply) = answer else { panic!("no reply but {answer:?}") };
    let (slices, used) = reply.payload();
    Got { control: reply.control, payload: slices[..used].concat() }
}

pub(crate) fn put_payload(pages: &[(u64, u8)]) -> Vec<u8> {
    let heads = pages
        .iter()
        .flat_map(|&(page, fill)| PageDescriptor::new(page, u64::from(fill)).as_bytes().to_vec());
    heads.chain(pages.iter().flat_map(|&(_, fill)| [fill; FRAME_LEN])).collect()
}

/// The same of pages that have lengths of their own.
pub(crate) fn sized_payload(pages: &[(u64, u8)]) -> Vec<u8> {
    let head = |&(page, fill): &(u64, u8)| {
        PageDescriptor::new(page, u64::from(fill)).with_length(length_of(fill) as u16)
    };
    let heads = pages.iter().flat_map(|page| head(page).as_bytes().to_vec());
    heads.chain(pages.iter().flat_map(|&(_, fill)| vec![fill; length_of(fill)])).collect()
}

/// Pages of a byte, of less than a frame, of a frame, and with a tail, part of it or all.
pub(crate) fn length_of(fill: u8) -> usize {
    const LENGTHS: [usize; 6] = [1, 1000, FRAME_LEN, FRAME_LEN + 1, PAGE_LEN_MAX - 1, PAGE_LEN_MAX];
    LENGTHS[usize::from(fill) % LENGTHS.len()]
}

pub(crate) const WORKLOADS: [WorkloadId; 2] = [WorkloadId([1; 16]), WorkloadId([2; 16])];

pub(crate) fn hello(bed: &mut Bed, link: LinkId, workload: WorkloadId) -> Control {
    bed.ask(link, Control::hello(1, workload, 5000), &[], 1).control
}

pub(crate) fn put(
    bed: &mut Bed,
    link: LinkId,
    workload: WorkloadId,
    pages: &[(u64, u8)],
) -> Control {
    let control = Control::put(1, workload, pages.len() as u16);
    bed.ask(link, control, &put_payload(pages), 1111).control
}

/// The pages held, as (page, fill), by the two kinds of get; checks that these agree.
pub(crate) fn fetch(
    bed: &mut Bed,
    link: LinkId,
    workload: WorkloadId,
    pages: &[u64],
) -> Vec<(u64, u8)> {
    let ids: Vec<u8> =
        pages.iter().flat_map(|&p| PageDescriptor::new(p, 0).as_bytes().to_vec()).collect();
    let many = bed.ask(link, Control::get_many(9, workload, pages.len() as u16), &ids, 7);
    let found = many.control.answer::<PagesReply>().done.count_ones() as usize;
    let (heads, contents) = many.payload.split_at(found * PageDescriptor::LEN);
    let heads = <[PageDescriptor]>::ref_from_bytes(heads).expect("descriptors");
    let pages_found: Vec<(u64, u8)> = heads
        .iter()
        .zip(contents.chunks(FRAME_LEN))
        .map(|(head, bytes)| {
            assert!(bytes.iter().all(|&b| u64::from(b) == head.check()));
            (head.page(), bytes[0])
        })
        .collect();
    for &page in pages {
        let one = bed.ask(link, Control::get(8, workload, page), &[], 1);
        let expected = pages_found.iter().find(|&&(p, _)| p == page);
        assert_eq!(one.payload.first().copied(), expected.map(|&(_, fill)| fill));
        assert_eq!(one.control.status() == Status::Ok, expected.is_some());
        assert_eq!(
            one.control.answer::<PagesReply>().check,
            expected.map_or(0, |&(_, fill)| u64::from(fill))
        );
    }
    pages_found
}

/// The pages held, as (page, fill, length), by the two kinds of get with lengths; checks that these agree.
pub(crate) fn fetch_sized(
    bed: &mut Bed,
    link: LinkId,
    workload: WorkloadId,
    pages: &[u64],
) -> Vec<(u64, u8, usize)> {
    let ids: Vec<u8> =
        pages.iter().flat_map(|&p| PageDescriptor::new(p, 0).as_bytes().to_vec()).collect();
    let many = Control::get_many(9, workload, pages.len() as u16).with_lengths();
    let many = bed.ask(link, many, &ids, 7);
    let found = many.control.answer::<PagesReply>().done.count_ones() as usize;
    let (heads, mut contents) = many.payload.split_at(found * PageDescriptor::LEN);
    let heads = <[PageDescriptor]>::ref_from_bytes(heads).expect("descriptors");
    let mut held = Vec::new();
    for head in heads {
        let bytes = contents.split_off(..usize::from(head.length())).expect("so many");
        assert!(bytes.iter().all(|&b| u64::from(b) == head.check()));
        held.push((head.page(), bytes[0], bytes.len()));
    }
    assert!(contents.is_empty());
    for &page in pages {
        let one = bed.ask(link, Control::get(8, workload, page).with_lengths(), &[], 1);
        let expected = held.iter().find(|&&(p, ..)| p == page);
        let reply: PagesReply = one.control.answer();
        assert_eq!(one.payload, expected.map_or(vec![], |&(_, fill, length)| vec![fill; length]));
        assert_eq!(usize::from(reply.length), expected.map_or(0, |&(.., length)| length));
        assert_eq!(reply.check, expected.map_or(0, |&(_, fill, _)| u64::from(fill)));
        assert!(one.control.has_lengths());
    }
    held
}
