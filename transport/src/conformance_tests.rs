//! What a transport promises, whatever it is made of: each behaviour is tried with every backend.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use crate::message::{PAGE_LEN, PageDescriptor, Status, WorkloadId};
use crate::sim::{Conditions, Net};
use crate::{
    AbortReason, CloseCode, CloseReason, Control, Event, ExchangeId, LinkId, Quic, Transport,
    TransportError, keys,
};

const WORKLOAD: WorkloadId = WorkloadId([4; 16]);
/// Real time that a behaviour may take to be seen.
const PATIENCE: Duration = Duration::from_secs(20);

/// Two ends of a link, and what they were told that nobody has looked at yet.
struct Ends<T> {
    client: T,
    server: T,
    /// The link as each end names it.
    asks: LinkId,
    answers: LinkId,
    seen: VecDeque<Event>,
    served: VecDeque<Event>,
    clock: Box<dyn FnMut() -> Instant>,
}

impl<T: Transport> Ends<T> {
    fn new(mut client: T, server: T, at: SocketAddr, clock: Box<dyn FnMut() -> Instant>) -> Self {
        let mut clock = clock;
        let asks = client.connect(clock(), at).unwrap();
        let (seen, served) = (VecDeque::new(), VecDeque::new());
        let mut ends = Ends { client, server, asks, answers: asks, seen, served, clock };
        let connected = |event: Event| match event {
            Event::Connected { link, .. } => link,
            other => panic!("{other:?}"),
        };
        ends.answers = connected(ends.served());
        assert_eq!(connected(ends.seen()), asks);
        ends
    }

    fn step(&mut self) {
        let now = (self.clock)();
        for (end, events) in
            [(&mut self.client, &mut self.seen), (&mut self.server, &mut self.served)]
        {
            end.drive(now).unwrap();
            events.extend(std::iter::from_fn(|| end.poll(now)));
            end.flush(now).unwrap();
        }
    }

    fn until(&mut self, mut next: impl FnMut(&mut Self) -> Option<Event>) -> Event {
        let start = Instant::now();
        loop {
            if let Some(event) = next(self) {
                return event;
            }
            assert!(start.elapsed() < PATIENCE);
            self.step();
        }
    }

    /// The requester's next event.
    fn seen(&mut self) -> Event {
        self.until(|ends| ends.seen.pop_front())
    }

    /// The responder's next event.
    fn served(&mut self) -> Event {
        self.until(|ends| ends.served.pop_front())
    }

    fn get(&mut self, number: u64) -> ExchangeId {
        let get = Control::get(number, WORKLOAD, number);
        self.client.request((self.clock)(), self.asks, &get, &[]).unwrap()
    }

    fn reply(&mut self, exchange: ExchangeId, control: &Control) -> Result<(), TransportError> {
        let reply = control.reply(Status::Ok).with_done(1);
        self.server.reply((self.clock)(), exchange, &reply, &[&[6; PAGE_LEN]])
    }
}

/// A message: its control message, payload without gaps, and an end.
fn message(mut next: impl FnMut() -> Event) -> (ExchangeId, Control, Vec<u8>) {
    let Event::Control { exchange, control } = next() else { panic!("it comes first") };
    let mut payload = Vec::new();
    loop {
        match next() {
            Event::Payload { exchange: of, offset, bytes } => {
                assert_eq!((of, offset as usize), (exchange, payload.len()));
                payload.extend_from_slice(&bytes);
            }
            Event::Complete { exchange: of } => {
                assert_eq!((of, control.payload_len as usize), (exchange, payload.len()));
                return (exchange, control, payload);
            }
            other => panic!("{other:?}"),
        }
    }
}

/// The slices are the caller's again when the call returns.
fn messages_come_whole_as_they_were_when_they_were_queued<T: Transport>(mut ends: Ends<T>) {
    let (count, now) = (16, (ends.clock)());
    let mut head = vec![1; count * PageDescriptor::LEN];
    let mut pages = vec![2; count * PAGE_LEN];
    let sent = [head.clone(), pages.clone()].concat();
    let put = Control::put(9, WORKLOAD, count as u16);
    let asked = ends.client.request(now, ends.asks, &put, &[&head, &pages]).unwrap();
    head.fill(0xee);
    pages.fill(0xee);
    let (exchange, control, payload) = message(|| ends.served());
    assert_eq!((control.request, payload == sent), (9, true));
    let reply = control.reply(Status::Full).with_done(1);
    ends.server.reply((ends.clock)(), exchange, &reply, &[]).unwrap();
    let (answered, control, payload) = message(|| ends.seen());
    assert_eq!((answered, control.status(), payload.len()), (asked, Status::Full, 0));
}

fn a_request_is_answered_once_and_by_who_was_asked<T: Transport>(mut ends: Ends<T>) {
    let asked = ends.get(1);
    let (exchange, control, _) = message(|| ends.served());
    ends.reply(exchange, &control).unwrap();
    let again = ends.reply(exchange, &control);
    assert!(matches!(again, Err(TransportError::ExchangeEnded)), "{again:?}");
    let (answered, _, payload) = message(|| ends.seen());
    assert_eq!((answered, payload), (asked, vec![6; PAGE_LEN]));
    let get = Control::get(2, WORKLOAD, 2);
    assert!(ends.server.request((ends.clock)(), ends.answers, &get, &[]).is_err());
}

fn of_an_abandoned_exchange_nothing_comes<T: Transport>(mut ends: Ends<T>) {
    let given_up = ends.get(1);
    let (exchange, control, _) = message(|| ends.served());
    ends.client.abandon(given_up);
    ends.client.abandon(given_up);
    // The responder may know already.
    let _ = ends.reply(exchange, &control);
    let asked = ends.get(2);
    let (exchange, control, _) = message(|| ends.served());
    ends.reply(exchange, &control).unwrap();
    assert_eq!(message(|| ends.seen()).0, asked);
    assert!(ends.seen.is_empty(), "{:?}", ends.seen);
}

fn a_link_that_closes_aborts_its_exchanges_first<T: Transport>(mut ends: Ends<T>) {
    assert!(ends.client.path(ends.asks).is_some());
    let asked = ends.get(1);
    message(|| ends.served());
    ends.server.close((ends.clock)(), ends.answers, CloseCode::Draining);
    let Event::Aborted { exchange, reason: AbortReason::LinkClosed } = ends.seen() else {
        panic!()
    };
    assert_eq!(exchange, asked);
    let Event::Closed { link, reason } = ends.seen() else { panic!("it ends") };
    assert_eq!(link, ends.asks);
    let CloseReason::ByPeer { code, .. } = reason else { panic!("{reason}") };
    assert_eq!(code, Some(CloseCode::Draining));
    assert!(ends.client.path(link).is_none());
    let get = Control::get(2, WORKLOAD, 2);
    let late = ends.client.request((ends.clock)(), link, &get, &[]);
    assert!(matches!(late, Err(TransportError::LinkClosed)), "{late:?}");
}

fn quic() -> Ends<Quic> {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let (node, client) = keys::ephemeral().unwrap();
    let server = Quic::server(any, &node).unwrap();
    let at = server.local_addr();
    Ends::new(Quic::client(any, &client).unwrap(), server, at, Box::new(Instant::now))
}

fn sim() -> Ends<crate::sim::Sim> {
    let net = Net::new(Conditions::lan(), Box::new(|| 0));
    let [a, b] = [1, 2].map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    let (client, server) = (net.node(a, 1).unwrap(), net.node(b, 2).unwrap());
    let mut now = Instant::now();
    let clock = move || {
        now = net.deadline().map_or(now, |next| next.max(now));
        now
    };
    Ends::new(client, server, b, Box::new(clock))
}

/// Tries behaviours with each backend.
macro_rules! conform {
    ($($behaviour:ident),* $(,)?) => {
        mod over_quic { $(#[test] fn $behaviour() { super::$behaviour(super::quic()); })* }
        mod over_sim { $(#[test] fn $behaviour() { super::$behaviour(super::sim()); })* }
    };
}

conform! {
    messages_come_whole_as_they_were_when_they_were_queued,
    a_request_is_answered_once_and_by_who_was_asked,
    of_an_abandoned_exchange_nothing_comes,
    a_link_that_closes_aborts_its_exchanges_first,
}
