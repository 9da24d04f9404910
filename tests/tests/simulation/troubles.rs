//! What goes wrong, and when. Agents lose their pages, or are away for long, within what the redundancy promises: while any copies are missing for that,
//! fewer agents than a page has copies. An agent that others fill takes no copies: none fails meanwhile.

use std::time::Duration;

use gms_policy::redundancy::Redundancy;
use gms_policy::stripes::Shape;
use gms_tests::Dice;

use crate::ledger::LANE_OF_WRITES;

/// Longest time for which an agent is away that nobody else stands in for: shorter than the 15 s after which a page counts as lost.
const AWAY_US: u64 = 6_000_000;
/// Longer than those 15 s, and than the 10 s after which pages get other copies.
const AWAY_LONG_US: u64 = 20_000_000;
/// One lane may hear nothing for this long: meanwhile pages are given to agents of which it does not know yet that they are away.
const LANE_AWAY_US: u64 = 8_000_000;
/// It takes 10 s until an agent that is away is not expected back, and pages get other copies.
const TRIES: u32 = 400;
/// A grace that nobody waits for in vain.
const LONG_GRACE: Duration = Duration::from_secs(10_000);

/// What happens to an agent, by its number, or to the links of one of the pager's lanes with it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Trouble {
    Cut(usize, usize),
    Mend(usize, usize),
    Pause(usize, Duration),
    Slow(usize, Duration),
    /// Others take its frames, but for so many.
    Fill(usize, u32),
    Empty(usize),
    Lie(usize),
    Honest(usize),
    Crash(usize),
    Start(usize),
    /// It is to end within the grace.
    Drain(usize, Duration),
}

/// After how long each happens.
pub(crate) type Plan = Vec<(Duration, Trouble)>;

/// An agent that fails, so that others must stand in for it.
#[derive(Clone, Debug)]
pub(crate) struct Loss {
    pub agent: usize,
    /// After how long it may begin at the earliest.
    pub after: Duration,
    /// From its beginning on.
    pub plan: Plan,
    /// Whether the agent's pages may be lost, or be out of reach for too long.
    pub is_lost: bool,
    /// How often it is looked whether it may begin.
    pub tries: u32,
}

fn within(dice: &mut Dice, longest_us: u64) -> Duration {
    Duration::from_micros(dice.below(longest_us))
}

/// The redundancy of a run on so many agents.
pub(crate) fn draw_redundancy(dice: &mut Dice, agents: usize) -> Redundancy {
    let parity = |data, parity| Redundancy::Parity(Shape::new(data, parity).expect("a shape"));
    let of = [
        Redundancy::None,
        Redundancy::Auto,
        Redundancy::Replica(2),
        Redundancy::Replica(3),
        parity(2, 1),
        parity(3, 1),
        parity(2, 2),
    ];
    loop {
        let redundancy = of[dice.place(of.len())];
        if redundancy.copies(agents) as usize <= agents {
            return redundancy;
        }
    }
}

/// What an agent gets over by itself, soon enough that nobody else need stand in for it.
pub(crate) fn draw_hiccups(dice: &mut Dice, agents: usize, lanes: usize) -> Plan {
    let mut plan = Plan::new();
    for _ in 0..dice.below(4) {
        let at = within(dice, 400_000);
        let longest = if dice.below(4) == 0 { AWAY_US } else { 1_000_000 };
        let (span, agent) = (within(dice, longest), dice.place(agents));
        match dice.below(8) {
            0..=3 => {
                let lane = dice.place(lanes);
                plan.push((at, Trouble::Cut(lane, agent)));
                plan.push((at + span, Trouble::Mend(lane, agent)));
            }
            4 | 5 => plan.push((at, Trouble::Pause(agent, span))),
            6 => plan.push((at, Trouble::Slow(agent, span))),
            _ => {
                plan.push((at, Trouble::Fill(agent, dice.below(16) as u32)));
                plan.push((at + span, Trouble::Empty(agent)));
            }
        }
    }
    plan
}

/// One of more agents than parity makes good, which are restarted empty at once.
pub(crate) fn draw_restart(dice: &mut Dice, agent: usize) -> Loss {
    let back = within(dice, 1_000_000);
    let plan = vec![(Duration::ZERO, Trouble::Crash(agent)), (back, Trouble::Start(agent))];
    Loss { agent, after: within(dice, 500_000), plan, is_lost: true, tries: TRIES }
}

/// How an agent fails, if another one can take its pages (`has_others`).
pub(crate) fn draw_loss(dice: &mut Dice, agent: usize, lanes: usize, has_others: bool) -> Loss {
    let (after, span) = (within(dice, 500_000), within(dice, AWAY_LONG_US));
    let mut is_lost = true;
    let plan = match dice.below(8) {
        0 => {
            let mut plan = vec![(Duration::ZERO, Trouble::Crash(agent))];
            // A workload that has no page there, and nobody else to give one to, waits until it is back.
            let back = (Duration::from_micros(AWAY_LONG_US), Trouble::Start(agent));
            plan.extend((!has_others).then_some(back));
            plan
        }
        1 | 2 => vec![(Duration::ZERO, Trouble::Crash(agent)), (span, Trouble::Start(agent))],
        3 => vec![(Duration::ZERO, Trouble::Pause(agent, span))],
        4 => {
            // From its beginning on nothing is written there.
            let mut cut = |lane| {
                let at =
                    if lane == LANE_OF_WRITES { Duration::ZERO } else { within(dice, 100_000) };
                [(at, Trouble::Cut(lane, agent)), (at + span, Trouble::Mend(lane, agent))]
            };
            (0..lanes).flat_map(&mut cut).collect()
        }
        5 => {
            let (lane, span) = (dice.place(lanes), within(dice, LANE_AWAY_US));
            vec![(Duration::ZERO, Trouble::Cut(lane, agent)), (span, Trouble::Mend(lane, agent))]
        }
        6 if has_others => {
            is_lost = dice.below(3) == 0;
            let grace = if is_lost { within(dice, 2_000_000) } else { LONG_GRACE };
            let mut plan = vec![(Duration::ZERO, Trouble::Drain(agent, grace))];
            // If it has ended by then.
            plan.extend((dice.below(2) == 0).then_some((span, Trouble::Start(agent))));
            plan
        }
        _ => vec![(Duration::ZERO, Trouble::Lie(agent)), (span, Trouble::Honest(agent))],
    };
    Loss { agent, after, plan, is_lost, tries: TRIES }
}
