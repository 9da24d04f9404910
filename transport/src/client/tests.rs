//! Gets and puts of a client whose agents the test plays.

mod sealed;

use std::collections::BTreeSet;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use bytes::Bytes;
use gms_policy::ids::{AgentId, ContentId};
use proptest::prelude::*;

use super::script::Script;
use super::*;
use crate::message::{PAGE_LEN, WorkloadId};
use crate::{AbortReason, Event};

const A: AgentId = AgentId(0);
const CHECKSUM: Checksum = Checksum::new(7);

/// How pages travel.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Plain,
    Sealed,
}

impl Form {
    /// A client of one agent.
    fn client(self) -> Client<Script> {
        match self {
            Form::Plain => Client::scripted(1, CHECKSUM),
            Form::Sealed => Client::scripted(1, CHECKSUM).sealed(seal().clone()),
        }
    }

    /// Page `n` as it travels.
    fn page(self, n: usize) -> Vec<u8> {
        match self {
            Form::Plain => page(n),
            Form::Sealed => sealed(n as u64, &page(n)),
        }
    }

    fn page_len(self) -> usize {
        match self {
            Form::Plain => PAGE_LEN,
            Form::Sealed => SEALED_LEN,
        }
    }
}

/// The seal of the sealed form.
fn seal() -> &'static Arc<Seal> {
    static SEAL: OnceLock<Arc<Seal>> = OnceLock::new();
    SEAL.get_or_init(|| Arc::new(Seal::new(WorkloadId([7; 16])).expect("random numbers")))
}

fn sealed(id: u64, page: &[u8]) -> Vec<u8> {
    let mut out = vec![0; SEALED_LEN];
    seal().seal(ContentId(id), page, &mut out);
    out
}

fn page(n: usize) -> Vec<u8> {
    vec![n as u8 + 1; PAGE_LEN]
}

fn wanted(count: usize) -> Vec<Wanted> {
    let wanted = |n| Wanted { id: ContentId(n as u64), check: Some(CHECKSUM.of(&page(n))) };
    (0..count).map(wanted).collect()
}

/// The payload of a reply with these pages, of `count` that were asked for.
fn payload(count: usize, pages: impl Iterator<Item = Vec<u8>>) -> Vec<u8> {
    let pages: Vec<Vec<u8>> = pages.collect();
    let head = if count > 1 { pages.len() * PageDescriptor::LEN } else { 0 };
    std::iter::once(vec![0; head]).chain(pages).flatten().collect()
}

fn drain(client: &mut Client<Script>, now: Instant) -> Vec<ClientEvent> {
    std::iter::from_fn(|| client.poll(now)).collect()
}

/// What an owner does in each turn.
fn turn(client: &mut Client<Script>, now: Instant) -> Vec<ClientEvent> {
    let mut events = drain(client, now);
    client.expire(now);
    events.extend(drain(client, now));
    client.send_unsent(now);
    events.extend(drain(client, now));
    events
}

/// What became of each page of a get.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Open,
    Arrived,
    Failed(Failure),
}

/// Follows a get's events: each page has one fate, and the end comes last.
struct Follower {
    get: GetId,
    fates: Vec<Fate>,
    ended: bool,
}

impl Follower {
    fn new(get: GetId, count: usize) -> Follower {
        Follower { get, fates: vec![Fate::Open; count], ended: false }
    }

    fn meet(&mut self, n: usize, fate: Fate) {
        assert_eq!(self.fates[n], Fate::Open, "page {n}: and now {fate:?}");
        self.fates[n] = fate;
    }

    fn follow(&mut self, events: Vec<ClientEvent>) {
        for event in events {
            assert!(!self.ended || event.get() != Some(self.get), "after the end: {event:?}");
            match event {
                ClientEvent::Arrived { get, pages, bytes } => {
                    assert_eq!(get, self.get);
                    assert_eq!(bytes.len(), pages.len() * PAGE_LEN);
                    for (n, bytes) in pages.zip(bytes.chunks(PAGE_LEN)) {
                        assert!(bytes == page(n), "page {n} is another");
                        self.meet(n, Fate::Arrived);
                    }
                }
                ClientEvent::Failed { pages, failure, .. } => {
                    let failed = (0..64).filter(|n| pages >> n & 1 == 1);
                    failed.for_each(|n| self.meet(n, Fate::Failed(failure)));
                }
                ClientEvent::Ended { .. } => {
                    assert!(!self.fates.contains(&Fate::Open), "{:?}", self.fates);
                    self.ended = true;
                }
                ClientEvent::Wrong { page, .. } => assert_eq!(self.fates[page], Fate::Open),
                _ => {}
            }
        }
    }
}

/// What an agent does with a request.
#[derive(Clone, Debug)]
enum Answer {
    /// It has all pages but these; of those that it sends these are spoiled. They come in pieces of this length, and so many of those.
    Pages {
        missing: u64,
        spoiled: u64,
        piece: usize,
        pieces: usize,
    },
    Denied,
    /// It failed at it.
    Fails,
    Silence,
    Abort,
    /// Its link breaks, and it is there again.
    Restart,
}

fn answer() -> impl Strategy<Value = Answer> {
    let few = || prop_oneof![3 => Just(0u64), 1 => any::<u64>()];
    prop_oneof![
        4 => (few(), few(), 1usize..70_000, prop_oneof![Just(usize::MAX), 0usize..40])
            .prop_map(|(missing, spoiled, piece, pieces)| Answer::Pages { missing, spoiled, piece, pieces }),
        1 => Just(Answer::Denied),
        1 => Just(Answer::Fails),
        1 => Just(Answer::Silence),
        1 => Just(Answer::Abort),
        1 => Just(Answer::Restart),
    ]
}

/// What a reply says of page 0.
#[derive(PartialEq)]
enum First {
    /// It is not there.
    Missing,
    /// It came, whole and right.
    Given,
    Unclear,
}

/// The agent does that.
fn play(
    client: &mut Client<Script>,
    form: Form,
    request: &(ExchangeId, Control),
    answer: &Answer,
) -> First {
    let (exchange, count) = (request.0, usize::from(request.1.count()));
    let all = u64::MAX >> (64 - count);
    match *answer {
        Answer::Pages { missing, spoiled, piece, pieces } => {
            let done = all & !missing;
            let status = if done == all { Status::Ok } else { Status::NotFound };
            let spoil = |n: usize| match spoiled >> n & 1 {
                0 => form.page(n),
                _ => vec![0; form.page_len()],
            };
            let bytes = payload(count, (0..count).filter(|n| done >> n & 1 == 1).map(spoil));
            client.play_reply(request, status, |control| {
                *control = control.with_done(done);
                control.payload_len = bytes.len() as u32;
            });
            let mut offset = 0;
            for bytes in bytes.chunks(piece).take(pieces) {
                let event =
                    Event::Payload { exchange, offset, bytes: Bytes::copy_from_slice(bytes) };
                client.play(event);
                offset += bytes.len() as u32;
            }
            match offset as usize == bytes.len() {
                true => client.play(Event::Complete { exchange }),
                false => client.play(Event::Aborted { exchange, reason: AbortReason::Peer }),
            }
            let head = if count > 1 { done.count_ones() as usize * PageDescriptor::LEN } else { 0 };
            let whole = offset as usize >= head + form.page_len();
            return match missing & 1 {
                1 => First::Missing,
                _ if whole && spoiled & 1 == 0 => First::Given,
                _ => First::Unclear,
            };
        }
        Answer::Denied => {
            client.play_reply(request, Status::Denied, |_| ());
            client.play(Event::Complete { exchange });
        }
        Answer::Fails => {
            client.play_reply(request, Status::Failed, |_| ());
            client.play(Event::Complete { exchange });
        }
        Answer::Silence => {}
        Answer::Abort => client.play(Event::Aborted { exchange, reason: AbortReason::Peer }),
        Answer::Restart => {
            client.play(Event::Aborted { exchange, reason: AbortReason::LinkClosed });
            client.restart(A, 1);
        }
    }
    First::Unclear
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn each_page_of_a_get_arrives_right_or_fails_once(
        count in 1usize..=64,
        form in prop_oneof![Just(Form::Plain), Just(Form::Sealed)],
        urgency in prop_oneof![
            Just(Urgency::Demand), Just(Urgency::Ahead), Just(Urgency::Bulk)
        ],
        answers in proptest::collection::vec((answer(), 0u64..3000), 1..12),
    ) {
        let mut client = form.client();
        let (mut now, start) = (Instant::now(), Instant::now());
        let demanded = urgency == Urgency::Demand;
        let get = client.get(now, A, wanted(count), urgency);
        let mut follower = Follower::new(get, count);
        let (mut not_held, mut failed_alone, mut asked) = (false, false, 0);
        for (answer, pause) in &answers {
            for request in client.take_sent() {
                asked += 1;
                let alone = request.1.count() == 1;
                failed_alone |= alone && matches!(answer, Answer::Fails);
                let first = play(&mut client, form, &request, answer);
                not_held |= first == First::Missing;
                follower.follow(drain(&mut client, now));
                let given = first != First::Given || follower.fates[0] == Fate::Arrived;
                prop_assert!(given, "it came and was not handed on: {:?}", follower.fates[0]);
            }
            follower.follow(drain(&mut client, now));
            now += Duration::from_millis(*pause);
            follower.follow(turn(&mut client, now));
        }
        now += GET_DEADLINE + RETRY;
        for _ in 0..2 {
            follower.follow(turn(&mut client, now));
        }
        prop_assert!(follower.ended, "{:?}", follower.fates);
        prop_assert!(demanded || asked <= 1, "nobody waited, and it was asked for {asked} times");
        if demanded {
            let late = now.duration_since(start) > GET_DEADLINE;
            let right = match follower.fates[0] {
                Fate::Arrived => true,
                Fate::Failed(Failure::NotHeld(Status::NotFound)) => not_held,
                Fate::Failed(Failure::NotHeld(Status::Failed)) => failed_alone,
                Fate::Failed(Failure::Unanswered) => late,
                _ => false,
            };
            prop_assert!(right, "{:?}", follower.fates[0]);
        }
        prop_assert!(client.gets.is_empty() && client.requests.is_empty());
        prop_assert_eq!(client.open(), 0);
    }
}

#[test]
fn a_demanded_page_is_handed_on_before_the_others_are_looked_at() {
    let (mut client, now) = (Client::scripted(1, CHECKSUM), Instant::now());
    client.get(now, A, wanted(8), Urgency::Demand);
    let sent = client.take_sent();
    client.answer(&sent[0], payload(8, (0..8).map(page)));
    let arrived: Vec<Range<usize>> = drain(&mut client, now)
        .into_iter()
        .filter_map(|event| match event {
            ClientEvent::Arrived { pages, .. } => Some(pages),
            _ => None,
        })
        .collect();
    assert_eq!(arrived, [0..1, 1..8]);
}

#[test]
fn only_the_demanded_page_is_asked_for_again() {
    let (mut client, mut now) = (Client::scripted(1, CHECKSUM), Instant::now());
    let get = client.get(now, A, wanted(8), Urgency::Demand);
    let mut follower = Follower::new(get, 8);
    assert_eq!(client.take_sent()[0].1.count(), 8);
    now += RETRY + Duration::from_millis(1);
    follower.follow(turn(&mut client, now));
    assert_eq!(follower.fates[0], Fate::Open);
    assert!(follower.fates[1..].iter().all(|&fate| fate == Fate::Failed(Failure::GivenUp)));
    let again = client.take_sent();
    assert_eq!((again.len(), again[0].1.count()), (1, 1));
    client.answer(&again[0], page(0));
    follower.follow(drain(&mut client, now));
    assert!(follower.ended && follower.fates[0] == Fate::Arrived);
}

#[test]
fn a_get_that_was_cancelled_is_heard_of_no_more() {
    let (mut client, now) = (Client::scripted(1, CHECKSUM), Instant::now());
    let get = client.get(now, A, wanted(2), Urgency::Demand);
    let sent = client.take_sent();
    client.cancel(now, get);
    client.answer(&sent[0], payload(2, (0..2).map(page)));
    assert!(drain(&mut client, now).is_empty());
    assert!(client.gets.is_empty() && client.requests.is_empty());
    // Nor of what was to be told when it was cancelled.
    let get = client.get(now, A, wanted(2), Urgency::Demand);
    client.expire(now + RETRY + Duration::from_millis(1));
    client.cancel(now, get);
    assert!(drain(&mut client, now).is_empty());
}

#[test]
fn a_payload_out_of_order_is_not_used() {
    let (mut client, now) = (Client::scripted(1, CHECKSUM), Instant::now());
    let get = client.get(now, A, wanted(1), Urgency::Demand);
    let mut follower = Follower::new(get, 1);
    let sent = client.take_sent();
    let (exchange, bytes) = (sent[0].0, Bytes::from(page(0)));
    client.play_reply(&sent[0], Status::Ok, |control| {
        *control = control.with_done(1);
        control.payload_len = PAGE_LEN as u32;
    });
    client.play(Event::Payload { exchange, offset: 0, bytes: bytes.slice(..PAGE_LEN / 2) });
    let offset = PAGE_LEN as u32 / 2 - 1;
    client.play(Event::Payload { exchange, offset, bytes: bytes.slice(PAGE_LEN / 2..) });
    client.play(Event::Complete { exchange });
    follower.follow(turn(&mut client, now));
    assert_eq!(follower.fates, [Fate::Open]);
    let again = only_sent(&mut client);
    client.answer(&again, page(0));
    follower.follow(turn(&mut client, now));
    assert_eq!(follower.fates, [Fate::Arrived]);
}

/// The only request sent since.
fn only_sent(client: &mut Client<Script>) -> (ExchangeId, Control) {
    let [sent] = client.take_sent()[..] else { panic!("one request") };
    sent
}

#[test]
fn what_a_link_does_not_take_is_sent_when_it_does() {
    let (mut client, now) = (Client::scripted(1, CHECKSUM), Instant::now());
    client.block(A);
    let get = client.get(now, A, wanted(1), Urgency::Demand);
    assert_eq!(client.unsent().collect::<Vec<_>>(), [get]);
    client.send_unsent(now);
    assert!(client.take_sent().is_empty());
    client.unblock(A);
    client.send_unsent(now);
    assert_eq!((client.take_sent().len(), client.unsent().count()), (1, 0));
}

#[test]
fn what_nobody_waits_for_does_not_wait_for_its_link() {
    let (mut client, now) = (Client::scripted(1, CHECKSUM), Instant::now());
    client.block(A);
    for urgency in [Urgency::Ahead, Urgency::Bulk] {
        let get = client.get(now, A, wanted(3), urgency);
        let mut follower = Follower::new(get, 3);
        follower.follow(turn(&mut client, now));
        assert!(follower.ended, "{urgency:?}");
        assert_eq!(follower.fates, [Fate::Failed(Failure::GivenUp); 3]);
    }
}

#[test]
fn what_a_thread_waits_for_is_sent_first() {
    let (mut client, now) = (Client::scripted(1, CHECKSUM), Instant::now());
    client.block(A);
    client.get(now, A, wanted(3), Urgency::Ahead);
    client.get(now, A, wanted(1), Urgency::Demand);
    client.unblock(A);
    client.send_unsent(now);
    let counts: Vec<u16> = client.take_sent().iter().map(|(_, control)| control.count()).collect();
    assert_eq!(counts, [1, 3]);
}

#[test]
fn an_agent_has_longer_for_what_nobody_hurries_for() {
    let (mut client, start) = (Client::scripted(1, CHECKSUM), Instant::now());
    let get = client.get(start, A, wanted(3), Urgency::Bulk);
    let sent = client.take_sent();
    let mut follower = Follower::new(get, 3);
    follower.follow(turn(&mut client, start + PUT_DEADLINE));
    client.answer(&sent[0], payload(3, (0..3).map(page)));
    follower.follow(drain(&mut client, start + PUT_DEADLINE));
    assert_eq!(follower.fates, [Fate::Arrived; 3]);
}

#[test]
fn a_page_that_failed_with_others_is_asked_for_alone() {
    let (mut client, now) = (Client::scripted(1, CHECKSUM), Instant::now());
    let get = client.get(now, A, wanted(8), Urgency::Demand);
    let mut follower = Follower::new(get, 8);
    for count in [8, 1] {
        let sent = client.take_sent();
        assert_eq!((sent.len(), sent[0].1.count()), (1, count));
        play(&mut client, Form::Plain, &sent[0], &Answer::Fails);
        follower.follow(turn(&mut client, now));
    }
    assert_eq!(follower.fates[0], Fate::Failed(Failure::NotHeld(Status::Failed)));
}

#[test]
fn each_request_has_a_number_of_its_own_and_names_the_session() {
    let (mut client, now) = (Client::scripted(1, CHECKSUM), Instant::now());
    client.get(now, A, wanted(1), Urgency::Demand);
    client.get(now, A, wanted(3), Urgency::Ahead);
    client.put(now, A, std::iter::once((ContentId(1), &page(1)[..]))).expect("it is up");
    client.discard(now, A, &[ContentId(1)]).expect("it is up");
    client.ask_status(now);
    client.goodbye(now);
    let sent = client.take_sent();
    let numbers: BTreeSet<u64> = sent.iter().map(|(_, control)| control.request).collect();
    assert_eq!((sent.len(), numbers.len()), (6, 6), "{numbers:?}");
    assert!(sent.iter().all(|(_, control)| control.session == 1));
}

#[test]
fn a_put_that_is_not_answered_counts_as_not_stored() {
    let (mut client, mut now) = (Client::scripted(1, CHECKSUM), Instant::now());
    let frames = [page(0), page(1), page(2)];
    let pages = || (0..3).map(|n| (ContentId(n as u64), &frames[n][..]));
    let puts = [0, 1].map(|_| client.put(now, A, pages()).expect("it is up"));
    let sent = client.take_sent();
    client.answer_with(&sent[0], Status::Full, 0b011, Vec::new());
    now += PUT_DEADLINE + Duration::from_millis(1);
    let mut told = drain(&mut client, now);
    told.extend(turn(&mut client, now));
    let stored = |event: &ClientEvent| match *event {
        ClientEvent::Stored { put, pages } => Some((put, pages)),
        _ => None,
    };
    let stored: Vec<_> = told.iter().filter_map(stored).collect();
    assert_eq!(stored, [(puts[0], 0b011), (puts[1], 0)]);
}

#[test]
fn an_agent_is_not_blamed_for_the_time_in_which_this_process_did_not_run() {
    let (mut client, start) = (Client::scripted(1, CHECKSUM), Instant::now());
    let get = client.get(start, A, wanted(1), Urgency::Demand);
    let mut follower = Follower::new(get, 1);
    let now = start + Duration::from_secs(100);
    client.excuse(now, Duration::from_secs(99));
    follower.follow(turn(&mut client, now));
    assert_eq!(follower.fates, [Fate::Open]);
}

#[test]
fn what_has_begun_after_a_pause_has_no_longer_than_all() {
    let (mut client, now) = (Client::scripted(1, CHECKSUM), Instant::now());
    let get = client.get(now, A, wanted(1), Urgency::Demand);
    client.excuse(now, Duration::from_secs(1000));
    let mut follower = Follower::new(get, 1);
    for second in 1..=GET_DEADLINE.as_secs() + RETRY.as_secs() + 1 {
        follower.follow(turn(&mut client, now + Duration::from_secs(second)));
    }
    assert_eq!(follower.fates, [Fate::Failed(Failure::Unanswered)]);
}

/// Whether an agent that ends each request after `pause`, by what `answer` says, has a demanded page for ever.
fn is_given_up(answer: &Answer, pause: Duration) -> bool {
    let (mut client, start) = (Client::scripted(1, CHECKSUM), Instant::now());
    let get = client.get(start, A, wanted(1), Urgency::Demand);
    let (mut follower, mut now) = (Follower::new(get, 1), start);
    while now < start + 4 * GET_DEADLINE && !follower.ended {
        follower.follow(turn(&mut client, now));
        now += Duration::from_millis(1);
        for request in client.take_sent() {
            play(&mut client, Form::Plain, &request, answer);
        }
        follower.follow(turn(&mut client, now));
        now += pause;
    }
    assert!(follower.fates[0] == Fate::Open || now > start + GET_DEADLINE);
    follower.fates[0] == Fate::Failed(Failure::Unanswered)
}

#[test]
fn an_agent_that_answers_each_request_by_nothing_does_not_put_the_end_off() {
    for answer in [Answer::Abort, Answer::Denied] {
        for pause in [1, 10, 500, 1900] {
            let pause = Duration::from_millis(pause);
            assert!(is_given_up(&answer, pause), "{answer:?} after {pause:?}");
        }
    }
}

#[test]
fn an_agent_that_has_left_a_request_unanswered_is_not_waited_for_until_it_answers_one() {
    let (mut client, now) = (Client::scripted(1, CHECKSUM), Instant::now());
    for (waited, answers) in [(SILENCE - Duration::from_millis(1), true), (SILENCE, false)] {
        let get = client.get(now, A, wanted(1), Urgency::Demand);
        client.cancel(now + waited, get);
        assert_eq!(client.answers(now + waited, A), answers, "{waited:?}");
    }
    client.take_sent();
    client.get(now + SILENCE, A, wanted(1), Urgency::Demand);
    let request = client.take_sent().remove(0);
    assert!(!client.answers(now + SILENCE, A), "it has only been asked");
    assert!(client.answers(now + SILENCE + SILENCE_LASTS, A), "for ever");
    client.answer(&request, page(0));
    turn(&mut client, now + SILENCE);
    assert!(client.answers(now + SILENCE, A));
}

/// Whoever is asked for the same by way of a hedge may be first although the agent is as usual.
#[test]
fn an_agent_that_is_slow_as_usual_is_not_silent() {
    let (mut client, mut now) = (Client::scripted(1, CHECKSUM), Instant::now());
    let usual = Duration::from_millis(150);
    for _ in 0..50 {
        client.take_sent();
        client.get(now, A, wanted(1), Urgency::Demand);
        let request = client.take_sent().remove(0);
        now += usual;
        client.answer(&request, page(0));
        turn(&mut client, now);
    }
    for (waited, answers) in [(usual * 2, true), (usual * (SILENCE_TIMES + 1), false)] {
        let get = client.get(now, A, wanted(1), Urgency::Demand);
        now += waited;
        client.cancel(now, get);
        assert_eq!(client.answers(now, A), answers, "{waited:?}");
    }
}

#[test]
fn an_agent_is_trusted_less_long_while_it_answers_nothing_and_another_one_does() {
    let soon = Duration::from_millis(1);
    let put = |client: &mut Client<Script>, at, agent| {
        client.put(at, agent, [(ContentId(1), &page(0)[..])].into_iter()).expect("it is up");
        client.take_sent().remove(0)
    };
    for other_answers in [true, false] {
        let (mut client, now) = (Client::scripted(2, CHECKSUM), Instant::now());
        put(&mut client, now, A);
        if other_answers {
            let other = put(&mut client, now, AgentId(1));
            client.play_reply(&other, Status::Full, |_| ());
            turn(&mut client, now + soon);
        }
        // Its own answer says nothing of whether it is the only one.
        let own = put(&mut client, now, A);
        client.play_reply(&own, Status::Full, |_| ());
        turn(&mut client, now + soon);
        let quiet = now + soon + QUIET;
        assert!(client.keeps(quiet, A));
        // If nobody answers it is not the agent.
        assert_eq!(client.keeps(quiet + soon, A), !other_answers);
        let second = put(&mut client, quiet, A);
        client.play_reply(&second, Status::Full, |_| ());
        turn(&mut client, quiet + soon);
        assert!(client.keeps(quiet + soon + QUIET, A), "the first put is what it is at");
        put(&mut client, now + SUSPECT, A);
        assert!(!client.keeps(now + SUSPECT + soon, A));
    }
}

/// An agent that says no at once must not be asked without pause.
#[test]
fn what_is_denied_is_asked_for_again_after_a_pause() {
    let (mut client, now) = (Client::scripted(1, CHECKSUM), Instant::now());
    client.take_sent();
    client.get(now, A, wanted(1), Urgency::Demand);
    let mut asked = 0;
    let mut at = now;
    while at < now + 20 * DENIED_PAUSE {
        for request in client.take_sent() {
            asked += 1;
            client.play_reply(&request, Status::Denied, |_| ());
            client.play(Event::Complete { exchange: request.0 });
        }
        assert!(
            turn(&mut client, at).iter().all(|event| !matches!(event, ClientEvent::Failed { .. }))
        );
        if client.unsent().next().is_some() {
            let due = client.deadline().expect("it is to be asked for again");
            assert!(due > at && due <= at + DENIED_PAUSE, "{:?}", due - at);
        }
        at += DENIED_PAUSE / 10;
    }
    assert!((15..=21).contains(&asked), "asked {asked} times");
}
