use super::*;
use proptest::prelude::*;

const fn content(id: u64, placement: PlacementId, hash: u64) -> Content {
    // In these tests no number stands for any agent.
    Content { id: ContentId(id), placement, holders: AgentSet::EMPTY, hash }
}

fn state() -> impl Strategy<Value = State> {
    let content = (0..=CONTENT_ID_MAX, any::<u64>(), any::<u64>())
        .prop_map(|(id, placement, hash)| content(id, PlacementId::from_bits(placement), hash));
    prop_oneof![
        Just(State::Empty),
        any::<u32>().prop_map(State::Slot),
        content.clone().prop_map(State::Remote),
        content.prop_map(State::Kept),
    ]
}

#[derive(Clone, Debug)]
enum Op {
    Set(u64, u64, State, Mark),
    Fork(u64, u64),
    Drop(u64, u64, u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        20 => (0u64..3, 0u64..2000, state(), 0u64..128).prop_map(|(s, p, state, m)| Op::Set(s, p, state, Mark::from_bits(m))),
        1 => (0u64..3, 0u64..3).prop_map(|(p, c)| Op::Fork(p, c)),
        1 => (0u64..3, 0u64..2000, 0u64..2000).prop_map(|(s, f, n)| Op::Drop(s, f, n)),
    ]
}

fn put(map: &mut PageMap, space: u64, page: PageAddr, state: State, mark: Mark) {
    map.put(SpaceId(space), page, state, mark).unwrap();
}

fn clear(map: &mut PageMap, space: u64, range: Range<u64>) {
    let mut graves = map.take(SpaceId(space), range.clone());
    while let Some(grave) = graves.pop() {
        graves.extend(map.bury(grave, |state| assert!(!matches!(state, State::Slot(_)))));
    }
    for (page, _) in map.known(SpaceId(space), range) {
        put(map, space, page, State::Empty, Mark::COLD);
    }
}

type Oracle = BTreeMap<(u64, PageAddr), (State, Mark)>;

fn apply(map: &mut PageMap, oracle: &mut Oracle, op: Op) {
    match op {
        Op::Set(space, page, state, mark) => {
            let page = PageAddr::containing(nth(page));
            put(map, space, page, state, mark);
            oracle.insert(
                (space, page),
                (state, if state == State::Empty { Mark::COLD } else { mark }),
            );
        }
        Op::Fork(parent, child) if parent != child => {
            clear(map, child, 0..1 << 40);
            map.fork(SpaceId(parent), SpaceId(child));
            oracle.retain(|(space, _), _| *space != child);
            let copies: Oracle = oracle
                .iter()
                .filter(|((s, _), _)| *s == parent)
                .map(|(&(_, page), &known)| ((child, page), known))
                .collect();
            oracle.extend(copies);
        }
        Op::Fork(..) => {}
        Op::Drop(space, from, count) => {
            let range = nth(from)..nth(from + count);
            clear(map, space, range.clone());
            oracle.retain(|(s, page), _| *s != space || !range.contains(&page.get()));
        }
    }
}

#[test]
fn a_fork_an_exit_and_an_unmap_of_whole_shelves_touch_no_chunk() {
    let mut map = PageMap::new(4096).unwrap();
    let page =
        |shelf: u64, chunk: u64| PageAddr::containing(shelf * SHELF_SPAN + chunk * CHUNK_SPAN);
    for (shelf, chunk) in (0..4).flat_map(|shelf| (0..512).map(move |chunk| (shelf, chunk))) {
        put(&mut map, 1, page(shelf, chunk), State::Remote(CONTENT), Mark::COLD);
    }
    map.fork(SpaceId(1), SpaceId(2));
    let graves = map.take(SpaceId(2), 0..u64::MAX);
    assert_eq!(graves.len(), 4);
    for grave in graves {
        assert!(map.bury(grave, |_| panic!("the parent has it")).is_empty());
    }
    // A page in the write-back buffer keeps its shelf from being taken as a whole, but not the others.
    put(&mut map, 1, page(2, 7), State::Slot(3), Mark::COLD);
    let graves = map.take(SpaceId(1), 0..u64::MAX);
    assert_eq!(graves.len(), 3 + 511);
    assert_eq!(map.known(SpaceId(1), 0..u64::MAX), [(page(2, 7), State::Slot(3))]);
    let mut released = 0;
    let mut graves = Vec::from_iter(graves);
    while let Some(grave) = graves.pop() {
        graves.extend(map.bury(grave, |state| released += u32::from(state != State::Empty)));
    }
    assert_eq!((released, map.chunks_used()), (4 * 512 - 1, 1));
}

/// Chunks 3 and 4 are away, of chunk 5 all but the last page is.
#[test]
fn chunks_that_are_away_are_passed_over() {
    let mut map = PageMap::new(256).unwrap();
    let at = |chunk: u64, page: u64| chunk * CHUNK_SPAN + page * PAGE;
    for page in (at(3, 0)..at(6, 0) - PAGE).step_by(PAGE as usize) {
        put(&mut map, 1, PageAddr::containing(page), State::Remote(CONTENT), Mark::COLD);
    }
    let not_away = |map: &PageMap, range| map.not_away(SpaceId(1), range);
    assert_eq!(not_away(&map, at(0, 9)..at(9, 0)), at(0, 9)..at(3, 0));
    assert_eq!(not_away(&map, at(3, 0)..at(9, 0)), at(5, 0)..at(9, 0));
    assert_eq!(not_away(&map, at(3, 7)..at(4, 8)), at(4, 8)..at(4, 8));
    assert_eq!(not_away(&map, at(5, 7)..at(5, 9)), at(5, 7)..at(5, 9));
    assert_eq!(map.not_away(SpaceId(2), at(3, 0)..at(9, 0)), at(3, 0)..at(9, 0));
    // One page that has come back.
    put(&mut map, 1, PageAddr::containing(at(4, 0)), State::Kept(CONTENT), Mark::COLD);
    assert_eq!(not_away(&map, at(3, 0)..at(9, 0)), at(4, 0)..at(9, 0));
    // More than is judged at once.
    for page in (at(10, 0)..at(100, 0)).step_by(PAGE as usize) {
        put(&mut map, 1, PageAddr::containing(page), State::Slot(1), Mark::COLD);
    }
    let end = at(10 + CHUNKS_JUDGED, 0);
    assert_eq!(not_away(&map, at(10, 0)..at(200, 0)), end..end);
    assert_eq!(not_away(&map, end..at(200, 0)), at(100, 0)..at(200, 0));
}

const CONTENT: Content = content(5, PlacementId::from_bits(1), 9);

/// The n-th page of a test: some on each of two shelves.
fn nth(n: u64) -> u64 {
    n * PAGE + SHELF_SPAN - 1000 * PAGE
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn behaves_like_a_map(ops in prop::collection::vec(op(), 0..300), from in 0u64..2000, n in 0u64..2000) {
        let mut map = PageMap::new(64).unwrap();
        let mut oracle = Oracle::new();
        for op in ops {
            apply(&mut map, &mut oracle, op);
        }
        for (&(space, page), &(state, mark)) in &oracle {
            prop_assert_eq!(map.get_marked(SpaceId(space), page), (state, mark));
        }
        let away = |(state, _): &&(State, Mark)| matches!(state, State::Slot(_) | State::Remote(_));
        let known = oracle.values().filter(away).count() as u64;
        prop_assert!(map.away() <= known && (map.away() == 0) == (known == 0));
        let range = nth(from)..nth(from + n);
        let expected: Vec<_> = oracle.iter()
            .filter(|((s, p), (state, _))| *s == 1 && range.contains(&p.get()) && *state != State::Empty)
            .map(|((_, p), (state, _))| (*p, *state)).collect();
        prop_assert_eq!(map.knows(SpaceId(1), range.clone()), !expected.is_empty());
        prop_assert_eq!(map.known(SpaceId(1), range), expected);
        let pages: Vec<_> = oracle.keys().filter(|(s, _)| *s == 2).map(|(_, p)| *p).collect();
        let before: Vec<_> = pages.iter().map(|&p| map.get_marked(SpaceId(2), p)).collect();
        let cold = map.cool(SpaceId(2), &pages);
        for (&page, (state, mut mark)) in pages.iter().zip(before) {
            let cools = matches!(state, State::Kept(_)) && mark.cool();
            prop_assert_eq!(map.get_marked(SpaceId(2), page), (state, mark));
            prop_assert_eq!(cold.contains(&page), !cools);
        }
        for space in 0..3 {
            clear(&mut map, space, 0..1 << 40);
        }
        prop_assert_eq!(map.chunks_used(), 0);
        prop_assert_eq!((map.bytes(), map.away()), (0, 0));
    }
}

#[test]
fn a_full_map_says_so_before_and_a_fork_needs_no_room() {
    let mut map = PageMap::new(16).unwrap();
    let page = |chunk: u64| PageAddr::containing(chunk * CHUNK_SPAN);
    let fill = |map: &mut PageMap, space: u64, chunk: u64| {
        map.put(SpaceId(space), page(chunk), State::Slot(1), Mark::COLD)
    };
    (0..15).for_each(|chunk| assert_eq!(fill(&mut map, 1, chunk), Ok(None)));
    assert!(map.is_full());
    (2..1000).for_each(|child| map.fork(SpaceId(1), SpaceId(child)));
    assert_eq!(map.get(SpaceId(999), page(14)), State::Slot(1));
    fill(&mut map, 2, 15).unwrap();
    assert_eq!(fill(&mut map, 2, 14), Err(Full));
    assert_eq!(map.get(SpaceId(2), page(14)), State::Slot(1), "a failed copy changes nothing");
}
