use gms_policy::ids::{AgentId, PageAddr, SpaceId};
use gms_policy::redundancy::AgentSet;
use gms_transport::client::script::Script;
use gms_transport::client::{Checksum, Client};
use gms_transport::message::PAGES_MAX;

use super::*;
use crate::fault::Fault;
use crate::fault::tests::{ID, Play, shared_by};
use crate::page_map::PAGE;
use crate::tables::{EvictOutcome, FaultAction, Place};

/// Pages between which nobody finds a stride.
const APART: [u64; 10] = [0, 5, 11, 18, 26, 35, 37, 45, 60, 63];
const AGENT: AgentId = AgentId(0);

/// A space whose pages are all at the agent, its home, and another fault thread.
fn home_and_worker() -> (Play, FaultCore<Script>) {
    let pages = PAGES_MAX as u64;
    let mut play = Play::by(shared_by(2), None, 1, pages);
    let all: Vec<PageAddr> = (0..pages).map(|n| place(&play, n).1).collect();
    let moved = EvictOutcome::Moved(play.shared.checksum(&right()));
    let mut tables = lock(&play.shared.tables);
    let (mut leaving, mut wake) = (Vec::new(), Vec::new());
    tables.begin_evict(ID, &all, &mut leaving);
    leaving.iter().for_each(|&(_, slot)| tables.finish_evict(slot, moved, &mut wake));
    for (slot, ..) in tables.start_write(AgentSet::of(AGENT), PAGES_MAX) {
        tables.written(slot, AGENT, true);
    }
    drop(tables);
    play.fault.agents.take_sent();
    let client = Client::scripted(1, Checksum::new(7));
    let worker = FaultCore::new(Instant::now(), play.shared.clone(), 1, client, |_| None, None);
    (play, worker)
}

fn right() -> Vec<u8> {
    vec![5; PAGE as usize]
}

fn place(play: &Play, page: u64) -> Place {
    (SpaceId(1), PageAddr::containing(play.page + page * PAGE))
}

/// A thread faults on this page; how many requests the home sends for it.
fn fault(play: &mut Play, page: u64) -> usize {
    let place = place(play, page);
    play.fault.fault(Instant::now(), Fault { place, write: true, tid: -1 });
    play.fault.agents.take_sent().len()
}

/// Threads fault on so many pages that the home fetches what it fetches itself, and then on the next, which is returned.
fn lend_one(play: &mut Play) -> u64 {
    let own = play.shared.sizes.own_pages;
    let sent: usize = APART[..own].iter().map(|&page| fault(play, page)).sum();
    assert_eq!((sent, fault(play, APART[own])), (own, 0));
    assert_eq!(play.shared.homes.loans(1).load(), 1);
    APART[own]
}

/// The worker is told, and its agent answers with the page.
fn serve(worker: &mut FaultCore<Script>) {
    worker.turn(&Instant::now);
    let sent = worker.agents.take_sent();
    assert_eq!((sent.len(), worker.guests.len()), (1, 1));
    worker.agents.answer(&sent[0], right());
    worker.network(&Instant::now);
    worker.turn(&Instant::now);
    assert!(worker.guests.is_empty() && worker.pending.is_empty() && worker.unproved.is_empty());
}

#[test]
fn a_page_that_was_lent_is_waited_for_and_installed_by_the_worker() {
    let (mut play, mut worker) = home_and_worker();
    let page = lend_one(&mut play);
    let place = place(&play, page);
    assert!(lock(&play.shared.tables).is_lent(place));
    // A fault of another thread, or again.
    assert_eq!((fault(&mut play, page), play.shared.homes.loans(1).load()), (0, 1));
    serve(&mut worker);
    let tables = &play.shared.tables;
    assert_eq!(lock(tables).fault(place), FaultAction::Resident);
    assert!(!lock(tables).is_lent(place) && !play.shared.has_failed());
    let [lent, all] = [&play.shared.lent_faults, &play.shared.pages_in];
    assert_eq!([lent, all].map(|count| count.load(Ordering::Relaxed)), [1, 1]);
    // SAFETY: the page is mapped, and there.
    let first = unsafe { std::ptr::read_volatile((play.page + page * PAGE) as *const u8) };
    assert_eq!(first, 5);
}

#[test]
fn home_and_worker_fetch_about_as_many() {
    let (mut play, _worker) = home_and_worker();
    let own: usize = APART.iter().map(|&page| fault(&mut play, page)).sum();
    assert_eq!((own, play.shared.homes.loans(1).load()), (5, 5));
}

#[test]
fn nothing_is_installed_by_a_worker_while_what_was_read_is_not_applied() {
    let (mut play, mut worker) = home_and_worker();
    let page = lend_one(&mut play);
    play.space.ungated.hold();
    serve(&mut worker);
    assert_eq!(play.shared.pages_in.load(Ordering::Relaxed), 0);
    // It is its home's, until that has installed one.
    play.space.ungated.applied();
    let now = Instant::now();
    play.fault.fault(now, Fault { place: place(&play, page), write: true, tid: -1 });
    let sent = play.fault.agents.take_sent();
    assert!(sent.len() == 1 && play.space.only_home.load(Ordering::Relaxed));
    play.fault.agents.answer(&sent[0], right());
    play.fault.network(&Instant::now);
    assert_eq!(play.shared.pages_in.load(Ordering::Relaxed), 1);
    assert_eq!((fault(&mut play, APART[9]), play.shared.homes.loans(1).load()), (0, 1));
}

#[test]
fn a_worker_that_cannot_ask_gives_back_what_it_was_lent() {
    let (mut play, mut worker) = home_and_worker();
    let page = lend_one(&mut play);
    worker.agents.block(AGENT);
    worker.turn(&Instant::now);
    assert!(worker.guests.is_empty() && worker.pending.is_empty() && worker.fetches.is_empty());
    assert!(!lock(&play.shared.tables).is_lent(place(&play, page)) && !play.shared.has_failed());
    assert_eq!(fault(&mut play, page), 1);
}

#[test]
fn a_thread_without_a_link_is_lent_nothing() {
    let (mut play, _worker) = home_and_worker();
    play.shared.homes.tell_link(1, AGENT, false);
    let own: usize = APART.iter().map(|&page| fault(&mut play, page)).sum();
    assert_eq!((own, play.shared.homes.loans(1).load()), (APART.len(), 0));
}
