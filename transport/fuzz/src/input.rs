//! Messages, whole and damaged.

use zerocopy::IntoBytes;

use crate::dice::Dice;
use crate::message::{
    CONTROL_LEN, Control, Op, PAGE_LEN, PageDescriptor, PagesReply, Status, TAG_LEN, Version,
    WorkloadId, v1,
};

/// Longest input; a page and its descriptor fit.
const BYTES_MAX: usize = 2 * CONTROL_LEN + 2 * (PageDescriptor::LEN + PAGE_LEN + TAG_LEN);

/// What is fed to a reader.
#[derive(Clone, Debug)]
pub struct Input {
    /// The reader expects a reply.
    pub replies: bool,
    /// Of which version.
    pub version: Version,
    pub bytes: Vec<u8>,
    /// Lengths of chunks; the last takes what is left.
    cuts: Vec<usize>,
}

impl Input {
    pub fn chunks(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = &self.bytes[..];
        let lengths = self.cuts.iter().copied().chain([usize::MAX]);
        lengths.map(move |length| rest.split_off(..length.min(rest.len())).unwrap_or_default())
    }

    /// One of the corpus, changed at one to four places.
    pub fn damaged(corpus: &[Input], dice: &mut Dice) -> Input {
        let mut input = corpus[dice.place(corpus.len())].clone();
        for _ in 0..=dice.place(4) {
            input.damage(corpus, dice);
        }
        input.bytes.truncate(BYTES_MAX);
        input
    }

    fn damage(&mut self, corpus: &[Input], dice: &mut Dice) {
        let at = match dice.place(4) {
            // The payload is not looked at.
            0 => dice.place(self.bytes.len().max(1)),
            _ => dice.place(CONTROL_LEN.min(self.bytes.len()).max(1)),
        };
        match dice.place(9) {
            0 if !self.bytes.is_empty() => self.bytes[at] ^= 1 << dice.place(8),
            1 if !self.bytes.is_empty() => self.bytes[at] = dice.bits() as u8,
            2 if !self.bytes.is_empty() => self.bytes[at] = [0, 1, 0x7f, 0xff][dice.place(4)],
            3 => self.bytes.truncate(dice.place(self.bytes.len() + 1)),
            4 => self.bytes.resize(self.bytes.len() + dice.place(300), dice.bits() as u8),
            5 => {
                // The head of one before the rest of another.
                let other = &corpus[dice.place(corpus.len())].bytes;
                let from = at.min(other.len());
                self.bytes.splice(at.min(self.bytes.len()).., other[from..].iter().copied());
            }
            6 => self.cuts.push(dice.place(2 * CONTROL_LEN)),
            7 => self.cuts = (0..dice.place(9)).map(|_| dice.place(PAGE_LEN)).collect(),
            8 => self.replies ^= dice.place(8) == 0,
            _ => {}
        }
    }
}

/// One of each kind, such as the readers accept.
pub fn whole_messages() -> Vec<Input> {
    let id = WorkloadId::default();
    let requests = [
        Control::hello(0, id, 60_000),
        Control::get(0, id, 7),
        Control::get_many(0, id, 2),
        Control::put(0, id, 1),
        Control::discard(0, id, 3),
        Control::grant(0, id, 64),
        Control::request(Op::Status, 0, id),
    ];
    let mut replies = vec![Control::get_many(0, id, 2).reply(Status::NotFound)];
    for done in 1..=3 {
        replies.push(Control::get_many(0, id, 2).reply(Status::Ok).with_done(done));
    }
    let requests = requests.into_iter().map(|control| (false, control));
    let all: Vec<_> = requests.chain(replies.into_iter().map(|control| (true, control))).collect();
    let sized = all.iter().filter(|(_, control)| matches!(control.op(), Some(Op::Get | Op::Put)));
    let sized = sized.map(|&(replies, control)| (replies, control.with_lengths()));
    // Version 1 has no lengths.
    let of_both = |&one: &_| [Version::V2, Version::V1].map(|version| whole(version, one));
    all.iter().flat_map(of_both).chain(sized.map(|one| whole(Version::V2, one))).collect()
}

/// With the payload that is due.
fn whole(version: Version, (replies, mut control): (bool, Control)) -> Input {
    let count = usize::from(control.count());
    let tag = if control.has_lengths() { TAG_LEN } else { 0 };
    let page = PageDescriptor::LEN + PAGE_LEN + tag;
    let length = match (control.op().expect("a known one"), replies) {
        (Op::Get, true) => control.answer::<PagesReply>().done.count_ones() as usize * page,
        (Op::Get, false) if count > 1 => count * PageDescriptor::LEN,
        (Op::Put, false) => count * page,
        (Op::Discard, false) => count * 8,
        _ => 0,
    };
    control.payload_len = length as u32;
    let payload = (0..length).map(|at| at as u8);
    let head = match version {
        Version::V1 => v1::encode(&control).expect("it has all of these"),
        Version::V2 => control.as_bytes().try_into().expect("128 bytes"),
    };
    let bytes = head.into_iter().chain(payload).collect();
    Input { replies, version, bytes, cuts: Vec::new() }
}
