use std::time::Duration;

use gms_policy::ids::PageAddr;
use gms_policy::redundancy::{AgentSet, Redundancy};
use gms_policy::stripes::Shape;
use gms_transport::client::script::Script;
use gms_transport::message::{Op, Status};

use super::super::tests::{ID, answer_with_pages, evict_zeros, holders, network, write_back_of};
use super::*;
use crate::fault::tests::shared_of;
use crate::page_map::PAGE;

/// Stripes of two pages and a sum.
fn striped(agents: u16) -> WriteBack<Script> {
    let shape = Shape::new(2, 1).expect("a shape");
    write_back_of(shared_of(1, Redundancy::Parity(shape)).0, agents)
}

/// Those of four pages and a sum.
fn wide(agents: u16) -> WriteBack<Script> {
    let shape = Shape::new(4, 1).expect("a shape");
    write_back_of(shared_of(1, Redundancy::Parity(shape)).0, agents)
}

fn puts(thread: &mut WriteBack<Script>, now: Instant) -> Vec<(AgentId, u16)> {
    thread.turn(now, true);
    let sent = thread.agents.take_sent();
    let puts = sent.iter().filter(|request| request.1.op() == Some(Op::Put));
    let puts: Vec<(AgentId, u16)> =
        puts.map(|put| (thread.agents.agent_of(put.0), put.1.count())).collect();
    sent.iter().for_each(|request| thread.agents.answer(request, Vec::new()));
    puts
}

fn taken(thread: &WriteBack<Script>) -> u64 {
    lock(&thread.shared.tables).frames_taken()
}

/// Turns until nothing is to be rebuilt any more.
fn rebuild(thread: &mut WriteBack<Script>, start: Instant) {
    for step in 1..=40 {
        let now = start + Duration::from_millis(100) * step;
        network(thread, now);
        thread.turn(now, true);
        answer_with_pages(thread, now);
    }
    assert_eq!(thread.shortage_left().0, 0);
}

#[test]
fn pages_wait_for_a_stripe_and_go_out_when_each_agent_has_its_part() {
    let (mut thread, now) = (striped(3), Instant::now());
    evict_zeros(&thread, 1);
    assert_eq!(puts(&mut thread, now), [], "a page alone is no stripe");
    evict_zeros(&thread, 2);
    thread.turn(now, true);
    let sent = thread.agents.take_sent();
    assert_eq!(sent.len(), 3);
    for (n, put) in sent.iter().enumerate() {
        assert_eq!((put.1.op(), put.1.count()), (Some(Op::Put), 1));
        assert_eq!([1, 2].map(|page| holders(&thread, page)), [None; 2], "{n} have their parts");
        thread.agents.answer(put, Vec::new());
        network(&mut thread, now);
    }
    let two = [1, 2].map(|page| holders(&thread, page).expect("it is out"));
    assert!(two.iter().all(|set| set.len() == 1) && two[0] != two[1], "{two:?}");
    assert_eq!((taken(&thread), lock(&thread.shared.tables).remote_pages()), (3, 2));
}

#[test]
fn a_part_that_is_not_stored_has_its_stripe_dealt_anew() {
    let (mut thread, now) = (striped(3), Instant::now());
    (1..=2).for_each(|page| evict_zeros(&thread, page));
    thread.turn(now, true);
    let sent = thread.agents.take_sent();
    thread.agents.answer(&sent[0], Vec::new());
    thread.agents.answer(&sent[1], Vec::new());
    thread.agents.answer_with(&sent[2], Status::Failed, 0, Vec::new());
    network(&mut thread, now);
    assert_eq!([1, 2].map(|page| holders(&thread, page)), [None; 2]);
    assert_eq!(taken(&thread), 0);
    rebuild(&mut thread, now);
    assert!([1, 2].iter().all(|&page| holders(&thread, page).is_some()));
    assert_eq!(taken(&thread), 3);
}

#[test]
fn fewer_agents_get_narrower_stripes_and_as_many_as_there_is_parity_none() {
    let (mut thread, now) = (striped(3), Instant::now());
    thread.agents.lose(AgentId(1));
    network(&mut thread, now);
    (1..=2).for_each(|page| evict_zeros(&thread, page));
    let dealt = puts(&mut thread, now);
    assert!(dealt.iter().all(|put| put.0 != AgentId(1)), "{dealt:?}");
    network(&mut thread, now);
    assert!([1, 2].iter().all(|&page| holders(&thread, page).is_some()));
    assert_eq!(taken(&thread), 4);
    thread.agents.lose(AgentId(0));
    network(&mut thread, now);
    (3..=4).for_each(|page| evict_zeros(&thread, page));
    assert_eq!(puts(&mut thread, now), [], "its only copy would be there");
    assert!(thread.agents_are_full());
}

/// Whichever of the agents it is: a page is made of the other parts, and the stripe is dealt to those that are left.
#[test]
fn what_an_agent_has_lost_is_made_of_the_other_parts() {
    for lost in (0..3).map(AgentId) {
        let (mut thread, now) = (striped(4), Instant::now());
        (1..=20).for_each(|page| evict_zeros(&thread, page));
        puts(&mut thread, now);
        network(&mut thread, now);
        assert!((1..=20).all(|page| holders(&thread, page).is_some()));
        let had = lock(&thread.shared.tables).held_by(lost);
        thread.agents.restart(lost, 2);
        network(&mut thread, now);
        let missing = (1..=20).filter(|&page| holders(&thread, page) == Some(AgentSet::EMPTY));
        let missing = missing.count() as u64;
        assert!(missing <= had, "{missing} of {had}");
        rebuild(&mut thread, now);
        assert!((1..=20).all(|page| holders(&thread, page).is_some_and(|set| set.len() == 1)));
        assert_eq!(thread.shared.pages_made.load(std::sync::atomic::Ordering::Relaxed), missing);
        assert!(!thread.shared.has_failed());
    }
}

/// A turn, which agents with so many frames answer.
fn step(thread: &mut WriteBack<Script>, now: Instant, frames: u64) {
    thread.turn(now, true);
    for agent in (0..5).map(AgentId) {
        let held = lock(&thread.shared.tables).held_by(agent);
        thread.agents.give_room(agent, frames.checked_sub(held).expect("room") as u32);
    }
    answer_with_pages(thread, now);
}

/// Dead pages have taken all of the memory at agents, and the write-back buffer is full of pages that wait for room there.
#[test]
fn where_agents_are_full_of_dead_pages_their_stripes_are_closed() {
    let (mut thread, mut now) = (wide(5), Instant::now());
    (1..=1600).for_each(|page| evict_zeros(&thread, page));
    (0..20).for_each(|_| step(&mut thread, now, 400));
    assert_eq!(taken(&thread), 2000);
    // Of each stripe half of the pages die.
    let mut tables = lock(&thread.shared.tables);
    for page in (1..=1600).filter(|page| page % 4 < 2) {
        tables.discarded((ID, PageAddr::containing(page * PAGE)));
    }
    let waiting = tables.free_slots() as u64;
    drop(tables);
    (2001..2001 + waiting).for_each(|page| evict_zeros(&thread, page));
    for _ in 0..1000 {
        now += Duration::from_millis(20);
        step(&mut thread, now, 400);
    }
    let out = lock(&thread.shared.tables).remote_pages();
    assert!(out > 1200, "{out} pages are out");
    assert!(lock(&thread.shared.tables).room_to_renew() > 0, "the slots of threads are taken");
}

#[test]
fn pages_that_are_lost_are_not_waited_for() {
    let (mut thread, now) = (striped(4), Instant::now());
    (1..=20).for_each(|page| evict_zeros(&thread, page));
    puts(&mut thread, now);
    network(&mut thread, now);
    for lost in [0, 1] {
        thread.agents.restart(AgentId(lost), 2);
        network(&mut thread, now);
    }
    assert!(thread.short(now) > 0);
    rebuild(&mut thread, now);
    let lost = lock(&thread.shared.tables).lost_pages();
    assert_eq!((thread.short(now), thread.shared.has_failed()), (0, false));
    assert!(0 < lost && lost < 20, "{lost} are lost");
    let nowhere = (1..=20).filter(|&page| holders(&thread, page) == Some(AgentSet::EMPTY));
    assert_eq!(nowhere.count() as u64, lost);
}
