//! Pages whose agents do not give them are made of the other parts of their stripes, for whoever asks agents: a fault thread while a thread waits for the page,
//! the evict thread to deal it anew or to bring it home.
//!
//! `begin` -> `turn` asks each agent of some parts -> `handle` collects them -> the page goes into the write-back buffer, as one that has just been evicted: from
//! there threads are served, and there it waits to be written anew. A part has no checksum of its own: its seal says that it is what was put, and names the
//! agent if it is not; the page made of them all has the checksum of its entry.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use gms_policy::limits::HEDGE_AFTER_MAX;
use gms_policy::redundancy::AgentSet;
use gms_policy::stripes::{Codec, Part, Read, Role, Shape};
use gms_transport::Transport;
use gms_transport::client::{
    Client, ClientEvent, Failure, GET_DEADLINE, GetId, RETRY, Urgency, Wanted,
};
use gms_transport::message::Status;

use crate::page_map::Content;
use crate::shared::Shared;
use crate::sync::lock;
use crate::tables::Place;

/// Pause before what cannot be done now is tried again.
const PAUSE: Duration = Duration::from_millis(10);

/// How the making of a page has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It is in the write-back buffer.
    Made,
    /// It is somewhere else by now, or nobody's.
    Gone,
    /// More parts are lost than there is parity.
    Lost,
    /// Agents have not given enough parts for [`GET_DEADLINE`].
    Stuck,
    /// It has another checksum, though each part has the right seal.
    Wrong,
}

impl End {
    /// Why a workload that waits for such a page is ended, if it is.
    pub fn reason(self) -> Option<&'static str> {
        match self {
            End::Made | End::Gone => None,
            End::Lost => Some(
                "a page is lost: more agents of its stripe have lost their parts than there is parity",
            ),
            End::Stuck => {
                Some("a page does not come: too few agents of its stripe give their parts")
            }
            End::Wrong => Some("a page that was made of parity is not the one that was evicted"),
        }
    }
}

/// A page whose making has ended.
pub struct Ended {
    /// Where it belongs.
    pub place: Place,
    /// What was to be made.
    pub content: Content,
    /// How it has ended.
    pub end: End,
    /// How long it took.
    pub took: Duration,
}

/// A part that has been asked for, and has not come.
struct Asked {
    get: GetId,
    part: Part,
    at: Instant,
}

/// A page that is being made.
struct Making {
    content: Content,
    began: Instant,
    /// When more parts are to be asked for; none while enough are.
    ask_at: Option<Instant>,
    /// Agents that have not given their parts, or not soon.
    failed: AgentSet,
    asked: Vec<Asked>,
    came: Vec<(Part, Bytes)>,
    /// Parts of which it can be made, once that is known.
    needed: usize,
    /// The page, until there is a slot for it.
    page: Option<Vec<u8>>,
}

/// See the module's documentation.
pub struct Decoder {
    shape: Option<Shape>,
    urgency: Urgency,
    pages: BTreeMap<Place, Making>,
    gets: BTreeMap<GetId, Place>,
    next: Instant,
}

impl Decoder {
    /// Without any page; it makes none without parity.
    pub fn new(now: Instant, shape: Option<Shape>, urgency: Urgency) -> Decoder {
        Decoder { shape, urgency, pages: BTreeMap::new(), gets: BTreeMap::new(), next: now }
    }

    /// Whether there is parity.
    pub fn is_able(&self) -> bool {
        self.shape.is_some()
    }

    /// Pages that are being made.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Whether this one is.
    pub fn makes(&self, place: Place) -> bool {
        self.pages.contains_key(&place)
    }

    /// When [`Decoder::turn`] is due, though nothing has come.
    pub fn due(&self) -> Option<Instant> {
        (!self.is_empty()).then_some(self.next)
    }

    /// A page is to be made. Some agents have not given it, or are asked for it already: their parts are not asked for before those of the others.
    pub fn begin(&mut self, now: Instant, place: Place, content: Content, failed: AgentSet) {
        let making = || Making {
            content,
            began: now,
            ask_at: Some(now),
            failed,
            asked: Vec::new(),
            came: Vec::new(),
            needed: usize::MAX,
            page: None,
        };
        self.pages.entry(place).or_insert_with(making);
        self.next = now;
    }

    /// What is being made may take as long from now on as if it had just begun.
    pub fn begin_anew(&mut self, now: Instant) {
        self.pages.values_mut().for_each(|making| making.began = now);
    }

    /// No agent is blamed for the time in which this process was stopped.
    pub fn excuse(&mut self, missed: Duration) {
        for making in self.pages.values_mut() {
            let asked = making.asked.iter_mut().map(|asked| &mut asked.at);
            asked.chain([&mut making.began]).for_each(|at| *at += missed);
        }
    }

    /// Goes on with each page. Returns those that have come to an end.
    pub fn turn<T: Transport>(
        &mut self,
        now: Instant,
        agents: &mut Client<T>,
        shared: &Shared,
    ) -> Vec<Ended> {
        let mut ended = Vec::new();
        if self.is_empty() || now < self.next {
            return ended;
        }
        self.next = now + PAUSE;
        for place in self.pages.keys().copied().collect::<Vec<Place>>() {
            if let Some(end) = self.go_on(now, place, agents, shared) {
                let making = self.pages.remove(&place).expect("it is being made");
                for asked in making.asked {
                    self.gets.remove(&asked.get);
                    agents.cancel(now, asked.get);
                }
                let took = now.saturating_duration_since(making.began);
                ended.push(Ended { place, content: making.content, end, took });
            }
        }
        ended
    }

    fn go_on<T: Transport>(
        &mut self,
        now: Instant,
        place: Place,
        agents: &mut Client<T>,
        shared: &Shared,
    ) -> Option<End> {
        let making = self.pages.get_mut(&place)?;
        let mut tables = lock(&shared.tables);
        if !tables.is_remote(place, making.content) {
            return Some(End::Gone);
        }
        if let Some(page) = &making.page {
            if shared.checksum(page) != making.content.hash {
                return Some(End::Wrong);
            }
            // Some slots are kept for pages that threads wait for.
            let may_wait =
                self.urgency == Urgency::Bulk && !shared.detaching.load(Ordering::Relaxed);
            if !tables.has_slot() || may_wait && tables.room_to_renew() == 0 {
                return None;
            }
            // With the tables locked, so that nobody reads the slot before its bytes are there.
            let slot = tables.rewrite(place, making.content);
            let Some(slot) = slot else { return Some(End::Gone) };
            shared.frames.fill(slot, page);
            shared.pages_made.fetch_add(1, Ordering::Relaxed);
            return Some(End::Made);
        }
        drop(tables);
        if now.saturating_duration_since(making.began) > GET_DEADLINE {
            return Some(End::Stuck);
        }
        // They may still come, but others are asked too.
        let patience = match self.urgency {
            Urgency::Demand => HEDGE_AFTER_MAX,
            Urgency::Ahead | Urgency::Bulk => RETRY,
        };
        let lane = agents.lane();
        let is_late = |asked: &&Asked| {
            now.saturating_duration_since(asked.at) > patience || !lane.is_up(asked.part.agent)
        };
        let late = making.asked.iter().filter(is_late).map(|asked| asked.part.agent);
        let late = late.collect::<AgentSet>().without(making.failed);
        if !late.is_empty() {
            making.fail(now, late);
        }
        self.ask(now, place, agents, shared)
    }

    /// Asks for the parts that are still needed.
    fn ask<T: Transport>(
        &mut self,
        now: Instant,
        place: Place,
        agents: &mut Client<T>,
        shared: &Shared,
    ) -> Option<End> {
        let making = self.pages.get_mut(&place)?;
        making.ask_at.filter(|&at| at <= now)?;
        let came: AgentSet = making.came.iter().map(|(part, _)| part.agent).collect();
        let lane = agents.lane();
        let up: AgentSet = lane.agents().filter(|&agent| lane.is_up(agent)).collect();
        let up = up.without(making.failed);
        let answering: AgentSet = up.agents().filter(|&agent| agents.keeps(now, agent)).collect();
        let read = |up: AgentSet| lock(&shared.tables).read(making.content, up.union(came));
        // Rather not of those that are silent, or give wrong pages.
        let sound = read(answering.without(shared.unsound_agents()));
        let read = if sound == Some(Read::Later) { read(up) } else { sound };
        let parts = match read {
            Some(Read::At(part)) => vec![part],
            Some(Read::Decode(needed, parts)) => {
                making.needed = needed;
                parts
            }
            Some(Read::Later) => {
                // Those that have failed, again.
                (making.ask_at, making.failed) = (Some(now + PAUSE), AgentSet::EMPTY);
                return None;
            }
            // Parts that are here may be of agents that have lost theirs since, and the others on their way.
            Some(Read::Lost)
                if !making.asked.is_empty()
                    && making.came.len() + making.asked.len() >= making.needed =>
            {
                making.ask_at = None;
                return None;
            }
            Some(Read::Lost) => return Some(End::Lost),
            Some(Read::Unknown) | None => return Some(End::Gone),
        };
        making.ask_at = None;
        let asked: AgentSet = making.asked.iter().map(|asked| asked.part.agent).collect();
        for part in parts.into_iter().filter(|part| !asked.union(came).has(part.agent)) {
            let wanted = vec![Wanted { id: part.id, check: None }];
            let get = agents.get(now, part.agent, wanted, self.urgency);
            making.asked.push(Asked { get, part, at: now });
            self.gets.insert(get, place);
        }
        None
    }

    /// An event of a part; given back if it is of something else.
    pub fn handle<T: Transport>(
        &mut self,
        now: Instant,
        event: ClientEvent,
        agents: &mut Client<T>,
        shared: &Shared,
    ) -> Option<ClientEvent> {
        let Some((get, place)) = event.get().and_then(|get| Some((get, *self.gets.get(&get)?)))
        else {
            return Some(event);
        };
        if !matches!(
            event,
            ClientEvent::Arrived { .. } | ClientEvent::Wrong { .. } | ClientEvent::Failed { .. }
        ) {
            return None;
        }
        self.gets.remove(&get);
        self.next = now;
        let making = self.pages.get_mut(&place)?;
        let at = making.asked.iter().position(|asked| asked.get == get)?;
        let part = making.asked.swap_remove(at).part;
        let what = match event {
            ClientEvent::Arrived { bytes, .. } => {
                making.came.push((part, bytes));
                making.put_together(self.shape?);
                return None;
            }
            ClientEvent::Wrong { .. } => {
                agents.cancel(now, get);
                Some("gives back a wrong page")
            }
            ClientEvent::Failed { failure: Failure::NotHeld(Status::NotFound), .. } => {
                let tables = lock(&shared.tables);
                tables.needs_part(place, making.content, part.agent).then_some("has lost a page")
            }
            _ => None,
        };
        if let Some(what) = what {
            shared.blame(part.agent, agents.lane().name(part.agent), what, false);
        }
        making.fail(now, AgentSet::of(part.agent));
        None
    }
}

impl Making {
    /// Agents do not give their parts: others are asked.
    fn fail(&mut self, now: Instant, agents: AgentSet) {
        (self.failed, self.ask_at) = (self.failed.union(agents), Some(now));
    }

    /// Makes the page, if enough parts are here.
    fn put_together(&mut self, shape: Shape) {
        let own = self.came.iter().find(|(part, _)| part.id == self.content.id);
        self.page = match (own, shape.role_of(self.content.id)) {
            (Some((_, bytes)), _) => Some(bytes.to_vec()),
            (None, Role::Data(wanted)) if self.came.len() >= self.needed => {
                let parts = self.came[..self.needed].iter();
                let parts: Vec<(Role, &[u8])> =
                    parts.map(|(part, bytes)| (part.role, &bytes[..])).collect();
                Codec::new(shape).decode(self.needed, wanted, &parts).ok()
            }
            _ => None,
        };
    }
}
