//! Discards, in steps: thousands of pages may be named in one, and others are served meanwhile.

use super::{Core, Done};
use crate::exchange::Exchange;
use crate::limits::{DISCARD_AT_ONCE, DISCARD_STEP};
use crate::store::{Store, TenantId};
use gms_policy::ContentId;
use gms_transport::ExchangeId;
use gms_transport::message::{Op, Status};

impl Core {
    /// Of a request that has come whole: whether it waits until it is [asked for](Core::poll_unfinished). That is so once.
    pub fn is_for_later(&mut self, exchange: ExchangeId) -> bool {
        let Some(request) = self.exchanges.get_mut(&exchange) else { return false };
        let is_discard = request.control.op() == Some(Op::Discard) && request.is_whole();
        let is_for_later =
            is_discard && request.ids().len() > DISCARD_AT_ONCE && !request.has_waited;
        if is_for_later {
            request.has_waited = true;
            self.unfinished.push_back(exchange);
        }
        is_for_later
    }

    /// Of one that has waited: does a part of it, if it is a long discard. False if the rest is for [`Core::handle_complete`].
    pub fn discards_part(&mut self, exchange: ExchangeId) -> bool {
        let Some(request) = self.exchanges.get(&exchange).filter(|request| is_long(request)) else {
            return false;
        };
        let mut accounts = self.shared.accounts();
        let admitted = self.admit_session(&accounts, exchange.link, &request.control);
        let Ok((_, Some(tenant))) = admitted else { return false };
        accounts.hold(tenant, 0);
        drop(accounts);
        let Some(request) = self.exchanges.get_mut(&exchange) else { return false };
        let freed = forget(&self.shared.store, tenant, request);
        self.stats.discards.add(freed);
        self.shared.accounts().let_go(tenant, freed);
        self.unfinished.push_back(exchange);
        true
    }

    /// A request whose next part may be done: it has come whole. Ask in each turn, for some.
    pub fn poll_unfinished(&mut self) -> Option<ExchangeId> {
        // Those of links that have ended are forgotten at once, however many they are.
        while let Some(exchange) = self.unfinished.pop_front() {
            if self.exchanges.contains_key(&exchange) {
                return Some(exchange);
            }
        }
        None
    }

    /// It is to be asked for again, behind all others.
    pub fn put_off(&mut self, exchange: ExchangeId) {
        self.unfinished.push_back(exchange);
    }

    pub(super) fn discard(&mut self, tenant: TenantId, request: &mut Exchange) -> Done {
        let freed = forget(&self.shared.store, tenant, request);
        self.stats.discards.add(freed);
        (request.control.reply(Status::Ok), freed)
    }
}

fn is_long(request: &Exchange) -> bool {
    request.control.op() == Some(Op::Discard)
        && request.is_whole()
        && request.ids().len() > DISCARD_STEP
}

/// Frees the next pages that are named; returns how many there were.
fn forget(store: &Store, tenant: TenantId, request: &mut Exchange) -> u64 {
    let ids = request.take_ids(DISCARD_STEP);
    ids.filter(|page| store.discard(tenant, ContentId(*page))).count() as u64
}
