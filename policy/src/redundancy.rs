//! Which agents hold a page: a set of them, which has a number.
//!
//! A page's entry has room for a few bits. The agents of a workload form few sets at a time, since pages are placed by the batch and an agent shares them
//! with its neighbours alone ([`choose_set`](crate::placement::choose_set)): a number for each set that is in use is enough.

pub use crate::agents::AgentSet;
use crate::ids::{AgentId, ContentId};
use crate::limits::AGENTS_MAX;
use crate::shape::{DATA_MAX, PARITY_MAX, Shape};
use crate::spread::{Sites, Spread};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

const _: () = assert!(AGENTS_MAX <= 1 << PlacementId::BITS, "a number for each agent alone");

/// The number of a set of agents, in one session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacementId(u16);

impl PlacementId {
    /// Bits that it takes.
    pub const BITS: u32 = 10;
    /// Those bits, the lowest of a word.
    pub const MASK: u64 = (1 << Self::BITS) - 1;

    /// The number in the lowest bits of a word.
    pub const fn from_bits(word: u64) -> Self {
        Self((word & Self::MASK) as u16)
    }

    /// The number, in the lowest bits of a word.
    pub const fn bits(self) -> u64 {
        self.0 as u64
    }
}

/// A set that has a number.
#[derive(Clone, Copy, Debug)]
struct Numbered {
    /// The set as it was when it got the number.
    members: AgentSet,
    /// Those of them that have not lost their pages.
    agents: AgentSet,
    /// Pages that are stored there.
    pages: u64,
    /// Pages that are being written there.
    writes: u64,
}

impl Numbered {
    fn is_free(&self) -> bool {
        self.pages == 0 && self.writes == 0
    }
}

/// The sets of a session, their numbers, and how many pages each of them holds. When an agent loses what it had, the numbers of its sets stand for the
/// others of them from then on: no page's entry changes. A number is given to another set when no page is there.
#[derive(Clone, Debug, Default)]
pub struct Placements {
    sets: Vec<Numbered>,
    ids: BTreeMap<AgentSet, PlacementId>,
    /// Pages that some agent has.
    pages: u64,
    /// How often a set has got a number, or an agent has lost what it had.
    changes: u64,
    /// Of stripes, if each page is at one agent of its set, and the others have other parts.
    shape: Option<Shape>,
}

/// Most numbers.
const NUMBERS: usize = 1 << PlacementId::BITS;

impl Placements {
    /// None, of sets that stripes of a shape are dealt to.
    pub fn striped(shape: Shape) -> Placements {
        Placements { shape: Some(shape), ..Placements::default() }
    }

    /// Pages are about to be written to a set. Returns its number; `None` if none is left, which happens to an agent alone only if it, or others, were
    /// lost some hundred times while pages still refer to that. [`Placements::end_write`] is due for each page.
    pub fn begin_write(&mut self, set: AgentSet, pages: u64) -> Option<PlacementId> {
        let id = self.number(set)?;
        self.sets[usize::from(id.0)].writes += pages;
        Some(id)
    }

    /// A page has been written, and is stored by each agent of the set, or is not.
    pub fn end_write(&mut self, id: PlacementId, is_stored: bool) {
        let set = &mut self.sets[usize::from(id.0)];
        set.writes -= 1;
        set.pages += u64::from(is_stored);
        self.pages += u64::from(is_stored && !set.agents.is_empty());
    }

    /// Nobody refers to a page of the set any more.
    pub fn release(&mut self, id: PlacementId) {
        let set = &mut self.sets[usize::from(id.0)];
        set.pages -= 1;
        self.pages -= u64::from(!set.agents.is_empty());
    }

    fn number(&mut self, set: AgentSet) -> Option<PlacementId> {
        if let Some(id) = self.ids.get(&set) {
            return Some(*id);
        }
        self.changes += 1;
        let numbered = Numbered { members: set, agents: set, pages: 0, writes: 0 };
        let unused = NUMBERS - self.sets.len();
        let at = if unused > 0 && (set.len() == 1 || unused > AGENTS_MAX) {
            self.sets.push(numbered);
            self.sets.len() - 1
        } else {
            let free = self.sets.iter().filter(|set| set.is_free()).count();
            // What is left of them is for agents alone.
            if set.len() > 1 && unused + free <= AGENTS_MAX {
                return None;
            }
            let at = self.sets.iter().position(Numbered::is_free)?;
            let before = std::mem::replace(&mut self.sets[at], numbered).agents;
            if self.ids.get(&before).is_some_and(|id| usize::from(id.0) == at) {
                self.ids.remove(&before);
            }
            at
        };
        let id = PlacementId(at as u16);
        self.ids.insert(set, id);
        Some(id)
    }

    /// The set of a number: those of it that have not lost their pages. Empty if there is none.
    pub fn agents(&self, id: PlacementId) -> AgentSet {
        self.sets.get(usize::from(id.0)).map(|set| set.agents).unwrap_or_default()
    }

    /// Those that have all of a page's bytes: the set, or of a stripe the agent that the page was dealt to.
    pub fn holders(&self, id: PlacementId, content: ContentId) -> AgentSet {
        let agents = self.agents(id);
        let Some(shape) = self.shape else { return agents };
        let part = shape.part(content, self.members(id));
        part.map_or(AgentSet::EMPTY, |part| AgentSet(agents.0 & AgentSet::of(part.agent).0))
    }

    /// The set of a number as it was before any of it lost its pages.
    pub fn members(&self, id: PlacementId) -> AgentSet {
        self.sets.get(usize::from(id.0)).map(|set| set.members).unwrap_or_default()
    }

    /// The shape of the stripes, if there are any.
    pub fn shape(&self) -> Option<Shape> {
        self.shape
    }

    /// All of it as words, for [`Placements::from_words`].
    pub fn words(&self) -> Vec<u64> {
        let (shape, sets) = (self.shape.map_or(0, Shape::bits), self.sets.len() as u64);
        let mut words = vec![shape, self.pages, sets];
        for set in &self.sets {
            words.extend([set.members.0, set.agents.0, set.pages, set.writes]);
        }
        words.extend(self.ids.iter().flat_map(|(set, id)| [set.0, id.bits()]));
        words
    }

    /// What [`Placements::words`] has told; `None` of other words.
    pub fn from_words(words: &[u64]) -> Option<Self> {
        let (&[shape, pages, count], rest) = words.split_first_chunk()?;
        let shape = if shape == 0 { None } else { Some(Shape::from_bits(shape)?) };
        let length = usize::try_from(count).ok().filter(|count| *count <= NUMBERS)? * 4;
        let (sets, ids) = rest.split_at_checked(length)?;
        let set = |words: &[u64]| Numbered {
            members: AgentSet(words[0]),
            agents: AgentSet(words[1]),
            pages: words[2],
            writes: words[3],
        };
        let sets: Vec<Numbered> = sets.chunks_exact(4).map(set).collect();
        let is_one = |pair: &[u64]| pair.get(1).is_some_and(|id| (*id as usize) < sets.len());
        let ids = ids.chunks(2).all(is_one).then_some(ids)?.chunks_exact(2);
        let ids = ids.map(|pair| (AgentSet(pair[0]), PlacementId::from_bits(pair[1]))).collect();
        Some(Self { sets, ids, pages, changes: 1, shape })
    }

    /// Changes whenever [`Placements::sets`] do.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Each set as it was when it got its number, and those of it that have not lost their pages. Not of stripes.
    pub fn sets(&self) -> impl Iterator<Item = [AgentSet; 2]> + '_ {
        self.sets.iter().map(|set| [set.members, set.agents])
    }

    /// The sets that [`Placements::sets`] has told, without pages.
    pub fn of(sets: impl Iterator<Item = [AgentSet; 2]>) -> Self {
        let numbered =
            |[members, agents]: [AgentSet; 2]| Numbered { members, agents, pages: 0, writes: 0 };
        let sets: Vec<Numbered> = sets.take(NUMBERS).map(numbered).collect();
        let is_whole = |(_, set): &(usize, &Numbered)| set.members == set.agents;
        let whole = sets.iter().enumerate().filter(is_whole);
        let ids = whole.map(|(at, set)| (set.agents, PlacementId(at as u16))).collect();
        Self { sets, ids, pages: 0, changes: 1, shape: None }
    }

    /// Pages are stored at a set. `None` if there is none of this number.
    pub fn hold(&mut self, id: PlacementId, pages: u64) -> Option<()> {
        let set = self.sets.get_mut(usize::from(id.0))?;
        set.pages += pages;
        self.pages += if set.agents.is_empty() { 0 } else { pages };
        Some(())
    }

    /// The numbers of sets that hold pages, or held them until they lost them.
    pub fn in_use(&self) -> impl Iterator<Item = PlacementId> + '_ {
        let used = self.sets.iter().enumerate().filter(|(_, set)| set.pages > 0);
        used.map(|(at, _)| PlacementId(at as u16))
    }

    /// The agent has lost every page that was written to it before. Whether there were any, or were being written: then numbers of sets are used up.
    pub fn lose(&mut self, agent: AgentId) -> bool {
        self.changes += 1;
        self.ids.retain(|set, _| !set.has(agent));
        self.pages -= self.only_at(agent);
        let mut had_pages = false;
        for set in self.sets.iter_mut().filter(|set| set.agents.has(agent)) {
            set.agents = set.agents.without(AgentSet::of(agent));
            had_pages |= !set.is_free();
        }
        had_pages
    }

    /// Pages that some agent has.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Pages at an agent.
    pub fn held_by(&self, agent: AgentId) -> u64 {
        self.pages_where(|agents| agents.has(agent))
    }

    /// Pages that are at this agent and at no other.
    pub fn only_at(&self, agent: AgentId) -> u64 {
        self.pages_where(|agents| agents == AgentSet::of(agent))
    }

    /// Pages of which there are too few copies.
    pub fn short_of(&self, shortage: &Shortage) -> u64 {
        self.pages_where(|agents| shortage.is_of(agents))
    }

    /// Those of them that an agent has.
    pub fn short_at(&self, agent: AgentId, shortage: &Shortage) -> u64 {
        self.pages_where(|agents| agents.has(agent) && shortage.is_of(agents))
    }

    /// Pages of stripes of which an agent has lost its part, or leaves with it.
    pub fn lacking(&self, leaving: AgentSet) -> u64 {
        let lacks = |set: &&Numbered| set.agents.without(leaving) != set.members;
        self.sets.iter().filter(lacks).map(|set| set.pages).sum()
    }

    /// Whether a page is, or is being written, at some of these agents and at no other; with parity, whether more parts of a stripe are, or are lost, than are
    /// made good.
    pub fn rests_on(&self, agents: AgentSet) -> bool {
        let rests = |set: &Numbered| match self.shape {
            Some(shape) => {
                let lost = set.members.without(set.agents.without(agents));
                lost.len() as usize > shape.parity()
            }
            None => !set.agents.is_empty() && set.agents.without(agents).is_empty(),
        };
        self.sets.iter().any(|set| !set.is_free() && rests(set))
    }

    /// Whether a page is, or is being written, at this agent and, if at others, only at such of those.
    pub fn rests_on_with(&self, agent: AgentId, others: AgentSet) -> bool {
        let all = others.union(AgentSet::of(agent));
        let rests = |agents: AgentSet| agents.has(agent) && agents.without(all).is_empty();
        self.sets.iter().any(|set| !set.is_free() && rests(set.agents))
    }

    fn pages_where(&self, is_meant: impl Fn(AgentSet) -> bool) -> u64 {
        self.sets.iter().filter(|set| is_meant(set.agents)).map(|set| set.pages).sum()
    }
}

/// Which copies of a page there are to be: at some agents, so far apart, and at each of some last resorts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copies {
    /// At how many agents that are no last resorts.
    pub agents: u32,
    /// The last resorts.
    pub last_resorts: AgentSet,
    /// Those of them that are to have it.
    pub due: AgentSet,
    /// Where agents are.
    pub sites: Sites,
    /// How far apart at least those are to be that are no last resorts.
    pub spread: Spread,
}

impl Copies {
    /// At so many agents, where there are no last resorts.
    pub fn at_agents(agents: u32) -> Self {
        let (none, spread) = (AgentSet::EMPTY, Spread::default());
        Self { agents, last_resorts: none, due: none, sites: Sites::ONE, spread }
    }

    /// Whether these agents are enough.
    pub fn are_at(&self, agents: AgentSet) -> bool {
        agents.without(self.last_resorts).len() >= self.agents
            && self.due.without(agents).is_empty()
            && self.are_apart(agents)
    }

    /// Whether these agents are as far apart as they are to be.
    pub fn are_apart(&self, agents: AgentSet) -> bool {
        self.spread <= self.sites.spread(agents.without(self.last_resorts).agents())
    }
}

/// When there are too few copies of a page, and more can be made.
#[derive(Clone, Copy, Debug)]
pub struct Shortage {
    /// Which there are to be.
    pub copies: Copies,
    /// At agents other than these.
    pub leaving: AgentSet,
    /// Agents that stay and want pages taken away: those are written anew, whoever else has them.
    pub recalling: AgentSet,
    /// Agents that can be asked for a copy.
    pub sources: AgentSet,
}

impl Shortage {
    /// When there is none at all elsewhere, not even at a last resort.
    pub fn of_all(&self) -> Self {
        Self { copies: Copies::at_agents(1), recalling: AgentSet::EMPTY, ..*self }
    }

    /// Whether it is so of a page that these agents have.
    pub fn is_of(&self, agents: AgentSet) -> bool {
        let is_short = !self.copies.are_at(agents.without(self.leaving));
        (is_short || agents.0 & self.recalling.0 != 0) && agents.0 & self.sources.0 != 0
    }
}

/// How many agents are to have each page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Redundancy {
    /// Two where there are two agents, else one.
    #[default]
    Auto,
    /// One: a page is lost with its agent.
    None,
    /// So many: a page is lost when all of them have lost it.
    Replica(u8),
    /// One, and parity at others: a page is lost when more agents of its stripe have lost their parts than have parity.
    Parity(Shape),
}

/// Most copies of a page at agents, a last resort aside.
pub const COPIES_MAX: u8 = 4;
/// Most agents that have a page: one may be a last resort.
pub const HOLDERS_MAX: usize = COPIES_MAX as usize + 1;

impl Redundancy {
    /// Agents to which each page, or its stripe, is written in a session with so many agents.
    pub fn copies(self, agents: usize) -> u32 {
        match self {
            Redundancy::Auto => agents.clamp(1, 2) as u32,
            Redundancy::None => 1,
            Redundancy::Replica(copies) => copies.into(),
            Redundancy::Parity(shape) => shape.parts() as u32,
        }
    }

    /// The shape of its stripes, if it has any.
    pub const fn shape(self) -> Option<Shape> {
        match self {
            Redundancy::Parity(shape) => Some(shape),
            Redundancy::Auto | Redundancy::None | Redundancy::Replica(_) => None,
        }
    }
}

/// Not a redundancy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedundancyError(String);

impl fmt::Display for RedundancyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let given = &self.0;
        write!(
            f,
            "{given:?} is none of auto, none, replica:2 ... replica:{COPIES_MAX}, parity:2+1 ... parity:{DATA_MAX}+{PARITY_MAX}"
        )
    }
}

impl std::error::Error for RedundancyError {}

impl FromStr for Redundancy {
    type Err = RedundancyError;

    fn from_str(text: &str) -> Result<Self, RedundancyError> {
        let copies = || text.strip_prefix("replica:")?.parse().ok();
        let shape = || {
            let (data, parity) = text.strip_prefix("parity:")?.split_once('+')?;
            Shape::new(data.parse().ok()?, parity.parse().ok()?)
        };
        match text {
            "auto" => Ok(Redundancy::Auto),
            "none" => Ok(Redundancy::None),
            _ => match (copies(), shape()) {
                (Some(copies @ 2..=COPIES_MAX), _) => Ok(Redundancy::Replica(copies)),
                (_, Some(shape)) => Ok(Redundancy::Parity(shape)),
                _ => Err(RedundancyError(text.into())),
            },
        }
    }
}

impl fmt::Display for Redundancy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Redundancy::Auto => f.write_str("auto"),
            Redundancy::None => f.write_str("none"),
            Redundancy::Replica(copies) => write!(f, "replica:{copies}"),
            Redundancy::Parity(shape) => write!(f, "parity:{shape}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        Write(u64),
        Store(usize),
        Fail(usize),
        Release(usize),
        Lose(u8),
    }

    fn step() -> impl Strategy<Value = Step> {
        let set = prop_oneof![
            (0..64u32).prop_map(|bit| 1 << bit),
            (0..12u32, 0..12u32).prop_map(|(a, b)| 1 << a | 1 << b),
            any::<u64>(),
        ];
        prop_oneof![
            40 => set.prop_filter("a set", |set| *set != 0).prop_map(Step::Write),
            20 => any::<usize>().prop_map(Step::Store),
            5 => any::<usize>().prop_map(Step::Fail),
            10 => any::<usize>().prop_map(Step::Release),
            1 => (0..64u8).prop_map(Step::Lose),
        ]
    }

    /// Pages by their numbers, and where they are in truth.
    type Truth = Vec<(PlacementId, AgentSet)>;

    fn take(truth: &mut Truth, which: usize) -> Option<(PlacementId, AgentSet)> {
        (!truth.is_empty()).then(|| truth.swap_remove(which % truth.len()))
    }

    fn apply(placements: &mut Placements, written: &mut Truth, stored: &mut Truth, step: Step) {
        match step {
            Step::Write(set) => {
                let id = placements.begin_write(AgentSet(set), 1);
                written.extend(id.map(|id| (id, AgentSet(set))));
            }
            Step::Store(which) => {
                if let Some(page) = take(written, which) {
                    placements.end_write(page.0, true);
                    stored.push(page);
                }
            }
            Step::Fail(which) => {
                if let Some(page) = take(written, which) {
                    placements.end_write(page.0, false);
                }
            }
            Step::Release(which) => {
                if let Some(page) = take(stored, which) {
                    placements.release(page.0);
                }
            }
            Step::Lose(agent) => {
                let lost = AgentSet::of(AgentId(agent));
                placements.lose(AgentId(agent));
                for page in written.iter_mut().chain(stored) {
                    page.1 = page.1.without(lost);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn a_page_s_number_tells_who_has_it(steps in prop::collection::vec(step(), 1..3000)) {
            let mut placements = Placements::default();
            let (mut written, mut stored) = (Truth::new(), Truth::new());
            for step in steps {
                apply(&mut placements, &mut written, &mut stored, step);
            }
            let words = placements.words();
            let placements = Placements::from_words(&words).expect("what was told");
            prop_assert_eq!(placements.words(), words);
            for (id, set) in written.iter().chain(&stored) {
                prop_assert_eq!(placements.agents(*id), *set);
            }
            let count = |is_meant: &dyn Fn(AgentSet) -> bool| {
                stored.iter().filter(|page| is_meant(page.1)).count() as u64
            };
            for agent in (0..64).map(AgentId) {
                let only = AgentSet::of(agent);
                let is_only = |page: &(PlacementId, AgentSet)| page.1 == only;
                let rests = written.iter().chain(&stored).any(is_only);
                prop_assert_eq!(placements.rests_on(only), rests);
                prop_assert_eq!(placements.held_by(agent), count(&|set| set.has(agent)));
                prop_assert_eq!(placements.only_at(agent), count(&|set| set == only));
                let few = |set: AgentSet| set.without(only).len() < 2 && set.0 & 0xff != 0;
                let shortage = Shortage {
                    copies: Copies::at_agents(2),
                    leaving: only,
                    recalling: AgentSet::EMPTY,
                    sources: AgentSet(0xff),
                };
                prop_assert_eq!(placements.short_of(&shortage), count(&few));
            }
            prop_assert_eq!(placements.pages(), count(&|set| !set.is_empty()));
        }

        #[test]
        fn a_set_is_its_agents(numbers in prop::collection::btree_set(0..AGENTS_MAX as u8, 0..20)) {
            let agents: Vec<AgentId> = numbers.into_iter().map(AgentId).collect();
            let set: AgentSet = agents.iter().copied().collect();
            prop_assert_eq!(set.agents().collect::<Vec<_>>(), agents.clone());
            prop_assert_eq!(set.len() as usize, agents.len());
            for agent in agents {
                let rest = set.without(AgentSet::of(agent));
                prop_assert!(!rest.has(agent) && rest.union(AgentSet::of(agent)) == set);
            }
        }
    }

    #[test]
    fn an_agent_alone_has_a_number_when_no_other_set_has_one_left() {
        let mut placements = Placements::default();
        let pair = |n: u64| AgentSet(n << 6 | 1 << 5);
        let given: Vec<PlacementId> =
            (1..4000).filter_map(|n| placements.begin_write(pair(n), 1)).collect();
        assert_eq!(given.len(), NUMBERS - AGENTS_MAX);
        for agent in (0..AGENTS_MAX as u8).map(AgentId) {
            let id = placements.begin_write(AgentSet::of(agent), 1).expect("a number");
            assert_eq!(placements.agents(id), AgentSet::of(agent));
        }
        // What is free again is for other sets, once more than each agent alone needs.
        given.iter().take(AGENTS_MAX + 1).for_each(|&id| placements.end_write(id, false));
        let again = placements.begin_write(AgentSet(u64::MAX), 1).expect("a number");
        assert_eq!(placements.agents(again), AgentSet(u64::MAX));
        assert_eq!(placements.begin_write(AgentSet(u64::MAX - 1), 1), None);
    }

    #[test]
    fn copies_at_agents_do_not_stand_for_one_at_a_last_resort_nor_the_other_way_round() {
        let [a, b, disk] = [0, 1, 2].map(|n| AgentSet::of(AgentId(n)));
        let copies = Copies { last_resorts: disk, due: disk, ..Copies::at_agents(1) };
        assert!(copies.are_at(a.union(disk)));
        assert!(!copies.are_at(a.union(b)) && !copies.are_at(disk));
        // One that cannot be used is not asked for.
        assert!(Copies { due: AgentSet::EMPTY, ..copies }.are_at(a));
        assert!(!Copies { due: AgentSet::EMPTY, ..copies }.are_at(disk));
        assert!(Copies { agents: 0, ..copies }.are_at(disk));
    }

    #[test]
    fn a_redundancy_reads_as_it_is_written() {
        for (text, two, four) in [("auto", 2, 2), ("none", 1, 1), ("replica:3", 3, 3)] {
            let read: Redundancy = text.parse().expect("a redundancy");
            assert_eq!((read.copies(2), read.copies(4)), (two, four));
            assert_eq!(read.to_string(), text);
        }
        assert_eq!(Redundancy::Auto.copies(1), 1);
        for text in ["", "replica", "replica:", "replica:1", "replica:5", "replica:x", "parity"] {
            let error = text.parse::<Redundancy>().expect_err(text).to_string();
            assert!(error.contains("replica:2"), "{error}");
        }
    }

    /// One agent drains, and the disk stands in for it: what is there is not short of everything.
    #[test]
    fn a_page_at_a_last_resort_is_not_only_at_agents_that_leave() {
        let (agent, disk) = (AgentSet::of(AgentId(0)), AgentSet::of(AgentId(1)));
        let copies = Copies { last_resorts: disk, due: disk, ..Copies::at_agents(0) };
        let sources = agent.union(disk);
        let shortage = Shortage { copies, leaving: agent, recalling: AgentSet::EMPTY, sources };
        assert!(shortage.is_of(agent) && !shortage.is_of(sources));
        assert!(shortage.of_all().is_of(agent) && !shortage.of_all().is_of(sources));
    }
}
