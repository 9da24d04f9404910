//! The tables against a slow, obvious model of a kernel, of agents and of what each process must see.
//!
//! In the model a page's bytes are a number, and 0 is a page of zeros. Markers are as the kernel keeps them. What happens between REMOVE's event and
//! the moment when the pages go is modelled: what a page may hold then is `truth::Truth`. Guards come and go without an event.

mod model;
mod truth;

use gms_policy::ids::SpaceId;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

use model::{AGENTS, Model, Op, PAGES, SPACES_MAX, span};

fn op() -> impl Strategy<Value = Op> {
    let space = 0..SPACES_MAX;
    let page = 0..PAGES;
    let area = (0..PAGES, 1..=PAGES / 2);
    let space = move || space.clone();
    let page = move || page.clone();
    let area = move || area.clone();
    prop_oneof![
        2 => (space(), area()).prop_map(|(s, (f, n))| Op::Map(s, f, n)),
        8 => (space(), page()).prop_map(|(s, p)| Op::Read(s, p)),
        12 => (space(), page()).prop_map(|(s, p)| Op::Write(s, p)),
        12 => (space(), area(), any::<u32>(), any::<u32>(), any::<bool>())
            .prop_map(|(s, (f, n), a, b, late)| Op::Evict(s, f, n, a & b, late)),
        10 => Just(Op::Finish),
        6 => (1u8..1 << AGENTS, 1..5usize).prop_map(|(a, n)| Op::StartWrite(a, n)),
        1 => (0..AGENTS).prop_map(Op::Restart),
        2 => (0..4u64, 1..4u32, 0u8..1 << AGENTS, 1..5usize)
            .prop_map(|(s, c, l, n)| Op::Repair(s, c, l, n)),
        1 => (0u8..1 << AGENTS, 1..4u32).prop_map(|(a, c)| Op::Distrust(a, c)),
        6 => any::<u32>().prop_map(Op::EndWrite),
        3 => (0..AGENTS, 1..9usize).prop_map(|(a, n)| Op::Discard(a, n)),
        3 => (space(), page()).prop_map(|(s, p)| Op::StartFetch(s, p)),
        3 => Just(Op::EndFetch),
        2 => (space(), area()).prop_map(|(s, (f, n))| Op::StartPrefetch(s, f, n)),
        2 => Just(Op::EndPrefetch),
        2 => (space(), area(), any::<bool>()).prop_map(|(s, (f, n), l)| Op::Remove(s, f, n, l)),
        2 => Just(Op::Zap),
        1 => space().prop_map(Op::SeeAbsent),
        1 => (space(), any::<bool>()).prop_map(|(s, d)| Op::Prove(s, d)),
        1 => (space(), area()).prop_map(|(s, (f, n))| Op::Unmap(s, f, n)),
        2 => (space(), page(), page(), 1..PAGES / 2).prop_map(|(s, f, t, n)| Op::Remap(s, f, t, n)),
        2 => space().prop_map(Op::Shift),
        2 => (space(), page(), 0..3u64, any::<bool>()).prop_map(|(s, f, n, w)| Op::Fork(s, f, n, w)),
        2 => (space(), area()).prop_map(|(s, (f, n))| Op::Guard(s, f, n)),
        1 => space().prop_map(Op::Reconcile),
        1 => space().prop_map(Op::Exit),
    ]
}

fn run(ops: &[Op]) {
    let mut model = Model::new();
    model.map(SpaceId(1), span(0, PAGES));
    ops.iter().for_each(|op| model.step(op));
    model.end();
}

/// PROPTEST_CASES asks for more.
fn cases() -> u32 {
    ProptestConfig::default().cases.max(4000)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("proptest-regressions"))), ..ProptestConfig::default() })]
    #[test]
    fn every_process_sees_its_own_bytes(ops in prop::collection::vec(op(), 1..150)) {
        run(&ops);
    }
}

// ---- cases worth a name

/// REMOVE's event has been read, the pages are still there: evicted now, they would come back after the removal.
#[test]
fn a_page_is_not_evicted_while_it_is_being_removed() {
    run(&[
        Op::Write(0, 3),
        Op::Remove(0, 3, 1, false),
        Op::Evict(0, 3, 1, 0, false),
        Op::Finish,
        Op::Zap,
        Op::Read(0, 3),
    ]);
}

#[test]
fn a_page_removed_between_its_move_and_the_end_of_it_reads_as_zeros() {
    run(&[
        Op::Write(0, 3),
        Op::Evict(0, 3, 1, 0, false),
        Op::Read(0, 3),
        Op::Remove(0, 3, 1, false),
        Op::Finish,
        Op::Zap,
        Op::Read(0, 3),
    ]);
}

#[test]
fn a_child_forked_while_a_page_leaves_keeps_it() {
    for end in [Op::Unmap(0, 3, 1), Op::Write(0, 3), Op::Exit(0)] {
        run(&[
            Op::Write(0, 3),
            Op::Evict(0, 3, 1, 0, false),
            Op::Fork(0, 0, 0, false),
            Op::Finish,
            Op::StartWrite(1, 4),
            end,
            Op::EndWrite(u32::MAX),
            Op::Discard(0, 9),
            Op::Read(1, 3),
        ]);
    }
}

#[test]
fn what_an_agent_has_lost_is_not_counted_as_held_by_it() {
    run(&[
        Op::Fork(0, 0, 0, false),
        Op::Write(1, 0),
        Op::Evict(1, 0, 1, 0, false),
        Op::Finish,
        Op::StartWrite(0b10, 1),
        Op::EndWrite(u32::MAX),
        // Its chunk is not buried at once.
        Op::Exit(1),
        Op::Restart(1),
        Op::Write(0, 4),
        Op::Evict(0, 4, 1, 0, false),
        Op::Finish,
        Op::StartWrite(0b110, 1),
    ]);
}

#[test]
fn a_copy_is_kept_until_the_last_of_a_family_lets_it_go() {
    run(&[
        Op::Write(0, 3),
        Op::Evict(0, 3, 1, 0, false),
        Op::Finish,
        Op::StartWrite(1, 4),
        Op::EndWrite(u32::MAX),
        Op::Fork(0, 0, 0, false),
        Op::Fork(0, 0, 0, false),
        Op::Write(0, 3),
        Op::Evict(0, 3, 1, 0, false),
        Op::Finish,
        Op::Exit(1),
        Op::Discard(0, 9),
        Op::Read(0, 3),
        Op::Read(1, 3),
    ]);
}

#[test]
fn a_fetch_that_a_remap_overtakes_brings_nothing_to_the_old_place() {
    run(&[
        Op::Write(0, 3),
        Op::Evict(0, 3, 1, 0, false),
        Op::Finish,
        Op::StartWrite(1, 4),
        Op::EndWrite(u32::MAX),
        Op::StartFetch(0, 3),
        Op::Remap(0, 3, 20, 1),
        Op::Map(0, 3, 1),
        Op::EndFetch,
        Op::Read(0, 3),
        Op::Read(0, 20),
    ]);
}
