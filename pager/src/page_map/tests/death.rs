//! Whatever the process does with the map, and wherever in that it dies, the map in its memory is as it was before.

use super::*;
use crate::arena::death;

const LIMIT: u32 = 64;
/// More stores than anything makes: who does not die before them knows what it has done so far.
const ALIVE: usize = usize::MAX / 2;

/// Like those of the test of the living, but with few pages at a time.
fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        16 => (0u64..3, page(), state(), 0u64..128)
            .prop_map(|(s, p, state, m)| Op::Set(s, p, state, Mark::from_bits(m))),
        2 => (0u64..3, 0u64..3).prop_map(|(p, c)| Op::Fork(p, c)),
        2 => (0u64..3, page(), 0u64..9).prop_map(|(s, f, n)| Op::Drop(s, f, n)),
        1 => (0u64..3).prop_map(|s| Op::Drop(s, 0, 2000)),
        2 => (0u64..3, 0u64..4, 0u64..4).prop_map(|(s, f, t)| Op::Move(s, f, t)),
        1 => (0u64..3).prop_map(Op::Cool),
    ]
}

/// On both sides of a chunk's and of a shelf's border.
fn page() -> impl Strategy<Value = u64> {
    prop_oneof![994u64..1004, 486u64..492]
}

fn known(map: &PageMap) -> Oracle {
    let spaces = (0..3).map(|space| (space, map.known(SpaceId(space), 0..u64::MAX)));
    let places =
        spaces.flat_map(|(space, known)| known.into_iter().map(move |(page, _)| (space, page)));
    places.map(|(space, page)| ((space, page), map.get_marked(SpaceId(space), page))).collect()
}

fn hash((state, _): &(State, Mark)) -> Option<u64> {
    match state {
        State::Remote(content) | State::Kept(content) => Some(content.hash),
        State::Slot(_) | State::Empty => None,
    }
}

/// The map of a process that has died, which owes nothing to the dead.
fn recover(map: &PageMap, buries: bool) -> PageMap {
    let file = map.file().try_clone().expect("a descriptor");
    let (mut map, mut graves) = PageMap::recover(file, LIMIT, 0).expect("a map");
    while buries && let Some(grave) = graves.pop() {
        graves.extend(map.bury(grave, |_| {}));
    }
    map.commit();
    map
}

/// What the map counts beside what is there.
fn counted(map: &PageMap) -> (u64, u32, Vec<(u64, u32)>) {
    (
        map.away(),
        map.chunks_used(),
        map.slotted.iter().map(|(&base, &count)| (base, count)).collect(),
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn a_death_at_any_moment_changes_nothing(ops in prop::collection::vec((op(), any::<bool>()), 1..60)) {
        let (mut map, mut oracle) = (PageMap::new(LIMIT, 0).expect("memory"), Oracle::new());
        for (op, dies) in ops {
            for stores in if dies { 0 } else { ALIVE }.. {
                let (before, counts) = (oracle.clone(), counted(&map));
                let commits = map.commits();
                let done = death::after(stores, || {
                    apply(&mut map, &mut oracle, op.clone());
                    map.commit();
                });
                if done.is_some() {
                    break;
                }
                let is_done = map.commits() > commits;
                let expected = if is_done { oracle } else { before };
                // One dies on its way to what it knows then.
                let left = death::after(stores % 7, || recover(&map, true));
                map = left.unwrap_or_else(|| recover(&map, true));
                oracle = expected;
                oracle.retain(|_, (state, _)| *state != State::Empty);
                if matches!(op, Op::Cool(_)) {
                    // Marks are but hints: they may have been cooled.
                    for (&(space, page), (_, mark)) in &mut oracle {
                        *mark = map.get_marked(SpaceId(space), page).1;
                    }
                }
                let known = known(&map);
                prop_assert_eq!(&known, &oracle, "after {} stores of {:?}", stores, op);
                prop_assert!(known.values().map(hash).eq(oracle.values().map(hash)));
                if is_done {
                    break;
                }
                prop_assert_eq!(counted(&map), counts);
            }
        }
        for space in 0..3 {
            clear(&mut map, space, 0..1 << 40);
            map.commit();
        }
        prop_assert_eq!((map.chunks_used(), map.away()), (0, 0));
        prop_assert_eq!(counted(&recover(&map, true)), (0, 0, Vec::new()));
    }
}

/// The next binary of the process has it in other words.
#[test]
fn a_map_that_went_through_words_can_be_recovered() {
    let mut map = PageMap::new(LIMIT, 0).expect("memory");
    for n in [10, 20, 990, 1200] {
        put(&mut map, 1, PageAddr::containing(nth(n)), State::Remote(CONTENT), Mark::COLD);
    }
    map.fork(SpaceId(1), SpaceId(2)).expect("memory");
    put(&mut map, 2, PageAddr::containing(nth(20)), State::Slot(3), Mark::COLD);
    let graves = map.take(SpaceId(2), nth(488)..nth(3000));
    map.commit();
    let (expected, mut words) = (known(&map), Vec::new());
    map.put_words(&graves, &mut words);
    let file = map.file().try_clone().expect("memory");
    let (mut again, graves) =
        PageMap::from_words(file, &mut Words::new(&words), 0).expect("memory");
    assert_eq!(graves.len(), 2);
    assert_eq!(known(&again), expected);
    assert_eq!(known(&recover(&again, false)), expected);
    graves.into_iter().for_each(|grave| assert_eq!(again.bury(grave, |_| {}).len(), 0));
    put(&mut again, 1, PageAddr::containing(nth(10)), State::Empty, Mark::COLD);
    again.commit();
    let again = recover(&again, true);
    assert_eq!((again.away(), known(&again).len()), (2 + 3, expected.len() - 1));
}
