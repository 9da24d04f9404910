//! How much of its host's memory an agent exports: an amount, or what the host can spare.
//!
//! What the host can spare is what it has available and what the agent's frames take, less a *reserve*. That sum does not change when pages come or go, so
//! the law has no loop through the agent itself: it follows the other programs of the host. It shrinks at once and grows slowly (additive increase would
//! take an hour on a large host, a part of what is missing takes as long on any), and neither within a dead band, which the noise of two readings taken
//! one after the other does not leave.
//!
//! Tasks that wait for memory while little is available say that not all of it can be had: it lies on another node, or in pieces. But a container that
//! thrashes at a limit of its own says the same, for as long as it runs. So stalls make the reserve half as large again, however many there are, until
//! there has been none for a while.

use crate::ids::Bytes;
use crate::limits::{
    EXPORT_BAND_PART, EXPORT_CALM, EXPORT_GROW_TIME, FILL_BYTES_PER_S, HOST_LOOK_MAX,
    HOST_LOOK_MIN, RESERVE_MAX, RESERVE_MIN, RESERVE_PART,
};
use crate::size::{Size, SizeError};
use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// What the user wants exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Export {
    /// This, whatever happens on the host.
    Amount(Size),
    /// What the host can spare, within bounds.
    Auto {
        /// At least this, if it is said.
        floor: Option<Size>,
        /// At most this; all memory if it is not said.
        ceiling: Option<Size>,
    },
}

/// Between which amounts an export may be. They are the same for one that is an amount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportRange {
    /// It is never less.
    pub floor: Bytes,
    /// Nor more.
    pub ceiling: Bytes,
}

impl Export {
    /// In bytes, percentages being of `whole`.
    pub fn of(self, whole: Bytes) -> ExportRange {
        match self {
            Self::Amount(size) => ExportRange::fixed(size.of(whole)),
            Self::Auto { floor, ceiling } => {
                let ceiling = ceiling.map_or(whole, |size| size.of(whole));
                let floor = floor.map_or(Bytes(0), |size| size.of(whole));
                ExportRange { floor: Bytes(floor.0.min(ceiling.0)), ceiling }
            }
        }
    }
}

impl ExportRange {
    /// Just this.
    pub const fn fixed(bytes: Bytes) -> Self {
        Self { floor: bytes, ceiling: bytes }
    }

    /// Whether the export follows the host.
    pub const fn is_auto(self) -> bool {
        self.floor.0 != self.ceiling.0
    }

    fn clamp(self, bytes: u64) -> u64 {
        bytes.clamp(self.floor.0, self.ceiling.0)
    }
}

/// Why a text is no export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportError {
    /// A size that is none.
    Size(SizeError),
    /// The floor is above the ceiling.
    Upside,
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size(error) => error.fmt(f),
            Self::Upside => f.write_str("a range whose first size is not less than its second"),
        }
    }
}

impl std::error::Error for ExportError {}

impl FromStr for Export {
    type Err = ExportError;

    /// A [`Size`], `auto`, or `auto:FLOOR..CEILING`, of which either may be left out.
    fn from_str(text: &str) -> Result<Self, ExportError> {
        let size = |text: &str| text.parse().map_err(ExportError::Size);
        let Some(rest) = text.strip_prefix("auto") else { return size(text).map(Self::Amount) };
        if rest.is_empty() {
            return Ok(Self::Auto { floor: None, ceiling: None });
        }
        let malformed = ExportError::Size(SizeError::Malformed);
        let bounds = rest.strip_prefix(':').and_then(|bounds| bounds.split_once(".."));
        let (floor, ceiling) = bounds.ok_or(malformed)?;
        let bound = |text: &str| (!text.is_empty()).then(|| size(text)).transpose();
        let (floor, ceiling) = (bound(floor)?, bound(ceiling)?);
        match (floor, ceiling) {
            (None, None) => Err(malformed),
            (Some(Size::Bytes(a)), Some(Size::Bytes(b))) if a >= b => Err(ExportError::Upside),
            (Some(Size::Percent(a)), Some(Size::Percent(b))) if a >= b => Err(ExportError::Upside),
            _ => Ok(Self::Auto { floor, ceiling }),
        }
    }
}

/// The host as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostView {
    /// What it could give to a program.
    pub available: Bytes,
    /// What the agent's frames take of it, free ones included.
    pub occupied: Bytes,
    /// Tasks have waited for memory since the last look.
    pub stalls: bool,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostVerdict {
    /// Most that pages may take from now on.
    pub export: Bytes,
    /// The memory of free frames is to be given back at once: others take it.
    pub pressed: bool,
    /// When to look again.
    pub look_again: Duration,
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct ExportLaw {
    range: ExportRange,
    reserve: u64,
    export: u64,
    last: Instant,
    /// When tasks last waited for memory of which little was available.
    stalled: Option<Instant>,
    /// Since when more could be spared, without a break.
    calm_since: Instant,
}

impl ExportLaw {
    /// For a host with `whole` memory, which is so now: the export is what it can spare.
    pub fn new(now: Instant, range: ExportRange, whole: Bytes, host: HostView) -> Self {
        let reserve = (whole.0 / RESERVE_PART).clamp(RESERVE_MIN, RESERVE_MAX).min(whole.0 / 2);
        let mut law = Self { range, reserve, export: 0, last: now, stalled: None, calm_since: now };
        law.export = range.clamp(law.spared(now, host));
        law
    }

    /// The export as of now.
    pub fn export(&self) -> Bytes {
        Bytes(self.export)
    }

    /// What is left to the host.
    pub fn reserve(&self) -> Bytes {
        Bytes(self.reserve)
    }

    fn spared(&self, now: Instant, host: HostView) -> u64 {
        let is_recent = |at| now.saturating_duration_since(at) < EXPORT_CALM;
        let doubted = if self.stalled.is_some_and(is_recent) { self.reserve / 2 } else { 0 };
        (host.available.0.saturating_add(host.occupied.0)).saturating_sub(self.reserve + doubted)
    }

    /// Takes in a look at the host.
    pub fn handle_look(&mut self, now: Instant, host: HostView) -> HostVerdict {
        let since = now.saturating_duration_since(self.last);
        self.last = now;
        let near = host.available.0 < 2 * self.reserve;
        if host.stalls && near {
            self.stalled = Some(now);
        }
        let (spared, band) = (self.spared(now, host), self.reserve / EXPORT_BAND_PART);
        // At rest an agent that is full leaves just the reserve: that alone costs no free frame its memory.
        let pressed = near && spared.saturating_add(band) < self.export.max(host.occupied.0);
        if spared.saturating_add(band) < self.export {
            self.export = spared;
        }
        if spared <= self.export.saturating_add(band) {
            self.calm_since = now;
        } else if now.saturating_duration_since(self.calm_since) >= EXPORT_CALM {
            let most = since.min(Duration::from_secs(1)).as_micros();
            let missing = u128::from(spared - self.export);
            self.export += (missing * most / EXPORT_GROW_TIME.as_micros()) as u64;
        }
        self.export = self.range.clamp(self.export);
        let look_again = self.look_again(host);
        HostVerdict { export: Bytes(self.export), pressed, look_again }
    }

    /// Before a program that fills memory as fast as it can has taken what is left of the reserve's second half; seldom if there is nothing to give.
    fn look_again(&self, host: HostView) -> Duration {
        if host.occupied.0 <= self.range.floor.0 {
            return HOST_LOOK_MAX;
        }
        let left = host.available.0.saturating_sub(self.reserve / 2);
        let micros = u128::from(left) * 1_000_000 / u128::from(FILL_BYTES_PER_S);
        Duration::from_micros(micros as u64).clamp(HOST_LOOK_MIN, HOST_LOOK_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;
    const WHOLE: u64 = 4096 * MIB;
    const RESERVE: u64 = WHOLE / RESERVE_PART;
    const ALL: ExportRange = ExportRange { floor: Bytes(0), ceiling: Bytes(WHOLE) };

    #[test]
    fn exports_are_read() {
        let bytes = |n| Some(Size::Bytes(Bytes(n)));
        let auto = |floor, ceiling| Ok(Export::Auto { floor, ceiling });
        assert_eq!("4G".parse(), Ok(Export::Amount(Size::Bytes(Bytes(4 << 30)))));
        assert_eq!("auto".parse(), auto(None, None));
        assert_eq!("auto:1G..8G".parse(), auto(bytes(1 << 30), bytes(8 << 30)));
        assert_eq!("auto:10%..".parse(), auto(Some(Size::Percent(10)), None));
        assert_eq!("auto:..8G".parse(), auto(None, bytes(8 << 30)));
        for text in ["auto:", "auto:..", "auto:1G", "auto8G", "auto:1G..2Q", "autos", "Auto"] {
            assert_eq!(
                text.parse::<Export>().map_err(|error| error.to_string().len() > 9),
                Err(true)
            );
        }
        for text in ["auto:8G..1G", "auto:1G..1G", "auto:50%..40%"] {
            assert_eq!(text.parse::<Export>(), Err(ExportError::Upside));
        }
        let of = |text: &str| text.parse::<Export>().expect("one").of(Bytes(1000));
        assert_eq!(of("40%"), ExportRange::fixed(Bytes(400)));
        assert_eq!(of("auto:10%.."), ExportRange { floor: Bytes(100), ceiling: Bytes(1000) });
        // Of another kind than the ceiling, it may turn out to be above it.
        assert_eq!(of("auto:2K..50%"), ExportRange::fixed(Bytes(500)));
        assert!(of("auto").is_auto() && !of("8").is_auto());
    }

    /// A host with some other programs and one agent, stepped in simulated time.
    struct Host {
        now: Instant,
        others: u64,
        /// Pages held, and free frames that have their memory still.
        held: u64,
        free: u64,
        law: ExportLaw,
        /// Whether tasks wait for memory all the time.
        stalls: bool,
        shrunk: u32,
        grown: u32,
    }

    impl Host {
        fn new(range: ExportRange, others: u64) -> Host {
            let now = Instant::now();
            let host =
                HostView { available: Bytes(WHOLE - others), occupied: Bytes(0), stalls: false };
            let law = ExportLaw::new(now, range, Bytes(WHOLE), host);
            Host { now, others, held: 0, free: 0, law, stalls: false, shrunk: 0, grown: 0 }
        }

        fn available(&self) -> u64 {
            WHOLE.saturating_sub(self.others + self.held + self.free)
        }

        /// A look, and what the agent and its pagers do until the next: `wanted` bytes of pages are to be there, `moves` bytes a second can leave.
        fn step(&mut self, wanted: u64, moves: u64) -> Duration {
            let host = HostView {
                available: Bytes(self.available()),
                occupied: Bytes(self.held + self.free),
                stalls: self.stalls,
            };
            let before = self.law.export().0;
            let HostVerdict { export, pressed, look_again } = self.law.handle_look(self.now, host);
            self.shrunk += u32::from(export.0 < before);
            self.grown += u32::from(export.0 > before);
            if pressed {
                self.free = 0;
            }
            if self.held > export.0 {
                let leave = (u128::from(moves) * look_again.as_micros() / 1_000_000) as u64;
                let leave = leave.min(self.held - export.0);
                (self.held, self.free) = (self.held - leave, self.free + leave);
            } else {
                let come = wanted.saturating_sub(self.held).min(export.0 - self.held);
                self.held += come;
                self.free = self.free.saturating_sub(come);
            }
            self.now += look_again;
            look_again
        }

        fn run(&mut self, time: Duration, wanted: u64) {
            let end = self.now + time;
            while self.now < end {
                self.step(wanted, 400 * MIB);
            }
        }
    }

    #[test]
    fn on_a_host_that_does_not_change_the_export_comes_to_rest() {
        let mut host = Host::new(ALL, 1024 * MIB);
        host.run(Duration::from_secs(120), WHOLE);
        let fits = WHOLE - 1024 * MIB - RESERVE;
        assert_eq!((host.shrunk, host.held), (0, fits));
        // Others take some more, and stay so: it shrinks by that, once.
        for more in 1..4 {
            host.others += 128 * MIB;
            host.run(Duration::from_secs(40), WHOLE);
            assert_eq!((host.shrunk, host.held), (more, fits - u64::from(more) * 128 * MIB));
        }
    }

    #[test]
    fn what_others_let_go_comes_back_slowly_and_after_a_calm() {
        let mut host = Host::new(ALL, 3072 * MIB);
        let before = host.law.export().0;
        host.others = 1024 * MIB;
        host.run(EXPORT_CALM - Duration::from_secs(1), 0);
        assert_eq!(host.law.export().0, before);
        host.run(Duration::from_secs(3), 0);
        let soon = host.law.export().0;
        assert!(soon > before && soon < before + 512 * MIB, "{before} {soon}");
        host.run(Duration::from_secs(180), 0);
        assert!(host.law.export().0 > WHOLE - 1024 * MIB - 2 * RESERVE);
    }

    /// A build, say: memory that is taken and let go every few seconds is never exported.
    #[test]
    fn a_host_that_swings_does_not_swing_the_export() {
        let mut host = Host::new(ALL, 1024 * MIB);
        host.run(Duration::from_secs(30), WHOLE);
        let swing = |host: &mut Host| {
            host.others = 2048 * MIB;
            host.run(Duration::from_secs(5), WHOLE);
            host.others = 1024 * MIB;
            host.run(Duration::from_secs(5), WHOLE);
        };
        swing(&mut host);
        let before = (host.shrunk, host.grown);
        (0..20).for_each(|_| swing(&mut host));
        assert_eq!((host.shrunk, host.grown), before);
        assert!(host.law.export().0 < WHOLE - 2048 * MIB);
    }

    #[test]
    fn stalls_shrink_it_only_where_memory_is_short_by_the_other_sign_too() {
        let (mut host, now) = (Host::new(ALL, 1024 * MIB), Instant::now());
        let look = |available| HostView {
            available: Bytes(available),
            occupied: Bytes(1024 * MIB),
            stalls: true,
        };
        let export = host.law.export();
        // A container that thrashes at its own limit.
        assert_eq!(host.law.handle_look(now, look(2048 * MIB)).export, export);
        let verdict = host.law.handle_look(now, look(RESERVE + 1));
        assert!(verdict.export.0 < 1024 * MIB && verdict.pressed, "{verdict:?}");
    }

    /// Of another container, say, which thrashes at a limit of its own: the host has its reserve all the time.
    #[test]
    fn stalls_that_do_not_end_cost_a_full_agent_half_a_reserve_once() {
        let mut host = Host::new(ALL, 1024 * MIB);
        host.run(Duration::from_secs(10), WHOLE);
        let full = host.held;
        host.stalls = true;
        for _ in 0..60 {
            host.run(Duration::from_secs(2), WHOLE);
            assert_eq!((host.shrunk, host.held), (1, full - RESERVE / 2));
        }
        host.stalls = false;
        host.run(Duration::from_secs(180), WHOLE);
        assert!(host.held + RESERVE / EXPORT_BAND_PART >= full, "{} of {full}", host.held);
    }

    #[test]
    fn free_frames_of_a_full_agent_keep_their_memory_until_others_take_it() {
        let mut host = Host::new(ALL, 1024 * MIB);
        host.run(Duration::from_secs(10), WHOLE);
        // Pages go and come: at each moment some frames are free.
        let free = 64 * MIB;
        (host.held, host.free) = (host.held - free, free);
        for noise in (0..RESERVE / EXPORT_BAND_PART).step_by(1 << 20) {
            host.others = 1024 * MIB + noise;
            host.run(Duration::from_secs(1), 0);
            assert_eq!(host.free, free, "given back for {noise} B");
        }
        host.others += 2 * MIB;
        host.run(Duration::from_secs(1), 0);
        assert_eq!(host.free, 0);
        // Of pages that leave because the export has shrunk nothing is kept either.
        host.others += 128 * MIB;
        host.run(Duration::from_secs(10), WHOLE);
        assert!(host.held <= host.law.export().0 && host.free <= RESERVE / EXPORT_BAND_PART);
    }

    proptest! {
        /// Who fills memory as fast as is assumed, where the agent holds free frames, finds room at each moment until only pages are left.
        #[test]
        fn a_program_that_fills_memory_finds_it(
            others in 0..2048u64, free in 0..2048u64, held in 0..512u64,
        ) {
            let mut host = Host::new(ALL, others * MIB);
            host.held = (held * MIB).min(host.law.export().0);
            host.free = (free * MIB).min(WHOLE - host.others - host.held);
            while host.others + host.held + RESERVE < WHOLE {
                let pause = host.step(0, 0);
                let filled = (u128::from(FILL_BYTES_PER_S) * pause.as_micros() / 1_000_000) as u64;
                // The last one may take more than there is if it does not stop.
                let filled = filled.min(WHOLE - host.others - host.held);
                host.others += filled;
                prop_assert!(host.others + host.held + host.free <= WHOLE, "nothing left");
            }
        }

        /// Whatever is told, the export is within its bounds, and a fixed one is what it was.
        #[test]
        fn bounds_hold(
            looks in prop::collection::vec((any::<u64>(), any::<u64>(), any::<bool>(), 0..2000u64), 1..50),
            (floor, ceiling) in (0..WHOLE, 0..WHOLE),
        ) {
            let range = ExportRange { floor: Bytes(floor.min(ceiling)), ceiling: Bytes(ceiling) };
            let mut now = Instant::now();
            let view = |&(available, occupied, stalls, _): &(u64, u64, bool, u64)| HostView {
                available: Bytes(available >> 16), occupied: Bytes(occupied >> 16), stalls,
            };
            let mut law = ExportLaw::new(now, range, Bytes(WHOLE), view(&looks[0]));
            for look in &looks {
                now += Duration::from_millis(look.3);
                let HostVerdict { export, look_again, .. } = law.handle_look(now, view(look));
                prop_assert!((range.floor.0..=range.ceiling.0).contains(&export.0));
                prop_assert!((HOST_LOOK_MIN..=HOST_LOOK_MAX).contains(&look_again));
            }
        }
    }
}
