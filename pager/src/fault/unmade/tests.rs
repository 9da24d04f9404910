use std::time::Instant;

use super::*;
use crate::fault::tests::{ID, Play};
use crate::kernel::{Event, Installed};
use crate::tables::{FaultAction, Place};
use gms_policy::ids::PageAddr;

fn unmap(play: &Play) -> Event {
    Event::Changed(Change::Unmap(play.page..play.page + PAGE))
}

fn place(play: &Play) -> Place {
    (ID, PageAddr::containing(play.page))
}

/// It has its marker, or not.
#[test]
fn an_evicted_page_outlives_an_unmap_that_was_not_made() {
    for made in [false, true] {
        let mut play = Play::new(None).evicted();
        let space = play.space.clone();
        if made {
            space.faults.mark(play.page..play.page + PAGE, false).expect("no marker");
        }
        play.fault.note_told(ID, vec![unmap(&play)]);
        play.fault.handle_told(&Instant::now, &space, &mut Vec::new());
        assert!(!play.shared.has_failed());
        let action = play.action(&space, play.page);
        assert_eq!(matches!(action, FaultAction::Buffered(_)), !made, "{action:?}");
    }
}

/// A remap that has not been told may have taken the marker away, or brought it.
#[test]
fn whether_an_unmap_was_made_is_not_decided_while_another_change_is_under_way() {
    for marked in [false, true] {
        let mut play = Play::new(None).evicted();
        let space = play.space.clone();
        space.faults.mark(play.page..play.page + PAGE, marked).expect("a page without memory");
        play.fault.note_told(ID, vec![unmap(&play)]);
        let (thread, ..) = play.with_mremap();
        assert!(!play.fault.drop_unmade(&space), "decided");
        assert_eq!(play.fault.read_space(&Instant::now, ID, true), 1);
        thread.join().expect("no panic");
    }
}

/// A page is leaving and has no marker yet, or is lost and no poison: it would be read as zeros. There is memory, which may have grown there; but a process
/// whose unmaps cannot be refused has unmapped it.
#[test]
fn a_page_without_a_marker_is_not_taken_for_unmapped_where_memory_is() {
    for (doomed, refuses) in [(false, true), (true, true), (false, false)] {
        let mut play = Play::with(None, 0, 2);
        let space = play.space.clone();
        space.pid.store(1, Ordering::Relaxed);
        play.fault.asks.refuses = if refuses { |_| true } else { |_| false };
        let play = &mut match doomed {
            true => play.evicted(),
            false => play,
        };
        space.faults.mark(play.page..play.page + PAGE, false).expect("no marker");
        let mut tables = lock(&play.shared.tables);
        match doomed {
            true => tables.doom(place(play)),
            false => tables.begin_evict(ID, &[place(play).1], &mut Vec::new()),
        }
        drop(tables);
        play.fault.note_told(ID, vec![unmap(play)]);
        play.fault.handle_told(&Instant::now, &space, &mut Vec::new());
        assert_eq!(play.shared.has_failed(), refuses, "doomed: {doomed}");
    }
}

/// A page is present in registered memory where another is lost: of the same mapping, unless it was registered while changes were under way.
#[test]
fn what_was_registered_while_a_change_was_under_way_proves_nothing() {
    for is_recorded in [true, false] {
        let mut play = Play::new(None).evicted();
        let (space, range) = (play.space.clone(), play.page..play.page + PAGE);
        space.pid.store(1, Ordering::Relaxed);
        space.faults.mark(range.clone(), false).expect("no marker");
        assert_eq!(space.faults.copy(play.page, &[1; PAGE as usize]), Installed::Done);
        lock(&play.shared.tables).doom(place(&play));
        if !is_recorded {
            lock(&space.unrecorded).insert(range);
        }
        play.fault.note_told(ID, vec![unmap(&play)]);
        play.fault.handle_told(&Instant::now, &space, &mut Vec::new());
        assert_eq!(play.shared.has_failed(), !is_recorded);
        assert_eq!(lock(&play.shared.tables).is_doomed(place(&play)), is_recorded);
    }
}
