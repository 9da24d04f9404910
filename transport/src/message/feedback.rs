//! What every reply says of its node.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The state of an agent, and what the request took there.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
#[repr(C)]
pub struct Feedback {
    /// Time from the start of the agent's turn that received the request's last packet to the beginning of the work, in ns. How long the packet
    /// waited in the socket before that turn is not in it.
    pub queue_ns: u32,
    /// Time from the beginning of the work until the reply is handed to the transport, in ns.
    pub service_ns: u32,
    /// Frames free.
    pub frames_free: u32,
    /// Time since the agent's oldest page was put, in ms; a whole number of seconds.
    pub oldest_age_ms: u32,
    /// Pages that the sender may put before it is granted more.
    pub credits_put: u32,
    /// Pages that the sender may ask for at a time (0 = no bound of the agent's own).
    pub credits_get: u32,
    /// Pages of the workload that the agent wants taken away, because its host needs the memory. Told to who has
    /// [`FEATURE_RECALL`](super::FEATURE_RECALL) only.
    pub recall: u32,
    /// Epoch of global memory management (0 = none).
    pub epoch: u32,
}

impl Feedback {
    /// Epochs are reserved.
    pub(super) fn is_valid(&self) -> bool {
        self.epoch == 0
    }
}
