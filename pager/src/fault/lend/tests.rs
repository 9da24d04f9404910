use gms_policy::ids::{AgentId, PageAddr, SpaceId};
use gms_transport::client::script::Script;
use gms_transport::client::{Checksum, Client};
use gms_transport::message::{Control, PAGES_MAX, Status};
use gms_transport::{AbortReason, Event, ExchangeId};

use super::*;
use crate::fault::tests::{ID, Play, shared_by};
use crate::fault::{Asks, Fault};
use crate::page_map::PAGE;
use crate::tables::{EvictOutcome, FaultAction, Place, WriteOutcome};

/// Pages between which nobody finds a stride.
const APART: [u64; 10] = [0, 5, 11, 18, 26, 35, 37, 45, 60, 63];
const AGENT: AgentId = AgentId(0);

/// A space whose pages are all at the agent, its home, and another fault thread.
fn home_and_worker() -> (Play, FaultCore<Script>) {
    home_and_worker_of(1)
}

/// The same, with all pages at each of several agents.
fn home_and_worker_of(agents: u16) -> (Play, FaultCore<Script>) {
    let pages = PAGES_MAX as u64;
    let mut play = Play::by(shared_by(2), None, agents, pages);
    let all: Vec<PageAddr> = (0..pages).map(|n| place(&play, n).1).collect();
    let moved = EvictOutcome::Moved(play.shared.checksum(&right()));
    let mut tables = lock(&play.shared.tables);
    let (mut leaving, mut wake) = (Vec::new(), Vec::new());
    tables.begin_evict(ID, &all, &mut leaving);
    leaving.iter().for_each(|&(_, slot)| tables.finish_evict(slot, moved, &mut wake));
    let holders = (0..agents as u8).map(AgentId).collect();
    for (slot, ..) in tables.start_write(holders, PAGES_MAX) {
        holders.agents().for_each(|agent| tables.written(slot, agent, WriteOutcome::Stored));
    }
    drop(tables);
    play.fault.agents.take_sent();
    let client = Client::scripted(agents, Checksum::new(7));
    let worker =
        FaultCore::new(Instant::now(), play.shared.clone(), 1, client, Asks::nobody(), None);
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

type Sent = (ExchangeId, Control);

/// Two agents have each page, and the worker has asked one of them for the page that it was lent, which is returned with what it has sent.
fn asked_of_one_of_two() -> (Play, FaultCore<Script>, u64, Sent) {
    let (mut play, mut worker) = home_and_worker_of(2);
    let page = lend_one(&mut play);
    worker.turn(&Instant::now);
    let sent = worker.agents.take_sent();
    assert_eq!(sent.len(), 1);
    (play, worker, page, sent[0])
}

/// The worker asks the other agent, which answers with the page. If the first `lacks` it, it is to be written anew.
fn assert_served_by_the_other(
    play: &Play,
    mut worker: FaultCore<Script>,
    page: u64,
    first: &Sent,
    lacks: bool,
) {
    let sent = worker.agents.take_sent();
    let agent = |sent: &Sent| worker.agents.agent_of(sent.0);
    let other = sent.iter().find(|sent| agent(sent) != agent(first)).expect("the other is asked");
    worker.agents.answer(other, right());
    worker.network(&Instant::now);
    worker.turn(&Instant::now);
    let mut tables = lock(&play.shared.tables);
    let known = if lacks { FaultAction::Zero } else { FaultAction::Resident };
    assert_eq!(tables.fault(place(play, page)), known);
    assert!(!tables.is_lent(place(play, page)) && !play.shared.has_failed());
    assert!(worker.pending.is_empty() && worker.guests.is_empty() && worker.fetches.is_empty());
    assert_eq!(play.shared.lent_faults.load(Ordering::Relaxed), 1);
}

#[test]
fn a_worker_asks_another_agent_when_the_first_is_silent() {
    let (play, mut worker, page, first) = asked_of_one_of_two();
    let due = worker.hedge_due().expect("another one has it");
    worker.turn(&|| due);
    assert_served_by_the_other(&play, worker, page, &first, false);
}

#[test]
fn a_worker_asks_another_agent_when_the_first_has_not_the_page() {
    let (play, mut worker, page, first) = asked_of_one_of_two();
    worker.agents.answer_with(&first, Status::NotFound, 0, Vec::new());
    worker.network(&Instant::now);
    assert_served_by_the_other(&play, worker, page, &first, true);
}

#[test]
fn a_worker_asks_another_agent_when_the_first_gives_a_wrong_page() {
    let (play, mut worker, page, first) = asked_of_one_of_two();
    worker.agents.answer(&first, vec![6; PAGE as usize]);
    worker.network(&Instant::now);
    worker.turn(&Instant::now);
    assert_served_by_the_other(&play, worker, page, &first, true);
}

#[test]
fn a_worker_whose_agent_goes_away_gives_the_page_back_although_another_was_asked_too() {
    let (mut play, mut worker, page, first) = asked_of_one_of_two();
    let due = worker.hedge_due().expect("another one has it");
    worker.turn(&|| due);
    let second = worker.agents.take_sent();
    let aborted = Event::Aborted { exchange: first.0, reason: AbortReason::LinkClosed };
    worker.agents.play(aborted);
    worker.agents.lose(worker.agents.agent_of(first.0));
    worker.network(&|| due);
    worker.turn(&|| due);
    let left = (&worker.pending, worker.fetches.len(), worker.guests.len());
    assert!(worker.pending.is_empty() && (left.1, left.2) == (0, 0), "{left:?}");
    // What comes all the same is not wanted any more.
    worker.agents.answer(&second[0], right());
    worker.network(&|| due);
    assert_eq!(play.shared.pages_in.load(Ordering::Relaxed), 0);
    assert_eq!(fault(&mut play, page), 1);
    assert!(!play.shared.has_failed());
}

#[test]
fn a_page_that_its_only_agent_has_lost_ends_the_workload_also_where_a_worker_asks() {
    let (mut play, mut worker) = home_and_worker();
    lend_one(&mut play);
    worker.turn(&Instant::now);
    let sent = worker.agents.take_sent();
    worker.agents.answer_with(&sent[0], Status::NotFound, 0, Vec::new());
    worker.network(&Instant::now);
    assert!(play.shared.has_failed() && worker.pending.is_empty());
}

#[test]
fn the_time_for_which_a_thread_has_waited_counts_from_the_moment_in_which_its_home_met_the_fault() {
    let (mut play, mut worker) = home_and_worker_of(2);
    lend_one(&mut play);
    let late = Instant::now() + Duration::from_secs(1);
    worker.turn(&|| late);
    let (_, demand) = worker.pending.first_key_value().expect("it was taken");
    assert!(late.duration_since(demand.began) > Duration::from_millis(900));
}
