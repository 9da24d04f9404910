//! How far a detach has come: what is asked of whom, and whom to ask for a page that one has not given.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use gms_policy::ids::{AgentId, ContentId, PageAddr, SpaceId};
use gms_policy::redundancy::AgentSet;
use gms_transport::client::{GET_DEADLINE, GetId};

use crate::page_map::Content;
use crate::tables::Place;

/// A page that came with a wrong seal or checksum this often is lost.
const PAGE_MISMATCHES_MAX: u32 = 3;
/// Pages of which that is remembered; more than these are lost at their first.
const MISMATCHED_MAX: usize = 4096;
/// An agent of which nothing was wanted for longer has its time anew: more than a get takes to be given up.
const WANTED_ANEW: Duration = Duration::from_secs(10);
const _: () = assert!(WANTED_ANEW.as_secs() < GET_DEADLINE.as_secs());

/// Pages asked of an agent.
pub(super) struct Fetch {
    pub(super) space: SpaceId,
    pub(super) agent: AgentId,
    pub(super) pages: Vec<(PageAddr, Content)>,
    /// The agent gave some of them back, or said that it does not have them.
    pub(super) answered: bool,
    /// What has come: installed together, since each time the gate is closed and the kernel asked for markers.
    pub(super) came: Vec<(PageAddr, Content)>,
    pub(super) bytes: Vec<u8>,
}

/// Pages that nobody has any more.
#[derive(Default)]
pub(super) struct Lost {
    pub(super) pages: u64,
    pub(super) processes: BTreeSet<i32>,
    pub(super) agents: BTreeSet<AgentId>,
}

/// The first and the last time that something was wanted of an agent which has given nothing back in between.
struct Silence {
    since: Instant,
    until: Instant,
}

/// How far a detach has come.
pub(in crate::evict) struct Homecoming {
    /// When the first page was looked for.
    pub(super) began: Option<Instant>,
    /// Where the scan of each space stands; `None` at its end.
    pub(super) cursors: BTreeMap<SpaceId, Option<u64>>,
    pub(super) next_pass: Instant,
    pub(super) queued: BTreeMap<AgentId, VecDeque<Place>>,
    pub(super) fetches: BTreeMap<GetId, Fetch>,
    silent: BTreeMap<AgentId, Silence>,
    /// Agents that have said that they have not got a page, or given it wrong too often.
    failed: BTreeMap<ContentId, AgentSet>,
    /// Agents that have not given a page in time: they may have it.
    late: BTreeMap<ContentId, AgentSet>,
    /// Agents that have given wrong pages: asked where nobody else can be.
    pub(super) unsound: AgentSet,
    /// Pages that their agents do not give are made of parity.
    pub(super) has_parity: bool,
    pub(super) mismatches: BTreeMap<Place, u32>,
    pub(super) lost: Lost,
    /// Pages away, and when that changed.
    pub(super) progress: (u64, Instant),
}

impl Homecoming {
    pub(in crate::evict) fn new(now: Instant, has_parity: bool) -> Homecoming {
        Homecoming {
            has_parity,
            began: None,
            cursors: BTreeMap::new(),
            next_pass: now,
            queued: BTreeMap::new(),
            fetches: BTreeMap::new(),
            silent: BTreeMap::new(),
            failed: BTreeMap::new(),
            late: BTreeMap::new(),
            unsound: AgentSet::EMPTY,
            mismatches: BTreeMap::new(),
            lost: Lost::default(),
            progress: (u64::MAX, now),
        }
    }

    /// This process did not run for so long.
    pub(in crate::evict) fn excuse(&mut self, missed: Duration) {
        let silences = self.silent.values_mut().flat_map(|s| [&mut s.since, &mut s.until]);
        silences.chain(&mut self.began).for_each(|time| *time += missed);
        self.progress.1 += missed;
    }

    /// Nothing more comes of a get.
    pub(super) fn end(&mut self, now: Instant, get: GetId) -> Option<Fetch> {
        let fetch = self.fetches.remove(&get)?;
        match fetch.answered {
            true => self.heard(now, fetch.agent),
            false => self.want(now, fetch.agent),
        }
        Some(fetch)
    }

    pub(super) fn queued(&self) -> usize {
        self.queued.values().map(VecDeque::len).sum()
    }

    pub(super) fn under_way(&self, agent: AgentId) -> usize {
        self.fetches.values().filter(|fetch| fetch.agent == agent).count()
    }

    /// Whether the agent has had its time to give its pages back.
    pub(super) fn is_silent(&self, agent: AgentId) -> bool {
        let silence = self.silent.get(&agent);
        silence.is_some_and(|silence| silence.until - silence.since > GET_DEADLINE)
    }

    /// How long agents may have been away by now, and may yet be awaited: no less than since the detach began.
    pub(super) fn patience(&self, now: Instant) -> Duration {
        match self.began {
            Some(began) if now.saturating_duration_since(began) > GET_DEADLINE => GET_DEADLINE,
            _ => Duration::MAX,
        }
    }

    /// Something is wanted of the agent.
    pub(super) fn want(&mut self, now: Instant, agent: AgentId) {
        let anew = Silence { since: now, until: now };
        let silence = self.silent.entry(agent).or_insert(anew);
        if now.duration_since(silence.until) > WANTED_ANEW {
            silence.since = now;
        }
        silence.until = now;
    }

    /// The agent gave pages back. If more is wanted of it, its time begins anew.
    pub(super) fn heard(&mut self, now: Instant, agent: AgentId) {
        let wanted =
            self.under_way(agent) > 0 || self.queued.get(&agent).is_some_and(|q| !q.is_empty());
        match wanted {
            true => drop(self.silent.insert(agent, Silence { since: now, until: now })),
            false => drop(self.silent.remove(&agent)),
        }
    }

    /// Whom to ask for a page: those who have it, have not failed to give it, and answer. Nobody has it any more where there is none.
    pub(super) fn sources(&self, content: Content) -> AgentSet {
        let noted = |of: &BTreeMap<ContentId, AgentSet>| of.get(&content.id).copied();
        let holders = content.holders.without(noted(&self.failed).unwrap_or_default());
        let answering: AgentSet =
            holders.agents().filter(|&agent| !self.is_silent(agent)).collect();
        // With parity it is made rather than taken from one that gives wrong pages, or is late. Else that one is asked where the others do not answer either.
        let least = |all: AgentSet, some: AgentSet| {
            if some.is_empty() && !self.has_parity { all } else { some }
        };
        let sound = least(answering, answering.without(self.unsound));
        least(sound, sound.without(noted(&self.late).unwrap_or_default()))
    }

    /// Pages have come right: what was noted of them is forgotten.
    pub(super) fn forgive(&mut self, space: SpaceId, pages: &[(PageAddr, Content)]) {
        for (page, content) in pages {
            self.failed.remove(&content.id);
            self.late.remove(&content.id);
            self.mismatches.remove(&(space, *page));
        }
    }

    /// Nothing is wanted of the agent any more, or its link has just come up: its time has not begun.
    pub(super) fn excuse_agent(&mut self, agent: AgentId, is_up: bool) {
        let wanted =
            self.under_way(agent) > 0 || self.queued.get(&agent).is_some_and(|q| !q.is_empty());
        if is_up || !wanted {
            self.silent.remove(&agent);
        }
    }

    /// An agent has not given a page in time.
    pub(super) fn note_late(&mut self, content: Content, agent: AgentId) {
        if self.late.len() < MISMATCHED_MAX || self.late.contains_key(&content.id) {
            let late = self.late.entry(content.id).or_default();
            *late = late.union(AgentSet::of(agent));
        }
    }

    /// An agent can be used again.
    pub(super) fn is_back(&mut self, agent: AgentId) {
        self.excuse_agent(agent, true);
        self.late.values_mut().for_each(|late| *late = late.without(AgentSet::of(agent)));
        self.late.retain(|_, late| !late.is_empty());
    }

    /// An agent has not got a page that it should have; whether others may.
    pub(super) fn fail(&mut self, content: Content, agent: AgentId) -> bool {
        if self.failed.len() >= MISMATCHED_MAX && !self.failed.contains_key(&content.id) {
            // Not remembered: the others are asked by chance.
            return self.has_parity || !content.holders.without(AgentSet::of(agent)).is_empty();
        }
        let failed = self.failed.entry(content.id).or_default();
        *failed = failed.union(AgentSet::of(agent));
        let others = self.has_parity || !self.sources(content).is_empty();
        if !others {
            self.failed.remove(&content.id);
        }
        others
    }

    /// Another wrong seal or checksum: whether the page is lost.
    pub(super) fn mismatch(&mut self, place: Place) -> bool {
        if self.mismatches.len() >= MISMATCHED_MAX && !self.mismatches.contains_key(&place) {
            return true;
        }
        let count = self.mismatches.entry(place).or_default();
        *count += 1;
        let lost = *count >= PAGE_MISMATCHES_MAX;
        if lost {
            self.mismatches.remove(&place);
        }
        lost
    }
}

#[cfg(test)]
mod tests {
    use gms_policy::redundancy::PlacementId;

    use super::*;

    const PAGE: PageAddr = PageAddr::containing(1 << 20);
    const SPACE: SpaceId = SpaceId(1);

    fn at(agents: &[u8]) -> Content {
        let holders = agents.iter().map(|&agent| AgentId(agent)).collect();
        Content { id: ContentId(7), placement: PlacementId::from_bits(0), holders, hash: 9 }
    }

    /// Asks an agent in vain for so long.
    fn ask_in_vain(home: &mut Homecoming, now: &mut Instant, agent: u8, time: Duration) {
        let end = *now + time;
        while *now <= end {
            home.want(*now, AgentId(agent));
            *now += Duration::from_secs(1);
        }
    }

    #[test]
    fn an_agent_is_silent_only_while_something_is_wanted_of_it() {
        let (mut now, agent) = (Instant::now(), AgentId(1));
        let mut home = Homecoming::new(now, false);
        ask_in_vain(&mut home, &mut now, 1, GET_DEADLINE);
        assert!(!home.is_silent(agent));
        home.queued.entry(agent).or_default().push_back((SPACE, PAGE));
        home.want(now, agent);
        assert!(home.is_silent(agent));
        home.heard(now, agent);
        assert!(!home.is_silent(agent) && home.silent.contains_key(&agent));
        home.queued.clear();
        home.heard(now, agent);
        assert!(home.silent.is_empty(), "nothing more is wanted of it");
    }

    #[test]
    fn agents_have_their_time_from_the_beginning_of_the_detach() {
        let now = Instant::now();
        let mut home = Homecoming::new(now, true);
        assert_eq!(home.patience(now + 10 * GET_DEADLINE), Duration::MAX, "it has not begun");
        home.began = Some(now);
        assert_eq!(home.patience(now + GET_DEADLINE), Duration::MAX);
        let later = now + GET_DEADLINE + Duration::from_secs(1);
        assert_eq!(home.patience(later), GET_DEADLINE);
        home.excuse(Duration::from_secs(2));
        assert_eq!(home.patience(later), Duration::MAX);
    }

    #[test]
    fn a_page_is_lost_after_some_wrong_checksums() {
        let mut home = Homecoming::new(Instant::now(), false);
        let place = |n: u64| (SPACE, PageAddr::containing(n << 12));
        let times = (0..PAGE_MISMATCHES_MAX).filter(|_| home.mismatch(place(1))).count();
        assert_eq!(times, 1);
        for n in 0..MISMATCHED_MAX as u64 {
            assert!(!home.mismatch(place(n)));
        }
        assert!(home.mismatch(place(1 << 20)), "what is remembered is bounded");
    }

    #[test]
    fn an_agent_that_was_late_once_is_asked_again_before_a_page_is_lost() {
        let (mut now, both) = (Instant::now(), at(&[0, 1]));
        let mut home = Homecoming::new(now, false);
        let of = |agent| AgentSet::of(AgentId(agent));
        // The other one is dead, and so not asked as long as this one is up.
        home.want(now, AgentId(0));
        home.note_late(both, AgentId(0));
        assert_eq!(home.sources(both), of(1));
        ask_in_vain(&mut home, &mut now, 1, GET_DEADLINE + Duration::from_secs(1));
        assert_eq!(home.sources(both), of(0), "of the other nothing was wanted meanwhile");
        // Its time begins when it is asked again.
        home.want(now, AgentId(0));
        assert_eq!(home.sources(both), of(0));
        ask_in_vain(&mut home, &mut now, 0, GET_DEADLINE + Duration::from_secs(1));
        assert!(home.sources(both).is_empty());
        home.is_back(AgentId(1));
        assert_eq!(home.sources(both), of(1));
    }

    #[test]
    fn who_was_late_is_preferred_to_nobody_and_who_has_said_no_is_not() {
        let now = Instant::now();
        let mut home = Homecoming::new(now, false);
        home.note_late(at(&[0]), AgentId(0));
        assert_eq!(home.sources(at(&[0])), AgentSet::of(AgentId(0)));
        assert!(home.fail(at(&[0, 1]), AgentId(0)), "another may have it");
        assert_eq!(home.sources(at(&[0, 1])), AgentSet::of(AgentId(1)));
        assert!(home.sources(at(&[0])).is_empty());
        home.is_back(AgentId(0));
        assert!(home.sources(at(&[0])).is_empty(), "it has said no");
        home.forgive(SPACE, &[(PAGE, at(&[0]))]);
        assert_eq!(home.sources(at(&[0])), AgentSet::of(AgentId(0)));
        // With parity it is made.
        let mut home = Homecoming::new(now, true);
        home.note_late(at(&[0]), AgentId(0));
        assert!(home.sources(at(&[0])).is_empty());
    }
}
