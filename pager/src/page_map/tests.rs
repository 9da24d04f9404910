mod death;

use super::*;
use crate::words::Words;
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
    Cool(u64),
    /// What a chunk covers, to where another does.
    Move(u64, u64, u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        20 => (0u64..3, 0u64..2000, state(), 0u64..128).prop_map(|(s, p, state, m)| Op::Set(s, p, state, Mark::from_bits(m))),
        1 => (0u64..3, 0u64..3).prop_map(|(p, c)| Op::Fork(p, c)),
        1 => (0u64..3, 0u64..2000, 0u64..2000).prop_map(|(s, f, n)| Op::Drop(s, f, n)),
        1 => (0u64..3, 0u64..4, 0u64..4).prop_map(|(s, f, t)| Op::Move(s, f, t)),
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

/// Of a chunk the addresses that it covers; the border of the shelves is between the first two.
fn chunk(n: u64) -> Range<u64> {
    let start = SHELF_SPAN - CHUNK_SPAN + n * CHUNK_SPAN;
    start..start + CHUNK_SPAN
}

/// As whoever moves pages must: those that stay, one by one.
fn shift(map: &mut PageMap, space: u64, from: &Range<u64>, to: u64, but: &[PageAddr]) {
    map.shift(SpaceId(space), from.clone(), to, but.iter().copied());
    for (page, _) in map.known(SpaceId(space), from.clone()) {
        let (state, mark) = map.get_marked(SpaceId(space), page);
        put(map, space, PageAddr::containing(page.get() - from.start + to), state, mark);
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
            map.fork(SpaceId(parent), SpaceId(child)).unwrap();
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
        Op::Move(space, from, to) if from != to => {
            let (from, to) = (chunk(from), chunk(to));
            clear(map, space, to.clone());
            shift(map, space, &from, to.start, &[]);
            oracle.retain(|(s, page), _| *s != space || !to.contains(&page.get()));
            for (key, known) in oracle.clone() {
                if key.0 == space && from.contains(&key.1.get()) {
                    oracle.remove(&key);
                    let page = PageAddr::containing(key.1.get() - from.start + to.start);
                    oracle.insert((space, page), known);
                }
            }
        }
        Op::Move(..) => {}
        Op::Cool(space) => {
            let pages: Vec<PageAddr> = known_pages(oracle, space);
            map.cool(SpaceId(space), &pages);
            // Marks are but hints: who shares a chunk has its pages cooled, too.
            for ((space, page), known) in oracle.iter_mut() {
                *known = map.get_marked(SpaceId(*space), *page);
            }
        }
    }
}

fn known_pages(oracle: &Oracle, space: u64) -> Vec<PageAddr> {
    oracle.keys().filter(|(s, _)| *s == space).map(|(_, page)| *page).collect()
}

#[test]
fn a_fork_an_exit_and_an_unmap_of_whole_shelves_touch_no_chunk() {
    let mut map = PageMap::new(4096, 0).unwrap();
    let page =
        |shelf: u64, chunk: u64| PageAddr::containing(shelf * SHELF_SPAN + chunk * CHUNK_SPAN);
    for (shelf, chunk) in (0..4).flat_map(|shelf| (0..512).map(move |chunk| (shelf, chunk))) {
        put(&mut map, 1, page(shelf, chunk), State::Remote(CONTENT), Mark::COLD);
    }
    map.fork(SpaceId(1), SpaceId(2)).unwrap();
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
    let mut map = PageMap::new(256, 0).unwrap();
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
        let mut map = PageMap::new(64, 0).unwrap();
        let mut oracle = Oracle::new();
        for op in ops {
            apply(&mut map, &mut oracle, op);
            map.commit();
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
        let pages = known_pages(&oracle, 2);
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
    let mut map = PageMap::new(16, 0).unwrap();
    let page = |chunk: u64| PageAddr::containing(chunk * CHUNK_SPAN);
    let fill = |map: &mut PageMap, space: u64, chunk: u64| {
        map.put(SpaceId(space), page(chunk), State::Slot(1), Mark::COLD)
    };
    (0..15).for_each(|chunk| assert_eq!(fill(&mut map, 1, chunk), Ok(None)));
    assert!(map.is_full());
    (2..1000).for_each(|child| map.fork(SpaceId(1), SpaceId(child)).unwrap());
    assert_eq!(map.get(SpaceId(999), page(14)), State::Slot(1));
    fill(&mut map, 2, 15).unwrap();
    assert_eq!(fill(&mut map, 2, 14), Err(Full::Pages));
    assert_eq!(map.get(SpaceId(2), page(14)), State::Slot(1), "a failed copy changes nothing");
}

#[test]
fn a_map_that_has_no_room_for_addresses_says_so_before() {
    let mut map = PageMap::new(64, 0).unwrap();
    map.shelves.uses_max = 16;
    let page = |shelf: u64| PageAddr::containing(shelf * SHELF_SPAN);
    let fill = |map: &mut PageMap, space: u64, shelf: u64| {
        map.put(SpaceId(space), page(shelf), State::Remote(CONTENT), Mark::COLD)
    };
    (0..3).for_each(|shelf| assert_eq!(fill(&mut map, 1, shelf), Ok(None)));
    (2..5).for_each(|child| map.fork(SpaceId(1), SpaceId(child)).unwrap());
    assert!(!map.is_full());
    map.fork(SpaceId(1), SpaceId(5)).unwrap();
    assert!(map.is_full() && map.chunks_used() == 3);
    assert_eq!(map.fork(SpaceId(1), SpaceId(6)), Err(Full::Addresses));
    assert!(!map.knows(SpaceId(6), 0..u64::MAX), "a failed fork changes nothing");
    assert_eq!(fill(&mut map, 6, 0), Ok(None));
    assert_eq!(fill(&mut map, 6, 1), Err(Full::Addresses));
    map.shift(SpaceId(6), 0..CHUNK_SPAN, SHELF_SPAN, std::iter::empty());
    assert_eq!(map.get(SpaceId(6), page(0)), State::Remote(CONTENT), "it has moved to nowhere");
    // A copy of what a space uses already needs no use.
    assert!(fill(&mut map, 5, 2).unwrap().is_some());
    map.take(SpaceId(5), page(0).get()..page(1).get());
    map.shift(SpaceId(6), 0..CHUNK_SPAN, SHELF_SPAN, std::iter::empty());
    assert_eq!(map.get(SpaceId(6), page(1)), State::Remote(CONTENT));
}

#[test]
fn a_map_that_has_no_room_for_shelves_says_so_before() {
    let mut map = PageMap::new(16, 0).unwrap();
    let page = |chunk: u64| PageAddr::containing(chunk * CHUNK_SPAN);
    (0..2).for_each(|n| put(&mut map, 1, page(n), State::Remote(CONTENT), Mark::COLD));
    for child in 2..16 {
        assert!(!map.is_full(), "{child}");
        map.fork(SpaceId(1), SpaceId(child)).unwrap();
        assert_eq!(map.take(SpaceId(child), 0..CHUNK_SPAN).len(), 1);
    }
    assert!(map.is_full() && map.chunks_used() == 2);
}

/// A note is two words of the log; what must be taken back has to be read by whoever goes on.
#[test]
fn memory_that_moves_costs_a_note_a_page_at_most_and_two_a_chunk_where_it_can() {
    let mut map = PageMap::new(64, 0).unwrap();
    for page in chunk(0).chain(chunk(1)).chain(chunk(2)).step_by(PAGE as usize) {
        put(&mut map, 1, PageAddr::containing(page), State::Remote(CONTENT), Mark::COLD);
    }
    map.commit();
    let mut notes = |from: &Range<u64>, to: u64, but: &[PageAddr]| {
        shift(&mut map, 1, from, to, but);
        let noted = map.memory.noted();
        map.commit();
        let is_there = map.known(SpaceId(1), to..to + (from.end - from.start)).len() as u64 * PAGE;
        assert_eq!((is_there, map.known(SpaceId(1), 0..u64::MAX).len()), (3 * CHUNK_SPAN, 3 * 512));
        noted as u64
    };
    let all = |start: u64| start..start + 3 * CHUNK_SPAN;
    let (first, second, third) = (all(chunk(0).start), all(5 << 40), all((6 << 40) + 7 * PAGE));
    // Beside those of chunks and pages: of uses, two of a new one and one of an old one.
    assert_eq!(notes(&first, second.start, &[]), 3 * 2 + 2 + 2);
    let page = PageAddr::containing(second.start + 9 * PAGE);
    let but_one = notes(&second, first.start, &[page]);
    assert!(but_one < 512 + 20, "{but_one}");
    let each = notes(&first, third.start, &[]);
    assert!((3 * 512..3 * 512 + 40).contains(&each), "{each}");
}

/// Who has inherited it has it where it was, and each can change it alone.
#[test]
fn a_chunk_that_is_shared_moves_for_one_alone() {
    let mut map = PageMap::new(64, 0).unwrap();
    let (from, to) = (chunk(1), chunk(3));
    let at = |range: &Range<u64>| PageAddr::containing(range.start);
    put(&mut map, 1, at(&from), State::Remote(CONTENT), Mark::COLD);
    map.fork(SpaceId(1), SpaceId(2)).unwrap();
    shift(&mut map, 1, &from, to.start, &[]);
    assert_eq!(map.chunks_used(), 1);
    assert_eq!(map.known(SpaceId(1), 0..u64::MAX), [(at(&to), State::Remote(CONTENT))]);
    assert_eq!(map.known(SpaceId(2), 0..u64::MAX), [(at(&from), State::Remote(CONTENT))]);
    assert!(map.put(SpaceId(2), at(&from), State::Slot(1), Mark::COLD).unwrap().is_some());
    assert_eq!(map.put(SpaceId(1), at(&to), State::Slot(2), Mark::COLD), Ok(None));
    assert_eq!(map.slotted.keys().copied().collect::<Vec<_>>(), [from.start, to.start]);
}

#[test]
fn marks_that_cool_cost_no_note() {
    let mut map = PageMap::new(64, 0).unwrap();
    let page = PageAddr::containing(0);
    put(&mut map, 1, page, State::Kept(CONTENT), Mark::from_bits(8));
    map.commit();
    assert_eq!(map.cool(SpaceId(1), &[page]), []);
    assert!(map.get_marked(SpaceId(1), page).1 != Mark::from_bits(8));
    assert_eq!(map.memory.noted(), 0);
}
