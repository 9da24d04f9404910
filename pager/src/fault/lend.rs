//! Workers: where more faults of a space wait than its home can serve, other fault threads fetch pages for it. The home reads, looks up and chooses what is
//! fetched along; a worker asks the agent and installs.
//!
//! Home: `worker_for` -> `lend` -> `kick_workers`. Worker: `take_loans`, then as for pages of its own (`fetch`), then `let_guests_go`.
//!
//! Where the page is, and whether it still belongs there, is found out by who installs it. Nothing is read of the space from a worker's last look to its
//! installation, and nothing is installed while what was read is not applied (`Space::read`, `Space::keep_unread`). What a worker cannot install or
//! ask for it gives back: the thread is woken and faults again, and the home serves the space alone until it has installed a page.

use std::sync::RwLockReadGuard;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gms_transport::Transport;
use gms_transport::client::GetId;

use super::demand::Demand;
use super::fetch::Fetch;
use super::{Asked, FaultCore};
use crate::homes::ThreadIndex;
use crate::loans::{Loan, Wanted};
use crate::space::{Lent, Space};
use crate::sync::lock;
use crate::tables::Place;
use crate::torture;

/// For what has been read of a space to be applied, before a worker gives up installing a page.
const APPLIED_SOON: Duration = Duration::from_micros(200);

impl<T: Transport> FaultCore<T> {
    /// Who is to fetch a page for which a thread waits, if not this thread: one that fetches fewer.
    pub(super) fn worker_for(&self, wanted: Wanted) -> Option<ThreadIndex> {
        let fetched = self.pending.len();
        let own = if torture::is_on() { 1 } else { self.shared.sizes.own_pages };
        if fetched < own {
            return None;
        }
        let state = self.spaces.get(&wanted.place.0)?;
        let alone = state.space.only_home.load(Ordering::Relaxed);
        let homes = &self.shared.homes;
        (!alone).then(|| homes.worker(self.thread, wanted.content.holders, fetched)).flatten()
    }

    /// Has a worker fetch the page, and those `ahead` along with it.
    pub(super) fn lend(
        &mut self,
        now: Instant,
        worker: ThreadIndex,
        demanded: Wanted,
        ahead: Vec<Wanted>,
    ) {
        let Some(state) = self.spaces.get(&demanded.place.0) else { return };
        let lent = Lent::new(state.space.clone());
        lock(&self.shared.tables).begin_loan(demanded.place);
        let loan = Loan { lent, demanded, ahead, began: now };
        match self.shared.homes.loans(worker).give(loan) {
            Ok(()) => drop(self.to_kick.insert(worker)),
            Err(loan) => {
                lock(&self.shared.tables).end_loan(demanded.place);
                self.fetch_here(now, now, demanded, loan.ahead);
            }
        }
    }

    /// Wakes those who were lent something.
    pub(super) fn kick_workers(&mut self) {
        while let Some(worker) = self.to_kick.pop_first() {
            self.shared.homes.kick(worker);
        }
    }

    /// Fetches what this thread was lent.
    pub(super) fn take_loans(&mut self, now: Instant) {
        while let Some(loan) = self.shared.homes.take_loan(self.thread) {
            let Loan { lent, demanded, ahead, began } = loan;
            self.guests.entry(demanded.place.0).or_insert(lent);
            self.asked = Asked::Others;
            self.fetch_here(now, began, demanded, ahead);
        }
    }

    /// What this thread was lent and cannot ask for it gives back.
    pub(super) fn give_back_unsent(&mut self, now: Instant) {
        if self.guests.is_empty() {
            return;
        }
        let unsent: Vec<GetId> = self.agents.unsent().collect();
        for get in unsent {
            let place = self.fetches.get(&get).and_then(Fetch::demanded);
            if let Some(place) = place.filter(|place| self.guests.contains_key(&place.0)) {
                self.give_back(now, place);
            }
        }
    }

    /// The page is its home's again, which serves the space alone until it has installed one.
    pub(super) fn give_back(&mut self, now: Instant, place: Place) {
        let gets = self.pending.get(&place).map(Demand::gets);
        gets.into_iter().flatten().for_each(|get| self.cancel(now, get));
        if let Some(space) = self.space_of(place.0) {
            space.only_home.store(true, Ordering::Relaxed);
        }
        self.unproved.retain(|unproved| unproved.0 != place);
        self.end_demand(place);
        self.wake(place);
    }

    /// If this thread is a worker of the space: keeps it unread, when what was read of it is applied, or is not soon. For pages that nobody awaits that
    /// is not waited for.
    pub(super) fn keep_unread<'a>(
        &self,
        clock: &impl Fn() -> Instant,
        space: &'a Space,
        awaited: bool,
    ) -> Option<RwLockReadGuard<'a, ()>> {
        self.guests.get(&space.id)?;
        let until = clock() + if awaited { APPLIED_SOON } else { Duration::ZERO };
        Some(space.keep_unread(|| clock() < until))
    }

    /// Spaces of which nothing is fetched any more are their homes' alone. Says how busy this thread is.
    pub(super) fn let_guests_go(&mut self) {
        self.shared.homes.loans(self.thread).tell_fetched(self.pending.len());
        if self.guests.is_empty() {
            return;
        }
        let (fetches, unproved) = (&self.fetches, &self.unproved);
        self.guests.retain(|&id, _| {
            fetches.values().any(|fetch| fetch.space() == id)
                || unproved.iter().any(|(place, ..)| place.0 == id)
        });
    }
}

#[cfg(test)]
mod tests;
