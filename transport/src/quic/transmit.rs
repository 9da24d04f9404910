//! What goes out, and the requests that are read when replies have gone.

use std::time::Instant;

use super::link::Link;
use super::{Quic, limits};
use crate::PeerId;

impl Quic {
    /// Transmits what touched links have, each in its turn, until the socket takes no more; where clients have their turns for a short time only.
    pub(super) fn transmit(&mut self, now: Instant) {
        self.turns.work_for(None);
        if let Some((transmit, _)) = self.stalled.take() {
            if !self.socket.send(&transmit, &self.buffer) {
                self.stalled = Some((transmit, now + limits::SOCKET_RETRY));
                self.transmits_at = None;
                return;
            }
            self.buffer.clear();
        }
        self.step_forward(now);
        let until = self.turns.is_contended().then(|| Instant::now() + limits::CLIENT_TURN);
        while let Some(index) = self.next_to_transmit(now) {
            if !self.transmit_one(now, index) {
                break;
            }
            if until.is_some_and(|until| until <= Instant::now()) {
                break;
            }
        }
        self.transmits_at = match (&self.stalled, self.dirty.is_empty()) {
            (Some(_), _) => None,
            (None, false) => Some(now),
            (None, true) => self.standing_until,
        };
        self.turns.work_for(None);
    }

    /// The link whose turn it is. Where clients have their turns that is one of the client for which least was done; if that one stands back, all do.
    fn next_to_transmit(&mut self, now: Instant) -> Option<usize> {
        if !self.turns.is_contended() {
            return self.dirty.pop_front();
        }
        let now = self.turns.time(now);
        let paid_at = |at: &usize| self.turns.paid_at(self.client_at(self.dirty[*at]));
        let at = (0..self.dirty.len()).min_by_key(paid_at)?;
        let client = self.client_at(self.dirty[at]);
        if let Some(until) = client.and_then(|client| self.turns.stands_back_until(now, client)) {
            self.stand_back(until);
            return None;
        }
        self.dirty.remove(at)
    }

    /// Whose link it is. One that is closed is nobody's: what is said last never stands back.
    pub(super) fn client_at(&self, index: usize) -> Option<PeerId> {
        let link = self.links.get(index)?.as_ref()?;
        link.client.filter(|_| link.is_open())
    }

    /// All links that have something wait until then, and are not looked at before, unless they are touched.
    fn stand_back(&mut self, until: Instant) {
        for index in self.dirty.drain(..) {
            let Some(link) = self.links.get_mut(index).and_then(Option::as_mut) else { continue };
            link.marked = false;
            if !std::mem::replace(&mut link.stands_back, true) {
                self.standing.push(index);
            }
        }
        self.standing_until = Some(self.standing_until.map_or(until, |other| other.min(until)));
    }

    /// The links that stood back have something to transmit, if it is time; the first of them also if who is expected was just answered.
    fn step_forward(&mut self, now: Instant) {
        let all = self.standing.len();
        let count = match self.standing_until.is_some_and(|until| until <= now) {
            true => all,
            false if !self.turns.is_contended() => all,
            false => all.min(usize::from(self.turns.is_just_answered(now))),
        };
        if count == all {
            self.standing_until = None;
        }
        for index in self.standing.drain(..count) {
            let Some(link) = self.links.get_mut(index).and_then(Option::as_mut) else { continue };
            link.stands_back = false;
            link.mark(&mut self.dirty);
        }
    }

    /// Transmits what a link has, some at most. False if the socket takes no more.
    fn transmit_one(&mut self, now: Instant, index: usize) -> bool {
        let Some(link) = self.links.get_mut(index).and_then(Option::as_mut) else { return true };
        let client = link.client;
        self.turns.work_for(client);
        link.marked = false;
        let mtu = link.conn.current_mtu();
        let (segments, bursts) = match self.turns.burst(now, client) {
            Some(burst) => ((burst / usize::from(mtu)).max(1), 1),
            None => (usize::MAX, limits::TRANSMIT_BURST),
        };
        let segments = segments.min(self.socket.segments(mtu));
        for _ in 0..bursts {
            let transmit = link.conn.poll_transmit(now, segments, &mut self.buffer);
            let Some(transmit) = transmit else {
                let answered = link.is_answered() && std::mem::take(&mut link.has_replied);
                let (before, after) = link.update_timeout();
                self.timeout = if before.is_some() && before == self.timeout {
                    self.links.iter().flatten().filter_map(|link| link.timeout).min()
                } else {
                    [self.timeout, after].into_iter().flatten().min()
                };
                if let Some(client) = client.filter(|client| answered && self.has_answers(*client))
                {
                    self.turns.work_for(None);
                    self.turns.answered(self.turns.time(now), client);
                }
                return true;
            };
            if !self.socket.send(&transmit, &self.buffer) {
                self.stalled = Some((transmit, now + limits::SOCKET_RETRY));
                link.mark(&mut self.dirty);
                return false;
            }
            self.buffer.clear();
        }
        link.mark(&mut self.dirty);
        true
    }

    /// Whether a client has the answers to all that it has asked for.
    fn has_answers(&self, client: PeerId) -> bool {
        let links = self.turns.links(client).iter();
        links.filter_map(|index| self.links.get(*index)?.as_ref()).all(Link::is_answered)
    }

    /// Who is expected, if there is something for it that is to leave before anything is begun for another.
    pub(super) fn leaves_first(&self, now: Instant) -> Option<PeerId> {
        let (expected, _) = self.turns.expected(now)?;
        let is_its = |index: &usize| self.client_at(*index) == Some(expected);
        self.dirty.iter().any(is_its).then_some(expected)
    }

    /// When something may be begun for a client, if that is not now; `first` [leaves first](Quic::leaves_first).
    pub(super) fn begins_at(
        &self,
        now: Instant,
        client: PeerId,
        first: Option<PeerId>,
    ) -> Option<Instant> {
        match first.is_some_and(|first| first != client) {
            true => Some(now),
            false => self.turns.stands_back_until(now, client),
        }
    }

    /// Reads requests which were held back, as far as replies have gone: of one link in a turn, of those that may the one of the client for which least was done.
    pub(super) fn resume(&mut self, now: Instant) {
        self.turns.work_for(None);
        self.resumes_at = None;
        let (time, first) = (self.turns.time(now), self.leaves_first(now));
        let links = &mut self.links;
        self.held.retain(|index| {
            let link = links.get_mut(*index).and_then(Option::as_mut);
            link.is_some_and(|link| {
                link.noted_held = link.holds_back();
                link.noted_held
            })
        });
        let mut least: Option<(Option<Instant>, usize)> = None;
        for (at, index) in self.held.iter().enumerate() {
            let Some(link) = self.links[*index].as_mut() else { continue };
            let client = link.client;
            link.set_burst(self.turns.burst(now, client));
            if !link.may_resume() {
                continue;
            }
            let waits = client.and_then(|client| self.begins_at(time, client, first));
            let paid_at = self.turns.paid_at(client);
            let then = match (waits.or(self.has_resumed.then_some(now)), least) {
                (Some(then), _) => then,
                (None, Some((other, _))) if other <= paid_at => now,
                (None, other) => {
                    least = Some((paid_at, at));
                    if other.is_none() {
                        continue;
                    }
                    now
                }
            };
            // What may be read, and is not, is in the next turn.
            self.resumes_at = Some(self.resumes_at.map_or(then, |other| other.min(then)));
        }
        let Some(index) = least.and_then(|(_, at)| self.held.remove(at)) else { return };
        self.has_resumed = true;
        let Some(link) = self.links.get_mut(index).and_then(Option::as_mut) else { return };
        self.turns.work_for(link.client);
        link.noted_held = false;
        // What is read allows the other end to send more.
        link.mark(&mut self.dirty);
        link.resume(now, &mut self.events);
        self.settle(now, index);
    }
}
