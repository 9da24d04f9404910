//! Sealed pages, and agents that forge them.

use super::*;
use zerocopy::FromBytes;

use crate::message::{HelloReply, TAG_LEN};

/// What an agent makes of the pages that it was asked for, by number and as they were put.
type Forgery = fn(Vec<Vec<u8>>) -> Vec<Vec<u8>>;

/// A reply to a get of `count` pages comes in pieces of this length; returns what is told of it. Without a checksum their seals tell the same.
fn answered(count: usize, forge: Forgery, piece: usize) -> Vec<ClientEvent> {
    let unchecked = wanted(count).into_iter().map(|wanted| Wanted { check: None, ..wanted });
    let told = answered_to(wanted(count), forge, piece);
    let unchecked = answered_to(unchecked.collect(), forge, piece);
    assert_eq!(fates(&told), fates(&unchecked), "without checksums");
    told
}

fn answered_to(wanted: Vec<Wanted>, forge: Forgery, piece: usize) -> Vec<ClientEvent> {
    let (mut client, now) = (Form::Sealed.client(), Instant::now());
    let count = wanted.len();
    client.get(now, A, wanted, Urgency::Ahead);
    let request = only_sent(&mut client);
    assert!(request.1.has_lengths());
    let pages = forge((0..count).map(|n| Form::Sealed.page(n)).collect());
    let bytes = payload(count, pages.into_iter());
    client.play_reply(&request, Status::Ok, |control| {
        *control = control.with_done(u64::MAX >> (64 - count)).with_lengths();
        control.payload_len = bytes.len() as u32;
    });
    let (exchange, mut offset) = (request.0, 0);
    for bytes in bytes.chunks(piece) {
        client.play(Event::Payload { exchange, offset, bytes: Bytes::copy_from_slice(bytes) });
        offset += bytes.len() as u32;
    }
    client.play(Event::Complete { exchange });
    let told = drain(&mut client, now);
    assert!(client.gets.is_empty(), "{told:?}");
    told
}

/// The pages that were handed on, and those that were wrong.
fn fates(told: &[ClientEvent]) -> (Vec<usize>, Vec<usize>) {
    let (mut arrived, mut wrong) = (Vec::new(), Vec::new());
    for event in told {
        match event {
            ClientEvent::Arrived { pages, bytes, .. } => {
                assert_eq!(bytes.len(), pages.len() * PAGE_LEN);
                for (n, bytes) in pages.clone().zip(bytes.chunks(PAGE_LEN)) {
                    assert!(bytes == page(n), "page {n} is another");
                    arrived.push(n);
                }
            }
            ClientEvent::Wrong { page, .. } => wrong.push(*page),
            _ => {}
        }
    }
    (arrived, wrong)
}

#[test]
fn sealed_pages_arrive_however_their_bytes_are_cut() {
    for count in [1, 2, 5] {
        // Within a page, before, within and behind its tag, and all at once.
        for piece in [1, 1000, PAGE_LEN, PAGE_LEN + 7, SEALED_LEN, 2 * SEALED_LEN + 3, 1 << 20] {
            let (arrived, wrong) = fates(&answered(count, |pages| pages, piece));
            assert_eq!(arrived, (0..count).collect::<Vec<_>>(), "{count} pages by {piece}");
            assert!(wrong.is_empty());
        }
    }
}

#[test]
fn a_forged_page_is_wrong_and_the_others_arrive() {
    let flip: Forgery = |mut pages| {
        pages[1][100] ^= 1;
        pages
    };
    let flip_tag: Forgery = |mut pages| {
        pages[1][SEALED_LEN - 1] ^= 0x80;
        pages
    };
    let plaintext: Forgery = |mut pages| {
        pages[1] = [page(1), vec![0; TAG_LEN]].concat();
        pages
    };
    // As it was put under another id: also what an earlier version of the page is.
    let former: Forgery = |mut pages| {
        pages[1] = sealed(1000, &page(1));
        pages
    };
    let another: Forgery = |mut pages| {
        pages[1] = pages[2].clone();
        pages
    };
    for forge in [flip, flip_tag, plaintext, former, another] {
        for piece in [1000, SEALED_LEN, 1 << 20] {
            assert_eq!(fates(&answered(4, forge, piece)), (vec![0, 2, 3], vec![1]));
        }
    }
}

#[test]
fn two_pages_that_are_exchanged_are_both_wrong() {
    let exchange: Forgery = |mut pages| {
        pages.swap(0, 3);
        pages
    };
    assert_eq!(fates(&answered(4, exchange, 1 << 20)), (vec![1, 2], vec![0, 3]));
}

#[test]
fn pages_of_other_lengths_are_wrong() {
    // One page and its tag are shorter; all are without tags, as those that were never sealed.
    let truncated: Forgery = |mut pages| {
        pages[0].truncate(SEALED_LEN - 1);
        pages
    };
    let plain: Forgery = |pages| (0..pages.len()).map(page).collect();
    for forge in [truncated, plain] {
        for count in [1, 3] {
            let (arrived, wrong) = fates(&answered(count, forge, 1 << 20));
            assert!(arrived.is_empty() && wrong.first() == Some(&0), "{arrived:?} {wrong:?}");
        }
    }
    // Bytes that are moved from one page to the next leave the length as it is.
    let moved: Forgery = |mut pages| {
        let byte = pages[0].pop().expect("a tag");
        pages[1].insert(0, byte);
        pages
    };
    assert_eq!(fates(&answered(3, moved, 1 << 20)), (vec![0, 1, 2], vec![]));
    // Sealed bytes, not the last of a tag: that one may be what follows it, by chance.
    let shifted: Forgery = |mut pages| {
        pages[0].remove(0);
        pages[1].push(0);
        pages
    };
    assert_eq!(fates(&answered(3, shifted, 1 << 20)), (vec![2], vec![0, 1]));
}

/// The awaited page is asked for again, and alone.
#[test]
fn a_wrong_page_for_which_a_thread_waits_is_asked_for_again() {
    let (mut client, now) = (Form::Sealed.client(), Instant::now());
    let get = client.get(now, A, wanted(2), Urgency::Demand);
    let request = only_sent(&mut client);
    let pages = [Form::Sealed.page(1), Form::Sealed.page(0)];
    client.answer(&request, payload(2, pages.into_iter()));
    let mut told = turn(&mut client, now);
    let again = only_sent(&mut client);
    assert!(again.1.count() == 1 && again.1.has_lengths());
    client.answer(&again, Form::Sealed.page(0));
    told.extend(turn(&mut client, now));
    assert_eq!(fates(&told), (vec![0], vec![0, 1]));
    assert!(matches!(told.last(), Some(ClientEvent::Ended { get: ended }) if *ended == get));
}

#[test]
fn what_is_put_is_sealed_and_opens_again() {
    let (mut client, now) = (Form::Sealed.client(), Instant::now());
    // The second put is shorter: nothing of the first is sent again.
    for count in [3, 2] {
        let frames: Vec<Vec<u8>> = (0..count).map(page).collect();
        let pages = frames.iter().enumerate().map(|(n, frame)| (ContentId(n as u64), &frame[..]));
        client.put(now, A, pages).expect("it is up");
        let (_, control) = only_sent(&mut client);
        assert!(control.has_lengths());
        let (heads, bytes) = client.lane.transport.payload.split_at(count * PageDescriptor::LEN);
        let heads = <[PageDescriptor]>::ref_from_bytes(heads).expect("descriptors");
        assert_eq!(bytes.len(), count * SEALED_LEN);
        for ((n, head), bytes) in heads.iter().enumerate().zip(bytes.chunks(SEALED_LEN)) {
            assert_eq!((head.page(), usize::from(head.length())), (n as u64, SEALED_LEN));
            assert_eq!(bytes, Form::Sealed.page(n));
            assert!(!bytes.windows(16).any(|bytes| bytes == &page(n)[..16]), "plaintext");
        }
    }
}

#[test]
fn an_agent_that_cannot_hold_sealed_pages_is_not_used() {
    let now = Instant::now();
    let lane = Lane::scripted(now, 1);
    let mut client = Client::new(lane, CHECKSUM).sealed(seal().clone());
    client.drive(now).expect("a script");
    let hello = client.come_up(now, A);
    // As of the build before, or of version 1 of the protocol.
    client.play_reply(&hello, Status::Ok, |control| {
        *control = control.with_answer(HelloReply::new(60_000, 0));
    });
    let told = drain(&mut client, now);
    let [ClientEvent::Down { reason, .. }] = &told[..] else { panic!("{told:?}") };
    assert!(reason.contains("cannot hold sealed pages") && reason.contains("--seal off"));
    assert!(!client.lane.is_up(A) && !client.lane.has_been_up(A));
}
