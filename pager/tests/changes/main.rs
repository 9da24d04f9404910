//! Threads free and move memory, and what they did is told late and in another order: the tables must still know which page is where.
//!
//! The model has addresses, blocks of memory that belong to threads, and for each thread at most one change that has been made and not been told of
//! (the kernel lets a thread go on only when its change has been read). Threads use only what is theirs, or free. What has been told is applied when
//! nothing is untold. Forks are told like changes; a child has its parent's memory as it was at that moment.

mod histories;
mod model;

use std::cell::Cell;

use gms_pager::page_map::PAGE;
use gms_pager::range_set::RangeSet;
use gms_pager::tables::{Change, Remap, Seen, Tables};
use gms_policy::ids::{PageAddr, SpaceId};
use proptest::prelude::*;
use proptest::test_runner::{FileFailurePersistence, TestRunner};

use model::{End, Model, Op, PAGES, THREADS, at};

fn op() -> impl Strategy<Value = Op> {
    let any_block = || 0..8usize;
    prop_oneof![
        6 => (0..THREADS, 0..PAGES, 1..8u64).prop_map(|(t, f, n)| Op::Map(t, f, n)),
        6 => (any_block(), any::<u32>()).prop_map(|(b, w)| Op::Evict(b, w)),
        2 => any_block().prop_map(|b| Op::Evict(b, u32::MAX)),
        3 => (any_block(), any::<u32>()).prop_map(|(b, w)| Op::Leave(b, w)),
        5 => any_block().prop_map(Op::Unmap),
        8 => (any_block(), 0..PAGES).prop_map(|(b, to)| Op::Remap(b, to)),
        2 => (any_block(), 0..THREADS).prop_map(|(b, t)| Op::Give(b, t)),
        1 => (any_block(), 1..4u64).prop_map(|(b, n)| Op::Grow(b, n)),
        1 => (any_block(), any::<u32>()).prop_map(|(b, w)| Op::Discard(b, w)),
        4 => (0..THREADS).prop_map(Op::Fork),
        5 => (0..THREADS).prop_map(Op::Tell),
        3 => (0..THREADS).prop_map(Op::TellAll),
    ]
}

/// Whether the workload was not stopped, for a doubt about what has moved where.
fn run(ops: &[Op]) -> bool {
    play(ops).end.is_none()
}

fn play(ops: &[Op]) -> Model {
    let mut model = Model::new();
    ops.iter().for_each(|op| model.step(op));
    model.check();
    model
}

#[test]
fn pages_are_found_in_whatever_order_changes_are_told() {
    let default = ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource(
            "proptest-regressions",
        ))),
        ..ProptestConfig::default()
    };
    let config =
        ProptestConfig { cases: default.cases.max(40_000), source_file: Some(file!()), ..default };
    let (most, count) = (config.cases, Count::default());
    let cases = (any::<bool>(), prop::collection::vec(op(), 1..60));
    let result = TestRunner::new(config).run(&cases, |(grow, mut ops)| {
        ops.retain(|op| grow || !matches!(op, Op::Grow(..)));
        count.add(&play(&ops));
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    assert!(count.looks.get() > most && count.inherited.get() > most, "hardly any: {count:?}");
    // Seen of 800,000: 39, 34 and 0, at random. So each count is a Poisson variable with a mean of about 2, 1.7 and 0.1 in 40,000 cases: the first exceeds 13
    // with a probability of 3e-8, the second 11 with 3e-7. With more cases that is as rare.
    let more = most.div_ceil(10_000);
    let bounds = [(&count.doubt, 9 + more), (&count.vain, 7 + more), (&count.marker, 7 + more)];
    for (ended, bound) in bounds {
        assert!(ended.get() <= bound, "of {most}: {count:?}");
    }
}

/// Of all cases.
#[derive(Debug, Default)]
struct Count {
    looks: Cell<u32>,
    inherited: Cell<u32>,
    doubt: Cell<u32>,
    vain: Cell<u32>,
    marker: Cell<u32>,
}

impl Count {
    fn add(&self, model: &Model) {
        let end = |end| u32::from(model.end == Some(end));
        for (count, more) in [
            (&self.looks, model.looks),
            (&self.inherited, model.inherited),
            (&self.doubt, end(End::Doubt)),
            (&self.vain, end(End::Vain)),
            (&self.marker, end(End::Marker)),
        ] {
            count.set(count.get() + more);
        }
    }
}

/// Two blocks of two threads, both away: the first is freed, and the second moves into the hole.
fn freed_and_refilled(then: &[Op]) {
    let mut ops =
        vec![Op::Map(0, 0, 4), Op::Map(1, 8, 4), Op::Evict(0, u32::MAX), Op::Evict(1, u32::MAX)];
    ops.extend_from_slice(then);
    assert!(run(&ops), "the workload was stopped");
}

#[test]
fn a_block_that_moved_to_where_another_was_freed_is_there_in_both_orders() {
    for first in [0, 1] {
        freed_and_refilled(&[Op::Unmap(0), Op::Remap(0, 0), Op::Tell(first)]);
        freed_and_refilled(&[Op::Unmap(0), Op::Remap(0, 0), Op::TellAll(first)]);
    }
}

#[test]
fn two_blocks_that_moved_one_behind_the_other_are_there_in_both_orders() {
    for first in [0, 1] {
        freed_and_refilled(&[Op::Remap(0, 20), Op::Remap(1, 0), Op::Tell(first)]);
        freed_and_refilled(&[Op::Remap(0, 20), Op::Remap(1, 0), Op::TellAll(first)]);
    }
}

/// One thread moves its block away and back without end, while another makes a change that is told late.
#[test]
fn a_block_that_comes_and_goes_is_where_it_is() {
    for moves in 1..7 {
        let mut ops =
            vec![Op::Map(0, 0, 4), Op::Map(1, 8, 4), Op::Evict(0, u32::MAX), Op::Unmap(1)];
        for n in 0..moves {
            // Of the two changes that are untold the second is told.
            ops.extend([Op::Remap(0, [20, 0][n % 2]), Op::Tell(1)]);
        }
        assert!(run(&ops), "the workload was stopped after {moves} moves");
    }
}

/// Of two orders that lead to the one marker, one moves a block to where another still is, which the kernel would have told as an unmap.
#[test]
fn a_block_does_not_move_to_where_another_is() {
    let ops = [
        Op::Map(0, 7, 3),
        Op::Map(1, 1, 2),
        Op::Evict(0, 1 << 7),
        Op::Evict(1, u32::MAX),
        Op::Unmap(1),
        Op::Remap(0, 2),
        // That and its echo are told, the unmap before it is not.
        Op::Tell(1),
        Op::Tell(1),
        Op::Remap(0, 5),
        Op::TellAll(1),
    ];
    assert!(run(&ops), "the workload was stopped");
}

/// The first block was freed, and the second came to its place and went on; or the first went there, and the second came to its place and was freed.
/// Told late, both look alike, and only the bytes would tell. Nobody guesses.
#[test]
fn what_may_be_either_of_two_blocks_is_not_guessed() {
    let freed = [Op::Unmap(0), Op::Remap(0, 0), Op::Tell(1), Op::Tell(1), Op::Remap(0, 20)];
    let left = [Op::Remap(0, 20), Op::Remap(1, 0), Op::Tell(1), Op::Tell(1), Op::Unmap(1)];
    for then in [freed, left] {
        let blocks = [Op::Map(0, 0, 4), Op::Map(1, 8, 4)];
        for away in [Op::Evict, Op::Leave] {
            let away = [away(0, u32::MAX), away(1, u32::MAX)];
            // Of the two that are untold, the second is told first.
            let ops = [&blocks[..], &away, &then, &[Op::TellAll(1)]].concat();
            assert_eq!(play(&ops).end, Some(End::Doubt));
        }
    }
}

/// The same, but the first block has no markers yet: what has some now is the second.
#[test]
fn what_has_no_markers_yet_is_not_where_markers_are() {
    let ops = [
        Op::Map(0, 0, 4),
        Op::Map(1, 8, 4),
        Op::Evict(1, u32::MAX),
        Op::Leave(0, u32::MAX),
        Op::Unmap(0),
        Op::Remap(0, 0),
        Op::Tell(1),
        Op::Tell(1),
        Op::Remap(0, 20),
        Op::TellAll(1),
    ];
    assert!(run(&ops), "the workload was stopped");
}

/// A block that came to where nothing was has gone on, of which is told before.
#[test]
fn what_was_not_there_before_is_not_what_has_left() {
    let (space, page) = (SpaceId(1), |n: u64| PageAddr::containing(at(n)));
    let mut tables = Tables::new(PAGES as u32, 8).unwrap();
    tables.add_space(space);
    tables.register(space, at(0)..at(4), &RangeSet::default());
    let mut leaving = Vec::new();
    tables.begin_evict(space, &[page(1)], &mut leaving);
    tables.marked(leaving[0].1, (space, page(1)));
    let remap = |from, to| Change::Remap(Remap { from: at(from), to: at(to), length: 4 * PAGE });
    let told = [remap(8, 20), remap(0, 8)];
    assert!(!tables.is_free(space, &told));
    // What nobody knew of may have been unmapped before.
    assert!(tables.is_free(space, &[Change::Unmap(at(8)..at(12)), remap(0, 8)]));
    // If it has not gone on, something else has left.
    for (seen, order) in [(21, [1, 0]), (9, [0, 1])] {
        let mut markers = Seen::default();
        markers.marked.insert(at(seen)..at(seen + 1));
        assert_eq!(
            tables.order(space, &told, &markers).map(|orders| orders.first),
            Ok(order.into())
        );
    }
}

/// The same, but of the first block less was away than is now: it is the second.
#[test]
fn markers_tell_which_of_two_blocks_it_is() {
    let ops = [
        Op::Map(0, 0, 4),
        Op::Map(1, 8, 4),
        Op::Evict(0, 0b0011),
        Op::Evict(1, u32::MAX),
        Op::Unmap(0),
        Op::Remap(0, 0),
        Op::Tell(1),
        Op::Tell(1),
        Op::Remap(0, 20),
        Op::TellAll(1),
    ];
    assert!(run(&ops), "the workload was stopped");
}

/// Three threads: what there is at first and second, what is done, and where in between another forks. Whenever its fork is told.
fn forked_beside(blocks: &[Op], done: &[Op]) {
    for forked in 0..=done.len() {
        for first in 0..4 {
            let mut ops = blocks.to_vec();
            ops.extend([Op::Evict(0, u32::MAX), Op::Evict(1, u32::MAX)]);
            ops.extend_from_slice(&done[..forked]);
            ops.push(Op::Fork(2));
            ops.extend_from_slice(&done[forked..]);
            ops.push(Op::TellAll(first));
            let model = play(&ops);
            assert!(
                model.end.is_none(),
                "fork {forked}, told from {first}: the workload was stopped"
            );
            assert!(model.inherited > 0);
        }
    }
}

#[test]
fn a_child_has_what_its_parent_had_when_it_was_born() {
    let two = [Op::Map(0, 0, 4), Op::Map(1, 8, 4)];
    forked_beside(&two, &[Op::Remap(0, 20)]);
    // To where another was freed, or went away.
    forked_beside(&two, &[Op::Unmap(0), Op::Remap(0, 0)]);
    forked_beside(&two, &[Op::Remap(0, 20), Op::Remap(1, 0)]);
    // A block that grows, and moves on.
    forked_beside(&two, &[Op::Grow(0, 2), Op::Remap(0, 20)]);
}

#[test]
fn a_child_has_blocks_that_were_freed_one_after_another_since() {
    let mut ops: Vec<Op> = (0..8).map(|n| Op::Map(0, n, 1)).collect();
    ops.push(Op::Map(1, 16, 8));
    ops.extend((0..9).map(|n| Op::Evict(n, u32::MAX)));
    ops.push(Op::Fork(2));
    // All are told before the fork. The last block comes to be the first of the list.
    ops.extend([Op::Unmap(0), Op::Tell(1)]);
    ops.extend((1..8).rev().flat_map(|n| [Op::Unmap(n), Op::Tell(1)]));
    ops.extend([Op::Remap(0, 0), Op::TellAll(1)]);
    let model = play(&ops);
    assert_eq!((model.end, model.inherited), (None, 16));
}

/// A fork may be told of long after it was made.
#[test]
fn a_child_has_a_block_that_came_and_went_thousands_of_times_since() {
    let mut ops = vec![Op::Map(0, 0, 4), Op::Evict(0, u32::MAX), Op::Fork(2)];
    for n in 0..5001 {
        // Of what it has left it tells too.
        ops.extend([Op::Remap(0, [20, 0][n % 2]), Op::Tell(1), Op::Tell(1)]);
    }
    ops.push(Op::TellAll(0));
    let model = play(&ops);
    assert_eq!((model.end, model.inherited), (None, 4));
}

/// The hole that a block has left looks as if it were there.
#[test]
fn what_grew_into_a_hole_is_not_taken_for_what_left_it() {
    let ops = [
        Op::Map(0, 0, 4),
        Op::Map(1, 4, 4),
        Op::Map(2, 20, 4),
        Op::Evict(1, u32::MAX),
        Op::Evict(2, u32::MAX),
        Op::Unmap(2),
        Op::Remap(1, 20),
        Op::Grow(0, 4),
        Op::Fork(0),
        Op::TellAll(0),
    ];
    assert_eq!(play(&ops).end, Some(End::Doubt));
}

/// What the second of two blocks left looks as if the first, which grew to there, had moved it along. Its markers tell.
#[test]
fn what_another_grew_over_when_it_had_left_is_not_taken_for_zeros() {
    let blocks =
        [Op::Map(0, 0, 4), Op::Map(1, 4, 2), Op::Evict(0, u32::MAX), Op::Evict(1, u32::MAX)];
    let moves = [Op::Remap(1, 20), Op::Grow(0, 2), Op::Remap(0, 8)];
    let told = |first| [&blocks[..], &moves, &[Op::Tell(first), Op::TellAll(0)]].concat();
    assert_eq!(play(&told(0)).end, None);
    assert_eq!(play(&told(1)).end, None);
}

/// Memory that grew is not known to be there. What leaves it, and a block that comes or was there and has no markers yet, are told the other way round.
#[test]
fn a_block_without_markers_is_not_taken_along_by_what_had_grown() {
    let beside = [Op::Map(0, 8, 1), Op::Map(1, 0, 2), Op::Leave(1, u32::MAX), Op::Grow(0, 3)];
    let before = [Op::Map(0, 0, 4), Op::Map(1, 4, 2), Op::Leave(1, u32::MAX)];
    let told = |blocks: &[Op], changes: &[Op]| {
        play(&[blocks, changes, &[Op::TellAll(1)]].concat()).end.is_some()
    };
    // It came to where the first had grown.
    assert!(told(&beside, &[Op::Unmap(0), Op::Remap(0, 10)]));
    assert!(told(&beside, &[Op::Remap(0, 20), Op::Remap(1, 10)]));
    // The first grew to where it had been.
    assert!(told(&before, &[Op::Unmap(1), Op::Grow(0, 2), Op::Remap(0, 20)]));
    assert!(told(&before, &[Op::Remap(1, 28), Op::Grow(0, 2), Op::Remap(0, 8)]));
    assert!(told(&before, &[Op::Remap(1, 20), Op::Grow(0, 2), Op::Unmap(0)]));
    // There is no memory where the block would be.
    let freed = [Op::Map(0, 8, 1), Op::Map(1, 0, 2), Op::Leave(1, u32::MAX), Op::Unmap(0)];
    let freed = [&freed[..], &[Op::Remap(0, 10), Op::Tell(1), Op::Tell(1), Op::Unmap(0)]].concat();
    assert!(!told(&freed, &[]));
}

/// With markers it is seen.
#[test]
fn a_block_with_markers_is_found_where_memory_had_grown() {
    let blocks = [Op::Map(0, 8, 1), Op::Map(1, 0, 2), Op::Evict(1, u32::MAX), Op::Grow(0, 3)];
    assert!(run(&[&blocks[..], &[Op::Unmap(0), Op::Remap(0, 10), Op::TellAll(1)]].concat()));
}

/// A place where a page without a marker may have come to is looked at, if it is known that it has not.
#[test]
fn a_child_has_a_block_that_is_where_one_without_markers_goes() {
    let ops = [
        Op::Map(1, 12, 1),
        Op::Map(1, 0, 3),
        Op::Evict(0, u32::MAX),
        Op::Leave(1, 1 << 2),
        Op::Fork(0),
        Op::Unmap(0),
        Op::Tell(1),
        Op::Remap(0, 10),
    ];
    let model = play(&ops);
    assert_eq!((model.end, model.inherited), (None, 1));
}

/// Of two unmaps that overlap, because memory had grown between them, the later one was told first, and the fork was between them.
#[test]
fn a_child_has_what_was_unmapped_after_its_fork_whichever_unmap_was_told_first() {
    let ops = [
        Op::Map(1, 16, 6),
        Op::Map(0, 24, 7),
        Op::Evict(1, 1 << 25),
        Op::Leave(0, 1 << 16),
        Op::Unmap(1),
        Op::Grow(0, 3),
        Op::Fork(2),
        Op::Unmap(0),
        Op::TellAll(1),
    ];
    assert!(run(&ops), "the workload was stopped");
}

/// Changes that two orders lead to the same markers, one of them if memory had grown: a child that was born meanwhile shows more than its parent, but each time
/// something that is so in both, with other pages. Nobody may take one for the other.
#[test]
fn a_child_whose_pages_differ_by_the_order_of_its_parents_changes_ends_the_workload() {
    let gone_and_back = [
        Op::Map(1, 22, 2),
        Op::Leave(0, 1 << 23),
        Op::Remap(0, 0),
        Op::Tell(0),
        Op::Fork(0),
        Op::Tell(0),
        Op::Remap(0, 22),
        Op::Tell(1),
        Op::Tell(1),
        Op::Unmap(0),
    ];
    let made_way_for = [
        Op::Map(2, 1, 4),
        Op::Map(1, 23, 3),
        Op::Evict(0, 3 << 3),
        Op::Unmap(1),
        Op::Remap(0, 20),
        Op::Tell(1),
        Op::Tell(1),
        Op::Fork(0),
        Op::Remap(0, 1),
        Op::Tell(2),
        Op::Tell(2),
        Op::Unmap(0),
    ];
    let unmapped_twice = [
        Op::Map(0, 2, 1),
        Op::Evict(0, u32::MAX),
        Op::Map(1, 19, 2),
        Op::Leave(1, 3 << 19),
        Op::Unmap(1),
        Op::Remap(0, 19),
        Op::Fork(2),
        Op::Tell(1),
        Op::Tell(2),
        Op::Unmap(0),
        Op::TellAll(1),
    ];
    for ops in [&gone_and_back[..], &made_way_for, &unmapped_twice] {
        assert!(matches!(play(ops).end, Some(End::Vain | End::Doubt)));
    }
}

/// The same where memory has grown in place: what left the page without a marker was told before what left that.
#[test]
fn a_child_whose_page_without_a_marker_may_be_where_memory_had_grown_ends_the_workload() {
    let grown = [
        Op::Map(0, 10, 1),
        Op::Map(1, 4, 2),
        Op::Evict(0, u32::MAX),
        Op::Discard(1, 1 << 4),
        Op::Leave(1, 1 << 5),
        Op::Grow(0, 1),
        Op::Unmap(0),
        Op::Fork(2),
        Op::Remap(0, 11),
        Op::Tell(2),
        Op::Tell(2),
        Op::Unmap(0),
        Op::TellAll(0),
    ];
    let grown_before = [
        Op::Map(0, 10, 1),
        Op::Map(1, 4, 1),
        Op::Evict(0, u32::MAX),
        Op::Leave(1, u32::MAX),
        Op::Grow(0, 1),
        Op::Unmap(0),
        Op::Remap(0, 11),
        Op::Tell(1),
        Op::Tell(1),
        Op::Fork(2),
        Op::Unmap(0),
        Op::TellAll(0),
    ];
    for ops in [&grown[..], &grown_before] {
        assert!(matches!(play(ops).end, Some(End::Vain | End::Doubt)));
    }
}

/// What a child has is looked at even if there is but one moment at which it can have been born.
#[test]
fn a_child_that_was_born_at_no_moment_of_the_order_that_was_found_ends_the_workload() {
    let ops = [
        Op::Map(1, 7, 1),
        Op::Map(0, 0, 7),
        Op::Evict(0, u32::MAX),
        Op::Evict(1, 1),
        Op::Unmap(1),
        Op::Fork(2),
        Op::Remap(0, 1),
        Op::Tell(2),
        Op::Tell(2),
        Op::Unmap(0),
        Op::Tell(2),
    ];
    assert_eq!(play(&ops).end, Some(End::Vain));
}
