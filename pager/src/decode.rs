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

/// A page that is being made.
struct Making {
    content: Content,
    began: Instant,
    /// When its parts were asked for, or are to be.
    at: Instant,
    /// Agents that have not given their parts.
    failed: AgentSet,
    asked: Vec<(GetId, Part)>,
    came: Vec<(Role, Bytes)>,
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

    /// A page is to be made.
    pub fn begin(&mut self, now: Instant, place: Place, content: Content) {
        let (failed, asked, came) = (AgentSet::EMPTY, Vec::new(), Vec::new());
        let making = Making { content, began: now, at: now, failed, asked, came, page: None };
        self.pages.entry(place).or_insert(making);
        self.next = now;
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
                self.stop_asking(now, place, agents);
                let making = self.pages.remove(&place).expect("it is being made");
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
            if !tables.has_slot() {
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
        let is_late = now.saturating_duration_since(making.at) > RETRY;
        let silent = |part: &Part| is_late || !agents.lane().is_up(part.agent);
        let silent: AgentSet = making
            .asked
            .iter()
            .map(|(_, part)| part)
            .filter(|part| silent(part))
            .map(|part| part.agent)
            .collect();
        if !silent.is_empty() {
            making.failed = making.failed.union(silent);
            self.stop_asking(now, place, agents);
        }
        self.ask(now, place, agents, shared)
    }

    /// Asks for the parts, unless they have been asked for.
    fn ask<T: Transport>(
        &mut self,
        now: Instant,
        place: Place,
        agents: &mut Client<T>,
        shared: &Shared,
    ) -> Option<End> {
        let making = self.pages.get_mut(&place)?;
        if !making.asked.is_empty() || making.at > now {
            return None;
        }
        let lane = agents.lane();
        let up: AgentSet = lane.agents().filter(|&agent| lane.is_up(agent)).collect();
        let up = up.without(making.failed);
        let read = |askable| lock(&shared.tables).read(making.content, askable);
        // Rather not of those that give wrong pages.
        let sound = read(up.without(shared.unsound_agents()));
        let read = if sound == Some(Read::Later) { read(up) } else { sound };
        let parts = match read {
            Some(Read::At(part)) => vec![part],
            Some(Read::Decode(_, parts)) => parts,
            Some(Read::Later) => {
                // All of them, again.
                (making.at, making.failed) = (now + PAUSE, AgentSet::EMPTY);
                return None;
            }
            Some(Read::Lost) => return Some(End::Lost),
            Some(Read::Unknown) | None => return Some(End::Gone),
        };
        making.at = now;
        for part in parts {
            let wanted = vec![Wanted { id: part.id, check: None }];
            let get = agents.get(now, part.agent, wanted, self.urgency);
            making.asked.push((get, part));
            self.gets.insert(get, place);
        }
        None
    }

    /// What was asked for is not waited for. It is asked for anew at `at`.
    fn stop_asking<T: Transport>(&mut self, at: Instant, place: Place, agents: &mut Client<T>) {
        let Some(making) = self.pages.get_mut(&place) else { return };
        making.came.clear();
        for (get, _) in making.asked.drain(..) {
            if self.gets.remove(&get).is_some() {
                agents.cancel(at, get);
            }
        }
        making.at = at;
    }

    /// An event of a part; given back if it is of something else.
    pub fn handle<T: Transport>(
        &mut self,
        now: Instant,
        event: ClientEvent,
        agents: &mut Client<T>,
        shared: &Shared,
    ) -> Option<ClientEvent> {
        let get = event.get().filter(|get| self.gets.contains_key(get));
        let Some((get, place)) = get.and_then(|get| Some((get, *self.gets.get(&get)?))) else {
            return Some(event);
        };
        let making = self.pages.get_mut(&place)?;
        let (_, part) = *making.asked.iter().find(|asked| asked.0 == get)?;
        let what = match event {
            ClientEvent::Arrived { bytes, .. } => {
                self.gets.remove(&get);
                self.next = now;
                making.came.push((part.role, bytes));
                self.put_together(place);
                return None;
            }
            ClientEvent::Wrong { .. } => Some("gives back a wrong page"),
            ClientEvent::Failed { failure: Failure::NotHeld(Status::NotFound), .. } => {
                let is_held = lock(&shared.tables).holds(making.content, part.agent);
                is_held.then_some("has lost a page")
            }
            ClientEvent::Failed { .. } => None,
            _ => return None,
        };
        if let Some(what) = what {
            shared.blame(part.agent, agents.lane().name(part.agent), what);
        }
        // Its link may have no room just now: it is asked again.
        let is_refused = matches!(event, ClientEvent::Failed { failure: Failure::GivenUp, .. });
        if !is_refused {
            making.failed = making.failed.union(AgentSet::of(part.agent));
        }
        self.next = now;
        self.stop_asking(if is_refused { now + PAUSE } else { now }, place, agents);
        None
    }

    /// Makes the page, if all parts are here.
    fn put_together(&mut self, place: Place) {
        let (Some(making), Some(shape)) = (self.pages.get_mut(&place), self.shape) else { return };
        if making.came.len() < making.asked.len() {
            return;
        }
        let own = shape.role_of(making.content.id);
        making.page = match (&making.came[..], own) {
            ([(role, bytes)], own) if *role == own => Some(bytes.to_vec()),
            (parts, Role::Data(wanted)) => {
                let parts: Vec<(Role, &[u8])> =
                    parts.iter().map(|(role, bytes)| (*role, &bytes[..])).collect();
                Codec::new(shape).decode(parts.len(), wanted, &parts).ok()
            }
            (_, Role::Parity(_)) => None,
        };
    }
}
