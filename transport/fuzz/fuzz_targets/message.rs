//! Feeds arbitrary bytes, arbitrarily cut, to the reader of messages: no panic, and nothing out of bounds comes out.
//! Run by `cargo +nightly fuzz run message` in `transport/`.
#![no_main]

use bytes::Bytes;
use gms_transport::message::{Control, PAYLOAD_MAX, WorkloadId};
use gms_transport::reader::{MessageReader, Piece};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (bool, Vec<Vec<u8>>)| {
    let (reply, chunks) = input;
    let mut reader = match reply {
        true => MessageReader::reply_to(Control::get_many(0, WorkloadId::default(), 64)),
        false => MessageReader::request(),
    };
    let (mut announced, mut came) = (None, 0);
    for chunk in chunks {
        let fed = reader.feed(Bytes::from(chunk), |piece| match piece {
            Piece::Control(control) => {
                assert!(announced.is_none());
                assert!(control.payload_len.get() as usize <= PAYLOAD_MAX);
                announced = Some(control.payload_len.get() as usize);
            }
            Piece::Payload { offset, bytes } => {
                assert_eq!(offset as usize, came);
                came += bytes.len();
                assert!(came <= announced.expect("control comes first"));
            }
        });
        if fed.is_err() {
            return;
        }
    }
    assert_eq!(reader.finish().is_ok(), announced == Some(came));
});
