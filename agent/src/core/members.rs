//! What other agents and pagers ask of one that is a member of a cluster.

use std::time::Instant;

use gms_transport::LinkId;
use gms_transport::message::{Control, GossipReply, MembersReply, Status};

use super::Core;
use crate::exchange::Exchange;

impl Core {
    /// A packet for the thread that gossips.
    pub(super) fn gossip(&self, now: Instant, link: LinkId, request: &Exchange) -> Control {
        let control = &request.control;
        let (Some(link), Some(bulletin)) = (self.links.get(&link), self.shared.bulletin.get())
        else {
            return control.reply(Status::Denied);
        };
        let known = bulletin.incarnation(link.peer.id);
        let answer = GossipReply::new(self.shared.store.frames(), known);
        control.reply(bulletin.post(now, &link.peer, request.head())).with_answer(answer)
    }

    /// Who is a member, as long as this agent is one.
    pub(super) fn tell_members(&mut self, control: &Control) -> Control {
        let (store, bulletin) = (&self.shared.store, self.shared.bulletin.get());
        let members = bulletin.and_then(|bulletin| bulletin.list(store));
        let status = if members.is_some() { Status::Ok } else { Status::Draining };
        self.members = members.unwrap_or_default();
        control.reply(status).with_answer(MembersReply::new(self.members.len() as u16))
    }
}
