//! Feeds damaged messages, cut anywhere, to the reader of messages: no panic, nothing out of bounds comes out, and the cuts change nothing.
//! What takes a new way through the reader is damaged further. In `transport/fuzz/`:
//!
//!     cargo run --release -- [RUNS [SEED]]
//!
//! It is a program of its own because libFuzzer needs a C++ compiler, and builds the reader alone so that this takes seconds.

mod coverage;
// Of what is shared with the crates and their tests only a part is used here.
#[allow(dead_code)]
#[path = "../../../tests/src/dice.rs"]
mod dice;
mod input;
#[allow(dead_code, unused_imports, reason = "the transport uses what the reader does not")]
#[path = "../../src/message/mod.rs"]
mod message;
#[allow(dead_code)]
#[path = "../../src/reader.rs"]
mod reader;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use bytes::Bytes;

use dice::Dice;
use input::Input;
use message::{
    CONTROL_LEN, Control, DecodeError, Op, PAYLOAD_MAX, PageDescriptor, PagesReply, PagesRequest,
    TAG_LEN, Version, WorkloadId,
};
use reader::{MessageReader, Piece};

const RUNS: u64 = 100_000;
const SEED: u64 = 1;
/// Most inputs kept to be damaged further.
const CORPUS_MAX: usize = 4096;

/// The payload of a message, or why there is none.
type Read = Result<Vec<u8>, DecodeError>;

/// What a reader makes of a stream that comes in these chunks.
fn read<'a>(input: &Input, chunks: impl Iterator<Item = &'a [u8]>) -> Read {
    let (replies, version) = (input.replies, input.version);
    let mut reader = match replies {
        true => {
            let asked = Control::get_many(0, WorkloadId::default(), 2);
            // Who asks with lengths takes replies without, too.
            let asked = if version == Version::V2 { asked.with_lengths() } else { asked };
            MessageReader::reply_to(version, asked)
        }
        false => MessageReader::request(version),
    };
    let (mut announced, mut payload) = (None, Vec::new());
    for chunk in chunks {
        reader.feed(Bytes::copy_from_slice(chunk), |piece| match piece {
            Piece::Control(control) => {
                assert!(announced.is_none(), "a second control message");
                assert_eq!(control.is_reply(), replies);
                announced = Some(control.payload_len as usize);
                check_lengths(&control);
            }
            Piece::Payload { offset, bytes } => {
                assert!(offset as usize == payload.len() && !bytes.is_empty());
                payload.extend_from_slice(&bytes);
            }
        })?;
        assert!(payload.len() <= announced.unwrap_or(0) && announced <= Some(PAYLOAD_MAX));
        assert_eq!(reader.has_control(), announced.is_some());
    }
    let end = reader.finish();
    assert_eq!(end.is_ok(), announced == Some(payload.len()));
    end.map(|()| payload)
}

/// What a message that was accepted says of its pages: as many bytes as they can have, and if they have lengths of their
/// own, no page without a byte.
fn check_lengths(control: &Control) {
    let (pages, shift) = match (control.op(), control.is_reply()) {
        (Some(Op::Put), false) => {
            (u32::from(control.count()), control.body::<PagesRequest>().page_shift)
        }
        (Some(Op::Get), true) => {
            let reply: PagesReply = control.answer();
            (reply.done.count_ones(), reply.page_shift)
        }
        _ => return,
    };
    let is_single = control.is_reply() && control.count() == 1;
    let head = if is_single { 0 } else { PageDescriptor::LEN as u32 };
    let frame = 1 << shift;
    let page = if control.has_lengths() { 1..=frame + TAG_LEN as u32 } else { frame..=frame };
    let due = pages * (head + page.start())..=pages * (head + page.end());
    assert!(due.contains(&control.payload_len), "{control:?}: {due:?}");
}

/// Whether the message was accepted.
fn check(input: &Input) -> bool {
    let cut = read(input, input.chunks());
    let whole = read(input, std::iter::once(&input.bytes[..]));
    assert_eq!(cut, whole, "the cuts matter");
    if let Ok(payload) = &whole {
        assert_eq!(payload[..], input.bytes[CONTROL_LEN..]);
    }
    whole.is_ok()
}

fn main() -> ExitCode {
    let mut numbers = std::env::args().skip(1).map(|word| word.parse().expect("a number"));
    let (runs, seed) = (numbers.next().unwrap_or(RUNS), numbers.next().unwrap_or(SEED));
    let mut dice = Dice::new(seed);
    let mut corpus = input::whole_messages();
    let whole = corpus.len() as u64;
    let (mut ways, mut accepted) = (BTreeSet::new(), 0);
    for run in 0..whole + runs {
        let input = match corpus.get(run as usize).filter(|_| run < whole) {
            Some(input) => input.clone(),
            None => Input::damaged(&corpus, &mut dice),
        };
        coverage::clear();
        let Ok(well) = catch_unwind(AssertUnwindSafe(|| check(&input))) else {
            eprintln!("found in run {run} of seed {seed}: {input:?}");
            return ExitCode::FAILURE;
        };
        let before = ways.len();
        coverage::collect(&mut ways);
        accepted += u64::from(well);
        if run < whole {
            assert!(well, "a whole message was refused: {input:?}");
        } else if ways.len() > before && corpus.len() < CORPUS_MAX {
            corpus.push(input);
        }
    }
    let (found, refused) = (corpus.len() as u64 - whole, whole + runs - accepted);
    println!("{runs} runs: {accepted} accepted, {refused} refused, {found} took new ways");
    // Else it tests nothing: it sees no edges, or damages too much or too little.
    let sees = found > 0 && accepted > runs / 100 && refused > runs / 100;
    if sees { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
