//! The control message: exactly 128 bytes, little-endian, versioned, with an optional payload behind it.
//!
//! The layout is documented byte by byte in `docs/protocol.md`. The form (a short fixed control message with an
//! attached payload of up to a page or a vector of pages) is that of Trapeze/GMS (Duke, 1997).

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Length of a control message in bytes.
pub const CONTROL_LEN: usize = 128;
/// First four bytes of every control message: `GMS1`.
pub const MAGIC: u32 = u32::from_le_bytes(*b"GMS1");
/// Version of the protocol that this build speaks.
pub const VERSION: u8 = 1;
/// Bytes of a page frame.
pub const PAGE_LEN: usize = 4096;
/// Most pages that one message may carry.
pub const PAGES_MAX: usize = 64;
/// Most payload bytes that one message may carry: 64 descriptors and 64 pages of 8 KiB.
pub const PAYLOAD_MAX: usize = PAGES_MAX * (size_of::<PageDescriptor>() + 2 * PAGE_LEN);
/// Most page ids that one discard may carry.
pub const DISCARD_MAX: usize = 4096;

/// A control message as it travels. All integers are little-endian; unused fields are zero.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Control {
    /// [`MAGIC`].
    pub magic: U32,
    /// [`VERSION`].
    pub version: u8,
    /// An [`Op`].
    pub op: u8,
    /// [`flags`].
    pub flags: U16,
    /// Chosen by the requester, echoed by the reply.
    pub request: U64,
    /// The workload within the client: with the client's certificate it names the tenant.
    pub workload: [u8; 16],
    /// Page id of a single-page operation.
    pub page: U64,
    /// Epoch of global memory management (0 = none).
    pub epoch: U64,
    /// Bytes of payload behind this message.
    pub payload_len: U32,
    /// Pages that the operation names.
    pub count: U16,
    /// log2 of the page length: 12 or 13.
    pub page_shift: u8,
    /// A [`Status`] (replies).
    pub status: u8,
    /// Checksum (the requester's own, opaque to agents) of a single-page payload.
    pub check: U64,
    /// Node which shall get the reply of a delegated exchange (0 = the sender).
    pub reply_to: U64,
    /// Bit i is set if page i of the operation succeeded (replies).
    pub done: U64,
    /// Time which the request waited at the agent, in ns (replies).
    pub queue_ns: U32,
    /// Time which the agent worked on the request, in ns (replies).
    pub service_ns: U32,
    /// Frames free at the agent (replies).
    pub frames_free: U64,
    /// Age of the agent's oldest page in ms (replies).
    pub oldest_age_ms: U32,
    /// Pages which the sender may put before it is granted more (replies).
    pub credits: U32,
    /// Operand of atomics: the value expected.
    pub compare: U64,
    /// Operand of atomics: the value to store or to add; hello: lease in ms.
    pub value: U64,
    /// Zero.
    pub reserved: U64,
}

const _: () = assert!(size_of::<Control>() == CONTROL_LEN);
const _: () = assert!(align_of::<Control>() == 1);

/// Names one page of a vector: precedes the pages in the payload, one for each page, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct PageDescriptor {
    /// Page id.
    pub page: U64,
    /// The requester's checksum of the page; stored and returned, never interpreted by agents.
    pub check: U64,
}
