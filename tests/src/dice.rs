//! Random numbers that are the same each time, for tests and benchmarks. (It uses nothing else: transport/fuzz has it too.)

/// The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA'14): a number for each number, without any likeness.
pub fn mix(number: u64) -> u64 {
    let z = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

/// SplitMix64.
pub struct Dice(u64);

impl Dice {
    /// The numbers of a seed.
    pub fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    /// The numbers of one of several threads.
    pub fn of_thread(seed: u64, thread: usize) -> Dice {
        Dice(mix(seed ^ (thread as u64) << 32))
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        let bits = mix(self.0);
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        bits
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.bits() % limit
    }

    /// The place of one of `count` things.
    pub fn place(&mut self, count: usize) -> usize {
        self.below(count as u64) as usize
    }

    /// Any order is as likely as any other (Fisher and Yates).
    pub fn shuffle<T>(&mut self, things: &mut [T]) {
        (1..things.len()).rev().for_each(|at| things.swap(at, self.place(at + 1)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_paper() {
        let mut dice = Dice::new(1_234_567);
        let first = [dice.bits(), dice.bits(), dice.bits()];
        assert_eq!(
            first,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    #[test]
    fn a_shuffle_loses_nothing_and_leaves_little_in_its_place() {
        let mut things: Vec<usize> = (0..1000).collect();
        Dice::of_thread(1, 2).shuffle(&mut things);
        let kept = things.iter().enumerate().filter(|(at, thing)| at == *thing).count();
        things.sort_unstable();
        assert!(kept < 10 && things.into_iter().eq(0..1000), "{kept} stay");
    }
}
