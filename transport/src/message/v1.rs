//! Version 1 of the message, the one before this build's: agents and pagers of that version are still served.
//!
//! It has no number of a session but in the reply to a hello, no deadline, no priority and no length of a page's own. Its
//! payloads are the same.

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::{
    CONTROL_LEN, Control, DecodeError, DiscardReply, DiscardRequest, Feedback, GrantRequest,
    HelloReply, HelloRequest, Op, PagesReply, PagesRequest, Status, StatusReply, Version,
    WorkloadId, flags,
};

const MAGIC: u32 = u32::from_le_bytes(*b"GMS1");
const VERSION: u8 = Version::V1 as u8;

/// As it travels.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Wire {
    magic: u32,
    version: u8,
    op: u8,
    flags: u16,
    request: u64,
    workload: WorkloadId,
    /// Page id of a single-page operation.
    page: u64,
    epoch: u64,
    payload_len: u32,
    count: u16,
    page_shift: u8,
    status: u8,
    check: u64,
    reply_to: u64,
    done: u64,
    queue_ns: u32,
    service_ns: u32,
    frames_free: u64,
    oldest_age_ms: u32,
    credits: u32,
    /// Hello reply: number of the session.
    compare: u64,
    /// Hello: lease in ms; grant: pages announced; status reply: frames exported.
    value: u64,
    reserved: u64,
}

const _: () = assert!(size_of::<Wire>() == CONTROL_LEN);

/// As an end of version 1 understands it: without session, priority and deadline.
///
/// # Errors
/// If that version has no such message.
pub(crate) fn encode(control: &Control) -> Result<[u8; CONTROL_LEN], DecodeError> {
    if control.has_lengths() || control.op().is_none_or(|op| !op.is_of_version_1()) {
        return Err(DecodeError::TooNew);
    }
    let mut wire = Wire::new_zeroed();
    (wire.magic, wire.version, wire.op) = (MAGIC, VERSION, control.op);
    wire.flags = u16::from(control.flags & flags::REPLY);
    (wire.request, wire.workload) = (control.request, control.workload);
    (wire.payload_len, wire.status) = (control.payload_len, control.status);
    match control.is_reply() {
        false => encode_request(control, &mut wire),
        true => encode_reply(control, &mut wire),
    }
    Ok(wire.as_bytes().try_into().expect("a message has 128 bytes"))
}

fn encode_request(control: &Control, wire: &mut Wire) {
    match control.op() {
        Some(Op::Hello) => wire.value = control.body::<HelloRequest>().lease_ms.into(),
        Some(Op::Get | Op::Put) => {
            let pages: PagesRequest = control.body();
            (wire.page, wire.count, wire.page_shift) = (pages.page, pages.count, pages.page_shift);
        }
        Some(Op::Discard) => wire.count = control.body::<DiscardRequest>().count,
        Some(Op::Grant) => wire.value = control.body::<GrantRequest>().pages,
        _ => {}
    }
}

fn encode_reply(control: &Control, wire: &mut Wire) {
    let feedback = control.feedback();
    (wire.queue_ns, wire.service_ns) = (feedback.queue_ns, feedback.service_ns);
    (wire.frames_free, wire.oldest_age_ms) = (feedback.frames_free.into(), feedback.oldest_age_ms);
    wire.credits = feedback.credits_put;
    match control.op() {
        Some(Op::Hello) => {
            wire.value = control.answer::<HelloReply>().lease_ms.into();
            wire.compare = control.session;
        }
        Some(Op::Get | Op::Put) => {
            let pages: PagesReply = control.answer();
            (wire.page, wire.count, wire.page_shift) = (pages.page, pages.count, pages.page_shift);
            (wire.done, wire.check) = (pages.done, pages.check);
        }
        Some(Op::Discard) => wire.count = control.answer::<DiscardReply>().count,
        Some(Op::Status | Op::Grant) => wire.value = control.answer::<StatusReply>().frames,
        _ => {}
    }
}

/// Reads a message; `answers` is the request, if a reply is due.
pub(crate) fn decode(
    bytes: &[u8; CONTROL_LEN],
    answers: Option<&Control>,
) -> Result<Control, DecodeError> {
    if bytes[..4] != MAGIC.to_le_bytes() {
        return Err(DecodeError::Magic);
    }
    let wire = Wire::read_from_bytes(bytes).expect("a message has 128 bytes");
    if wire.version != VERSION {
        return Err(DecodeError::Version { theirs: wire.version });
    }
    let op = Op::from_byte(wire.op).filter(|op| op.is_of_version_1());
    let status = Status::from_byte(wire.status);
    let (Some(op), Some(status)) = (op, status) else {
        return Err(DecodeError::Unknown { op: wire.op, status: wire.status });
    };
    if wire.flags & !u16::from(flags::REPLY) != 0 || wire.reserved != 0 {
        return Err(DecodeError::Reserved);
    }
    let counts = matches!(op, Op::Get | Op::Put | Op::Discard);
    let stray = !counts && (wire.count != 0 || wire.page_shift != 0);
    if stray || wire.done.checked_shr(wire.count.into()).unwrap_or(0) != 0 {
        return Err(DecodeError::Body { op, count: wire.count });
    }
    let mut control = match wire.flags {
        0 => decode_request(&wire, op),
        _ => decode_reply(&wire, op, status, answers)?,
    };
    control.payload_len = wire.payload_len;
    control.check()?;
    Ok(control)
}

fn decode_request(wire: &Wire, op: Op) -> Control {
    let control = Control::request(op, wire.request, wire.workload);
    match op {
        Op::Hello => Control::hello(wire.request, wire.workload, wire.value),
        Op::Get | Op::Put => {
            let (page, page_shift) = (wire.page, wire.page_shift);
            control.with(PagesRequest { page, page_shift, ..PagesRequest::new(wire.count) })
        }
        Op::Discard => control.with(DiscardRequest::new(wire.count)),
        Op::Grant => control.with(GrantRequest::new(wire.value)),
        _ => control,
    }
}

fn decode_reply(
    wire: &Wire,
    op: Op,
    status: Status,
    answers: Option<&Control>,
) -> Result<Control, DecodeError> {
    let asked = answers.ok_or(DecodeError::Direction)?;
    let mut reply = Control::request(op, wire.request, wire.workload).reply(status);
    // Nothing else names it: the link belongs to one session.
    reply.session = if op == Op::Hello { wire.compare } else { asked.session };
    let feedback = Feedback {
        queue_ns: wire.queue_ns,
        service_ns: wire.service_ns,
        frames_free: wire.frames_free.try_into().unwrap_or(u32::MAX),
        oldest_age_ms: wire.oldest_age_ms,
        credits_put: wire.credits,
        ..Feedback::default()
    };
    let reply = reply.with_feedback(feedback);
    Ok(match op {
        Op::Hello => {
            let lease_ms = wire.value.try_into().unwrap_or(u32::MAX);
            reply.with_answer(HelloReply::new(lease_ms, 0))
        }
        Op::Get | Op::Put => {
            let (page, page_shift) = (wire.page, wire.page_shift);
            let asked = PagesRequest { page, page_shift, ..PagesRequest::new(wire.count) };
            let (done, check) = (wire.done, wire.check);
            reply.with_answer(PagesReply { done, check, ..PagesReply::to(&asked) })
        }
        Op::Discard => reply.with_answer(DiscardReply::to(&DiscardRequest::new(wire.count))),
        Op::Status | Op::Grant => reply.with_answer(StatusReply::new(wire.value)),
        _ => reply,
    })
}
