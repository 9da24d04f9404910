//! Parity: pages that go out are dealt in stripes, and pages that no agent gives whole are made of the other parts of theirs.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gms_policy::ids::{AgentId, ContentId};
use gms_policy::redundancy::AgentSet;
use gms_policy::stripes::{Answer, Codec, Read};
use gms_transport::Transport;
use gms_transport::client::ClientEvent;

use super::{Put, WriteBack};
use crate::decode::End;
use crate::page_map::Content;
use crate::sync::lock;
use crate::tables::{Dealt, Place, Tables};
use crate::torture::{self, Point};

/// Pages that are made at a time.
const MAKES_MAX: usize = 16;

impl<T: Transport> WriteBack<T> {
    /// Deals stripes to some agents; fails with the one whose link does not take its parts, or with none if there are too few pages for a stripe.
    pub(super) fn deal(&mut self, now: Instant, agents: &[AgentId]) -> Result<(), Option<AgentId>> {
        let Some(shape) = self.shared.config.redundancy.shape() else { return Err(None) };
        let (set, shared) = (agents.iter().copied().collect(), Arc::clone(&self.shared));
        let views = self.views();
        let room = views.iter().filter(|view| agents.contains(&view.id)).map(|v| v.credits.0);
        let max = room.min().unwrap_or(0).min(shared.sizes.put_pages as u64) as usize;
        let dealt = lock(&shared.tables).deal(set, max);
        if dealt.is_empty() {
            return Err(None);
        }
        let pages = |stripe: &Dealt| -> Vec<&[u8]> {
            stripe.slots.iter().map(|&slot| shared.frames.read(slot)).collect()
        };
        let encode = |stripe| Codec::new(shape).encode(&pages(stripe)).expect("pages of a stripe");
        let sums: Vec<Vec<Vec<u8>>> = dealt.iter().map(encode).collect();
        let mut refused = None;
        for &agent in agents {
            let mut parts: Vec<(ContentId, &[u8])> = Vec::new();
            for (stripe, sums) in dealt.iter().zip(&sums) {
                let bytes = pages(stripe).into_iter().chain(sums.iter().map(Vec::as_slice));
                let all = stripe.parts.iter().zip(bytes);
                let own = all.filter(|(part, _)| part.agent == agent);
                parts.extend(own.map(|(part, bytes)| (part.id, bytes)));
            }
            let ids: Vec<ContentId> = parts.iter().map(|part| part.0).collect();
            let put = refused.is_none().then(|| self.agents.put(now, agent, parts.into_iter()));
            match put {
                Some(Ok(put)) => drop(self.puts.insert(put, Put::Parts(agent, ids))),
                _ => {
                    refused.get_or_insert(agent);
                    self.settle_parts(&ids, |_| false);
                }
            }
        }
        refused.map_or(Ok(()), |agent| Err(Some(agent)))
    }

    /// An agent has answered for parts, or is not asked.
    pub(super) fn settle_parts(&mut self, parts: &[ContentId], is_stored: impl Fn(usize) -> bool) {
        torture::at(Point::BeforeWrittenIsNoted);
        let mut tables = lock(&self.shared.tables);
        for (n, &id) in parts.iter().enumerate().rev() {
            tables.answered(id, if is_stored(n) { Answer::Stored } else { Answer::Failed });
        }
    }

    /// Whether pages are made where their agents do not give them.
    pub fn has_parity(&self) -> bool {
        self.decoder.is_able()
    }

    /// How pages can be read now, or could if all that have been away for less than `patience` were back; none without parity.
    pub fn reader(
        &self,
        now: Instant,
        patience: Duration,
    ) -> Option<impl Fn(&Tables, Content) -> Read + use<T>> {
        let lane = self.agents.lane();
        let counts = |agent: &AgentId| lane.is_up(*agent) || self.away(now, *agent) < patience;
        let up: AgentSet = lane.agents().filter(counts).collect();
        let read = move |tables: &Tables, content| tables.read(content, up);
        self.has_parity().then_some(move |tables: &Tables, content| {
            read(tables, content).unwrap_or(Read::Unknown)
        })
    }

    /// Whether another page can be made now.
    pub fn may_make(&self) -> bool {
        self.decoder.len() < MAKES_MAX
    }

    /// Whether this one is being made.
    pub fn makes(&self, place: Place) -> bool {
        self.decoder.makes(place)
    }

    /// A page, which some agents have not given, is to be made of the other parts of its stripe; false if too many are.
    pub fn make(&mut self, now: Instant, place: Place, content: Content, failed: AgentSet) -> bool {
        let may = self.may_make() || self.decoder.makes(place);
        if may {
            self.decoder.begin(now, place, content, failed);
        }
        may
    }

    /// The workload is being let go: agents get their time anew for what is being made, as for all else.
    pub fn begin_detach(&mut self, now: Instant) {
        self.decoder.begin_anew(now);
    }

    /// Pages that could not be made since this was called last, while the workload is let go: nobody has them.
    pub fn take_unmade(&mut self) -> Vec<(Place, Content)> {
        std::mem::take(&mut self.unmade)
    }

    /// What is being made comes on.
    pub(super) fn make_on(&mut self, now: Instant) {
        for ended in self.decoder.turn(now, &mut self.agents, &self.shared) {
            match ended.end {
                // While the workload runs, whoever needs such a page finds out; it may be there by then.
                End::Lost | End::Stuck if self.shared.detaching.load(Ordering::Relaxed) => {
                    self.unmade.push((ended.place, ended.content));
                }
                End::Made | End::Gone | End::Lost | End::Stuck => {}
                End::Wrong => self.shared.fail(ended.end.reason().unwrap_or_default()),
            }
        }
    }

    /// Nobody is blamed for the time in which this process was stopped.
    pub fn excuse(&mut self, now: Instant, missed: Duration) {
        self.agents.excuse(now, missed);
        self.decoder.excuse(missed);
        self.away_since.values_mut().for_each(|since| *since += missed);
    }

    /// An event of a part that was asked for; given back if it is of something else.
    pub(super) fn note_part(&mut self, now: Instant, event: ClientEvent) -> Option<ClientEvent> {
        self.decoder.handle(now, event, &mut self.agents, &self.shared)
    }
}

#[cfg(test)]
mod tests;
