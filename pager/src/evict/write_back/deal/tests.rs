use std::sync::atomic::Ordering;
use std::time::Duration;

use gms_policy::ids::PageAddr;
use gms_policy::redundancy::{AgentSet, Redundancy};
use gms_policy::stripes::Shape;
use gms_transport::ExchangeId;
use gms_transport::client::script::Script;
use gms_transport::message::{Control, Op, Status};

use super::super::tests::{ID, answer_with_pages, evict_zeros, holders, network, write_back_of};
use super::*;
use crate::fault::tests::shared_of;
use crate::page_map::PAGE;
use crate::tables::FaultAction;

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

/// A page that this agent has.
fn page_at(thread: &WriteBack<Script>, agent: AgentId) -> (Place, Content) {
    let mut tables = lock(&thread.shared.tables);
    let mut away = (1..=20).map(|n| (ID, PageAddr::containing(n * PAGE)));
    let content = |place| match tables.fault(place) {
        FaultAction::Fetch(content) if content.holders.has(agent) => Some((place, content)),
        _ => None,
    };
    away.find_map(content).expect("it has one")
}

/// Twenty pages are out; returns one that this agent has.
fn dealt(thread: &mut WriteBack<Script>, now: Instant, agent: u8) -> (Place, Content) {
    (1..=20).for_each(|page| evict_zeros(thread, page));
    puts(thread, now);
    network(thread, now);
    page_at(thread, AgentId(agent))
}

/// Turns at every tenth of a second; gets are answered by `answer`, false if it leaves one to be answered with the page.
fn turns(
    thread: &mut WriteBack<Script>,
    start: Instant,
    seconds: u32,
    answer: impl Fn(&mut WriteBack<Script>, &(ExchangeId, Control)) -> bool,
) {
    for step in 1..=seconds * 10 {
        let now = start + Duration::from_millis(100) * step;
        network(thread, now);
        thread.turn(now, false);
        for sent in thread.agents.take_sent() {
            if sent.1.op() != Some(Op::Get) || !answer(thread, &sent) {
                let is_get = sent.1.op() == Some(Op::Get);
                let bytes = if is_get { vec![0; PAGE as usize] } else { Vec::new() };
                thread.agents.answer(&sent, bytes);
            }
        }
        network(thread, now);
    }
}

fn made(thread: &WriteBack<Script>) -> u64 {
    thread.shared.pages_made.load(Ordering::Relaxed)
}

/// One part is lost, and one does not come: with two of parity the page is made of the others.
#[test]
fn a_silent_agent_and_a_lost_one_are_done_without() {
    let shape = Shape::new(2, 2).expect("a shape");
    for silent in (1..4).map(AgentId) {
        let mut thread = write_back_of(shared_of(1, Redundancy::Parity(shape)).0, 4);
        let now = Instant::now();
        let (place, content) = dealt(&mut thread, now, 0);
        thread.agents.restart(AgentId(0), 2);
        network(&mut thread, now);
        thread.make(now, place, content, AgentSet::EMPTY);
        turns(&mut thread, now, 14, |thread, get| thread.agents.agent_of(get.0) == silent);
        assert_eq!(made(&thread), 1, "{silent:?} is silent");
    }
}

#[test]
fn a_page_that_its_agent_refuses_is_made_of_the_other_parts() {
    let (mut thread, now) = (striped(3), Instant::now());
    let (place, content) = dealt(&mut thread, now, 0);
    thread.shared.detaching.store(true, Ordering::Relaxed);
    thread.make(now, place, content, AgentSet::EMPTY);
    turns(&mut thread, now, 16, |thread, get| {
        let is_own = thread.agents.agent_of(get.0) == AgentId(0);
        if is_own {
            thread.agents.answer_with(get, Status::Denied, 0, Vec::new());
        }
        is_own
    });
    assert_eq!((made(&thread), thread.take_unmade()), (1, Vec::new()));
}

/// A page begins to be made, of which too many agents are away.
fn makes_in_vain(thread: &mut WriteBack<Script>, now: Instant) -> (Place, Content) {
    let (place, content) = dealt(thread, now, 0);
    [0, 1].into_iter().for_each(|agent| thread.agents.lose(AgentId(agent)));
    thread.make(now, place, content, AgentSet::EMPTY);
    (place, content)
}

/// While the workload runs: what cannot be made may come later.
#[test]
fn what_could_not_be_made_long_ago_is_not_lost_when_the_workload_is_let_go() {
    let (mut thread, now) = (striped(3), Instant::now());
    makes_in_vain(&mut thread, now);
    turns(&mut thread, now, 16, |_, _| false);
    assert_eq!((made(&thread), thread.take_unmade()), (0, Vec::new()));
}

/// As long as anything else that is away, however long it was tried before.
#[test]
fn a_page_that_is_being_made_when_the_workload_is_let_go_has_its_time_anew() {
    let (mut thread, start) = (striped(3), Instant::now());
    let (place, content) = makes_in_vain(&mut thread, start);
    let late = start + Duration::from_secs(12);
    thread.shared.detaching.store(true, Ordering::Relaxed);
    thread.begin_detach(late);
    for second in 0..15 {
        thread.make_on(late + Duration::from_secs(second));
        assert_eq!(thread.take_unmade(), Vec::new(), "after {second} s");
    }
    thread.make_on(late + Duration::from_secs(16));
    assert_eq!(thread.take_unmade(), vec![(place, content)]);
}

/// Each agent that is away has its own time to come back.
#[test]
fn a_page_can_come_later_while_an_agent_that_is_needed_has_not_been_away_for_long() {
    let (mut thread, start) = (striped(3), Instant::now());
    let (_, content) = dealt(&mut thread, start, 0);
    let second = Duration::from_secs(1);
    let reads = |thread: &WriteBack<Script>, now| {
        let tables = lock(&thread.shared.tables);
        [Duration::ZERO, 15 * second].map(|patience| {
            let read = thread.reader(now, patience).expect("parity")(&tables, content);
            matches!(read, Read::At(_) | Read::Decode(..))
        })
    };
    let lose = |thread: &mut WriteBack<Script>, now, agent| {
        thread.agents.lose(AgentId(agent));
        network(thread, now);
        thread.distrust_agents(now);
    };
    lose(&mut thread, start, 0);
    assert_eq!(reads(&thread, start + 60 * second), [true; 2], "of the other two");
    lose(&mut thread, start + 60 * second, 1);
    assert_eq!(reads(&thread, start + 60 * second), [false, true]);
    assert_eq!(reads(&thread, start + 74 * second), [false, true]);
    thread.excuse(start + 80 * second, 5 * second);
    assert_eq!(reads(&thread, start + 79 * second), [false, true], "for 5 s nobody looked");
    assert_eq!(reads(&thread, start + 80 * second), [false; 2]);
}

/// The agent of a page has lost it, that of the first part that comes is restarted behind it, and the other is slow.
#[test]
fn a_page_is_not_lost_while_its_parts_are_here_or_on_their_way() {
    for comes in [true, false] {
        let (mut thread, now) = (striped(3), Instant::now());
        let (place, content) = dealt(&mut thread, now, 0);
        let own = content.holders.agents().next().expect("an agent");
        thread.agents.restart(own, 2);
        network(&mut thread, now);
        thread.make(now, place, content, AgentSet::EMPTY);
        thread.turn(now, false);
        let gets = |sent: Vec<(ExchangeId, Control)>| -> Vec<(ExchangeId, Control)> {
            sent.into_iter().filter(|sent| sent.1.op() == Some(Op::Get)).collect()
        };
        let sent = gets(thread.agents.take_sent());
        assert_eq!(sent.len(), 2);
        thread.agents.answer(&sent[0], vec![0; PAGE as usize]);
        network(&mut thread, now);
        thread.agents.restart(thread.agents.agent_of(sent[0].0), 2);
        network(&mut thread, now);
        let late = now + Duration::from_millis(2100);
        thread.turn(late, false);
        assert!(thread.makes(place) && thread.take_unmade().is_empty(), "too early");
        match comes {
            true => thread.agents.answer(&sent[1], vec![0; PAGE as usize]),
            false => thread.agents.answer_with(&sent[1], Status::NotFound, 0, Vec::new()),
        }
        network(&mut thread, late);
        for n in 1..4 {
            thread.turn(late + Duration::from_millis(20) * n, false);
        }
        assert_eq!((made(&thread), thread.makes(place)), (u64::from(comes), false));
    }
}

/// When an agent is asked, the program discards the page: all parts are forgotten.
#[test]
fn an_agent_is_not_blamed_for_a_part_that_nobody_needs_any_more() {
    let (mut thread, now) = (striped(3), Instant::now());
    dealt(&mut thread, now, 0);
    (0..4).for_each(|_| {
        let (place, content) = page_at(&thread, AgentId(0));
        thread.make(now, place, content, AgentSet::EMPTY);
        thread.turn(now, false);
        let sent = thread.agents.take_sent();
        lock(&thread.shared.tables).discarded(place);
        let get = sent.iter().find(|sent| sent.1.op() == Some(Op::Get)).expect("asked");
        thread.agents.answer_with(get, Status::NotFound, 0, Vec::new());
        network(&mut thread, now);
        turns(&mut thread, now, 1, |_, _| false);
    });
    assert!(thread.shared.unsound_agents().is_empty());
}

#[test]
fn the_time_for_which_this_process_was_stopped_is_no_agents() {
    let (mut thread, now) = (striped(3), Instant::now());
    let (place, content) = dealt(&mut thread, now, 0);
    thread.make(now, place, content, AgentSet::EMPTY);
    thread.turn(now, false);
    thread.agents.take_sent();
    let missed = Duration::from_secs(20);
    thread.excuse(now + missed, missed);
    turns(&mut thread, now + missed, 4, |thread, get| thread.agents.agent_of(get.0) == AgentId(0));
    assert_eq!(made(&thread), 1);
}

/// It is up, and refuses all gets. Another one is lost, and what it had is rebuilt.
#[test]
fn an_agent_that_gives_no_page_does_not_keep_the_loss_of_another_from_being_mended() {
    let shape = Shape::new(2, 2).expect("a shape");
    let mut thread = write_back_of(shared_of(1, Redundancy::Parity(shape)).0, 5);
    let start = Instant::now();
    dealt(&mut thread, start, 0);
    thread.agents.restart(AgentId(0), 2);
    network(&mut thread, start);
    for step in 1..=100 {
        let now = start + Duration::from_millis(100) * step;
        network(&mut thread, now);
        thread.turn(now, true);
        let sent = thread.agents.take_sent();
        for request in sent {
            let (op, count) = (request.1.op(), usize::from(request.1.count()));
            if op == Some(Op::Get) && thread.agents.agent_of(request.0) == AgentId(3) {
                thread.agents.answer_with(&request, Status::Denied, 0, Vec::new());
                continue;
            }
            let bytes = match count {
                _ if op != Some(Op::Get) => 0,
                1 => PAGE as usize,
                count => count * (PAGE as usize + 16),
            };
            thread.agents.answer(&request, vec![0; bytes]);
        }
        network(&mut thread, now);
    }
    assert_eq!(thread.shortage_left().0, 0);
}

#[test]
fn pages_that_nobody_waits_for_leave_slots_to_those_for_which_threads_do() {
    let (mut thread, now) = (striped(3), Instant::now());
    (1..=60).for_each(|page| evict_zeros(&thread, page));
    puts(&mut thread, now);
    network(&mut thread, now);
    (61..)
        .take_while(|&page| {
            let is_room = lock(&thread.shared.tables).free_slots() > 0;
            is_room.then(|| evict_zeros(&thread, page)).is_some()
        })
        .count();
    for n in 1..=60 {
        let place = (ID, PageAddr::containing(n * PAGE));
        let FaultAction::Fetch(content) = lock(&thread.shared.tables).fault(place) else {
            panic!("{n} is not away")
        };
        thread.make(now, place, content, AgentSet::EMPTY);
        turns(&mut thread, now, 1, |_, _| false);
    }
    let made = made(&thread);
    let left = (0..60).take_while(|&n| {
        let place = (ID, PageAddr::containing((60 - n) * PAGE));
        let mut tables = lock(&thread.shared.tables);
        let FaultAction::Fetch(content) = tables.fault(place) else { return false };
        tables.rewrite(place, content).is_some()
    });
    assert!(0 < made && made < 60 && left.count() > 0, "{made}");
}
