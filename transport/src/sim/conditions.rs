//! What happens to messages.

use std::ops::RangeInclusive;
use std::time::Duration;

/// What happens to one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It arrives after this.
    Arrives(Duration),
    /// It never arrives.
    Lost,
    /// It arrives after the first of these, and once more after the second.
    Twice(Duration, Duration),
}

/// A network's conditions. Probabilities are in 1/1,000,000.
#[derive(Clone, Debug)]
pub struct Conditions {
    /// How long a message is under way. Where this varies, messages overtake each other.
    pub delay_us: RangeInclusive<u64>,
    /// What a node sends to another one, in bytes a second.
    pub bandwidth: u64,
    /// Messages that are lost.
    pub lost_ppm: u64,
    /// Requests that come twice.
    pub twice_ppm: u64,
    /// Messages that come late.
    pub late_ppm: u64,
    /// How late those come.
    pub late: Duration,
}

impl Conditions {
    /// A LAN on which nothing goes wrong.
    pub fn lan() -> Conditions {
        Conditions {
            delay_us: 10..=10,
            bandwidth: 3 << 30,
            lost_ppm: 0,
            twice_ppm: 0,
            late_ppm: 0,
            late: Duration::ZERO,
        }
    }

    /// Draws what happens to the next message; `random` gives random numbers.
    pub fn draw(&self, random: &mut dyn FnMut() -> u64) -> Fate {
        let mut happens = |ppm: u64| ppm > 0 && random() % 1_000_000 < ppm;
        if happens(self.lost_ppm) {
            return Fate::Lost;
        }
        let (twice, late) = (happens(self.twice_ppm), happens(self.late_ppm));
        let extra = if late { self.late } else { Duration::ZERO };
        let mut delay = || {
            let span = self.delay_us.end() - self.delay_us.start() + 1;
            Duration::from_micros(self.delay_us.start() + random() % span)
        };
        let first = delay() + extra;
        if twice { Fate::Twice(first, delay() + self.late) } else { Fate::Arrives(first) }
    }
}
