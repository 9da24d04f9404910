//! How a stripe lies at agents: from the content id of a page and its set of agents follows which stripe it is of, and which agent has it.

use crate::agents::AgentSet;
use crate::ids::{AgentId, ContentId};
use std::fmt;
use std::ops::Range;

/// Most pages of a stripe.
pub const DATA_MAX: usize = 12;
/// Most parity parts of a stripe.
pub const PARITY_MAX: usize = 4;
const _: () = assert!(DATA_MAX + PARITY_MAX <= u16::BITS as usize, "a bit for each part");

/// `K+M`: a stripe has K pages and M parity parts, each at another agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    data: u8,
    parity: u8,
}

/// A stripe, by its number. Numbers are never used again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct StripeId(pub(crate) u64);

/// Which part of its stripe a part is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// The bytes of a page.
    Data(u8),
    /// A sum of all pages.
    Parity(u8),
}

/// A part of a stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Names its bytes.
    pub id: ContentId,
    /// Who has them, or is to get them.
    pub agent: AgentId,
    /// Which part it is.
    pub role: Role,
}

impl Shape {
    /// `None` but for 2 to [`DATA_MAX`] pages and 1 to [`PARITY_MAX`] parity parts. (Of a single page there would be copies.)
    pub const fn new(data: u8, parity: u8) -> Option<Shape> {
        let is_data = 2 <= data && data as usize <= DATA_MAX;
        let is_parity = 1 <= parity && parity as usize <= PARITY_MAX;
        if is_data && is_parity { Some(Shape { data, parity }) } else { None }
    }

    /// The shape in a word; never 0.
    pub(crate) const fn bits(self) -> u64 {
        (self.data as u64) << 8 | self.parity as u64
    }

    /// What [`Shape::bits`] has told; `None` of other words.
    pub(crate) const fn from_bits(word: u64) -> Option<Shape> {
        if word >> 16 != 0 { None } else { Shape::new((word >> 8) as u8, word as u8) }
    }

    /// K: pages of a full stripe.
    pub const fn data(self) -> usize {
        self.data as usize
    }

    /// M: parity parts of each stripe, and how many of its agents may be lost at once.
    pub const fn parity(self) -> usize {
        self.parity as usize
    }

    /// K+M: parts of a full stripe, and agents of each stripe.
    pub const fn parts(self) -> usize {
        self.data() + self.parity()
    }

    /// Pages of a stripe of so many agents: fewer than K where there are fewer than K+M agents, so that each part is still at another one, and none where there
    /// are no more than M.
    pub const fn data_at(self, agents: usize) -> usize {
        let data = agents.saturating_sub(self.parity());
        if data < self.data() { data } else { self.data() }
    }

    /// The ids of a content's stripe.
    pub const fn ids_of(self, id: ContentId) -> Range<ContentId> {
        let first = self.stripe_of(id).0 * self.parts() as u64;
        ContentId(first)..ContentId(first + self.parts() as u64)
    }

    /// The stripe of a content.
    pub const fn stripe_of(self, id: ContentId) -> StripeId {
        StripeId(id.0 / self.parts() as u64)
    }

    /// Which part of its stripe a content is.
    pub const fn role_of(self, id: ContentId) -> Role {
        let position = (id.0 % self.parts() as u64) as u8;
        match position.checked_sub(self.data) {
            None => Role::Data(position),
            Some(row) => Role::Parity(row),
        }
    }

    /// The part of a content that was written to these agents, M+1 to K+M of them. Its place among them, in the order of their numbers, is another one in the
    /// next stripe: so each has as many parity parts as the others. `None` if a stripe of so many agents has no such part.
    pub fn part(self, id: ContentId, members: AgentSet) -> Option<Part> {
        let (count, role) = (members.len() as usize, self.role_of(id));
        let data = self.data_at(count);
        let position = match role {
            Role::Data(page) => Some(usize::from(page)).filter(|&page| page < data)?,
            Role::Parity(row) => data + usize::from(row),
        };
        if data == 0 || count > self.parts() {
            return None;
        }
        let place = (position as u64 + self.stripe_of(id).0) % count as u64;
        members.agents().nth(place as usize).map(|agent| Part { id, agent, role })
    }

    /// The contents of a stripe with so many pages: those, and the parity.
    pub(crate) fn contents(self, stripe: StripeId, pages: u8) -> impl Iterator<Item = ContentId> {
        let positions = (0..pages).chain(self.data..self.data + self.parity);
        let first = stripe.0 * self.parts() as u64;
        positions.map(move |position| ContentId(first + u64::from(position)))
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.data, self.parity)
    }
}
