//! From the kernel: messages are read, events applied before the gate is opened, faults handed on.

use std::sync::MutexGuard;
use std::sync::atomic::Ordering;
use std::time::Instant;

use gms_policy::ids::SpaceId;
use gms_transport::Transport;

use super::{Fault, FaultCore, Told};
use crate::kernel::{Event, Messages, PageFault, ReadError};
use crate::space::Space;
use crate::sync::lock;
use crate::torture::{self, Point};
use crate::trace::Trace;

impl<T: Transport> FaultCore<T> {
    /// Reads the messages of a space, and serves its faults. False if there were none. `polled` says that something was readable.
    pub(super) fn read_space(
        &mut self,
        clock: &impl Fn() -> Instant,
        id: SpaceId,
        polled: bool,
    ) -> bool {
        let faults = self.read_faults(clock, id, polled);
        let found = faults.is_some();
        let now = clock();
        faults.into_iter().flatten().for_each(|fault| self.fault(now, fault));
        found
    }

    /// The same, but for the faults, which are returned.
    pub(super) fn read_faults(
        &mut self,
        clock: &impl Fn() -> Instant,
        id: SpaceId,
        polled: bool,
    ) -> Option<Vec<Fault>> {
        let space = self.spaces.get(&id)?.space.clone();
        let mut messages = Messages::default();
        torture::at(Point::BeforeRead);
        let gate = self.read_messages(clock(), &space, polled, &mut messages);
        let state = self.spaces.get(&id)?;
        if messages.is_empty() && (state.backlog.is_empty() || gate.is_none()) {
            return None;
        }
        self.trace(Trace::read);
        let mut faults = messages.faults;
        self.note_told(id, messages.events);
        let state = self.spaces.get(&id)?;
        if gate.is_some() && !state.backlog.is_empty() {
            let told = !state.unborn && self.read_changes(clock, &space, &mut faults);
            torture::at(Point::AfterRead);
            match told.then(|| self.prove_order(&space)).flatten() {
                Some(proof) => self.apply(&space, &proof),
                None => space.ungated.hold(),
            }
        }
        torture::at(Point::BeforeGateOpens);
        drop(gate);
        if self.shared.has_failed() {
            // What is known may be wrong: nobody is served any more.
            return Some(Vec::new());
        }
        self.shared.faults.fetch_add(faults.len() as u64, Ordering::Relaxed);
        let fault = |PageFault { page, write, tid }| Fault { place: (id, page), write, tid };
        Some(faults.into_iter().map(fault).collect())
    }

    /// Reads one fault, or what there is if an event is unread or (with the gate) other threads wait already. Returns the gate, closed, if an event
    /// may have been read.
    fn read_messages<'a>(
        &mut self,
        now: Instant,
        space: &'a Space,
        polled: bool,
        messages: &mut Messages,
    ) -> Option<MutexGuard<'a, ()>> {
        let mut gate = space.gate.try_lock().ok();
        if gate.is_none() && !polled {
            return None;
        }
        let changing = space.faults.has_event();
        if changing && gate.is_none() {
            gate = Some(lock(&space.gate));
        }
        self.repair(space);
        torture::at(Point::BetweenLookAndRead);
        // Without the gate nothing but one fault may be read.
        let several = changing || (gate.is_some() && !self.pending.is_empty());
        let read = match gate {
            Some(_) => space.read(several, messages),
            None => space.read_ungated(messages),
        };
        self.note_read(now, space, read, messages);
        if gate.is_none() && !messages.events.is_empty() {
            gate = Some(lock(&space.gate));
        }
        gate
    }

    /// Something was read of the space, or could not be.
    pub(super) fn note_read(
        &mut self,
        now: Instant,
        space: &Space,
        read: Result<(), ReadError>,
        messages: &Messages,
    ) {
        match read {
            Ok(()) => self.end_unread(now, space, &messages.events),
            Err(ReadError::NoDescriptor) => self.leave_unread(now, space),
            Err(error) => {
                self.shared.fail(format!("reading faults of {} failed: {error}", space.name()));
            }
        }
    }

    /// What is to be applied.
    pub(super) fn note_told(&mut self, id: SpaceId, events: Vec<Event>) {
        let Some(state) = self.spaces.get_mut(&id) else { return };
        state.backlog.extend(events.into_iter().map(|event| Told { event, echoed: false }));
        if !state.backlog.is_empty() {
            self.behind.insert(id);
        }
    }
}
