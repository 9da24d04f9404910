use gms_transport::ExchangeId;
use gms_transport::client::LEASE;
use gms_transport::client::script::Script;
use gms_transport::message::Control;

use super::super::tests::{
    ID, answer, answer_with_pages, both, evict, evict_zeros, holders, network, page, redundant,
    tell_states, write_back,
};
use super::super::{DISCARDS_BATCH, GONE_AFTER};
use super::*;

const STEP: Duration = Duration::from_millis(100);

/// Three agents, of which the first two have each page.
fn at_two_of_three(now: Instant, pages: Range<u64>) -> WriteBack<Script> {
    let mut thread = redundant(3);
    thread.agents.lose(AgentId(2));
    network(&mut thread, now);
    pages.clone().for_each(|n| evict_zeros(&thread, n));
    thread.turn(now, true);
    answer_with_pages(&mut thread, now);
    thread.agents.restart(AgentId(2), 1);
    network(&mut thread, now);
    assert!(pages.clone().all(|n| holders(&thread, n) == Some(both())));
    thread
}

fn sent_of(thread: &mut WriteBack<Script>, op: Op) -> Vec<(ExchangeId, Control)> {
    let sent = thread.agents.take_sent();
    sent.into_iter().filter(|request| request.1.op() == Some(op)).collect()
}

/// Pages of others lack a copy, which nobody gives.
#[test]
fn an_agent_that_drains_waits_for_none_but_its_own_pages() {
    let start = Instant::now();
    let mut thread = at_two_of_three(start, 1..40);
    thread.agents.restart(AgentId(1), 2);
    network(&mut thread, start);
    let goes = (1..10).any(|n| {
        let now = start + STEP * n;
        tell_states(&mut thread, now, AgentId(2));
        thread.turn(now, true);
        let sent = thread.agents.take_sent();
        sent.iter().any(|request| request.1.op() == Some(Op::Goodbye))
    });
    assert!(goes && thread.shortage_left().0 > 0);
}

/// The others, at lower addresses, only lack one of two copies.
#[test]
fn pages_that_only_an_agent_has_which_drains_are_copied_first() {
    let now = Instant::now();
    let mut thread = redundant(3);
    let only = |thread: &mut WriteBack<Script>, agent: u8, session, pages: Range<u64>| {
        let others = (0..3).filter(|other| *other != agent).map(AgentId);
        others.for_each(|other| thread.agents.lose(other));
        thread.agents.restart(AgentId(agent), session);
        network(thread, now);
        pages.for_each(|n| evict_zeros(thread, n));
        thread.turn(now, true);
        answer_with_pages(thread, now);
    };
    only(&mut thread, 1, 1, 1..200);
    only(&mut thread, 0, 1, 200..232);
    (1..3).for_each(|agent| thread.agents.restart(AgentId(agent), 1));
    network(&mut thread, now);
    let later = now + STEP;
    tell_states(&mut thread, later, AgentId(0));
    thread.turn(later, true);
    let gets = sent_of(&mut thread, Op::Get);
    let first = gets.first().expect("copies are made");
    assert_eq!(thread.agents.agent_of(first.0), AgentId(0));
}

/// What waits for an agent that is away makes nobody else be told of each content by itself, and is forgotten when it has had no link for long.
#[test]
fn an_agent_that_is_gone_does_not_keep_discards_from_being_told_together() {
    let (mut thread, start) = (write_back(2), Instant::now());
    for first in (0..24).map(|n| 64 * n) {
        evict(&thread, first..first + 64);
        thread.turn(start, true);
        answer(&mut thread, start, &[]);
    }
    let at = |thread: &WriteBack<Script>, agent| -> Vec<u64> {
        let set = AgentSet::of(AgentId(agent));
        (0..64 * 24).filter(|&n| holders(thread, n) == Some(set)).collect()
    };
    let (first, gone) = (at(&thread, 0), at(&thread, 1));
    assert!(first.len() > 100 && gone.len() > DISCARDS_BATCH);
    thread.agents.lose(AgentId(1));
    thread.shared.homes.tell_link(0, AgentId(1), false);
    network(&mut thread, start);
    let discard = |thread: &WriteBack<Script>, n: u64| {
        lock(&thread.shared.tables).discarded((ID, page(n)));
    };
    gone.iter().for_each(|&n| discard(&thread, n));
    let mut told = 0;
    for (n, &page) in first.iter().take(50).enumerate() {
        discard(&thread, page);
        thread.turn(start + Duration::from_millis(1) * n as u32, true);
        told += sent_of(&mut thread, Op::Discard).len();
    }
    assert!(told <= 2, "told {told} times in 50 ms");
    let waiting = |thread: &WriteBack<Script>| lock(&thread.shared.tables).discards_of(AgentId(1));
    assert_eq!(waiting(&thread), gone.len());
    thread.turn(start + 2 * LEASE + STEP, true);
    assert_eq!(waiting(&thread), 0);
}

/// It is asked for again and again, by nobody who waits.
#[test]
fn a_page_that_an_agent_has_lost_ends_nothing_before_it_is_needed() {
    let (mut thread, start) = (write_back(2), Instant::now());
    (1..100).for_each(|n| evict_zeros(&thread, n));
    thread.turn(start, true);
    answer_with_pages(&mut thread, start);
    assert!(lock(&thread.shared.tables).held_by(AgentId(0)) > 0);
    let mut wrong = 0;
    for n in 1..80 {
        let now = start + STEP * n;
        tell_states(&mut thread, now, AgentId(0));
        thread.turn(now, true);
        for request in thread.agents.take_sent() {
            let is_get = request.1.op() == Some(Op::Get);
            let pages = if is_get { usize::from(request.1.count()) } else { 0 };
            wrong += u32::from(is_get);
            thread.agents.answer(&request, vec![1; PAGE as usize * pages]);
        }
        network(&mut thread, now);
    }
    assert!(wrong > 5, "asked {wrong} times");
    assert!(thread.shared.outcome().is_none(), "{:?}", thread.shared.outcome());
}

/// Whoever needs the page may be the one that does not reach its agent.
#[test]
fn pages_move_from_an_agent_that_some_thread_does_not_reach() {
    let start = Instant::now();
    let mut thread = at_two_of_three(start, 1..40);
    thread.shared.homes.tell_link(0, AgentId(0), false);
    for n in 0..=(GONE_AFTER.as_millis() / STEP.as_millis()) as u32 + 30 {
        let now = start + STEP * n;
        thread.turn(now, true);
        answer_with_pages(&mut thread, now);
    }
    let others: AgentSet = [AgentId(1), AgentId(2)].into_iter().collect();
    assert!((1..40).all(|n| holders(&thread, n) == Some(others)));
}
