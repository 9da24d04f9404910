//! Which stripes are dealt anew, and which first.

use super::*;

fn set(agents: &[u8]) -> AgentSet {
    agents.iter().copied().map(AgentId).collect()
}

impl World {
    fn evict_to(&mut self, members: AgentSet, stripes: usize) {
        for _ in 0..stripes {
            self.evict(self.shape.data());
            let pages = std::mem::take(&mut self.buffer);
            self.deal_to(members, pages);
        }
        self.answer_all();
    }

    /// Of how many pages the stripes were dealt to these agents.
    fn live_at(&self, members: AgentSet) -> usize {
        let at = self.pages.values().filter(|place| match **place {
            Place::Safe(id) => self.dealt(id).members == members,
            _ => false,
        });
        at.count()
    }

    fn live_page_at(&self, page: u64) -> Option<AgentSet> {
        match self.pages[&page] {
            Place::Safe(id) => Some(self.dealt(id).members),
            _ => None,
        }
    }

    /// Rounds of repair, in which everybody who stays is dealt to.
    fn repair(&mut self, rounds: usize) {
        for random in 0..rounds as u64 {
            self.close(usize::MAX);
            self.take_back(usize::MAX);
            self.discard();
            self.deal(random, true);
            self.answer_all();
            self.discard();
        }
    }
}

#[test]
fn stripes_that_cannot_be_read_keep_no_others_waiting() {
    let mut world = World::new(Shape::new(4, 1).expect("a shape"), 3);
    let (stuck, lacking, whole) =
        (set(&[0, 1, 2, 3, 4]), set(&[0, 2, 3, 4, 5]), set(&[2, 3, 4, 5, 6]));
    world.evict_to(stuck, 40);
    world.evict_to(lacking, 40);
    (world.away, world.leaving) = (set(&[0, 1]), set(&[0, 1]));
    world.repair(100);
    assert_eq!(world.live_at(lacking), 0, "they could be rebuilt");
    let left = world.live_at(stuck);
    assert!(0 < left && left < 80, "what can be read of them is rebuilt too: {left}");
    assert_eq!(world.stripes.closing(), 0, "what is stuck takes no part");
    // Dead pages of others are made room for meanwhile.
    world.evict_to(whole, 100);
    let kept = |page: &u64| page.is_multiple_of(4) || world.live_page_at(*page) != Some(whole);
    let dying: Vec<u64> = world.pages.keys().copied().filter(|page| !kept(page)).collect();
    dying.into_iter().for_each(|page| world.die(page));
    let before = world.stripes.parts();
    world.repair(200);
    assert!(world.stripes.parts() + 200 < before, "{} of {before}", world.stripes.parts());
    world.check(world.all());
    world.finish(0);
    world.check(world.all());
    assert_eq!((world.live_at(stuck), world.stripes.lost(&world.placements).count()), (0, 0));
}

#[test]
fn what_an_agent_has_lost_goes_before_what_agents_leave_with() {
    let mut world = World::new(Shape::new(4, 1).expect("a shape"), 2);
    let (lacking, draining) = (set(&[0, 1, 2, 3, 4]), set(&[2, 3, 4, 5, 6]));
    world.evict_to(draining, 40);
    world.evict_to(lacking, 40);
    world.leaving = set(&[5, 6]);
    world.lose(AgentId(0));
    world.close(usize::MAX);
    let closing = world.closing();
    assert!(!closing.is_empty());
    assert!(closing.iter().all(|&(_, id)| world.dealt(id).members == lacking), "{closing:?}");
    world.finish(0);
    assert_eq!((world.live_at(draining), world.stripes.lost(&world.placements).count()), (0, 0));
    world.check(world.all());
}

/// A put that was on its way may have reached the agent's next session.
#[test]
fn an_agent_that_was_restarted_meanwhile_may_forget_what_it_was_put() {
    let shape = Shape::new(2, 1).expect("a shape");
    let (mut stripes, mut placements) = (Stripes::new(shape), Placements::striped(shape));
    let members = set(&[0, 1, 2]);
    let (_, parts) = stripes.deal(&mut placements, members, 2).expect("it fits");
    placements.lose(AgentId(1));
    stripes.lose(AgentId(1));
    let answers =
        parts.iter().map(|part| stripes.answered(&mut placements, part.id, Answer::Stored));
    assert_eq!(answers.last(), Some(Written::Failed));
    assert_eq!(stripes.take_discards(), parts);
    assert_eq!(
        (stripes.parts(), stripes.held_by(AgentId(0)), stripes.held_by(AgentId(1))),
        (0, 0, 0)
    );
}

/// Full stripes among many short ones: what may be closing is bounded by what it takes.
#[test]
fn what_is_closing_takes_a_32nd_of_all_parts() {
    let mut world = World::new(Shape::new(12, 1).expect("a shape"), 1);
    let members = world.all().without(set(&[13]));
    world.evict_to(members, 400);
    world.evict(1000);
    for page in std::mem::take(&mut world.buffer) {
        world.deal_to(members, vec![page]);
    }
    world.answer_all();
    world.leaving = set(&[0]);
    let parts = world.stripes.parts();
    world.close(usize::MAX);
    assert!(0 < world.stripes.closing() && world.stripes.closing() * 13 <= parts / 32);
}

#[test]
fn two_losses_with_one_parity_part_are_named() {
    let mut world = World::new(Shape::new(4, 1).expect("a shape"), 0);
    world.evict(4);
    world.deal(0, true);
    world.answer_all();
    let ids: Vec<ContentId> = world
        .pages
        .values()
        .map(|place| match *place {
            Place::Safe(id) => id,
            _ => panic!("not safe"),
        })
        .collect();
    world.lose(world.own(ids[1]).agent);
    assert_eq!(world.stripes.lost(&world.placements).count(), 0);
    assert!(matches!(
        world.stripes.read(&world.placements, ids[1], world.all()),
        Read::Decode(4, _)
    ));
    world.lose(world.own(ids[2]).agent);
    assert_eq!(world.stripes.lost(&world.placements).collect::<Vec<ContentId>>(), [ids[1], ids[2]]);
    world.check(world.all());
    // The others are dealt anew, and then nothing is kept of the stripe.
    world.finish(0);
    assert_eq!((world.stripes.live(), world.stripes.parts(), world.held()), (2, 3, 3));
    world.check(world.all());
}
