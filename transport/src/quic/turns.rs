//! Whose turn it is among clients that have links. One that sends without end would have nearly all of a thread: its datagrams fill the socket, and what
//! each asks for may cost a hundred times what another's does. So while more than one client sends, what comes waits in a lane for each, and it is the
//! turn of the one for which least was done of late.
//!
//! What is done for a client is measured, and owed: it is paid by the time that passes, of which a part is everybody's. Who asks for one thing after the
//! other would always find that something was begun for another since it was answered. So it is expected to ask again, and meanwhile little is begun for those
//! that owe more.

use std::collections::VecDeque;
use std::collections::hash_map::HashMap;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};

use super::limits::{
    ANSWERED, BURST_CONTENDED, BURST_EXPECTED, CLIENT_PART, CONTENDED, EXPECTED, EXPECTED_FREE,
    EXPECTED_LEAST, EXPECTED_PART, LANES_MAX, OWES_LITTLE, OWES_MORE, OWES_MOST, OWES_MUCH,
    QUIET_MAX, STRANGER_LEAST, UNSEEN_MOST,
};
use super::strangers::Datagram;
use crate::PeerId;

/// Clients with links, what waits of each, and what was done for each.
#[derive(Debug, Default)]
pub(super) struct Turns {
    clients: HashMap<PeerId, Client>,
    /// Who was active last.
    last: Option<PeerId>,
    /// Until when clients have their turns, if no two are active any more.
    contended_until: Option<Instant>,
    /// For whom something is done, and since when.
    measured: Option<(PeerId, Instant)>,
    /// Since when something is received, of whom is not known yet.
    received_since: Option<Instant>,
    /// CPU time of the thread when this turn of the loop began, or clients began to have turns.
    cpu_time: Duration,
    /// Of all lanes.
    weight: usize,
    /// When this turn of the loop began.
    now: Option<Instant>,
    /// Who owes little and may ask again, and until when.
    expected: Option<(PeerId, Instant)>,
    /// Until when that one was just answered.
    answered_until: Option<Instant>,
    /// Time for which clients were worked for.
    worked: Duration,
}

#[derive(Debug, Default)]
struct Client {
    links: Vec<usize>,
    lane: VecDeque<Datagram>,
    weight: usize,
    /// When what was done for it is paid.
    paid_at: Option<Instant>,
    /// It was active until then: it has asked for something, or sent more than who keeps a link does.
    active_until: Option<Instant>,
    /// Receptions since then, which is not long ago.
    received: (Option<Instant>, u32),
    /// When it had an answer to all that it had asked for, if it has asked for nothing since, and the time that was worked until then.
    answered_at: Option<(Instant, Duration)>,
    /// A bit for each of the last times that it asked then, or two: whether it did so soon.
    asked_soon: u8,
}

impl Client {
    /// When all that was done for it is paid.
    fn owes_until(&self, now: Instant) -> Instant {
        self.paid_at.map_or(now, |at| at.max(now))
    }

    /// Whether it asks again as soon as it is answered, and owes little.
    fn is_prompt(&self, now: Instant) -> bool {
        self.asked_soon.count_ones() >= EXPECTED_LEAST && self.owes_until(now) <= now + OWES_LITTLE
    }
}

/// CPU time of this thread; longer than any other if it cannot be told.
fn cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::MAX, Duration::from)
}

impl Turns {
    /// A link of the client is up.
    pub(super) fn enter(&mut self, client: PeerId, link: usize) {
        self.clients.entry(client).or_default().links.push(link);
    }

    /// One of its links is gone.
    pub(super) fn leave(&mut self, client: PeerId, link: usize) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        state.links.retain(|other| *other != link);
        if state.links.is_empty() {
            self.weight -= state.weight;
            self.clients.remove(&client);
        }
    }

    /// Whether more than one client is active.
    pub(super) fn is_contended(&self) -> bool {
        self.contended_until.is_some()
    }

    /// A turn begins: is one client left, it has the thread for itself.
    pub(super) fn begin(&mut self, now: Instant) {
        self.now = Some(now);
        if self.contended_until.is_some_and(|until| until <= now) {
            self.contended_until = None;
        }
        if self.is_contended() {
            self.cpu_time = cpu_time();
        }
    }

    /// The client has asked for something. If it was the last to be expected, the time in which others may have stood back for it is its own.
    pub(super) fn asked(&mut self, now: Instant, client: PeerId) {
        let is_contended = self.is_contended();
        if let Some(state) = self.clients.get_mut(&client)
            && let Some((at, worked)) = state.answered_at.take()
        {
            // It may have asked before: nobody has looked while something was done for others.
            let (took, unseen) = (now.saturating_duration_since(at), self.worked - worked);
            let was_expected =
                is_contended && self.expected.is_some_and(|(expected, _)| expected == client);
            state.asked_soon = match took <= EXPECTED + unseen.min(UNSEEN_MOST) {
                true => state.asked_soon << 1 | 1,
                false => state.asked_soon << if was_expected { 2 } else { 1 },
            };
            if was_expected && took > EXPECTED_FREE {
                self.charge(now, client, took.min(EXPECTED) - EXPECTED_FREE);
            }
        }
        self.is_active(now, client);
    }

    fn is_active(&mut self, now: Instant, client: PeerId) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        state.active_until = Some(now + CONTENDED);
        let last = self.last.replace(client).filter(|last| *last != client);
        let last = last.and_then(|last| self.clients.get(&last)?.active_until);
        if last.is_some_and(|until| now < until) {
            if !self.is_contended() {
                // Of a turn in which nothing was measured before.
                self.cpu_time = cpu_time();
            }
            self.contended_until = Some(now + CONTENDED);
        }
    }

    /// The client has its answers, as often before, and asked again each time.
    #[cfg(test)]
    pub(super) fn expect(&mut self, now: Instant, client: PeerId) {
        for _ in 0..EXPECTED_LEAST {
            self.answered(now, client);
            self.asked(now, client);
        }
        self.answered(now, client);
    }

    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.weight
    }

    /// Whether anything waits.
    pub(super) fn are_waiting(&self) -> bool {
        self.weight > 0
    }

    /// The client has sent something, in another reception if it is the `first`: whether it must wait for its turn.
    pub(super) fn must_wait(&mut self, now: Instant, client: PeerId, first: bool) -> bool {
        let Some(state) = self.clients.get_mut(&client) else { return false };
        let (since, count) = &mut state.received;
        if since.is_none_or(|since| now > since + CONTENDED) {
            (*since, *count) = (Some(now), 0);
        }
        *count += u32::from(first);
        // What waits goes first.
        let behind = !state.lane.is_empty();
        if *count > QUIET_MAX {
            self.is_active(now, client);
        }
        behind || self.is_contended()
    }

    /// Has a datagram of a client wait. If there is no room, the last one of the longest lane is lost.
    pub(super) fn push(&mut self, client: PeerId, datagram: Datagram) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        let weight = datagram.bytes.len().max(STRANGER_LEAST);
        state.weight += weight;
        self.weight += weight;
        state.lane.push_back(datagram);
        while self.weight > LANES_MAX {
            let Some(longest) = self.clients.values_mut().max_by_key(|client| client.weight) else {
                return;
            };
            let Some(lost) = longest.lane.pop_back() else { return };
            let weight = lost.bytes.len().max(STRANGER_LEAST);
            longest.weight -= weight;
            self.weight -= weight;
        }
    }

    /// Of those that may, the client for which least was done of late; it has something that waits.
    pub(super) fn next(&self, now: Instant) -> Option<PeerId> {
        let waiting = self.clients.iter().filter(|(_, state)| !state.lane.is_empty());
        let (client, _) = waiting.min_by_key(|(_, state)| state.paid_at)?;
        self.stands_back_until(now, *client).is_none().then_some(*client)
    }

    /// The first datagram that waits of a client.
    pub(super) fn take(&mut self, client: PeerId) -> Option<Datagram> {
        let state = self.clients.get_mut(&client)?;
        let datagram = state.lane.pop_front()?;
        let weight = datagram.bytes.len().max(STRANGER_LEAST);
        state.weight -= weight;
        self.weight -= weight;
        Some(datagram)
    }

    /// When the next datagram that waits may be handled; perhaps long ago.
    pub(super) fn due(&self) -> Option<Instant> {
        let now = self.now.filter(|_| self.weight > 0)?;
        let waiting = self.clients.iter().filter(|(_, state)| !state.lane.is_empty());
        waiting.map(|(client, _)| self.stands_back_until(now, *client).unwrap_or(now)).min()
    }

    /// The time now, where clients have their turns, and otherwise that at which this turn of the loop began.
    pub(super) fn time(&self, began: Instant) -> Instant {
        if self.is_contended() { began.max(Instant::now()) } else { began }
    }

    /// Until when nothing is begun for a client, because one that owes less is expected to ask again: who reads one page after the other would find something
    /// begun each time (anticipatory scheduling, Iyer and Druschel, 2001). What is begun as soon as that one is answered is done when it asks.
    pub(super) fn stands_back_until(&self, now: Instant, client: PeerId) -> Option<Instant> {
        let state = self.clients.get(&client)?;
        let Some((expected, until)) = self.expected(now) else {
            return self.pays_until(now, state);
        };
        let least = self.clients.get(&expected).map_or(now, |expected| expected.owes_until(now));
        let more = state.owes_until(now).saturating_duration_since(least);
        let may = match more <= OWES_MUCH {
            true => more <= OWES_MORE || state.is_prompt(now) || self.is_just_answered(now),
            false => false,
        };
        (!may).then(|| until.min(state.owes_until(now) - OWES_MORE))
    }

    /// Until when nothing is begun for a client whose last piece of work was so long that it owes more than others ever do, while another is active.
    fn pays_until(&self, now: Instant, state: &Client) -> Option<Instant> {
        let until =
            state.paid_at?.checked_sub(OWES_MOST + OWES_MUCH).filter(|until| *until > now)?;
        let others = self.clients.values().filter(|other| other.paid_at < state.paid_at);
        let active = others.filter_map(|other| other.active_until).filter(|until| *until > now);
        Some(active.max()?.min(until))
    }

    /// Who is expected to ask again, and until when.
    pub(super) fn expected(&self, now: Instant) -> Option<(PeerId, Instant)> {
        self.expected.filter(|(_, until)| *until > now && self.is_contended())
    }

    /// Whether that one had no time yet to ask again.
    pub(super) fn is_just_answered(&self, now: Instant) -> bool {
        self.answered_until.is_some_and(|until| until > now)
    }

    /// Whether it has.
    pub(super) fn has_asked_again(&self, now: Instant) -> bool {
        let state = self.expected(now).and_then(|(expected, _)| self.clients.get(&expected));
        state.is_some_and(|state| !state.lane.is_empty())
    }

    /// The client's links.
    pub(super) fn links(&self, client: PeerId) -> &[usize] {
        self.clients.get(&client).map_or(&[], |state| &state.links)
    }

    /// The client has all its answers: it is expected to ask again, if it does so and owes little, and less than who is expected now.
    pub(super) fn answered(&mut self, now: Instant, client: PeerId) {
        let other = self.expected(now).and_then(|(other, _)| self.clients.get(&other));
        let other = other.map(|other| other.owes_until(now));
        let is_contended = self.is_contended();
        let Some(state) = self.clients.get_mut(&client) else { return };
        state.answered_at = Some((now, self.worked));
        if is_contended
            && state.is_prompt(now)
            && other.is_none_or(|other| state.owes_until(now) <= other)
        {
            self.expected = Some((client, now + EXPECTED));
            self.answered_until = Some(now + ANSWERED);
        }
    }

    /// Bytes that are sent for a client together; of replies, those that its requests may ask for.
    pub(super) fn burst(&self, now: Instant, client: Option<PeerId>) -> Option<usize> {
        let expected = self.expected(now).filter(|(expected, _)| Some(*expected) != client);
        let burst = if expected.is_some() { BURST_EXPECTED } else { BURST_CONTENDED };
        self.is_contended().then_some(burst)
    }

    /// Of two clients less was done of late for the one of which this is earlier.
    pub(super) fn paid_at(&self, client: Option<PeerId>) -> Option<Instant> {
        self.clients.get(&client?)?.paid_at
    }

    /// Something is received: it is known later for whom.
    pub(super) fn work_for_sender(&mut self) {
        self.work_for(None);
        self.received_since = self.is_contended().then(Instant::now);
    }

    /// What is done from now on, or since something is received, is done for this client, or for none. Nothing is measured while there is one only.
    pub(super) fn work_for(&mut self, client: Option<PeerId>) {
        let client = client.filter(|_| self.is_contended());
        let received_since = self.received_since.take();
        if self.measured.map(|(measured, _)| measured) == client {
            return;
        }
        let now = Instant::now();
        if let Some((measured, since)) = self.measured.take() {
            let mut took = now.saturating_duration_since(since);
            if took > OWES_LITTLE / 2 {
                // The thread may not have run.
                took = took.min(cpu_time().saturating_sub(self.cpu_time));
            }
            self.charge(now, measured, took);
        }
        self.measured = client.map(|client| (client, received_since.unwrap_or(now)));
    }

    /// So long was worked for a client, until now.
    pub(super) fn charge(&mut self, now: Instant, client: PeerId, took: Duration) {
        let expected = self.expected(now).map(|(expected, _)| expected);
        self.worked += took;
        let Some(state) = self.clients.get_mut(&client) else { return };
        let owes = match expected {
            Some(expected) if expected == client => took * EXPECTED_PART / (EXPECTED_PART - 1),
            Some(_) if !state.is_prompt(now) => took * EXPECTED_PART,
            _ => took * CLIENT_PART,
        };
        let began = now.checked_sub(took).unwrap_or(now);
        let from = state.paid_at.map_or(began, |paid| paid.max(began));
        state.paid_at = Some(from.min(now + OWES_MOST) + owes);
        if expected == Some(client) {
            self.answered_until = None;
        }
    }
}

#[cfg(test)]
mod tests;
