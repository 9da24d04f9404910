//! Whatever the tables are told, and wherever in that the process dies, they are as they were before.

use proptest::prelude::*;

use gms_policy::eviction::Mark;
use gms_policy::ids::{AgentId, PageAddr, SpaceId};
use gms_policy::redundancy::AgentSet;

use super::slots::Phase;
use super::{EvictOutcome, FaultAction, Place, Remap, Tables, WriteOutcome};
use crate::arena::death;
use crate::page_map::{Full, PAGE, State};

const SLOTS: u32 = 8;
const BUDGET: u64 = 64;
/// More stores than anything makes.
const ALIVE: usize = usize::MAX / 2;
const PAGES: u64 = 12;
/// The pages lie on both sides of a shelf's border.
const BASE: u64 = (1 << 30) - PAGES / 2 * PAGE;

#[derive(Clone, Debug)]
enum Op {
    Evict(u64, u64, u64),
    /// Of the leaving one: whether it stays, is zeros, or has this checksum.
    Finish(u64),
    Write(u8),
    /// To one of the agents, of a page that is being written.
    Written(u64, u8, bool),
    Fault(u64, u64),
    Fork(u64, u64),
    Unmap(u64, u64, u64),
    Remap(u64, u64, u64),
    /// All of it far away, or back.
    Move(u64, bool),
    Drop(u64),
    Lose(u8),
    Greet(u8, u64),
    Bury,
}

fn op() -> impl Strategy<Value = Op> {
    let (space, page) = (|| 0..3u64, || 0..PAGES);
    prop_oneof![
        8 => (space(), page(), 1..5u64).prop_map(|(s, p, n)| Op::Evict(s, p, n)),
        12 => (0..6u64).prop_map(Op::Finish),
        6 => (1..8u8).prop_map(Op::Write),
        16 => (0..8u64, 0..3u8, any::<bool>()).prop_map(|(n, a, is_stored)| Op::Written(n, a, is_stored)),
        8 => (space(), page()).prop_map(|(s, p)| Op::Fault(s, p)),
        2 => (space(), space()).prop_map(|(p, c)| Op::Fork(p, c)),
        2 => (space(), page(), 1..5u64).prop_map(|(s, p, n)| Op::Unmap(s, p, n)),
        1 => space().prop_map(|s| Op::Unmap(s, 0, 1 << 20)),
        2 => (space(), page(), page()).prop_map(|(s, from, to)| Op::Remap(s, from, to)),
        2 => (space(), any::<bool>()).prop_map(|(s, is_away)| Op::Move(s, is_away)),
        1 => space().prop_map(Op::Drop),
        1 => (0..3u8).prop_map(Op::Lose),
        1 => (0..3u8, 0..4u64).prop_map(|(a, s)| Op::Greet(a, s)),
        4 => Just(Op::Bury),
    ]
}

fn at(page: u64) -> PageAddr {
    PageAddr::containing(BASE + page * PAGE)
}

fn apply(tables: &mut Tables, op: &Op) {
    match *op {
        Op::Evict(space, page, count) => {
            let pages: Vec<PageAddr> = (page..page + count).map(at).collect();
            tables.begin_evict(SpaceId(space), &pages, &mut Vec::new());
        }
        Op::Finish(how) => {
            let Some(&slot) = tables.leaving.first() else { return };
            let mut wake = Vec::new();
            match (how, tables.only_owner(slot)) {
                (0, _) => tables.finish_evict(slot, EvictOutcome::Stayed, &mut wake),
                (1, Some(_)) => tables.finish_evict(slot, EvictOutcome::Zero, &mut wake),
                (hash, _) => {
                    let unmarked: Vec<Place> = tables.unmarked(slot).collect();
                    unmarked.into_iter().for_each(|place| tables.marked(slot, place));
                    tables.finish_evict(slot, EvictOutcome::Moved(hash), &mut wake);
                }
            }
        }
        Op::Write(agents) => drop(tables.start_write(AgentSet::from_bits(agents.into()), 2)),
        Op::Written(slot, agent, is_stored) => {
            let outcome = if is_stored { WriteOutcome::Stored } else { WriteOutcome::Failed };
            tables.written(slot as u32, AgentId(agent), outcome);
        }
        Op::Fault(space, page) => match tables.fault((SpaceId(space), at(page))) {
            FaultAction::Fetch(content) => {
                assert!(tables.fetched((SpaceId(space), at(page)), content, true));
            }
            FaultAction::Buffered(_) => tables.second_chance((SpaceId(space), at(page))),
            FaultAction::Zero | FaultAction::Resident | FaultAction::Wait => {}
        },
        Op::Fork(parent, child) if parent != child => {
            tables.drop_space(SpaceId(child));
            tables.fork(SpaceId(parent), SpaceId(child));
        }
        Op::Fork(..) => {}
        Op::Unmap(space, page, count) => {
            tables.unmap(SpaceId(space), at(page).get()..at(page).get() + count * PAGE);
        }
        Op::Remap(space, from, to) => {
            let (from, to) = (at(from).get(), at(to).get());
            let length = from.abs_diff(to).min(3 * PAGE);
            tables.remap(SpaceId(space), Remap { from, to, length });
        }
        Op::Move(space, is_away) => {
            // Two chunks.
            let (here, there) = ((1 << 30) - (2 << 20), 7 << 30);
            let (from, to) = if is_away { (here, there) } else { (there, here) };
            tables.remap(SpaceId(space), Remap { from, to, length: 4 << 20 });
        }
        Op::Drop(space) => {
            tables.drop_space(SpaceId(space));
        }
        Op::Lose(agent) => drop(tables.lose(AgentId(agent))),
        Op::Greet(agent, session) => drop(tables.begin_session(AgentId(agent), session)),
        Op::Bury => drop(tables.bury(3)),
    }
}

/// What lives on.
#[derive(Debug, PartialEq)]
struct Image {
    known: Vec<(Place, State, Mark)>,
    /// What is in each slot, and whose.
    slots: Vec<(Option<Held>, Vec<Place>)>,
    sets: Vec<[AgentSet; 2]>,
    sessions: Vec<Option<u64>>,
    losers: AgentSet,
    away: u64,
}

/// Whether it is leaving, and was only at agents; its checksum; the copy that there was of it.
type Held = (bool, bool, u64, Option<u64>);

fn image(tables: &Tables) -> Image {
    let spaces = (0..3).map(SpaceId);
    let known = spaces.flat_map(|space| {
        let known = tables.map.known(space, 0..u64::MAX).into_iter();
        known.map(move |(page, state)| ((space, page), state, tables.map.get_marked(space, page).1))
    });
    let slot = |slot: &super::slots::Slot| {
        let is_leaving = slot.phase == Phase::Leaving;
        // Of one that is there the rest says nothing.
        let hash = if is_leaving { 0 } else { slot.hash };
        let held =
            (is_leaving, is_leaving && slot.was_remote, hash, slot.kept.map(|kept| kept.id.0));
        let mut owners: Vec<Place> = slot.owners.iter().map(|owner| owner.place).collect();
        owners.sort();
        // One that was being written when its last page went is as good as free.
        ((is_leaving || !owners.is_empty()).then_some(held), owners)
    };
    Image {
        known: known.collect(),
        slots: tables.slots.iter().map(slot).collect(),
        sets: tables.map.placements.sets().collect(),
        sessions: (0..3).map(|agent| tables.session_of(AgentId(agent))).collect(),
        losers: tables.losers,
        away: tables.away_pages(),
    }
}

/// What is counted: how many refer to each content of several, and pages at agents. As long as nothing waits to be buried.
fn counts(tables: &Tables) -> (Vec<(u64, u32)>, u64, Vec<u64>) {
    let mut shared: Vec<(u64, u32)> =
        tables.shared.iter().map(|(id, count)| (id.0, *count)).collect();
    shared.sort_unstable();
    (shared, tables.remote_pages(), (0..3).map(|agent| tables.held_by(AgentId(agent))).collect())
}

fn bury(tables: &mut Tables) {
    while tables.bury(1) {}
    tables.commit();
}

fn begin(tables: &mut Tables) {
    for space in (0..3).map(SpaceId) {
        tables.add_space(space);
        if let Some(state) = tables.spaces.get_mut(&space) {
            state.register(0..1 << 40);
        }
    }
    tables.commit();
}

/// The tables of a process that has died, which pages what it paged.
fn recover(tables: &Tables) -> Tables {
    let file = tables.file().try_clone().expect("a descriptor");
    let mut again = Tables::recover(file, BUDGET).expect("tables");
    begin(&mut again);
    again
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn a_death_at_any_moment_changes_nothing(
        ops in prop::collection::vec((op(), any::<bool>()), 1..80),
        buries in any::<bool>(),
    ) {
        let mut tables = Tables::new(SLOTS, BUDGET).expect("a memfd");
        begin(&mut tables);
        for (op, dies) in ops {
            for stores in if dies { 0 } else { ALIVE }.. {
                if buries {
                    bury(&mut tables);
                }
                let (before, counted, next) = (image(&tables), counts(&tables), tables.next_content);
                let commits = tables.map.commits();
                let done = death::after(stores, || {
                    apply(&mut tables, &op);
                    begin(&mut tables);
                });
                if done.is_some() {
                    break;
                }
                let is_done = tables.map.commits() > commits;
                let after = image(&tables);
                tables = recover(&tables);
                prop_assert!(tables.next_content >= next, "an id is used twice");
                if is_done {
                    prop_assert_eq!(image(&tables).known, after.known);
                    break;
                }
                if buries {
                    bury(&mut tables);
                    prop_assert_eq!(counts(&tables), counted, "after {} stores of {:?}", stores, &op);
                    prop_assert_eq!(image(&tables), before, "after {} stores of {:?}", stores, &op);
                } else {
                    let now = image(&tables);
                    prop_assert_eq!((now.known, now.slots), (before.known, before.slots));
                }
            }
        }
        // Who refers to what is known: in the end nobody does, and each content was released once at least.
        (0..3).for_each(|space| tables.drop_space(SpaceId(space)));
        bury(&mut tables);
        prop_assert_eq!((tables.away_pages(), tables.map_bytes(), tables.shared.len()), (0, 0, 0));
        let mut again = recover(&tables);
        prop_assert_eq!(counts(&again), counts(&tables));
        while let Some(&slot) = again.leaving.first() {
            again.finish_evict(slot, EvictOutcome::Stayed, &mut Vec::new());
        }
        prop_assert!(again.is_buffer_free(), "a slot is nobody's, and not free");
    }
}

#[test]
fn a_page_that_was_being_written_when_it_went_leaves_its_slot_free_and_its_bytes_to_be_forgotten() {
    let mut tables = Tables::new(1, BUDGET).expect("a memfd");
    begin(&mut tables);
    let (space, agent) = (SpaceId(1), AgentId(0));
    tables.begin_evict(space, &[at(1)], &mut Vec::new());
    tables.finish_evict(0, EvictOutcome::Moved(7), &mut Vec::new());
    let started = tables.start_write(AgentSet::of(agent), 1);
    tables.unmap(space, at(1).get()..at(2).get());
    tables.commit();
    let mut again = recover(&tables);
    assert!(again.is_buffer_free() && !again.has_ready());
    assert_eq!(again.take_discards(agent, 9), [started[0].1]);
}

/// An entry that could not be changed may say that a slot has the page which has another's by now.
#[test]
fn tables_without_room_for_a_change_are_not_recovered() {
    let mut tables = Tables::new(1, BUDGET).expect("a memfd");
    begin(&mut tables);
    recover(&tables);
    tables.exhausted = Some(Full::Pages);
    tables.commit();
    assert!(Tables::recover(tables.file().try_clone().expect("a descriptor"), BUDGET).is_err());
}

/// If the process died there, the page that came back would be in the slot again, and its bytes are overwritten as soon as another has the slot.
#[test]
fn a_slot_that_is_given_up_in_a_hold_is_not_filled_in_it() {
    let mut tables = Tables::new(1, BUDGET).expect("a memfd");
    begin(&mut tables);
    let (space, agent) = (SpaceId(1), AgentId(0));
    let places = [(space, at(1)), (space, at(2))];
    let evict = |tables: &mut Tables, page: PageAddr| {
        tables.begin_evict(space, &[page], &mut Vec::new());
        tables.finish_evict(0, EvictOutcome::Moved(7), &mut Vec::new());
        tables.commit();
    };
    evict(&mut tables, places[0].1);
    tables.start_write(AgentSet::of(agent), 1);
    tables.written(0, agent, WriteOutcome::Stored);
    tables.commit();
    evict(&mut tables, places[1].1);
    let FaultAction::Fetch(content) = tables.fault(places[0]) else { panic!("not away") };
    tables.second_chance(places[1]);
    assert_eq!(tables.rewrite(places[0], content), None);
    tables.commit();
    assert_eq!(tables.rewrite(places[0], content), Some(0));
}
