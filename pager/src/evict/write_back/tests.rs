use gms_policy::ids::{PageAddr, SpaceId};
use gms_policy::stripes::Shape;

use super::*;
use crate::fault::tests::{shared, shared_auto, shared_of, shared_redundant};
use crate::page_map::PAGE;
use crate::range_set::RangeSet;
use crate::shared::Outcome;
use crate::tables::{EvictOutcome, FaultAction};
use gms_transport::client::script::Script;
use gms_transport::client::{Checksum, PUT_DEADLINE};
use gms_transport::message::{Control, Feedback, MemberEntry, PAGES_MAX, Status};
use gms_transport::{Event, ExchangeId};

pub(super) const ID: SpaceId = SpaceId(1);

pub(super) fn write_back(agents: u16) -> WriteBack<Script> {
    write_back_of(shared().0, agents)
}

/// Each page is to have two copies.
pub(super) fn redundant(agents: u16) -> WriteBack<Script> {
    write_back_of(shared_redundant(2).0, agents)
}

pub(super) fn write_back_of(shared: Arc<Shared>, agents: u16) -> WriteBack<Script> {
    lock(&shared.tables).add_space(ID);
    lock(&shared.tables).register(ID, 0..PAGE << 20, &RangeSet::default());
    let agents = Client::scripted(agents, Checksum::new(7));
    let mut write_back = WriteBack::new(Instant::now(), shared, agents);
    write_back.agents.take_sent();
    for agent in write_back.agents.lane().agents() {
        write_back.shared.agent_up(agent, "a", 1);
    }
    write_back
}

pub(super) fn network(write_back: &mut WriteBack<Script>, now: Instant) {
    write_back.agents.drive(now).expect("a script");
    while write_back.poll(now).is_some() {}
}

/// Moves some pages to the write-back buffer.
pub(super) fn evict(thread: &WriteBack<Script>, pages: impl Iterator<Item = u64>) {
    let pages: Vec<PageAddr> = pages.map(|n| PageAddr::containing(n * PAGE)).collect();
    let (mut leaving, mut wake) = (Vec::new(), Vec::new());
    let mut tables = lock(&thread.shared.tables);
    tables.begin_evict(ID, &pages, &mut leaving);
    for (page, slot) in leaving {
        tables.finish_evict(slot, EvictOutcome::Moved(page.get()), &mut wake);
    }
}

/// The agents answer what was sent, but for some operations; true if a write was among that.
pub(super) fn answer(thread: &mut WriteBack<Script>, now: Instant, mute: &[Op]) -> bool {
    let mut sent = thread.agents.take_sent();
    sent.retain(|request| !mute.iter().any(|op| request.1.op() == Some(*op)));
    sent.iter().for_each(|request| thread.agents.answer(request, Vec::new()));
    network(thread, now);
    sent.iter().any(|request| request.1.op() == Some(Op::Put))
}

#[test]
fn what_is_not_answered_is_given_up_whatever_it_is() {
    // As many requests for its state as one deadline holds.
    let open_max = DISCARDS_MAX + PUT_DEADLINE.as_secs() as usize + 1;
    for mute in [&[Op::Status][..], &[Op::Discard], &[Op::Status, Op::Discard]] {
        let (mut thread, start) = (write_back(1), Instant::now());
        evict(&thread, 0..256);
        thread.turn(start, true);
        answer(&mut thread, start, &[]);
        let mut last_write = Duration::ZERO;
        for step in 0..240 {
            let time = Duration::from_millis(50) * step;
            let now = start + time;
            let page = PageAddr::containing(u64::from(step) * PAGE);
            lock(&thread.shared.tables).discarded((ID, page));
            evict(&thread, std::iter::once(256 + u64::from(step)));
            thread.discard_at = now;
            thread.agents.expire(now);
            thread.agents.send_unsent(now);
            if step % 20 == 0 {
                thread.agents.ask_status(now);
            }
            thread.turn(now, true);
            if answer(&mut thread, now, mute) {
                last_write = time;
            }
            assert!(thread.agents.open() <= open_max, "{mute:?}: {}", thread.agents.open());
        }
        assert!(last_write > Duration::from_secs(11), "{mute:?}: no write after {last_write:?}");
    }
}

#[test]
fn what_an_agent_may_not_have_heard_of_is_told_again() {
    let (mut thread, mut now) = (write_back(1), Instant::now());
    evict(&thread, 1..2);
    thread.turn(now, true);
    answer(&mut thread, now, &[]);
    lock(&thread.shared.tables).discarded((ID, page(1)));
    let mut discards = |thread: &mut WriteBack<Script>| {
        now += PUT_DEADLINE + DISCARDS_PAUSE;
        thread.agents.expire(now);
        thread.turn(now, true);
        let sent = thread.agents.take_sent();
        sent.into_iter().find(|(_, control)| control.op() == Some(Op::Discard))
    };
    assert!(discards(&mut thread).is_some());
    let again = discards(&mut thread).expect("a frame is lost until the workload ends");
    // It had no room for the request.
    thread.agents.play_reply(&again, Status::Denied, |_| {});
    thread.agents.play(Event::Complete { exchange: again.0 });
    network(&mut thread, Instant::now());
    let again = discards(&mut thread).expect("a frame is lost until the workload ends");
    thread.agents.answer(&again, Vec::new());
    network(&mut thread, Instant::now());
    assert!(discards(&mut thread).is_none());
}

#[test]
fn an_agent_to_which_nothing_can_be_sent_holds_up_no_other() {
    let (mut thread, now) = (write_back(2), Instant::now());
    thread.agents.block(AgentId(0));
    let batches = PUTS_MAX;
    evict(&thread, 0..(batches * PAGES_MAX) as u64);
    assert!(thread.turn(now, true));
    let sent = thread.agents.take_sent();
    let to_other = |(exchange, control): &(ExchangeId, Control)| {
        control.op() == Some(Op::Put) && thread.agents.agent_of(*exchange) == AgentId(1)
    };
    assert_eq!(sent.iter().filter(|sent| to_other(sent)).count(), batches);
    let views = thread.agents.lane().views();
    assert!(views[0].refusals > 0 && views[1].refusals == 0, "{views:?}");
}

/// An agent bounds its links: it may refuse one to a fault thread and not to us.
#[test]
fn nothing_is_put_where_a_fault_thread_could_not_fetch_it() {
    let (mut thread, now) = (write_back(2), Instant::now());
    let reach = |thread: &WriteBack<Script>, agent, up| {
        thread.shared.homes.tell_link(0, AgentId(agent), up);
    };
    reach(&thread, 0, false);
    evict(&thread, 0..4 * PAGES_MAX as u64);
    assert!(thread.turn(now, true) && !thread.agents_are_full());
    let puts = thread.agents.take_sent();
    assert_eq!(puts.len(), 4);
    assert!(puts.iter().all(|&(put, _)| thread.agents.agent_of(put) == AgentId(1)));
    reach(&thread, 1, false);
    evict(&thread, 256..257);
    assert!(!thread.turn(now, true) && thread.agents_are_full());
    reach(&thread, 0, true);
    assert!(thread.turn(now, true) && !thread.agents_are_full());
}

/// Each lane hears of it, the one some time after the other.
#[test]
fn a_restart_of_an_agent_is_for_the_lane_that_sees_it_first() {
    let (mut thread, now, agent) = (write_back(1), Instant::now(), AgentId(0));
    let other_lane = |thread: &WriteBack<Script>, session| {
        thread.shared.agent_up(agent, "a", session);
    };
    // A page comes back, and the agent has a copy.
    evict(&thread, 1..2);
    thread.turn(now, true);
    answer(&mut thread, now, &[]);
    let place = (ID, PageAddr::containing(PAGE));
    let FaultAction::Fetch(content) = lock(&thread.shared.tables).fault(place) else {
        panic!("not written")
    };
    assert!(lock(&thread.shared.tables).fetched(place, content, true));
    thread.agents.restart(agent, 2);
    network(&mut thread, now);
    evict(&thread, 1..2);
    assert!(lock(&thread.shared.tables).has_ready(), "it was left to an agent that has lost it");
    thread.turn(now, true);
    answer(&mut thread, now, &[]);
    assert!(!lock(&thread.shared.tables).has_ready());
    // Of the other lane an earlier greeting may be read later.
    for session in [2, 1, 2] {
        other_lane(&thread, session);
        assert!(!thread.shared.has_failed(), "what it has it was given after the restart");
    }
    // One that never had a link before is the first to see it.
    other_lane(&thread, 3);
    let Some(Outcome::Killed(reason)) = thread.shared.outcome() else { panic!("not killed") };
    // As far as gms knows it may be either.
    assert!(reason.contains("restarted") && reason.contains("no link"), "{reason}");
}

pub(super) fn page(n: u64) -> PageAddr {
    PageAddr::containing(n * PAGE)
}

pub(super) fn holders(thread: &WriteBack<Script>, n: u64) -> Option<AgentSet> {
    match lock(&thread.shared.tables).fault((ID, page(n))) {
        FaultAction::Fetch(content) => Some(content.holders),
        _ => None,
    }
}

pub(super) fn both() -> AgentSet {
    [AgentId(0), AgentId(1)].into_iter().collect()
}

/// Answers one of the two puts of a page, and looks whether that was enough.
#[test]
fn a_page_has_gone_out_when_each_of_two_agents_has_it() {
    let (mut thread, now) = (redundant(3), Instant::now());
    evict(&thread, 1..2);
    thread.turn(now, true);
    let sent = thread.agents.take_sent();
    assert_eq!(sent.len(), 2);
    let to: AgentSet = sent.iter().map(|(put, _)| thread.agents.agent_of(*put)).collect();
    assert_eq!(to.len(), 2);
    thread.agents.answer(&sent[0], Vec::new());
    network(&mut thread, now);
    assert_eq!(holders(&thread, 1), None, "one has it");
    thread.agents.answer(&sent[1], Vec::new());
    network(&mut thread, now);
    assert_eq!(holders(&thread, 1), Some(to));
}

#[test]
fn while_one_agent_is_away_the_other_gets_the_pages_alone_and_both_when_it_is_back() {
    let (mut thread, now) = (redundant(2), Instant::now());
    thread.agents.lose(AgentId(1));
    network(&mut thread, now);
    evict_zeros(&thread, 1);
    thread.turn(now, true);
    answer(&mut thread, now, &[]);
    assert_eq!(holders(&thread, 1), Some(AgentSet::of(AgentId(0))));
    // Back, with all that it had: nothing is missing there but what came since.
    thread.agents.restart(AgentId(1), 1);
    for step in 1..=20 {
        let later = now + Duration::from_millis(200) * step;
        network(&mut thread, later);
        thread.turn(later, true);
        answer_with_pages(&mut thread, later);
    }
    assert_eq!(holders(&thread, 1), Some(both()));
    assert_eq!(thread.shortage_left().0, 0);
}

/// Answers gets with the bytes that [`evict`] has left in the buffer (zeros), everything else as it is.
pub(super) fn answer_with_pages(thread: &mut WriteBack<Script>, now: Instant) {
    let sent = thread.agents.take_sent();
    answer_all(thread, now, &sent);
}

fn answer_all(thread: &mut WriteBack<Script>, now: Instant, sent: &[(ExchangeId, Control)]) {
    for request in sent {
        let payload = match (request.1.op(), request.1.count()) {
            (Some(Op::Get), 1) => vec![0; PAGE as usize],
            (Some(Op::Get), count) => vec![0; usize::from(count) * (PAGE as usize + 16)],
            _ => Vec::new(),
        };
        thread.agents.answer(request, payload);
    }
    network(thread, now);
}

pub(super) fn evict_zeros(thread: &WriteBack<Script>, n: u64) {
    let hash = thread.shared.checksum(&[0; PAGE as usize]);
    let (mut leaving, mut wake) = (Vec::new(), Vec::new());
    let mut tables = lock(&thread.shared.tables);
    tables.begin_evict(ID, &[page(n)], &mut leaving);
    tables.finish_evict(leaving[0].1, EvictOutcome::Moved(hash), &mut wake);
}

/// The agents are asked for their state: one drains.
pub(super) fn tell_states(thread: &mut WriteBack<Script>, now: Instant, leaving: AgentId) {
    thread.agents.ask_status(now);
    for request in thread.agents.take_sent() {
        let leaves = thread.agents.agent_of(request.0) == leaving;
        let status = if leaves { Status::Draining } else { Status::Ok };
        thread.agents.answer_with(&request, status, 0, Vec::new());
    }
    network(thread, now);
}

/// Of three agents one is restarted, and one drains: each page ends with two copies at the agents that stay.
#[test]
fn pages_of_agents_that_were_lost_or_leave_are_copied_anew() {
    let (mut thread, start) = (redundant(3), Instant::now());
    (1..40).for_each(|n| evict_zeros(&thread, n));
    thread.turn(start, true);
    answer_with_pages(&mut thread, start);
    let lost = holders(&thread, 1).and_then(|set| set.agents().next()).expect("a copy");
    thread.agents.restart(lost, 2);
    network(&mut thread, start);
    assert!(!thread.shared.has_failed(), "another has each page");
    assert_eq!(holders(&thread, 1).map(AgentSet::len), Some(1));
    let mut now = start;
    for _ in 0..20 {
        now += Duration::from_millis(100);
        thread.turn(now, true);
        answer_with_pages(&mut thread, now);
    }
    assert_eq!(thread.shortage_left().0, 0);
    let of_all = |thread: &WriteBack<Script>| -> Vec<AgentSet> {
        (1..40).map(|n| holders(thread, n).expect("at agents")).collect()
    };
    assert!(of_all(&thread).iter().all(|set| set.len() == 2), "{:?}", of_all(&thread));

    tell_states(&mut thread, now, AgentId(2));
    for _ in 0..20 {
        now += Duration::from_millis(100);
        thread.turn(now, true);
        answer_with_pages(&mut thread, now);
    }
    assert!(of_all(&thread).iter().all(|set| *set == both()), "{:?}", of_all(&thread));
    assert_eq!(lock(&thread.shared.tables).held_by(AgentId(2)), 0);
}

/// What the other agent of a page has may be lost with it.
#[test]
fn an_agent_that_drains_is_kept_while_the_only_other_one_does_not_answer() {
    let (mut thread, start) = (redundant(2), Instant::now());
    evict(&thread, 0..40);
    thread.turn(start, true);
    answer_with_pages(&mut thread, start);
    assert!((0..40).all(|n| holders(&thread, n) == Some(both())));
    let mut now = start;
    let turns = |thread: &mut WriteBack<Script>, now: &mut Instant| {
        for _ in 0..15 {
            *now += Duration::from_millis(100);
            thread.turn(*now, true);
        }
    };
    thread.agents.ask_status(now);
    let asked = thread.agents.take_sent();
    let of_first = |one: &&(ExchangeId, Control)| thread.agents.agent_of(one.0) == AgentId(0);
    let (first, other): (Vec<_>, Vec<_>) = asked.iter().partition(of_first);
    turns(&mut thread, &mut now);
    for request in first {
        thread.agents.answer_with(request, Status::Draining, 0, Vec::new());
    }
    network(&mut thread, now);
    turns(&mut thread, &mut now);
    let leaves = |thread: &mut WriteBack<Script>| {
        let sent = thread.agents.take_sent();
        sent.iter().any(|request| request.1.op() == Some(Op::Goodbye))
    };
    assert!(!leaves(&mut thread) && (0..40).all(|n| holders(&thread, n) == Some(both())));
    // It answers after all; but it may have ended since it said that.
    for request in other {
        thread.agents.answer_with(request, Status::Ok, 0, Vec::new());
    }
    network(&mut thread, now);
    turns(&mut thread, &mut now);
    assert!(!leaves(&mut thread));
    thread.agents.ask_status(now);
    let sent = thread.agents.take_sent();
    let of_other = sent.iter().find(|request| thread.agents.agent_of(request.0) == AgentId(1));
    thread.agents.answer_with(of_other.expect("it is asked"), Status::Ok, 0, Vec::new());
    network(&mut thread, now);
    turns(&mut thread, &mut now);
    assert!(leaves(&mut thread));
    assert!((0..40).all(|n| holders(&thread, n) == Some(AgentSet::of(AgentId(1)))));
}

/// The first agents are in one zone, the last one in another.
fn two_zones(agents: u8) -> WriteBack<Script> {
    let mut thread = redundant(agents.into());
    let zone = |agent| if agent + 1 < agents { "near" } else { "far" };
    let told = (0..agents).map(|agent| {
        let (addr, zone) = (([10, 0, 0, 1], 1).into(), zone(agent).parse().expect("a zone"));
        MemberEntry::new([agent; 16], addr, 1, zone)
    });
    thread.agents.lane().roster().learn("agent-0", &Vec::from_iter(told));
    network(&mut thread, Instant::now());
    thread
}

#[test]
fn copies_are_in_two_zones_also_while_the_agent_in_one_of_them_is_busy() {
    let (mut thread, now) = (two_zones(3), Instant::now());
    let pages = (2 * PUTS_MAX * PAGES_MAX) as u64;
    evict(&thread, 0..pages);
    thread.turn(now, true);
    let sent = thread.agents.take_sent();
    let to =
        |agent| sent.iter().filter(|put| thread.agents.agent_of(put.0) == AgentId(agent)).count();
    assert_eq!((to(0) + to(1), to(2)), (PUTS_MAX, PUTS_MAX));
    assert!(!thread.agents_are_full(), "it is waited for");
    answer_all(&mut thread, now, &sent);
    thread.turn(now, true);
    answer_with_pages(&mut thread, now);
    let far = AgentSet::of(AgentId(2));
    assert!(
        (0..pages)
            .all(|n| holders(&thread, n)
                .is_some_and(|set| set.len() == 2 && set.without(far) != set))
    );
}

#[test]
fn copies_are_in_one_zone_while_the_other_takes_none_and_are_moved_when_it_does() {
    let (mut thread, mut now) = (two_zones(3), Instant::now());
    thread.agents.lose(AgentId(2));
    network(&mut thread, now);
    (1..40).for_each(|n| evict_zeros(&thread, n));
    thread.turn(now, true);
    answer_with_pages(&mut thread, now);
    assert!((1..40).all(|n| holders(&thread, n) == Some(both())));
    assert_eq!((thread.short(now), thread.shortage_left().0), (0, 0), "nobody else is there");
    thread.agents.restart(AgentId(2), 2);
    network(&mut thread, now);
    let is_far = |set: AgentSet| set.len() == 2 && set.has(AgentId(2));
    for _ in 0..20 {
        now += Duration::from_millis(100);
        thread.turn(now, true);
        answer_with_pages(&mut thread, now);
        assert_eq!(thread.short(now), 0, "told as too few");
    }
    assert!((1..40).all(|n| holders(&thread, n).is_some_and(is_far)));
    assert_eq!(thread.shortage_left().0, 0);
}

/// It has no room, and says so.
#[test]
fn no_page_waits_for_room_in_another_zone() {
    let (mut thread, now) = (two_zones(3), Instant::now());
    thread.agents.recall(AgentId(2), 1);
    thread.agents.ask_status(now);
    answer_with_pages(&mut thread, now);
    (1..40).for_each(|n| evict_zeros(&thread, n));
    thread.turn(now, true);
    answer_with_pages(&mut thread, now);
    assert!((1..40).all(|n| holders(&thread, n) == Some(both())));
    assert_eq!(thread.shortage_left().0, 0);
}

/// Its host needs memory, by its own words, until it has 10 pages left.
#[test]
fn pages_that_an_agent_wants_taken_away_move_to_another() {
    let (mut thread, mut now) = (write_back(2), Instant::now());
    (1..200).for_each(|n| evict_zeros(&thread, n));
    let held = |thread: &WriteBack<Script>, agent| {
        lock(&thread.shared.tables).held_by(AgentId(agent)) as u32
    };
    for _ in 0..60 {
        now += Duration::from_millis(100);
        thread.turn(now, true);
        thread.agents.ask_status(now);
        let recall = held(&thread, 0).saturating_sub(10);
        thread.agents.recall(AgentId(0), recall);
        answer_with_pages(&mut thread, now);
        assert_eq!(thread.short(now), 0, "told as a loss");
    }
    assert!(held(&thread, 0) <= 10 && held(&thread, 1) >= 189);
    assert_eq!(thread.shortage_left().0, 0);
}

/// It says of none that it has forgotten it, so all that it was relieved of is still under way.
#[test]
fn no_more_pages_are_under_way_than_an_agent_wants_taken_away() {
    let (mut thread, mut now) = (write_back(2), Instant::now());
    (1..1000).for_each(|n| evict_zeros(&thread, n));
    let held = |thread: &WriteBack<Script>| lock(&thread.shared.tables).held_by(AgentId(0));
    let mut before = 0;
    for step in 0..40 {
        now += Duration::from_millis(100);
        thread.turn(now, true);
        thread.agents.ask_status(now);
        if step == 10 {
            before = held(&thread);
            thread.agents.recall(AgentId(0), 100);
        }
        let forgets = |request: &(ExchangeId, Control)| request.1.op() == Some(Op::Discard);
        let sent = thread.agents.take_sent();
        let (_unanswered, sent): (Vec<_>, Vec<_>) = sent.into_iter().partition(forgets);
        answer_all(&mut thread, now, &sent);
    }
    let relieved = before - held(&thread);
    assert!(before > 300 && (100..=100 + 2 * PAGES_MAX as u64).contains(&relieved), "{relieved}");
}

/// The lane of the fault thread hears of the restart before this one hears the answer of the session before.
#[test]
fn what_was_stored_before_a_restart_is_not_believed_after_it() {
    let (mut thread, now) = (write_back(1), Instant::now());
    evict(&thread, 1..2);
    thread.turn(now, true);
    thread.shared.agent_up(AgentId(0), "a", 2);
    answer(&mut thread, now, &[]);
    assert!(lock(&thread.shared.tables).has_ready(), "the only bytes were let go");
    assert_eq!(holders(&thread, 1), None);
}

#[test]
fn an_unchanged_page_is_not_left_where_a_fault_thread_could_not_fetch_it() {
    let (mut thread, now) = (write_back(2), Instant::now());
    evict(&thread, 1..2);
    thread.turn(now, true);
    answer(&mut thread, now, &[]);
    let place = (ID, page(1));
    let FaultAction::Fetch(content) = lock(&thread.shared.tables).fault(place) else {
        panic!("not away")
    };
    assert!(lock(&thread.shared.tables).fetched(place, content, true));
    let agent = content.holders.agents().next().expect("one");
    thread.shared.homes.tell_link(0, agent, false);
    thread.turn(now, true);
    evict(&thread, 1..2);
    assert!(lock(&thread.shared.tables).has_ready(), "it was left there");
}

/// It says so in all its words, with frames that are left for others, or with less than a turn's worth.
#[test]
fn an_agent_without_room_is_given_no_page_alone_and_holds_up_no_other() {
    for (frames, credits) in [(1000, 0), (511, 511)] {
        let (mut thread, now) = (write_back_of(shared_auto().0, 2), Instant::now());
        assert_eq!(thread.shared.copies, 2);
        for _ in 0..20 {
            thread.agents.ask_status(now);
            for request in thread.agents.take_sent() {
                let little = thread.agents.agent_of(request.0) == AgentId(1);
                let op = request.1.op();
                thread.agents.play_reply(&request, Status::Ok, |control| {
                    if op == Some(Op::Put) {
                        *control = control.with_done(u64::MAX >> (64 - request.1.count()));
                    }
                    let told = control.feedback();
                    let room = (frames, credits);
                    let (frames_free, credits_put) =
                        if little { room } else { (told.frames_free, told.credits_put) };
                    *control = control.with_feedback(Feedback { frames_free, credits_put, ..told });
                });
                thread.agents.play(Event::Complete { exchange: request.0 });
            }
            network(&mut thread, now);
            let first = lock(&thread.shared.tables).remote_pages() + 1;
            evict(&thread, first..first + 64);
            thread.turn(now, true);
        }
        let tables = lock(&thread.shared.tables);
        assert!(tables.remote_pages() >= 64 * 10, "held up: {}", tables.remote_pages());
        assert_eq!(tables.held_by(AgentId(1)), 0);
    }
}

#[test]
fn nothing_is_waited_for_when_no_more_copies_are_to_be_made() {
    let (mut thread, now) = (redundant(2), Instant::now());
    evict_zeros(&thread, 1);
    thread.turn(now, true);
    answer_with_pages(&mut thread, now);
    thread.agents.restart(AgentId(1), 2);
    network(&mut thread, now);
    let later = now + Duration::from_millis(200);
    thread.turn(later, true);
    assert!(thread.shortage_left().0 > 0);
    thread.turn(later, false);
    assert_eq!(thread.shortage_left(), (0, None));
}

/// Of several copies one is made later, rather than all threads wait that need room.
#[test]
fn an_agent_that_answers_nothing_is_soon_done_without() {
    let (mut thread, now) = (redundant(2), Instant::now());
    evict(&thread, 0..64);
    thread.turn(now, true);
    let puts = thread.agents.take_sent();
    let to =
        |thread: &WriteBack<Script>, put: &(ExchangeId, Control)| thread.agents.agent_of(put.0);
    let (silent, other) = (AgentId(0), AgentId(1));
    let answered = puts.iter().find(|put| to(&thread, put) == other).expect("a put to each");
    let soon = now + Duration::from_millis(250);
    thread.agents.answer(answered, Vec::new());
    network(&mut thread, soon);
    evict(&thread, 64..128);
    thread.turn(soon, true);
    assert_eq!(thread.agents.take_sent().len(), 2, "both are waited for");
    evict(&thread, 128..192);
    thread.turn(now + Duration::from_millis(310), true);
    let sent = thread.agents.take_sent();
    assert!(!sent.is_empty() && sent.iter().all(|put| to(&thread, put) != silent), "{sent:?}");
}

#[test]
fn it_is_known_when_too_few_agents_answer_for_a_stripe() {
    let parity = Redundancy::Parity(Shape::new(2, 2).expect("a shape"));
    let (mut thread, now) = (write_back_of(shared_of(1, parity).0, 4), Instant::now());
    evict(&thread, 0..256);
    thread.turn(now, true);
    assert!(!thread.too_few_answer());
    let silent = [AgentId(0), AgentId(1)];
    let later = now + Duration::from_millis(310);
    let sent = thread.agents.take_sent();
    assert!(!sent.is_empty());
    let answering = sent.iter().filter(|put| !silent.contains(&thread.agents.agent_of(put.0)));
    let answering: Vec<(ExchangeId, Control)> = answering.copied().collect();
    answering.iter().for_each(|put| thread.agents.answer(put, Vec::new()));
    network(&mut thread, later);
    thread.turn(later, true);
    assert!(thread.too_few_answer() && !thread.agents_are_full());
}

#[test]
fn an_agent_is_used_no_more_when_it_lost_pages_too_often() {
    let (mut thread, agent, now) = (redundant(2), AgentId(1), Instant::now());
    let stored = |thread: &mut WriteBack<Script>, n| {
        evict(thread, n..n + 1);
        thread.turn(now, true);
        answer_with_pages(thread, now);
    };
    for n in 1..64 {
        stored(&mut thread, n);
        thread.shared.agent_up(agent, "b", 1 + n);
    }
    for session in 100..200 {
        thread.shared.agent_up(agent, "b", session);
    }
    assert!(!thread.shared.unsound_agents().has(agent), "it had nothing but 63 times");
    stored(&mut thread, 64);
    thread.shared.agent_up(agent, "b", 200);
    assert!(thread.shared.unsound_agents().has(agent), "64 times");
}

/// What the agent that drains has, and the other one has not answered, is in no tables as a page at agents.
#[test]
fn a_page_that_is_half_written_is_not_left_to_an_agent_that_is_let_go() {
    let (mut thread, start) = (redundant(2), Instant::now());
    evict(&thread, 1..2);
    thread.turn(start, true);
    let puts = thread.agents.take_sent();
    let (first, other): (Vec<_>, Vec<_>) =
        puts.iter().partition(|put| thread.agents.agent_of(put.0) == AgentId(0));
    first.iter().for_each(|put| thread.agents.answer(put, Vec::new()));
    network(&mut thread, start);
    for now in [1, 2].map(|n| start + Duration::from_millis(100) * n) {
        tell_states(&mut thread, now, AgentId(0));
        thread.turn(now, true);
    }
    let sent = thread.agents.take_sent();
    assert!(sent.iter().any(|request| request.1.op() == Some(Op::Goodbye)), "it is let go");
    other.iter().for_each(|put| thread.agents.answer(put, Vec::new()));
    network(&mut thread, start + Duration::from_millis(300));
    assert_eq!(holders(&thread, 1), None, "it counts as stored at both");
}

#[test]
fn a_lack_that_comes_and_goes_is_told_some_times_a_minute() {
    let (start, mut lack) = (Instant::now(), repair::Lack::default());
    let mut look = |n: u32| lack.note(start + Duration::from_secs(2) * n / 3, n % 6 < 3);
    let told: Vec<bool> = (0..900).filter_map(&mut look).collect();
    assert!(told.chunks(2).all(|pair| pair[0] && pair.get(1).is_none_or(|end| !end)));
    assert!((60..=120).contains(&told.len()), "{} lines in ten minutes", told.len());
}
