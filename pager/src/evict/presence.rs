//! What the user is told of agents that cannot be used, that leave, and that are back. The state is looked at often, and told where it differs from what was told
//! last: what passes between two looks, or comes more often than [`Pace`] allows, is not told, but where it ends is.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use gms_policy::ids::AgentId;
use gms_policy::pace::Pace;
use gms_transport::Transport;

use super::EvictThread;
use crate::sync::lock;

/// How long after a line of an agent another reason for the same may be told.
const REASON_EVERY: Duration = Duration::from_secs(60);
/// For how long after this process was stopped a link that is lost is lost by that: as long as silence is borne, and a handshake takes.
const EXCUSED: Duration = Duration::from_secs(10);
/// For how long some threads may lack a link to an agent before it is away.
const UNREACHED_MAX: Duration = Duration::from_secs(5);

/// An agent as it is now.
#[derive(Clone, Copy, Debug, Default)]
struct Seen<'a> {
    name: &'a str,
    /// Another agent told of it: the start of the session, which tells of agents that do not answer, did not.
    is_learned: bool,
    /// This thread has a link to it.
    up: bool,
    /// All fault threads have.
    reached: bool,
    failure: Option<&'a str>,
    draining: bool,
    /// Pages that it has.
    held: u64,
    /// It has lost what it had since its last line.
    emptied: bool,
}

/// What was told of an agent last.
#[derive(Debug, Default, PartialEq, Eq)]
enum Told {
    /// Left at the first look that finds it usable, or not.
    #[default]
    Nothing,
    Usable,
    Drains,
    /// It cannot be used, for this reason.
    Away(String),
    /// It left when nobody needed it: no reason is told until it is back.
    Left,
}

/// Why an agent is away that this thread has a link to.
pub(super) const UNREACHED: &str = "some threads of gms have no link to it";

#[derive(Debug, Default)]
struct Standing {
    told: Told,
    at: Option<Instant>,
    has_been_used: bool,
    /// Since when some threads have no link to it, though this one has.
    unreached: Option<Instant>,
    pace: Pace,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Presence {
    agents: BTreeMap<AgentId, Standing>,
    /// When this process ran on after it had been stopped, and for how long it had been.
    stopped: Option<(Instant, Duration)>,
}

impl Presence {
    /// This process was stopped for so long.
    pub(super) fn excuse(&mut self, now: Instant, missed: Duration) {
        self.stopped = Some((now, missed));
    }

    /// What is to be told of an agent now.
    fn observe(&mut self, now: Instant, agent: AgentId, seen: Seen<'_>) -> Option<String> {
        let excuse = self.stopped.filter(|(at, _)| now < *at + EXCUSED).map(|(_, missed)| missed);
        self.agents.entry(agent).or_default().observe(now, seen, excuse)
    }
}

impl Standing {
    fn observe(
        &mut self,
        now: Instant,
        seen: Seen<'_>,
        excuse: Option<Duration>,
    ) -> Option<String> {
        let partly = seen.up && !seen.reached;
        self.unreached = partly.then(|| self.unreached.unwrap_or(now));
        let for_long = self.unreached.is_some_and(|since| now >= since + UNREACHED_MAX);
        let (told, text) = match seen.up {
            true if seen.reached => self.usable(seen)?,
            true if !for_long => return None,
            _ => self.away(now, seen, excuse)?,
        };
        if text.is_some() && !self.pace.allows(now) {
            return None;
        }
        self.has_been_used |= matches!(told, Told::Usable | Told::Drains);
        (self.told, self.at) = (told, Some(now));
        text
    }

    /// Of an agent that can be used: what is told of it from now on, and in which words, if that is news.
    fn usable(&self, seen: Seen<'_>) -> Option<(Told, Option<String>)> {
        let name = seen.name;
        let told = if seen.draining { Told::Drains } else { Told::Usable };
        let lost = "it was restarted, or had no link to gms for over a minute; its copies are gone, and are made anew";
        let text = match (&self.told, &told) {
            (Told::Away(_) | Told::Left, _) if seen.emptied => {
                Some(format!("agent {name} answers again: {lost}"))
            }
            (Told::Away(_) | Told::Left, _) if self.has_been_used => {
                Some(format!("agent {name} answers again"))
            }
            (Told::Away(_) | Told::Left, _) => {
                Some(format!("agent {name} answers now, and is used"))
            }
            _ if seen.emptied => Some(format!("agent {name}: {lost}")),
            (Told::Drains, Told::Drains) | (_, Told::Usable) => None,
            _ => Some(format!(
                "agent {name} drains: it is about to end and takes no more pages; those that would have too few copies are copied to others"
            )),
        };
        (text.is_some() || self.told != told).then_some((told, text))
    }

    /// The same of one that cannot.
    fn away(
        &self,
        now: Instant,
        seen: Seen<'_>,
        excuse: Option<Duration>,
    ) -> Option<(Told, Option<String>)> {
        let name = seen.name;
        let of_others = seen.up.then_some(UNREACHED);
        let reason = seen.failure.or(of_others)?;
        let left = format!("agent {name} has drained and ended; no page needed it any more");
        let text = match &self.told {
            Told::Left => return None,
            Told::Away(before) => {
                let is_due = self.at.is_none_or(|at| now >= at + REASON_EVERY);
                if before == reason || !is_due {
                    return None;
                }
                format!("agent {name} is still away: {reason}")
            }
            // The start of the session has told of it.
            Told::Nothing if !seen.is_learned => return Some((Told::Away(reason.into()), None)),
            Told::Nothing => format!("agent {name} does not answer yet: {reason}"),
            _ if seen.draining && seen.held == 0 => return Some((Told::Left, Some(left))),
            _ if seen.draining => {
                format!(
                    "agent {name} is away: {reason}; it drained, and {} pages were left there",
                    seen.held
                )
            }
            _ => match excuse {
                Some(missed) => format!(
                    "agent {name} is away: gms itself was stopped for {:.0} s, and makes the link anew",
                    missed.as_secs_f64()
                ),
                None => format!("agent {name} is away: {reason}"),
            },
        };
        Some((Told::Away(reason.into()), Some(text)))
    }
}

impl<T: Transport> EvictThread<T> {
    /// Tells what has changed of the agents.
    pub(super) fn tell_presence(&mut self, now: Instant) {
        if self.shared.has_failed() {
            return;
        }
        let lane = self.write_back.agents.lane();
        let ended = self.shared.ended_agent();
        for agent in lane.agents().filter(|&agent| Some(agent) != ended) {
            let seen = Seen {
                name: lane.name(agent),
                is_learned: lane.learned_from(agent).is_some(),
                up: lane.is_up(agent),
                reached: self.shared.homes.all_reach(agent),
                failure: lane.failure(agent),
                draining: lane.is_draining(agent),
                held: lock(&self.shared.tables).held_by(agent),
                emptied: self.shared.is_emptied(agent),
            };
            if let Some(text) = self.presence.observe(now, agent, seen) {
                if seen.up && seen.emptied {
                    self.shared.note_emptied(agent, false);
                }
                if !self.shared.config.quiet {
                    crate::speech::note(text);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UP: Seen<'_> = Seen {
        name: "a:1",
        is_learned: false,
        up: true,
        reached: true,
        failure: None,
        draining: false,
        held: 3,
        emptied: false,
    };
    const DOWN: Seen<'_> =
        Seen { up: false, reached: false, failure: Some("it fell silent"), ..UP };

    /// What is told of an agent that is seen so, each at its second.
    fn told(looks: &[(u64, Seen<'_>)]) -> Vec<String> {
        let (start, mut presence) = (Instant::now(), Presence::default());
        let mut look = |&(second, seen)| {
            presence.observe(start + Duration::from_secs(second), AgentId(0), seen)
        };
        looks.iter().filter_map(&mut look).collect()
    }

    #[test]
    fn each_absence_is_told_with_its_end() {
        let looks = [(0, UP), (1, DOWN), (2, DOWN), (3, UP), (4, UP), (5, DOWN)];
        let (away, again) = ("agent a:1 is away: it fell silent", "agent a:1 answers again");
        assert_eq!(told(&looks), [away, again, away]);
    }

    #[test]
    fn another_reason_is_told_after_a_minute() {
        let other = Seen { failure: Some("it refuses our certificate"), ..DOWN };
        let lines = told(&[(0, UP), (1, DOWN), (2, other), (60, DOWN), (62, other), (200, other)]);
        assert_eq!(
            lines[1..],
            ["agent a:1 is still away: it refuses our certificate"],
            "{lines:?}"
        );
    }

    #[test]
    fn an_agent_that_comes_and_goes_is_told_some_times_a_minute() {
        let looks: Vec<_> = (0..600).map(|n| (n, if n % 2 == 0 { UP } else { DOWN })).collect();
        let lines = told(&looks);
        assert!(lines.len() <= 66, "{} lines in ten minutes", lines.len());
    }

    #[test]
    fn a_restart_is_told_with_what_was_lost() {
        let empty = Seen { emptied: true, held: 0, ..UP };
        for looks in [&[(0, UP), (1, DOWN), (2, empty)][..], &[(0, UP), (1, empty)]] {
            let lines = told(looks);
            let last = lines.last().expect("a line");
            assert!(last.contains("its copies are gone, and are made anew"), "{lines:?}");
        }
    }

    #[test]
    fn an_agent_is_back_only_when_all_threads_reach_it() {
        let partly = Seen { reached: false, ..UP };
        assert_eq!(told(&[(0, UP), (1, DOWN), (2, partly), (3, partly)]).len(), 1);
        assert_eq!(told(&[(0, UP), (1, partly), (2, UP), (3, partly), (7, partly)]).len(), 0);
        let lines = told(&[(0, UP), (1, partly), (6, partly), (9, UP)]);
        assert!(lines.len() == 2 && lines[0].contains("some threads of gms"), "{lines:?}");
    }

    #[test]
    fn a_drain_is_told_at_its_beginning_and_as_an_end() {
        let drains = Seen { draining: true, ..UP };
        let ended = Seen { draining: true, held: 0, ..DOWN };
        let lines = told(&[(0, UP), (1, drains), (2, drains), (3, ended), (99, ended)]);
        assert!(lines.len() == 2 && lines[0].starts_with("agent a:1 drains"), "{lines:?}");
        assert!(lines[1].contains("drained and ended") && !lines[1].contains("away"), "{lines:?}");
        let lines = told(&[(0, drains), (1, Seen { held: 7, ..ended })]);
        assert!(lines[1].contains("is away: ") && lines[1].contains("7 pages were left"));
    }

    #[test]
    fn an_agent_that_was_never_up_is_told_when_it_answers_and_a_learned_one_when_it_does_not() {
        assert_eq!(told(&[(0, DOWN), (1, UP)]), ["agent a:1 answers now, and is used"]);
        let learned = Seen { is_learned: true, ..DOWN };
        let unknown = Seen { failure: None, ..learned };
        let lines = told(&[(0, unknown), (1, learned), (2, learned), (3, UP)]);
        let yet = "agent a:1 does not answer yet: it fell silent";
        assert_eq!(lines, [yet, "agent a:1 answers now, and is used"]);
        assert_eq!(told(&[(0, unknown), (1, UP)]), [""; 0]);
    }

    #[test]
    fn no_agent_is_blamed_for_the_time_in_which_gms_was_stopped() {
        let (start, mut presence) = (Instant::now(), Presence::default());
        let second = |n| start + Duration::from_secs(n);
        assert_eq!(presence.observe(start, AgentId(0), UP), None);
        presence.excuse(second(100), Duration::from_secs(99));
        let line = presence.observe(second(101), AgentId(0), DOWN).expect("a line");
        assert!(line.contains("gms itself was stopped for 99 s"), "{line}");
        presence.observe(second(102), AgentId(0), UP);
        let line = presence.observe(second(111), AgentId(0), DOWN).expect("a line");
        assert!(line.contains("it fell silent"), "{line}");
    }
}
