use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::Duration;

use super::*;
use crate::message::{PAGE_LEN, PageDescriptor, Status, WorkloadId};
use crate::{AbortReason, CloseReason};

const WORKLOAD: WorkloadId = WorkloadId([7; 16]);

fn addr(n: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, n))
}

/// A pager's and an agent's node, and the time.
struct Pair {
    net: Net,
    now: Instant,
    pager: Sim,
    agent: Sim,
    link: LinkId,
}

/// SplitMix64 (Steele, Lea, Flood 2014).
fn random(seed: u64) -> Box<dyn FnMut() -> u64 + Send> {
    let mut state = seed;
    Box::new(move || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    })
}

impl Pair {
    /// Linked under good conditions, which then become `conditions`.
    fn new(conditions: Conditions, seed: u64) -> Pair {
        let now = Instant::now();
        let net = Net::new(Conditions::lan(), random(seed));
        let (mut pager, agent) = (net.node(addr(1), 1).unwrap(), net.node(addr(2), 2).unwrap());
        let link = pager.connect(now, addr(2)).unwrap();
        let mut pair = Pair { net, now, pager, agent, link };
        let Some(Event::Connected { peer, .. }) = pair.agent_hears() else { panic!("no link") };
        assert_eq!((peer.addr, peer.fingerprint.0[0]), (addr(1), 1));
        let Some(Event::Connected { link, peer }) = pair.pager_hears() else { panic!("no link") };
        assert_eq!((link, peer.addr), (pair.link, addr(2)));
        pair.net.set_conditions(conditions);
        pair
    }

    /// Time passes until the pager has an event, or nothing is under way any more.
    fn pager_hears(&mut self) -> Option<Event> {
        hears(&self.net, &mut self.pager, &mut self.now)
    }

    fn agent_hears(&mut self) -> Option<Event> {
        hears(&self.net, &mut self.agent, &mut self.now)
    }

    fn get(&mut self, number: u64) -> ExchangeId {
        let get = Control::get(number, WORKLOAD, number);
        self.pager.request(self.now, self.link, &get, &[]).unwrap()
    }

    /// The agent answers all requests with as many pages of `fill` as they name, until nothing comes.
    fn serve(&mut self, fill: u8) -> Vec<u64> {
        let (mut served, mut asked) = (Vec::new(), BTreeMap::new());
        while let Some(event) = self.agent_hears() {
            match event {
                Event::Control { exchange, control } => drop(asked.insert(exchange, control)),
                Event::Complete { exchange } => {
                    let request: Control = asked.remove(&exchange).expect("it comes first");
                    let reply = request.reply(Status::Ok).with_done(1);
                    self.agent.reply(self.now, exchange, &reply, &[&[fill; PAGE_LEN]]).unwrap();
                    served.push(request.request);
                }
                _ => {}
            }
        }
        served
    }
}

fn hears(net: &Net, node: &mut Sim, now: &mut Instant) -> Option<Event> {
    loop {
        node.drive(*now).unwrap();
        if let Some(event) = node.poll(*now) {
            return Some(event);
        }
        *now = net.deadline()?;
    }
}

#[test]
fn a_message_comes_whole_and_in_order_after_its_delay_and_the_time_that_it_takes() {
    let slow = Conditions { delay_us: 100..=100, bandwidth: 1 << 20, ..Conditions::lan() };
    let mut pair = Pair::new(slow, 1);
    let pages = vec![5; 3 * (PageDescriptor::LEN + PAGE_LEN)];
    let put = Control::put(9, WORKLOAD, 3);
    let (sent, pages_len) = (pair.now, pages.len());
    let asked = pair.pager.request(sent, pair.link, &put, &[&pages]).unwrap();
    let Some(Event::Control { control, exchange }) = pair.agent_hears() else { panic!() };
    assert_eq!((control.request, control.payload_len as usize), (9, pages_len));
    assert_eq!(pair.now - sent, Duration::from_micros(100));
    let mut came = 0;
    loop {
        match pair.agent_hears() {
            Some(Event::Payload { offset, bytes, .. }) => {
                assert_eq!(offset as usize, came);
                came += bytes.len();
            }
            Some(Event::Complete { .. }) => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(came, pages_len);
    let took = (pair.now - sent - Duration::from_micros(100)).as_secs_f64();
    let due = (pages_len + 128) as f64 / f64::from(1 << 20);
    assert!((took - due).abs() < 1e-3, "{took} s instead of {due}");
    let reply = control.reply(Status::Full).with_done(1);
    pair.agent.reply(pair.now, exchange, &reply, &[]).unwrap();
    let Some(Event::Control { control, exchange }) = pair.pager_hears() else { panic!() };
    assert_eq!((exchange, control.status()), (asked, Status::Full));
    assert!(matches!(pair.pager_hears(), Some(Event::Complete { .. })));
    assert!(pair.pager_hears().is_none());
}

#[test]
fn what_is_lost_never_comes_and_what_comes_twice_is_answered_once() {
    let lossy = Conditions {
        lost_ppm: 300_000,
        twice_ppm: 300_000,
        delay_us: 5..=500,
        ..Conditions::lan()
    };
    let mut pair = Pair::new(lossy, 2);
    let asked: Vec<ExchangeId> = (0..200).map(|number| pair.get(number)).collect();
    let served = pair.serve(6);
    let mut twice = served.clone();
    twice.sort_unstable();
    let times = |number: u64| twice.iter().filter(|&&served| served == number).count();
    assert!((0..200).any(|number| times(number) == 0));
    assert!((0..200).any(|number| times(number) == 2));
    assert!(!served.is_sorted(), "none is overtaken");
    let mut answered = Vec::new();
    while let Some(event) = pair.pager_hears() {
        match event {
            Event::Complete { exchange } => answered.push(exchange),
            Event::Control { .. } | Event::Payload { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    let count = answered.len();
    answered.sort_unstable();
    answered.dedup();
    assert!(answered.len() == count && (50..180).contains(&count), "{count} answers");
    assert!(answered.iter().all(|exchange| asked.contains(exchange)));
}

#[test]
fn the_same_seed_is_the_same_story() {
    let story = |seed| {
        let rough = Conditions { lost_ppm: 200_000, delay_us: 5..=900, ..Conditions::lan() };
        let mut pair = Pair::new(rough, seed);
        for number in 0..50 {
            pair.get(number);
        }
        pair.serve(1)
    };
    assert_eq!(story(5), story(5));
    assert_ne!(story(5), story(6));
}

#[test]
fn a_node_that_crashes_is_missed_and_comes_back_as_another_one() {
    let mut pair = Pair::new(Conditions::lan(), 3);
    let open = pair.get(1);
    let began = pair.now;
    pair.net.crash(pair.now, addr(2));
    let Some(Event::Aborted { exchange, reason }) = pair.pager_hears() else { panic!() };
    assert_eq!((exchange, reason), (open, AbortReason::LinkClosed));
    let Some(Event::Closed { reason, .. }) = pair.pager_hears() else { panic!() };
    assert_eq!((reason, pair.now - began), (CloseReason::Lost { addr: addr(2) }, IDLE));
    pair.pager.connect(pair.now, addr(2)).unwrap();
    let Some(Event::Closed { reason, .. }) = pair.pager_hears() else { panic!() };
    assert_eq!(reason, CloseReason::Unreachable { addr: addr(2) });
    pair.agent = pair.net.node(addr(2), 2).unwrap();
    pair.link = pair.pager.connect(pair.now, addr(2)).unwrap();
    assert!(matches!(pair.agent_hears(), Some(Event::Connected { .. })));
    assert!(matches!(pair.pager_hears(), Some(Event::Connected { .. })));
    pair.get(2);
    assert_eq!(pair.serve(1), [2]);
}

#[test]
fn a_cut_ends_links_and_is_mended() {
    let mut pair = Pair::new(Conditions::lan(), 4);
    pair.get(1);
    pair.net.cut(pair.now, addr(1), addr(2));
    let ends = |event: Option<Event>| match event {
        Some(Event::Closed { reason: CloseReason::Lost { .. }, .. }) => true,
        Some(Event::Aborted { .. }) => false,
        other => panic!("{other:?}"),
    };
    assert!(!ends(pair.pager_hears()) && ends(pair.pager_hears()), "the get never came");
    assert!(ends(pair.agent_hears()));
    // As long as one that was asked for before is not given up, it comes up.
    let link = pair.pager.connect(pair.now, addr(2)).unwrap();
    pair.now += Duration::from_secs(2);
    assert!(!pair.pager.drive(pair.now).unwrap());
    pair.net.mend(addr(1), addr(2));
    let mended = pair.now;
    let Some(Event::Connected { link: up, .. }) = pair.pager_hears() else { panic!("no link") };
    assert_eq!(up, link);
    assert!(pair.now - mended < Duration::from_secs(2), "{:?}", pair.now - mended);
}

/// Else one end of it would be lost when it has long been up, and the other never hear of that.
#[test]
fn a_link_that_was_not_up_when_a_cut_began_is_not_lost_by_it() {
    let mut pair = Pair::new(Conditions::lan(), 6);
    let link = pair.pager.connect(pair.now, addr(2)).unwrap();
    pair.net.cut(pair.now, addr(1), addr(2));
    pair.now += Duration::from_secs(1);
    assert!(!pair.pager.drive(pair.now).unwrap());
    pair.net.mend(addr(1), addr(2));
    let heard: Vec<Event> = std::iter::from_fn(|| pair.pager_hears()).collect();
    let [Event::Connected { link: up, .. }, Event::Closed { link: lost, .. }] = heard[..] else {
        panic!("{heard:?}")
    };
    assert_eq!((up, lost), (link, pair.link));
    pair.link = link;
    pair.get(1);
    assert_eq!(pair.serve(1), [1]);
}

#[test]
fn whoever_closes_a_link_tells_the_other_why() {
    let mut pair = Pair::new(Conditions::lan(), 5);
    let open = pair.get(1);
    pair.pager.close(pair.now, pair.link, CloseCode::Draining);
    let Some(Event::Aborted { exchange, .. }) = pair.pager_hears() else { panic!() };
    assert_eq!(exchange, open);
    let Some(Event::Closed { reason: CloseReason::Local, .. }) = pair.pager_hears() else {
        panic!()
    };
    let closed = std::iter::from_fn(|| pair.agent_hears()).last();
    let Some(Event::Closed { reason: CloseReason::ByPeer { code, .. }, .. }) = closed else {
        panic!("{closed:?}")
    };
    assert_eq!(code, Some(CloseCode::Draining));
    // A link that is closed before it is up is not left to the other end.
    let early = pair.pager.connect(pair.now, addr(2)).unwrap();
    pair.pager.close(pair.now, early, CloseCode::Goodbye);
    let heard: Vec<Event> = std::iter::from_fn(|| pair.agent_hears()).collect();
    assert!(matches!(heard[..], [Event::Connected { .. }, Event::Closed { .. }]), "{heard:?}");
}
