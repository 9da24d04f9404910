use proptest::prelude::*;

use super::*;

const WORKLOAD: WorkloadId = WorkloadId([7; 16]);
const PAGE: usize = PageDescriptor::LEN + PAGE_LEN;

fn bytes(control: &Control) -> [u8; CONTROL_LEN] {
    control.as_bytes().try_into().unwrap()
}

fn long(control: Control, payload_len: usize) -> Control {
    Control { payload_len: payload_len as u32, ..control }
}

/// One of each, as they may travel.
fn all() -> Vec<Control> {
    let feedback = Feedback {
        queue_ns: 1,
        service_ns: 2,
        frames_free: 3,
        oldest_age_ms: 4,
        credits_put: 5,
        recall: 6,
        ..Feedback::default()
    };
    let get = Control { session: 77, ..Control::get(4, WORKLOAD, 9) };
    let many = Control::get_many(2, WORKLOAD, 2);
    let put = Control::put(1, WORKLOAD, 64);
    let (hello, status) =
        (Control::hello(6, WORKLOAD, 5000), Control::request(Op::Status, 8, WORKLOAD));
    let discard = long(Control::discard(3, WORKLOAD, 4096), 4096 * 8);
    let welcome = hello.reply(Status::Ok).with_answer(HelloReply::new(4000, 0));
    vec![
        get,
        hello,
        status,
        discard,
        long(many, 2 * PageDescriptor::LEN),
        long(put, 64 * PAGE),
        Control::grant(7, WORKLOAD, 64),
        Control::request(Op::Goodbye, 9, WORKLOAD),
        Control { session: 5, ..welcome.with_feedback(feedback) },
        long(get.reply(Status::Ok).with_done(1), PAGE_LEN).with_feedback(feedback),
        get.reply(Status::NotFound),
        long(many.reply(Status::NotFound).with_done(2), PAGE),
        put.reply(Status::Full).with_done(0b101),
        discard.reply(Status::Ok),
        status.reply(Status::Draining).with_answer(StatusReply::new(1 << 20)),
    ]
}

/// What came after version 1.
fn newer() -> Vec<Control> {
    let gossip = Control::request(Op::Gossip, 11, WORKLOAD);
    let members = Control::request(Op::Members, 12, WORKLOAD);
    vec![
        long(gossip, 1),
        long(gossip, super::members::GOSSIP_LEN_MAX),
        gossip.reply(Status::Ok).with_answer(GossipReply::new(7, Some(u64::MAX))),
        gossip.reply(Status::Denied),
        members,
        long(members.reply(Status::Ok).with_answer(MembersReply::new(3)), 3 * MemberEntry::LEN),
    ]
}

#[test]
fn what_constructors_make_decodes_to_itself() {
    for control in all().into_iter().chain(newer()) {
        assert_eq!(Control::decode(&bytes(&control)), Ok(control));
    }
    for op in [Op::Delegate, Op::Epoch, Op::Atomic, Op::Block] {
        let control = Control::request(op, 1, WORKLOAD).with_priority(Priority::Bulk);
        assert_eq!(Control::decode(&bytes(&control)), Ok(control));
        assert_eq!((control.op(), control.priority()), (Some(op), Priority::Bulk));
    }
}

#[test]
fn a_message_has_the_documented_bytes() {
    let control =
        Control { session: 0x0c0d, deadline_us: 9, ..Control::get(0x0102, WORKLOAD, 0x0a0b) };
    let control = control.with_priority(Priority::Ahead);
    let bytes_of = bytes(&control);
    assert_eq!(&bytes_of[..16], b"GMS2\x02\x02\0\x02\x02\x01\0\0\0\0\0\0");
    assert_eq!(&bytes_of[16..24], b"\x0d\x0c\0\0\0\0\0\0");
    assert_eq!(bytes_of[24..40], [7; 16]);
    assert_eq!(bytes_of[40..48], [9, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes_of[48..60], [0x0b, 0x0a, 0, 0, 0, 0, 0, 0, 1, 0, 12, 0]);
    let reply = long(control.reply(Status::Ok).with_done(1), PAGE_LEN);
    let feedback = Feedback { queue_ns: 1, credits_put: 6, recall: 7, ..Feedback::default() };
    let bytes_of = bytes(&reply.with_feedback(feedback));
    assert_eq!(bytes_of[72], 7);
    assert_eq!(bytes_of[4..8], [2, 2, 0, 3]);
    assert_eq!((bytes_of[48], bytes_of[64]), (1, 6));
    assert_eq!(bytes_of[80..92], [0x0b, 0x0a, 0, 0, 0, 0, 0, 0, 1, 0, 12, 0]);
    assert_eq!(bytes_of[96], 1);
}

#[test]
fn each_malformed_field_is_named() {
    let good = bytes(&Control::get(1, WORKLOAD, 9));
    let with = |at: usize, value: u8| {
        let mut bad = good;
        bad[at] = value;
        Control::decode(&bad).unwrap_err()
    };
    let op = Op::Get;
    assert_eq!(with(0, b'X'), DecodeError::Magic);
    assert_eq!(with(4, 9), DecodeError::Version { theirs: 9 });
    assert_eq!(with(6, 1), DecodeError::Reserved, "a status in a request");
    assert_eq!(with(7, 0x80), DecodeError::Reserved);
    assert_eq!(with(7, 6), DecodeError::Reserved, "a priority that does not exist");
    assert_eq!(with(54, 1), DecodeError::Body { op, count: 1 }, "an id of more than 48 bits");
    assert_eq!(with(127, 1), DecodeError::Body { op, count: 1 });
    assert_eq!(with(56, 65), DecodeError::Body { op, count: 65 });
    assert_eq!(with(58, 14), DecodeError::Body { op, count: 1 });
    assert_eq!(with(44, 1), DecodeError::PayloadLen { op: 2, len: 1, expected: 0 });
    let mut reply = bytes(&Control::get(1, WORKLOAD, 9).reply(Status::NotFound));
    reply[96] = 2;
    assert_eq!(
        Control::decode(&reply),
        Err(DecodeError::Body { op, count: 1 }),
        "beyond its pages"
    );
    reply[96] = 0;
    reply[6] = 99;
    assert_eq!(Control::decode(&reply), Err(DecodeError::Unknown { op: 2, status: 99 }));
}

#[test]
fn what_an_operation_of_a_later_build_says_is_not_judged() {
    let mut later = bytes(&Control::request(Op::Status, 1, WORKLOAD));
    later[5] = 200;
    later[100] = 17;
    later[44..48].copy_from_slice(&700u32.to_le_bytes());
    let control = Control::decode(&later).expect("passed on");
    assert_eq!((control.op(), control.payload_len, control.count()), (None, 700, 0));
    let answer = control.reply(Status::Unsupported);
    assert_eq!((control.check_reply(&answer), answer.check()), (Ok(()), Ok(())));
    later[44..48].copy_from_slice(&(PAYLOAD_MAX as u32 + 1).to_le_bytes());
    assert!(Control::decode(&later).is_err(), "its payload has the bound of all");
}

#[test]
fn pages_with_lengths_of_their_own_have_bounds() {
    let mut put = Control::put(1, WORKLOAD, 2);
    put.flags |= flags::LENGTHS;
    let descriptors = 2 * PageDescriptor::LEN;
    for (length, is_good) in [
        (descriptors + 1, false),
        (descriptors + 2, true),
        (descriptors + 2 * (PAGE_LEN + TAG_LEN), true),
        (descriptors + 2 * (PAGE_LEN + TAG_LEN) + 1, false),
    ] {
        assert_eq!(long(put, length).check().is_ok(), is_good, "{length}");
    }
    let mut reply = Control::get(1, WORKLOAD, 5).reply(Status::Ok).with_done(1);
    reply.flags |= flags::LENGTHS;
    assert_eq!(Control::get(1, WORKLOAD, 5).check_reply(&reply), Err(DecodeError::Mismatch));
    assert_eq!(long(reply, PAGE_LEN).check(), Ok(()), "without a length it is the frame");
    let mut other = Control::request(Op::Status, 1, WORKLOAD);
    other.flags |= flags::LENGTHS;
    assert_eq!(other.check(), Err(DecodeError::Reserved));
    let named = PageDescriptor::new(PageDescriptor::ID_END - 1, 5);
    assert_eq!((named.page(), named.length(), named.check()), (PageDescriptor::ID_END - 1, 0, 5));
}

#[test]
fn no_reply_is_longer_than_its_request_allows() {
    for request in [
        Control::get(1, WORKLOAD, 9),
        Control::get_many(1, WORKLOAD, 64),
        Control::put(1, WORKLOAD, 64),
        Control::hello(1, WORKLOAD, 0),
    ] {
        let all = u64::MAX.checked_shr(64 - u32::from(request.count())).unwrap_or(0);
        let mut reply = request.reply(Status::Ok).with_done(all);
        for lengths in [0, flags::LENGTHS] {
            reply.flags |= lengths;
            let due = *reply.payload_due(reply.op().unwrap()).end() as usize;
            assert!(CONTROL_LEN + due <= request.reply_max() || request.op() != Some(Op::Get));
        }
    }
}

#[test]
fn a_reply_to_another_request_is_refused() {
    let asked = Control { session: 5, ..Control::get(1, WORKLOAD, 9) };
    let reply = asked.reply(Status::Ok);
    assert_eq!(asked.check_reply(&asked), Err(DecodeError::Direction));
    assert_eq!(asked.check_reply(&reply), Ok(()));
    let other = Control { session: 5, ..Control::get(1, WORKLOAD, 10) }.reply(Status::Ok);
    assert_eq!(asked.check_reply(&other), Err(DecodeError::Mismatch));
    let later = Control { session: 6, ..reply };
    assert_eq!(asked.check_reply(&later), Err(DecodeError::Mismatch), "of another session");
    let hello = Control::hello(1, WORKLOAD, 9);
    let welcome = Control { session: 6, ..hello.reply(Status::Ok) };
    assert_eq!(hello.check_reply(&welcome), Ok(()), "it says which session begins");
}

#[test]
fn version_1_says_the_same_as_far_as_it_can() {
    let mut asked = Control::get(0, WORKLOAD, 0);
    for control in all() {
        let wire = v1::encode(&control).unwrap();
        assert_eq!(&wire[..5], b"GMS1\x01");
        let answers = control.is_reply().then_some(&asked);
        let read =
            v1::decode(&wire, answers).unwrap_or_else(|error| panic!("{error}: {control:?}"));
        // Of the session only the reply to a hello tells; the others are of that of the link.
        let named = control.is_reply() && control.op() == Some(Op::Hello);
        let mut known = Control { session: if named { control.session } else { 0 }, ..control };
        if control.is_reply() {
            // It knows of no recalls.
            known = known.with_feedback(Feedback { recall: 0, ..control.feedback() });
        }
        assert_eq!(read, known);
        if !control.is_reply() {
            asked = Control { session: 0, ..control };
        }
    }
}

#[test]
fn version_1_echoes_what_its_pagers_check() {
    let asked = Control::discard(3, WORKLOAD, 9);
    let wire = v1::encode(&asked.reply(Status::Ok)).unwrap();
    assert_eq!(wire[52..54], [9, 0]);
    let asked = Control::get_many(3, WORKLOAD, 5);
    let wire = v1::encode(&asked.reply(Status::NotFound)).unwrap();
    assert_eq!((wire[52], wire[54], wire[55]), (5, 12, 1));
    let mut long = Control::put(3, WORKLOAD, 5);
    long.flags |= flags::LENGTHS;
    let block = Control::request(Op::Block, 1, WORKLOAD);
    for new in [long, block].into_iter().chain(newer()) {
        assert_eq!(v1::encode(&new), Err(DecodeError::TooNew));
    }
}

#[test]
fn version_1_has_the_bytes_that_it_always_had() {
    let control = Control::get(0x0102, WORKLOAD, 0x0a0b);
    let wire = v1::encode(&control).unwrap();
    assert_eq!(&wire[..16], b"GMS1\x01\x02\0\0\x02\x01\0\0\0\0\0\0");
    assert_eq!(wire[16..32], [7; 16]);
    assert_eq!(wire[32..34], [0x0b, 0x0a]);
    assert_eq!(wire[52..56], [1, 0, 12, 0]);
    let with = |at: usize, value: u8| {
        let mut bad = wire;
        bad[at] = value;
        v1::decode(&bad, None).unwrap_err()
    };
    let op = Op::Get;
    assert_eq!(with(0, b'X'), DecodeError::Magic);
    assert_eq!(with(4, 9), DecodeError::Version { theirs: 9 });
    assert_eq!(with(5, 0), DecodeError::Unknown { op: 0, status: 0 });
    assert_eq!(with(5, 11), DecodeError::Unknown { op: 11, status: 0 }, "it came with version 2");
    assert_eq!(with(55, 99), DecodeError::Unknown { op: 2, status: 99 });
    assert_eq!(with(7, 0x80), DecodeError::Reserved);
    assert_eq!(with(127, 1), DecodeError::Reserved);
    assert_eq!(with(52, 65), DecodeError::Body { op, count: 65 });
    assert_eq!(with(54, 14), DecodeError::Body { op, count: 1 });
    assert_eq!(with(48, 1), DecodeError::PayloadLen { op: 2, len: 1, expected: 0 });
    assert_eq!(with(72, 2), DecodeError::Body { op, count: 1 });
}

proptest! {
    #[test]
    fn whatever_comes_is_refused_or_within_its_bounds(
        which in 0usize..21, damage in prop::collection::vec((0usize..CONTROL_LEN, any::<u8>()), 0..6),
        old in any::<bool>(),
    ) {
        let control = all().into_iter().chain(newer()).nth(which).expect("so many");
        let old = old && which < 15;
        let mut wire = if old { v1::encode(&control).unwrap() } else { bytes(&control) };
        damage.into_iter().for_each(|(at, byte)| wire[at] = byte);
        let asked = Control::get(1, WORKLOAD, 9);
        let read = if old { v1::decode(&wire, Some(&asked)) } else { Control::decode(&wire) };
        if let Ok(read) = read {
            prop_assert!(read.payload_len as usize <= PAYLOAD_MAX);
            prop_assert!(read.reply_max() <= CONTROL_LEN + PAYLOAD_MAX);
            prop_assert_eq!(read.check(), Ok(()));
            prop_assert_eq!(Control::decode(&bytes(&read)), Ok(read));
            if !read.is_reply() {
                let reply = read.reply(Status::Unsupported);
                prop_assert_eq!((reply.check(), read.check_reply(&reply)), (Ok(()), Ok(())));
            }
        }
    }
}
