//! To which agent an evicted page goes: the power of two choices (Mitzenmacher, "The Power of Two Choices in
//! Randomized Load Balancing", 1996) over what agents say of themselves.
//!
//! Two eligible agents are drawn; the better one gets the page *more often*, by the ratio of their merits,
//! rather than always: feedback is as old as the last reply, and on old information the strict comparison
//! sends everybody to the same agent at once (Mitzenmacher, "How Useful Is Old Information?", 2000).
//!
//! merit = free frames / cost^2, cost = (network + queue + service time) x (1 + exchanges in flight), doubled
//! for each refusal in a row. Free frames are GMS's weights (SOSP'95): agents fill at the same pace.

use crate::ids::{AgentId, PageCount};
use crate::limits::{COST_NS_MIN, EWMA_SHIFT, EXPLORE_SHARE, NEIGHBOURS, REFUSAL_DOUBLINGS_MAX};
use crate::spread::Site;
use std::cmp::Reverse;
use std::time::Duration;

/// What is known of one agent when a page is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AgentView {
    /// Which agent.
    pub id: AgentId,
    /// Connected, and not draining.
    pub up: bool,
    /// Connected: it gives pages back.
    pub linked: bool,
    /// Frames which it said were free, less the pages sent since.
    pub free_frames: PageCount,
    /// Pages which it still lets us put.
    pub credits: PageCount,
    /// Time which requests waited at the agent (moving average).
    pub queue: Duration,
    /// Time which the agent worked on a request (moving average).
    pub service: Duration,
    /// The rest of an exchange's time: the network's share (moving average).
    pub rtt: Duration,
    /// Exchanges sent and not yet answered.
    pub inflight: u32,
    /// Refusals in a row.
    pub refusals: u32,
    /// Its memory is a disk's: it gets a copy of every page, and is asked for one when no other agent can give it.
    pub last_resort: bool,
    /// Where it is: pages are spread.
    pub site: Site,
}

impl AgentView {
    /// Whether a page may be sent to it at all.
    fn eligible(&self) -> bool {
        self.up && self.free_frames.0 > 0 && self.credits.0 > 0
    }

    fn cost(&self) -> f64 {
        let ns = (self.rtt + self.queue + self.service).as_nanos().max(u128::from(COST_NS_MIN));
        let doublings = self.refusals.min(REFUSAL_DOUBLINGS_MAX);
        ns as f64 * (1.0 + f64::from(self.inflight)) * f64::from(1u32 << doublings)
    }

    fn merit(&self) -> f64 {
        let cost = self.cost();
        self.free_frames.0 as f64 / (cost * cost)
    }
}

/// A choice between agents.
pub trait Placement {
    /// The agent which should get the next pages; `None` if none of `views` is up with room and credits.
    /// `random` must be uniform over all of `u64`.
    fn choose(&self, views: &[AgentView], random: u64) -> Option<AgentId>;
}

/// Whom of several agents that hold a page to ask for it: one that is connected, no last resort, rather one that does not drain, the one of least cost.
pub fn nearest(views: impl IntoIterator<Item = AgentView>) -> Option<AgentId> {
    let rank = |view: &AgentView| (!view.linked, view.last_resort, !view.up);
    let order = |a: &AgentView, b: &AgentView| {
        rank(a).cmp(&rank(b)).then(a.cost().total_cmp(&b.cost())).then(a.id.cmp(&b.id))
    };
    views.into_iter().min_by(order).map(|view| view.id)
}

/// The `count` agents which should get the next pages, each all of them, and with them every last resort that takes any; none if fewer are up with room
/// and credits. They are in as many zones, and then on as many hosts, as any `count` of those can be. The first is chosen from all, the others from its
/// [`NEIGHBOURS`]: so few sets of agents hold pages together, and few pages are lost when as many agents fail at once as a page has copies (Cidon et al.,
/// "Copysets", ATC'13).
pub fn choose_set(
    placement: &impl Placement,
    views: &[AgentView],
    count: u32,
    random: u64,
) -> Vec<AgentId> {
    let (count, eligible) = (count as usize, views.iter().filter(|view| view.eligible()).copied());
    let (last, mut left): (Vec<AgentView>, Vec<AgentView>) =
        eligible.partition(|view| view.last_resort);
    if left.len() < count {
        return Vec::new();
    }
    let (mut chosen, mut sites) = (Vec::new(), Vec::new());
    while chosen.len() < count {
        let farthest = left.iter().map(|view| view.site.distance(&sites)).max();
        let far = left.iter().filter(|view| Some(view.site.distance(&sites)) == farthest);
        let far: Vec<AgentView> = far.copied().collect();
        let Some(next) = placement.choose(&far, mix(random, 4 + chosen.len() as u64)) else {
            break;
        };
        if chosen.is_empty() {
            left = neighbours(next, left, count);
        }
        let found = left.iter().position(|view| view.id == next);
        sites.extend(found.map(|at| left.swap_remove(at).site));
        chosen.push(next);
    }
    chosen.extend(last.iter().map(|view| view.id));
    chosen
}

/// An agent, and those with which it holds pages: of a circle of all, in which zones and hosts alternate, the next ones that are far from it, some of them far
/// from each other, so that any `count` can be chosen as far apart as of all.
fn neighbours(of: AgentId, mut agents: Vec<AgentView>, count: usize) -> Vec<AgentView> {
    agents.sort_unstable_by_key(|view| view.id);
    let sites: Vec<Site> = agents.iter().map(|view| view.site).collect();
    let mut circle: Vec<_> = Site::alternation(&sites).into_iter().zip(agents).collect();
    circle.sort_by_key(|(turn, _)| *turn);
    let start = circle.iter().position(|(_, view)| view.id == of).unwrap_or(0);
    circle.rotate_left(start);
    let mut circle: Vec<AgentView> = circle.into_iter().map(|(_, view)| view).collect();
    let mut near = vec![circle.remove(0)];
    while near.len() < count {
        let sites: Vec<Site> = near.iter().map(|view| view.site).collect();
        let next = (0..circle.len()).min_by_key(|at| Reverse(circle[*at].site.distance(&sites)));
        let Some(next) = next else { break };
        near.push(circle.remove(next));
    }
    let own = near[0].site;
    circle.sort_by_key(|view| Reverse(view.site.distance(&[own])));
    near.extend(circle.into_iter().take((1 + NEIGHBOURS).saturating_sub(near.len())));
    near
}

/// Two random candidates, compared by merit.
#[derive(Clone, Copy, Debug, Default)]
pub struct TwoChoices;

impl Placement for TwoChoices {
    fn choose(&self, views: &[AgentView], random: u64) -> Option<AgentId> {
        let eligible = || views.iter().filter(|view| view.eligible());
        let count = eligible().count();
        let nth = |n: usize| eligible().nth(n);
        if count < 2 {
            return nth(0).map(|view| view.id);
        }
        let first = (mix(random, 1) % count as u64) as usize;
        let second = (first + 1 + (mix(random, 2) % (count as u64 - 1)) as usize) % count;
        let (a, b) = (nth(first)?, nth(second)?);
        let share = a.merit() / (a.merit() + b.merit());
        // 53 random bits make a uniform number in 0..1.
        let draw = (mix(random, 3) >> 11) as f64 / (1u64 << 53) as f64;
        Some(if draw < share.clamp(EXPLORE_SHARE, 1.0 - EXPLORE_SHARE) { a.id } else { b.id })
    }
}

/// Independent random numbers from one (SplitMix64: Steele, Lea and Flood, OOPSLA'14).
fn mix(random: u64, n: u64) -> u64 {
    let mut z = random.wrapping_add(n.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// What one reply tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// From the request's sending to the reply's last byte.
    pub elapsed: Duration,
    /// The agent's words: how long the request waited there.
    pub queue: Duration,
    /// The agent's words: how long it worked on it.
    pub service: Duration,
    /// Frames free at the agent.
    pub frames_free: PageCount,
    /// Pages which we may put before we are granted more.
    pub credits: PageCount,
    /// The agent refused (part of) the request: it is full.
    pub refused: bool,
}

/// The moving averages of one agent, as its replies tell them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Feedback {
    rtt_ns: u64,
    queue_ns: u64,
    service_ns: u64,
    frames_free: PageCount,
    credits: PageCount,
    refusals: u32,
    replies: u64,
}

impl Feedback {
    /// Takes in a reply. Times that an agent claims beyond the exchange's own are cut to it.
    pub fn on_reply(&mut self, reply: Reply) {
        let elapsed = nanos(reply.elapsed);
        let queue = nanos(reply.queue).min(elapsed);
        let service = nanos(reply.service).min(elapsed - queue);
        let first = self.replies == 0;
        for (average, sample) in [
            (&mut self.rtt_ns, elapsed - queue - service),
            (&mut self.queue_ns, queue),
            (&mut self.service_ns, service),
        ] {
            *average = if first { sample } else { ewma(*average, sample) };
        }
        // Who takes nothing has no room, whatever it says: it would get the same pages again and again.
        let told = (reply.frames_free, reply.credits);
        let none = (PageCount(0), PageCount(0));
        (self.frames_free, self.credits) = if reply.refused { none } else { told };
        self.refusals = if reply.refused { self.refusals.saturating_add(1) } else { 0 };
        self.replies += 1;
    }

    /// Pages were sent: they are taken from the room and the credits until the next reply tells.
    pub fn on_put(&mut self, pages: PageCount) {
        self.frames_free.0 = self.frames_free.0.saturating_sub(pages.0);
        self.credits.0 = self.credits.0.saturating_sub(pages.0);
    }

    /// How long its answers take on average, by what is known of it.
    pub fn usual(&self) -> Duration {
        Duration::from_nanos(self.rtt_ns + self.queue_ns + self.service_ns)
    }

    /// An exchange was not answered within `waited`: that is what it cost.
    pub fn on_timeout(&mut self, waited: Duration) {
        self.rtt_ns = ewma(self.rtt_ns, nanos(waited).max(self.rtt_ns));
        self.on_refusal();
    }

    /// The agent took no request, or did not answer one.
    pub fn on_refusal(&mut self) {
        self.refusals = self.refusals.saturating_add(1);
    }

    /// The view that [`Placement`] needs.
    pub fn view(&self, id: AgentId, up: bool, inflight: u32) -> AgentView {
        AgentView {
            id,
            up,
            linked: up,
            free_frames: self.frames_free,
            credits: self.credits,
            queue: Duration::from_nanos(self.queue_ns),
            service: Duration::from_nanos(self.service_ns),
            rtt: Duration::from_nanos(self.rtt_ns),
            inflight,
            refusals: self.refusals,
            last_resort: false,
            site: Site::default(),
        }
    }
}

fn nanos(time: Duration) -> u64 {
    time.as_nanos().try_into().unwrap_or(u64::MAX)
}

fn ewma(average: u64, sample: u64) -> u64 {
    average - (average >> EWMA_SHIFT) + (sample >> EWMA_SHIFT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spread::Spread;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    fn view(id: u8, free: u64, rtt_us: u64) -> AgentView {
        AgentView {
            id: AgentId(id),
            up: true,
            linked: true,
            free_frames: PageCount(free),
            credits: PageCount(64),
            queue: Duration::ZERO,
            service: Duration::from_micros(2),
            rtt: Duration::from_micros(rtt_us),
            inflight: 0,
            refusals: 0,
            last_resort: false,
            site: Site::default(),
        }
    }

    #[test]
    fn of_those_who_have_a_page_the_nearest_that_is_up_is_asked() {
        let down = AgentView { up: false, linked: false, ..view(0, 100, 10) };
        // Room is of no matter.
        let views = [down, view(1, 100, 80), view(2, 0, 40)];
        assert_eq!(nearest(views), Some(AgentId(2)));
        let busy = AgentView { inflight: 4, ..views[2] };
        assert_eq!(nearest([down, views[1], busy]), Some(AgentId(1)));
        let disk = AgentView { last_resort: true, ..view(3, 100, 1) };
        assert_eq!(nearest([down, views[1], disk]), Some(AgentId(1)));
        assert_eq!(nearest([down, disk]), Some(AgentId(3)));
        let drains = AgentView { up: false, ..views[1] };
        assert_eq!(nearest([drains, disk]), Some(AgentId(1)), "it still gives pages");
        assert_eq!(nearest([drains, view(4, 100, 900)]), Some(AgentId(4)));
        assert_eq!(nearest([down]), Some(AgentId(0)), "nobody is up");
        assert_eq!(nearest([]), None);
    }

    fn shares(views: &[AgentView]) -> Vec<f64> {
        let mut counts = vec![0u32; views.len()];
        for n in 0..20_000 {
            let id = TwoChoices.choose(views, mix(7, n)).expect("one is eligible");
            counts[views.iter().position(|v| v.id == id).expect("a view's id")] += 1;
        }
        counts.into_iter().map(|c| f64::from(c) / 20_000.0).collect()
    }

    #[test]
    fn equals_get_equal_shares() {
        for share in shares(&[view(1, 100, 20), view(2, 100, 20), view(9, 100, 20)]) {
            assert!((share - 1.0 / 3.0).abs() < 0.02, "{share}");
        }
    }

    #[test]
    fn a_slow_agent_gets_fewer_but_is_still_measured() {
        let share = shares(&[view(0, 100, 20), view(1, 100, 2000)])[1];
        assert!((0.005..0.03).contains(&share), "{share}");
        let mut queued = view(1, 100, 20);
        queued.queue = Duration::from_micros(60);
        let share = shares(&[view(0, 100, 20), queued])[1];
        assert!((0.03..0.15).contains(&share), "{share}");
    }

    #[test]
    fn room_load_and_refusals_count() {
        let share = shares(&[view(0, 300, 20), view(1, 100, 20)])[1];
        assert!((share - 0.25).abs() < 0.02, "{share}");
        let busy = AgentView { inflight: 1, ..view(1, 100, 20) };
        assert!((shares(&[view(0, 100, 20), busy])[1] - 0.2).abs() < 0.02);
        let refusing = AgentView { refusals: u32::MAX, ..view(1, 100, 20) };
        assert!(shares(&[view(0, 100, 20), refusing])[1] < 0.03);
    }

    #[test]
    fn averages_follow_replies_and_unlearn() {
        let mut feedback = Feedback::default();
        let reply = |us| Reply {
            elapsed: Duration::from_micros(us),
            queue: Duration::from_micros(1),
            service: Duration::from_micros(2),
            frames_free: PageCount(9),
            credits: PageCount(5),
            refused: false,
        };
        feedback.on_reply(reply(23));
        assert_eq!(feedback.view(AgentId(0), true, 0).rtt, Duration::from_micros(20));
        (0..50).for_each(|_| feedback.on_reply(reply(503)));
        assert!(feedback.view(AgentId(0), true, 0).rtt > Duration::from_micros(480));
        (0..50).for_each(|_| feedback.on_reply(reply(23)));
        assert!(feedback.view(AgentId(0), true, 0).rtt < Duration::from_micros(30));
        feedback.on_put(PageCount(6));
        let view = feedback.view(AgentId(0), true, 0);
        assert_eq!((view.free_frames, view.credits), (PageCount(3), PageCount(0)));
        assert_eq!(TwoChoices.choose(&[view], 1), None);
        // It takes nothing, and claims to have room.
        feedback.on_reply(Reply { refused: true, ..reply(23) });
        assert_eq!(TwoChoices.choose(&[feedback.view(AgentId(0), true, 0)], 1), None);
        feedback.on_reply(reply(23));
        assert!(TwoChoices.choose(&[feedback.view(AgentId(0), true, 0)], 1).is_some());
    }

    fn any_view() -> impl Strategy<Value = AgentView> {
        (any::<(u8, bool, u64, u64, u64, u64)>(), any::<(u64, u32, u32)>()).prop_map(
            |((id, up, free, credits, queue, service), (rtt, inflight, refusals))| AgentView {
                id: AgentId(id),
                up,
                linked: up,
                free_frames: PageCount(free % 3),
                credits: PageCount(credits % 3),
                queue: Duration::from_nanos(queue),
                service: Duration::from_nanos(service),
                rtt: Duration::from_nanos(rtt),
                inflight,
                refusals,
                last_resort: id % 5 == 0,
                site: Site::default(),
            },
        )
    }

    fn distinct(mut views: Vec<AgentView>) -> Vec<AgentView> {
        let mut seen = BTreeSet::new();
        views.retain(|view| seen.insert(view.id));
        views
    }

    /// Agents on some hosts in some zones, a host in one zone.
    fn sited_views() -> impl Strategy<Value = Vec<AgentView>> {
        let host = prop_oneof![2 => 0u8..3, 1 => 0u8..12];
        let agents = prop::collection::vec((any_view(), host), 0..12);
        (agents, prop::collection::vec(0u8..4, 12)).prop_map(|(agents, zones)| {
            let place = |host: &u8| (zones[usize::from(*host)], *host);
            let sites = Site::number(&Vec::from_iter(agents.iter().map(|(_, host)| place(host))));
            let sited = agents.into_iter().zip(sites);
            let free =
                |view: AgentView| PageCount(view.free_frames.0.max(u64::from(view.id.0 % 8)));
            distinct(
                sited
                    .map(|((view, _), site)| AgentView {
                        site,
                        free_frames: free(view),
                        up: true,
                        ..view
                    })
                    .collect(),
            )
        })
    }

    /// The zones of some sites, and the hosts, counted one by one.
    fn apart(sites: impl Iterator<Item = Site>) -> (usize, usize) {
        let (mut zones, mut hosts) = (Vec::new(), Vec::new());
        for site in sites {
            let is_new = |seen: &[Site], at: usize| {
                seen.iter()
                    .all(|other| [site.distance(&[*other]).0, site.distance(&[*other]).1][at])
            };
            if is_new(&zones, 0) {
                zones.push(site);
            }
            if is_new(&hosts, 1) {
                hosts.push(site);
            }
        }
        (zones.len(), hosts.len())
    }

    /// Two racks of four hosts: each agent gets its share of the pages, and no rack has both copies of one.
    #[test]
    fn spread_pages_are_many_at_no_agent() {
        let sites = Site::number(&Vec::from_iter((0..8u8).map(|id| (id / 4, id))));
        let views = Vec::from_iter(
            (0..8).map(|id| AgentView { site: sites[usize::from(id)], ..view(id, 1000, 20) }),
        );
        let mut counts = [0u32; 8];
        for n in 0..20_000 {
            let chosen = choose_set(&TwoChoices, &views, 2, mix(9, n));
            assert_ne!(chosen[0].0 / 4, chosen[1].0 / 4);
            chosen.iter().for_each(|id| counts[usize::from(id.0)] += 1);
        }
        assert!(counts.iter().all(|count| (4000..6000).contains(count)), "{counts:?}");
    }

    /// One host with many agents, one with a single one.
    #[test]
    fn agents_of_one_host_share_a_page_only_if_there_is_no_other_host() {
        let sites = Site::number(&Vec::from_iter((0..6u8).map(|id| ((), id / 5))));
        let views = Vec::from_iter(
            (0..6).map(|id| AgentView { site: sites[usize::from(id)], ..view(id, 1000, 20) }),
        );
        for n in 0..1000 {
            assert!(choose_set(&TwoChoices, &views, 2, mix(9, n)).contains(&AgentId(5)));
            assert_eq!(choose_set(&TwoChoices, &views[..5], 2, mix(9, n)).len(), 2);
        }
    }

    proptest! {
        /// The choice is always an eligible agent, and there is one whenever one exists.
        #[test]
        fn chooses_only_eligible(views in prop::collection::vec(any_view(), 0..8), random: u64) {
            match TwoChoices.choose(&views, random) {
                Some(id) => prop_assert!(views.iter().any(|v| v.id == id && v.eligible())),
                None => prop_assert!(!views.iter().any(AgentView::eligible)),
            }
        }

        /// As many different agents as were asked for, all eligible, whenever there are so many. Last resorts come on top.
        #[test]
        fn sets_are_of_eligible_agents(
            views in prop::collection::vec(any_view(), 0..12),
            count in 0u32..4,
            random: u64,
        ) {
            let views = distinct(views);
            let mut chosen = choose_set(&TwoChoices, &views, count, random);
            let eligible = views.iter().filter(|view| view.eligible());
            let (last, eligible): (Vec<&AgentView>, Vec<&AgentView>) =
                eligible.partition(|view| view.last_resort);
            let eligible: Vec<AgentId> = eligible.iter().map(|view| view.id).collect();
            let enough = eligible.len() >= count as usize;
            if enough {
                let added = chosen.split_off(count as usize);
                prop_assert_eq!(added, last.iter().map(|view| view.id).collect::<Vec<_>>());
            }
            prop_assert_eq!(chosen.len(), if enough { count as usize } else { 0 });
            prop_assert!(chosen.iter().all(|id| eligible.contains(id)));
            prop_assert!(chosen.iter().enumerate().all(|(i, id)| !chosen[..i].contains(id)));
        }

        /// No set of as many agents is in more zones, or in as many and on more hosts. An agent is with few others, whatever the random number.
        #[test]
        fn sets_are_as_far_apart_as_they_can_be_and_few(
            (views, count) in (sited_views(), 1u32..=4),
            randoms in prop::collection::vec(any::<u64>(), 20),
        ) {
            let takers: Vec<&AgentView> =
                views.iter().filter(|view| view.eligible() && !view.last_resort).collect();
            let best = (0u32..1 << takers.len()).filter(|set| set.count_ones() == count).map(|set| {
                let in_set = takers.iter().enumerate().filter(|(n, _)| set >> n & 1 == 1);
                apart(in_set.map(|(_, view)| view.site))
            });
            let best = best.max();
            let mut mates: BTreeMap<AgentId, BTreeSet<AgentId>> = BTreeMap::new();
            for random in randoms {
                let mut chosen = choose_set(&TwoChoices, &views, count, random);
                let Some(best) = best else {
                    prop_assert!(chosen.is_empty());
                    return Ok(());
                };
                chosen.truncate(count as usize);
                let site = |id: &AgentId| views.iter().find(|view| view.id == *id).map(|view| view.site);
                prop_assert_eq!(apart(chosen.iter().filter_map(site)), best);
                mates.entry(chosen[0]).or_default().extend(&chosen[1..]);
                let told = Spread::of(takers.iter().map(|view| view.site)).of_any(count);
                prop_assert_eq!(told, Spread::of(chosen.iter().filter_map(site)));
            }
            for mates in mates.values() {
                prop_assert!(mates.len() <= NEIGHBOURS.max(count as usize - 1), "{:?}", mates);
            }
        }

        /// No reply, however wrong, breaks the averages.
        #[test]
        fn any_reply_is_taken(samples in prop::collection::vec(any::<(u64, u64, u64)>(), 0..20)) {
            let mut feedback = Feedback::default();
            for (elapsed, queue, service) in samples {
                let [elapsed, queue, service] = [elapsed, queue, service].map(Duration::from_nanos);
                feedback.on_reply(Reply { elapsed, queue, service, ..Reply::default() });
                feedback.on_timeout(elapsed);
            }
            prop_assert!(feedback.view(AgentId(0), true, 0).merit().is_finite());
        }
    }
}
