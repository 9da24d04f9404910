//! The pager: its real tables and clients of agents. What its two threads do with them is written here as in pager/src/fault and
//! pager/src/evict, on the model kernel, until those are cores themselves.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Instant;

use bytes::Bytes;
use gms_pager::kernel::{Installed, Probe};
use gms_pager::page_map::{Content, PAGE};
use gms_pager::range_set::RangeSet;
use gms_pager::tables::{Change, EvictOutcome, FaultAction, Place, Tables, contested, drop_echoes};
use gms_policy::ids::{AgentId, PageAddr, SpaceId};
use gms_policy::placement::{Placement, TwoChoices};
use gms_tests::Dice;
use gms_transport::client::{
    AgentAddress, Checksum, Client, ClientEvent, GetId, Lane, PutId, Urgency, Wanted,
};
use gms_transport::message::{Op, PAGES_MAX, WorkloadId};
use gms_transport::sim::{Net, Sim};

use crate::kernel::{Event, Kernel, Page, room, zeros};

const SPACE: SpaceId = SpaceId(1);
/// Slots of the write-back buffer.
const SLOTS: u32 = 24;
/// Most pages put at once, and puts under way to an agent.
const WRITE_PAGES: usize = 8;
const WRITES_MAX: usize = 2;
/// Most pages moved at once.
const BATCH: u64 = 8;
/// Most pages fetched ahead.
const AHEAD: u64 = 6;
const WORKLOAD: WorkloadId = WorkloadId([7; 16]);

/// What is fetched by one get.
struct Fetch {
    pages: Vec<(PageAddr, Content)>,
    open: u64,
    /// Whether a thread waits for the first.
    demanded: bool,
}

impl Fetch {
    fn is_awaited(&self, page: usize) -> bool {
        self.demanded && page == 0
    }
}

/// What has happened.
#[derive(Default)]
pub struct Count {
    pub demanded: u64,
    pub ahead: u64,
    pub unwanted: u64,
    pub failed_puts: u64,
    pub reordered: u64,
    pub doubts: u64,
}

/// See the module's documentation.
pub struct Owner {
    pub tables: Tables,
    pub count: Count,
    frames: Vec<Page>,
    checksum: Checksum,
    budget: usize,
    faults: Client<Sim>,
    evicts: Client<Sim>,
    pending: BTreeSet<PageAddr>,
    fetches: BTreeMap<GetId, Fetch>,
    /// Faults to be tried again.
    again: Vec<PageAddr>,
    /// What has been read of changes and waits for others that have begun. Nobody is served meanwhile, or evicted.
    backlog: Vec<Event>,
    writes: BTreeMap<PutId, Vec<u32>>,
    /// Pages that were moved, and are not noted as such yet.
    leaving: Vec<(u32, EvictOutcome)>,
    /// Removals that were told, and are not known to be over.
    aging: bool,
    /// Why the workload was ended, and for which agent.
    pub killed: Option<(Option<AgentId>, String)>,
}

impl Owner {
    /// A pager of a workload of `pages` pages of which about `budget` are to be resident.
    pub fn new(
        net: &Net,
        now: Instant,
        agents: &[AgentAddress],
        pages: u64,
        budget: usize,
    ) -> Owner {
        let mut tables = Tables::new(SLOTS, budget as u64).expect("a memfd");
        tables.add_space(SPACE);
        tables.register(SPACE, 0..pages * PAGE, &Default::default());
        let checksum = Checksum::new(7);
        let client = |number| {
            let node = net.node(([10, 0, 1, number], 1).into(), 99).expect("a descriptor");
            Client::new(Lane::new(now, node, WORKLOAD, agents), checksum)
        };
        Owner {
            tables,
            count: Count::default(),
            frames: vec![zeros(); SLOTS as usize],
            checksum,
            budget,
            faults: client(1),
            evicts: client(2),
            pending: BTreeSet::new(),
            fetches: BTreeMap::new(),
            again: Vec::new(),
            backlog: Vec::new(),
            writes: BTreeMap::new(),
            leaving: Vec::new(),
            aging: false,
            killed: None,
        }
    }

    fn kill(&mut self, agent: Option<AgentId>, reason: &str) {
        self.killed.get_or_insert_with(|| (agent, reason.into()));
    }

    fn has_room(&self, kernel: &Kernel) -> bool {
        kernel.resident().len() < self.budget + 4
    }

    // ---- the fault thread

    /// A turn of it.
    pub fn serve(&mut self, now: Instant, kernel: &mut Kernel, dice: &mut Dice) {
        self.backlog.extend(std::iter::from_fn(|| kernel.read_event()));
        let only_removals = self.backlog.iter().all(|event| matches!(event, Event::Remove(_)));
        if !self.backlog.is_empty() && (only_removals || !kernel.has_event()) {
            self.apply(kernel);
        }
        let mut faults = std::mem::take(&mut self.again);
        faults.extend(std::iter::from_fn(|| kernel.read_fault()));
        for page in faults {
            self.fault(now, kernel, page, dice);
        }
        self.faults.drive(now).expect("a network in memory does not fail");
        self.arrivals(now, kernel);
        self.faults.expire(now);
        self.arrivals(now, kernel);
        self.cancel_discarded(now, kernel);
        self.faults.send_unsent(now);
        self.arrivals(now, kernel);
        self.faults.flush(now).expect("a network in memory does not fail");
    }

    /// Applies what was told of changes, in the order in which they were made.
    fn apply(&mut self, kernel: &mut Kernel) {
        let mut events = std::mem::take(&mut self.backlog);
        drop_echoes(&mut events, change);
        let changes: Vec<Change> = events.iter().filter_map(change).collect();
        let concerned = contested(&changes);
        let mut marked = RangeSet::default();
        for range in concerned.iter() {
            kernel.look(&range).0.iter().for_each(|part| marked.insert(part));
        }
        if concerned.iter().next().is_some() {
            let Ok(order) = self.tables.order(SPACE, &changes, &marked) else {
                self.count.doubts += 1;
                return self.kill(None, "it is not known which pages are where");
            };
            self.count.reordered += u64::from(!order.is_sorted());
            // Removals concern no room.
            let removals = events.iter().filter(|event| change(event).is_none()).cloned();
            let moves: Vec<&Event> =
                events.iter().filter(|event| change(event).is_some()).collect();
            events = removals.chain(order.into_iter().map(|n| moves[n].clone())).collect();
        }
        for event in events {
            let range = match event {
                Event::Remove(range) => {
                    self.tables.remove(SPACE, range.clone());
                    range
                }
                Event::Unmap(range) => {
                    self.tables.unmap(SPACE, range.clone());
                    range
                }
                Event::Remap(remap) => {
                    self.tables.remap(SPACE, remap);
                    remap.source()
                }
            };
            kernel.wake_range(&range);
        }
        for range in concerned.iter() {
            self.tables.forget_unmarked(SPACE, range, &marked);
        }
    }

    fn fault(&mut self, now: Instant, kernel: &mut Kernel, page: PageAddr, dice: &mut Dice) {
        if !self.backlog.is_empty() {
            return self.again.push(page);
        }
        let place = (SPACE, page);
        let action = self.tables.fault(place);
        let takes = !matches!(action, FaultAction::Wait | FaultAction::Resident);
        if takes && !self.has_room(kernel) {
            return self.tables.wait_for_room(place);
        }
        match action {
            FaultAction::Zero => {
                assert!(
                    !kernel.has_marker(page) || kernel.has_event(),
                    "page {:#x} was evicted, and nothing is known of it",
                    page.get()
                );
                match kernel.copy(page, &zeros()) {
                    Installed::Done => self.tables.zeroed(SPACE, page.get()..page.get() + PAGE),
                    Installed::Changing => self.again.push(page),
                    Installed::Exists | Installed::Gone => kernel.wake(page),
                }
            }
            FaultAction::Resident => self.probed(kernel, page),
            FaultAction::Buffered(slot) => {
                if !kernel.has_marker(page) || kernel.has_event() {
                    return self.probed(kernel, page);
                }
                let installed = kernel.copy(page, &self.frames[slot as usize]);
                assert_eq!(installed, Installed::Done);
                self.tables.second_chance(place);
            }
            FaultAction::Fetch(content) => self.fetch(now, page, content, dice.below(AHEAD)),
            FaultAction::Wait => {}
        }
    }

    /// Something is known of the page; whether it is there is seen now, and its threads try again.
    fn probed(&mut self, kernel: &mut Kernel, page: PageAddr) {
        match kernel.probe(page) {
            Probe::Changing => return self.again.push(page),
            Probe::Absent => {
                self.tables.discarded((SPACE, page));
                self.tables.zeroed(SPACE, page.get()..page.get() + PAGE);
            }
            Probe::Occupied | Probe::Gone => {}
        }
        kernel.wake(page);
    }

    fn fetch(&mut self, now: Instant, page: PageAddr, content: Content, ahead: u64) {
        if !self.pending.insert(page) {
            return;
        }
        let next = (1..=ahead).map(|n| PageAddr::containing(page.get() + n * PAGE));
        let ahead = self.tables.begin_prefetch(SPACE, next, ahead as usize);
        let mut by_agent: BTreeMap<AgentId, Vec<(PageAddr, Content)>> = BTreeMap::new();
        for wanted in std::iter::once((page, content)).chain(ahead) {
            by_agent.entry(wanted.1.agent).or_default().push(wanted);
        }
        for (agent, pages) in by_agent {
            let demanded = agent == content.agent;
            let urgency = if demanded { Urgency::Demand } else { Urgency::Ahead };
            let wanted = |&(_, c): &(PageAddr, Content)| Wanted { id: c.id, check: c.hash };
            let get = self.faults.get(now, agent, pages.iter().map(wanted).collect(), urgency);
            let open = u64::MAX >> (PAGES_MAX - pages.len());
            self.fetches.insert(get, Fetch { pages, open, demanded });
        }
    }

    fn arrivals(&mut self, now: Instant, kernel: &mut Kernel) {
        while let Some(event) = self.faults.poll(now) {
            match event {
                ClientEvent::Arrived { get, pages, bytes } => {
                    self.arrived(kernel, get, pages, &bytes);
                }
                ClientEvent::Failed { get, pages, failure } => {
                    self.forsake(kernel, get, pages, Some(format!("{failure:?}")));
                }
                ClientEvent::Ended { get } => drop(self.fetches.remove(&get)),
                ClientEvent::Wrong { .. } => self.kill(None, "a page is wrong"),
                ClientEvent::Up { agent, session, lost } => self.agent_up(agent, session, lost),
                ClientEvent::Answered { .. }
                | ClientEvent::Down { .. }
                | ClientEvent::Stored { .. } => {}
            }
        }
    }

    fn arrived(&mut self, kernel: &mut Kernel, get: GetId, pages: Range<usize>, bytes: &Bytes) {
        let Some(mut fetch) = self.fetches.remove(&get) else { return };
        for (n, bytes) in pages.zip(bytes.chunks_exact(PAGE as usize)) {
            fetch.open &= !(1 << n);
            let ((page, content), awaited) = (fetch.pages[n], fetch.is_awaited(n));
            let place = (SPACE, page);
            let wanted = self.backlog.is_empty() && self.tables.is_remote(place, content);
            // Nobody waits for the others: they are not brought where something may be about to go.
            let settled =
                awaited || !self.tables.has_quarantine(SPACE, &(page.get()..page.get() + PAGE));
            let outcome = match kernel.has_marker(page) {
                true if wanted && settled => kernel.copy(page, bytes),
                false if wanted && awaited => {
                    self.probed(kernel, page);
                    Installed::Gone
                }
                _ => Installed::Gone,
            };
            let waited = match awaited {
                true => self.pending.remove(&page),
                false => self.tables.end_prefetch(place),
            };
            match awaited {
                _ if outcome != Installed::Done => self.count.unwanted += 1,
                true => self.count.demanded += 1,
                false => self.count.ahead += 1,
            }
            if matches!(outcome, Installed::Done | Installed::Exists) {
                self.tables.fetched(place, content, waited);
            }
            if outcome != Installed::Done && waited {
                kernel.wake(page);
            }
        }
        self.fetches.insert(get, fetch);
    }

    /// Pages do not come by this get.
    fn forsake(&mut self, kernel: &mut Kernel, get: GetId, pages: u64, failure: Option<String>) {
        let Some(fetch) = self.fetches.get_mut(&get) else { return };
        let closed = fetch.open & pages;
        fetch.open &= !pages;
        let awaited = fetch.demanded && closed & 1 == 1;
        let closed: Vec<(PageAddr, Content)> = (0..fetch.pages.len())
            .filter(|n| closed >> n & 1 == 1)
            .map(|n| fetch.pages[n])
            .collect();
        for &(page, _) in &closed[usize::from(awaited)..] {
            if self.tables.end_prefetch((SPACE, page)) {
                kernel.wake(page);
            }
        }
        if !awaited {
            return;
        }
        let (page, content) = closed[0];
        self.pending.remove(&page);
        match failure.filter(|_| self.tables.is_remote((SPACE, page), content)) {
            Some(failure) => self.kill(Some(content.agent), &failure),
            None => kernel.wake(page),
        }
    }

    /// What has been discarded while its agent was away: nobody is to wait for it.
    fn cancel_discarded(&mut self, now: Instant, kernel: &mut Kernel) {
        let unsent: Vec<GetId> = self.faults.unsent().collect();
        for get in unsent {
            let Some(fetch) = self.fetches.get(&get) else { continue };
            let (page, content) = fetch.pages[0];
            if fetch.demanded && !self.tables.is_remote((SPACE, page), content) {
                self.faults.cancel(now, get);
                self.forsake(kernel, get, u64::MAX, None);
                self.fetches.remove(&get);
            }
        }
    }

    /// As `Shared::agent_up`.
    fn agent_up(&mut self, agent: AgentId, session: u64, lost: bool) {
        if !self.tables.begin_session(agent, session, lost) {
            return;
        }
        if self.tables.depends_on(agent) {
            return self.kill(Some(agent), "it was restarted");
        }
        self.tables.forget_copies(agent);
    }

    // ---- the evict thread

    /// A turn of it.
    pub fn evict(&mut self, now: Instant, kernel: &mut Kernel, dice: &mut Dice) {
        self.evicts.drive(now).expect("a network in memory does not fail");
        self.handle_stored(now);
        self.evicts.expire(now);
        self.handle_stored(now);
        let lane = self.evicts.lane();
        let untrusted = lane.agents().filter(|&agent| !lane.keeps(now, agent)).collect();
        self.tables.distrust(untrusted);
        if self.backlog.is_empty() {
            self.register(kernel);
            self.finish_leaving(kernel, dice);
            if kernel.resident().len() > self.budget {
                self.move_out(kernel, dice);
            }
            self.reconcile(kernel, dice);
        }
        self.write_back(now, dice);
        if dice.below(50) == 0 {
            self.evicts.ask_status(now);
        }
        while self.has_room(kernel)
            && let [place] = self.tables.take_roomless(1)[..]
        {
            kernel.wake(place.1);
        }
        self.evicts.flush(now).expect("a network in memory does not fail");
    }

    /// Rooms that were mapped are found by looking.
    fn register(&mut self, kernel: &mut Kernel) {
        if kernel.has_event() {
            return;
        }
        for number in kernel.unregistered() {
            kernel.register(number);
            self.tables.register(SPACE, room(number), &RangeSet::default());
        }
    }

    fn move_out(&mut self, kernel: &mut Kernel, dice: &mut Dice) {
        let resident: Vec<PageAddr> = kernel.resident().collect();
        let first = dice.place(resident.len());
        let count = 1 + dice.below(BATCH) as usize;
        let window: Vec<PageAddr> = resident.into_iter().skip(first).take(count).collect();
        let victims = self.tables.cool(SPACE, &window);
        let mut begun = Vec::new();
        self.tables.begin_evict(SPACE, &victims, &mut begun);
        for (page, slot) in begun {
            let pinned = dice.below(20) == 0;
            let outcome = match (!pinned).then(|| kernel.take(page)).flatten() {
                None => EvictOutcome::Stayed,
                Some(bytes) => {
                    let hash = self.checksum.of(&bytes);
                    let is_zero = bytes.iter().all(|&byte| byte == 0);
                    self.frames[slot as usize] = bytes;
                    if is_zero { EvictOutcome::Zero } else { EvictOutcome::Moved(hash) }
                }
            };
            self.leaving.push((slot, outcome));
        }
    }

    fn finish_leaving(&mut self, kernel: &mut Kernel, dice: &mut Dice) {
        let mut wake = Vec::new();
        for (slot, outcome) in std::mem::take(&mut self.leaving) {
            // Markers are left where the page is now; a change may have come in between.
            let unmarked: Vec<Place> = match outcome {
                EvictOutcome::Moved(_) => self.tables.unmarked(slot).collect(),
                EvictOutcome::Zero | EvictOutcome::Stayed => Vec::new(),
            };
            for place in unmarked {
                if dice.below(4) > 0 && kernel.mark(place.1) {
                    self.tables.marked(slot, place);
                }
            }
            let waits = matches!(outcome, EvictOutcome::Moved(_))
                && self.tables.unmarked(slot).next().is_some();
            if waits || (outcome == EvictOutcome::Zero && kernel.has_event()) {
                self.leaving.push((slot, outcome));
                continue;
            }
            // Zeros are left nowhere.
            let outcome = match self.tables.only_owner(slot) {
                None if outcome == EvictOutcome::Zero => {
                    EvictOutcome::Moved(self.checksum.of(&zeros()))
                }
                _ => outcome,
            };
            self.tables.finish_evict(slot, outcome, &mut wake);
        }
        wake.into_iter().for_each(|place| kernel.wake(place.1));
    }

    fn reconcile(&mut self, kernel: &Kernel, dice: &mut Dice) {
        if !self.aging && dice.below(4) == 0 {
            self.aging = self.tables.age_quarantine(SPACE);
        }
        if self.aging && kernel.removes().is_none() {
            self.tables.end_quarantine(SPACE);
            self.aging = false;
        }
        let stale = self.tables.take_stale(SPACE);
        for range in stale.iter() {
            match kernel.has_event() {
                true => self.tables.look_again(SPACE, range),
                false => {
                    let (marked, taken) = kernel.look(&range);
                    self.tables.reconcile(SPACE, range, &marked, &taken);
                }
            }
        }
    }

    fn write_back(&mut self, now: Instant, dice: &mut Dice) {
        let mut views = self.evicts.lane().views();
        while self.tables.has_ready() {
            views.retain(|view| {
                view.credits.0 > 0 && self.evicts.lane().under_way(view.id, Op::Put) < WRITES_MAX
            });
            let Some(agent) = TwoChoices.choose(&views, dice.bits()) else { break };
            let batch = self.tables.start_write(agent, WRITE_PAGES);
            if batch.is_empty() {
                break;
            }
            let slots: Vec<u32> = batch.iter().map(|written| written.0).collect();
            let pages =
                batch.iter().map(|&(slot, id, _)| (id, self.frames[slot as usize].as_slice()));
            match self.evicts.put(now, agent, pages) {
                Ok(put) => drop(self.writes.insert(put, slots)),
                Err(_) => {
                    slots.iter().rev().for_each(|&slot| self.tables.written(slot, false));
                    views.retain(|view| view.id != agent);
                }
            }
        }
        let agents: Vec<AgentId> = self.evicts.lane().agents().collect();
        for agent in agents {
            let ids = match self.evicts.lane().is_up(agent) {
                true => self.tables.take_discards(agent, PAGES_MAX),
                false => Vec::new(),
            };
            if !ids.is_empty() {
                let _ = self.evicts.discard(now, agent, &ids);
            }
        }
    }

    fn handle_stored(&mut self, now: Instant) {
        while let Some(event) = self.evicts.poll(now) {
            match event {
                ClientEvent::Stored { put, pages } => {
                    let slots = self.writes.remove(&put).expect("a put of ours");
                    self.count.failed_puts += u64::from(pages == 0);
                    for (n, &slot) in slots.iter().enumerate().rev() {
                        self.tables.written(slot, pages >> n & 1 == 1);
                    }
                }
                ClientEvent::Up { agent, session, lost } => self.agent_up(agent, session, lost),
                _ => {}
            }
        }
    }

    // ---- the end

    /// When something of it is due.
    pub fn deadline(&self) -> Option<Instant> {
        [self.faults.deadline(), self.evicts.deadline()].into_iter().flatten().min()
    }

    /// Frees all that agents hold.
    pub fn goodbye(&mut self, now: Instant) {
        self.evicts.goodbye(now);
        self.evicts.flush(now).expect("a network in memory does not fail");
    }
}

fn change(event: &Event) -> Option<Change> {
    match event {
        Event::Remove(_) => None,
        Event::Unmap(range) => Some(Change::Unmap(range.clone())),
        Event::Remap(remap) => Some(Change::Remap(*remap)),
    }
}
