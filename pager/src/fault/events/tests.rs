use gms_policy::ids::PageAddr;

use super::*;
use crate::fault::tests::{ID, Play, dead_userfaultfd, map, own_userfaultfd};
use crate::kernel::Probe;
use crate::kernel::uffd::Userfaultfd;
use crate::page_map::PAGE;
use crate::tables::{EvictOutcome, Remap};

/// A child that nobody has met has two threads: one moves page 0 away, the other page 1 to where it was, and that is told first.
#[test]
fn moves_of_a_child_that_nobody_has_met_are_not_taken_in_an_order_that_cannot_be() {
    for in_order in [true, false] {
        let mut play = Play::with(None, 0, 2);
        let pages = [play.page, play.page + PAGE].map(PageAddr::containing);
        let (mut leaving, mut wake) = (Vec::new(), Vec::new());
        let mut tables = lock(&play.shared.tables);
        tables.begin_evict(ID, &pages, &mut leaving);
        for &(page, slot) in &leaving {
            tables.finish_evict(slot, EvictOutcome::Moved(page.get()), &mut wake);
        }
        drop(tables);
        let faults = Box::new(Userfaultfd::of_child(own_userfaultfd()));
        let child = Arc::new(Space::new(play.shared.new_space(), faults));
        lock(&play.shared.tables).fork(ID, child.id);
        play.shared.homes.bear(child.id, 0);
        play.fault.add(child.clone());
        let remap =
            |from: u64, to: u64| Event::Changed(Change::Remap(Remap { from, to, length: PAGE }));
        let away = remap(play.page, play.page + (1 << 30));
        let there = remap(play.page + PAGE, play.page);
        let told = if in_order { vec![away, there] } else { vec![there, away] };
        play.fault.note_told(child.id, told);
        play.fault.prove_order(&child);
        assert_eq!(play.shared.has_failed(), !in_order);
    }
}

/// Of an unmap is told after the move to where it was, and then of a removal there, by the thread that has moved.
#[test]
fn what_is_removed_is_what_was_there_when_it_was_told() {
    let remap = Change::Remap(Remap { from: 0, to: 8 * PAGE, length: PAGE });
    let unmap = Change::Unmap(8 * PAGE..9 * PAGE);
    let told = [Event::Changed(remap), Event::Changed(unmap), Event::Remove(8 * PAGE..9 * PAGE)];
    let orders = Orders { first: vec![1, 0], ..Orders::default() };
    let proof = Proof { orders, ..Proof::default() };
    let sorted = proof.sort(told.into_iter().enumerate(), |(_, event)| event.change().is_some());
    let told: Vec<usize> = sorted.iter().map(|(told, _)| *told).collect();
    assert_eq!(told, [1, 0, 2]);
}

/// It has ended when its own fork is applied: the grandchild lives.
#[test]
fn a_child_that_ends_leaves_its_pages_to_its_own() {
    let mut play = Play::new(None).evicted();
    let parent = play.space.clone();
    play.tell(&parent, vec![Play::fork()]);
    let child = play.child();
    play.fault.note_told(child.id, vec![Play::fork()]);
    play.shared.homes.end(child.id);
    play.obey();
    let grandchild = play.child();
    assert!(grandchild.id != child.id && !play.fault.spaces.contains_key(&child.id));
    assert!(matches!(play.action(&grandchild, play.page), FaultAction::Buffered(_)));
    assert!(!lock(&play.shared.tables).knows(child.id, 0..u64::MAX));
}

/// A page without a marker is removed, it is told, and then that another thread has moved it away: had that been sooner, it would have been another's memory that was
/// removed, which had grown to there.
#[test]
fn a_page_that_is_leaving_is_not_taken_for_removed_where_others_have_memory() {
    for regrown in [true, false] {
        let mut play = Play::with(None, 0, 2);
        let (space, page, away) = (play.space.clone(), play.page + PAGE, map(PAGE));
        space.threaded.store(true, Ordering::Relaxed);
        let mut leaving = Vec::new();
        lock(&play.shared.tables).begin_evict(ID, &[PageAddr::containing(page)], &mut leaving);
        if !regrown {
            assert!(space.faults.unregister(page..page + PAGE));
        }
        let removed = Event::Remove(page..page + PAGE);
        play.fault.note_told(ID, vec![removed, Play::remap(page, away)]);
        play.fault.handle_told(&Instant::now, &space, &mut Vec::new());
        assert_eq!(play.shared.has_failed(), regrown);
        assert!(regrown || lock(&play.shared.tables).is_empty((ID, PageAddr::containing(away))));
    }
}

/// What another thread has begun may have taken it away before.
#[test]
fn the_removal_of_a_page_that_is_leaving_waits_for_what_others_have_begun() {
    for marked in [true, false] {
        let mut play = Play::with(None, 0, 2);
        let (space, page) = (play.space.clone(), PageAddr::containing(play.page + PAGE));
        space.threaded.store(true, Ordering::Relaxed);
        let mut leaving = Vec::new();
        let mut tables = lock(&play.shared.tables);
        tables.begin_evict(ID, &[page], &mut leaving);
        if marked {
            tables.marked(leaving[0].1, (ID, page));
        }
        drop(tables);
        let (thread, ..) = play.with_mremap();
        play.fault.note_told(ID, vec![Event::Remove(page.get()..page.get() + PAGE)]);
        let late = |play: &mut Play| play.fault.spaces.get_mut(&ID).expect("the space").late;
        play.fault.spaces.get_mut(&ID).expect("the space").late = Some(Instant::now());
        play.fault.handle_told(&Instant::now, &space, &mut Vec::new());
        assert_eq!(late(&mut play).is_none(), marked, "it is applied");
        assert_eq!(play.fault.read_space(&Instant::now, ID, true), 1);
        thread.join().expect("no panic");
        while late(&mut play).is_some() {
            play.fault.settle(&Instant::now);
        }
        assert!(!play.shared.has_failed());
    }
}

/// Of a process that has ended only the children matter.
#[test]
fn removals_of_a_process_that_has_ended_are_in_doubt_for_its_children_only() {
    for forks in [true, false] {
        let mut play = Play::with(Some(dead_userfaultfd()), 0, 2);
        let (space, page, away) = (play.space.clone(), play.page + PAGE, map(PAGE));
        space.threaded.store(true, Ordering::Relaxed);
        let mut leaving = Vec::new();
        lock(&play.shared.tables).begin_evict(ID, &[PageAddr::containing(page)], &mut leaving);
        let removed = Event::Remove(page..page + PAGE);
        let told = [Some(removed), forks.then(Play::fork), Some(Play::remap(page, away))];
        play.fault.note_told(ID, told.into_iter().flatten().collect());
        assert!(play.fault.prove_removals(&space, &Proof::default()));
        assert_eq!(play.shared.has_failed(), forks);
    }
}

/// A page that is leaving, and has no marker yet.
fn unmarked(threaded: bool) -> (Play, Arc<Space>, PageAddr) {
    let play = Play::with(None, 0, 2);
    let (space, page) = (play.space.clone(), PageAddr::containing(play.page + PAGE));
    space.threaded.store(threaded, Ordering::Relaxed);
    space.faults.mark(page.get()..page.get() + PAGE, false).expect("no marker");
    lock(&play.shared.tables).begin_evict(ID, &[page], &mut Vec::new());
    (play, space, page)
}

/// Threads that remove memory without any pause do not end the workload: a remap would have been told long ago.
#[test]
fn removals_do_not_wait_for_ever() {
    let (mut play, space, page) = unmarked(true);
    let (thread, ..) = play.with_mremap();
    play.fault.note_told(ID, vec![Event::Remove(page.get()..page.get() + PAGE)]);
    let long_ago = Instant::now().checked_sub(Duration::from_secs(60)).expect("an uptime");
    play.fault.spaces.get_mut(&ID).expect("the space").late = Some(long_ago);
    play.fault.handle_told(&Instant::now, &space, &mut Vec::new());
    assert!(lock(&play.shared.tables).is_empty((ID, page)) && !play.shared.has_failed());
    assert_eq!(play.fault.read_space(&Instant::now, ID, true), 1);
    thread.join().expect("no panic");
}

/// One thread has memory removed and another forks, of which is told afterwards: which was first is not known.
#[test]
fn a_child_that_uses_what_was_removed_while_it_was_forked_gets_sigbus() {
    for threaded in [true, false] {
        let (mut play, space, page) = unmarked(threaded);
        let removed = Event::Remove(page.get()..page.get() + PAGE);
        play.fault.note_told(ID, vec![removed, play.fork_here()]);
        play.fault.handle_told(&Instant::now, &space, &mut Vec::new());
        assert!(!play.shared.has_failed());
        let tables = lock(&play.shared.tables);
        assert!([ID, play.child().id].iter().all(|&id| tables.is_empty((id, page))));
        drop(tables);
        let found = space.faults.probe(page.get());
        assert_eq!(found, if threaded { Probe::Occupied } else { Probe::Absent });
    }
}

/// What it has removed itself is zeros. What it has moved, or its own child has, would be read as such.
#[test]
fn a_page_is_kept_from_a_child_unless_it_may_be_elsewhere_too() {
    for (forks, moves) in [(false, false), (true, false), (false, true)] {
        let mut play = Play::with(None, 0, 2);
        let page = play.page + PAGE;
        play.space.faults.mark(page..page + PAGE, false).expect("no marker");
        let Event::Fork(faults) = play.fork_here() else { panic!("no fork") };
        let child = play.fault.bear(faults);
        let told = [forks.then(Play::fork), moves.then(|| Play::remap(page, map(PAGE)))];
        let removed = Event::Remove(page..page + PAGE);
        let told =
            if forks || moves { told.into_iter().flatten().collect() } else { vec![removed] };
        play.fault.note_told(child.id, told);
        let (thread, ..) = play.with_mremap();
        let known = Some(0).filter(|_| !forks && !moves);
        assert_eq!(play.fault.keep_from(&child, page), known);
        // What is told late may have been made before a removal.
        let mut told = play.fault.spaces[&child.id].backlog.iter();
        assert!(
            told.any(
                |told| matches!(&told.event, Event::Changed(Change::Remap(r)) if r.from != page)
            )
        );
        thread.join().expect("no panic");
        let found = play.space.faults.probe(page);
        assert_eq!(found, if forks { Probe::Occupied } else { Probe::Absent });
    }
}

/// Where such a page has been moved meanwhile it is not known where the child would have it.
#[test]
fn what_was_removed_and_moved_while_a_process_forked_is_in_doubt() {
    let (mut play, space, page) = unmarked(true);
    let removed = Event::Remove(page.get()..page.get() + PAGE);
    play.tell(&space, vec![removed, Play::remap(page.get(), map(PAGE)), Play::fork()]);
    assert!(play.shared.has_failed());
    while play.fault.poll_listen().is_some() {}
    assert_eq!(Arc::strong_count(&play.child()), 3, "the evict thread keeps it until it is killed");
    // Who goes on is to find that too.
    assert!(lock(&play.shared.tables).is_leaving((ID, page)), "nothing is applied");
}
