//! How much the log says of what clients do: they can connect and leave, begin and end as often as they like.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use gms_transport::PeerId;

use crate::limits::{CLIENT_LINES_MAX, LINES_MAX};

/// The lines of this second.
#[derive(Debug, Default)]
pub(crate) struct Quota {
    began: Option<Instant>,
    lines: u32,
    left_out: u32,
    /// Of each client: no more than there may be lines.
    clients: HashMap<PeerId, u32>,
}

impl Quota {
    /// Whether there may be another line now, of what a client does or of what is nobody's. Says how many were left out when there may again.
    pub(crate) fn admits(&mut self, now: Instant, client: Option<PeerId>) -> bool {
        if self.began.is_none_or(|began| now >= began + Duration::from_secs(1)) {
            if self.left_out > 0 {
                tracing::info!(
                    left_out = self.left_out,
                    "more links, workloads or members came or went"
                );
            }
            *self = Quota { began: Some(now), ..Quota::default() };
        }
        let is_full = self.lines >= LINES_MAX;
        let has_said_all =
            |client| self.clients.get(&client).is_some_and(|said| *said >= CLIENT_LINES_MAX);
        if is_full || client.is_some_and(has_said_all) {
            self.left_out = self.left_out.saturating_add(1);
            return false;
        }
        self.lines += 1;
        client.into_iter().for_each(|client| *self.clients.entry(client).or_default() += 1);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_client_does_not_take_all_lines() {
        let (mut quota, mut now) = (Quota::default(), Instant::now());
        let client = |n| Some(PeerId::Issued([n; 16]));
        let mut said = |now, client, times: u32| {
            (0..times).filter(|_| quota.admits(now, client)).count() as u32
        };
        for _ in 0..2 {
            assert_eq!(said(now, client(1), 1000), CLIENT_LINES_MAX);
            assert_eq!(said(now, client(2), 1), 1);
            assert_eq!(said(now, None, 1000), LINES_MAX - CLIENT_LINES_MAX - 1);
            assert_eq!(said(now, client(3), 1), 0);
            now += Duration::from_secs(1);
        }
        assert_eq!(quota.left_out + quota.lines, 1000 + 1 + 1000 + 1);
    }
}
