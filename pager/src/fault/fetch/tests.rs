use std::sync::{Arc, OnceLock};

use gms_policy::limits::HEDGE_AFTER_MAX;
use gms_policy::redundancy::{AgentSet, Redundancy};
use gms_policy::stripes::{Answer, Shape};
use gms_transport::client::RETRY;
use gms_transport::message::{PageDescriptor, Status};

use super::*;
use crate::fault::tests::{ID, Play, dead_userfaultfd, map, own_userfaultfd, shared_of};
use crate::kernel::Faults;
use crate::kernel::hooked::Hooked;
use crate::kernel::pagemap::Pagemap;
use crate::kernel::uffd::Userfaultfd;
use crate::shared::Outcome;
use crate::speech::SAID;
use crate::tables::{EvictOutcome, FaultAction, WriteOutcome};

/// Of 64 pages that are at the agent a thread waits for the first, which comes right, and never for the others, which do not.
#[test]
fn wrong_pages_that_nobody_waits_for_are_told_and_end_the_workload() {
    let pages = PAGES_MAX as u64;
    let (mut play, now) = (Play::with(None, 1, pages), Instant::now());
    let right = vec![5; PAGE as usize];
    let hash = play.shared.checksum(&right);
    let all: Vec<PageAddr> =
        (0..pages).map(|n| PageAddr::containing(play.page + n * PAGE)).collect();
    let mut tables = lock(&play.shared.tables);
    let (mut leaving, mut wake) = (Vec::new(), Vec::new());
    tables.begin_evict(ID, &all, &mut leaving);
    for &(_, slot) in &leaving {
        tables.finish_evict(slot, EvictOutcome::Moved(hash), &mut wake);
    }
    for (slot, ..) in tables.start_write(AgentSet::of(AgentId(0)), PAGES_MAX) {
        tables.written(slot, AgentId(0), WriteOutcome::Stored);
    }
    drop(tables);
    play.fault.agents.take_sent();
    for round in 1..=3 {
        let begun = lock(&play.shared.tables).begin_prefetch(ID, all.iter().copied(), PAGES_MAX);
        let mut ahead: Vec<Wanted> = begun
            .into_iter()
            .map(|(page, content)| Wanted { place: (ID, page), content })
            .collect();
        let demanded = (round == 1).then(|| ahead.remove(0));
        match demanded {
            Some(demanded) => fetch_proved(&mut play, now, demanded, ahead),
            None => play.fault.ask(now, AgentId(0), ahead, false),
        }
        let sent = play.fault.agents.take_sent();
        let count = usize::from(sent[0].1.count());
        let mut payload = vec![0; count * size_of::<PageDescriptor>()];
        payload.extend(demanded.iter().flat_map(|_| right.clone()));
        payload.resize(count * (size_of::<PageDescriptor>() + PAGE as usize), 6);
        play.fault.agents.answer(&sent[0], payload);
        play.fault.network(&|| now);
        play.fault.repeat(now, &|| now);
        assert_eq!(play.shared.pages_in.load(Ordering::Relaxed), 1, "the one that was right");
        let said = SAID.take();
        assert_eq!(said.contains("wrong checksum"), round == 1, "{round}: {said}");
        assert_eq!(play.shared.has_failed(), round == 3, "{round}");
    }
    let Some(Outcome::Killed(reason)) = play.shared.outcome() else { panic!("it goes on") };
    assert!(reason.contains("agent-0") && reason.contains("wrong checksum"), "{reason}");
}

/// A thread waits for a page, whose marker has been looked for.
fn fetch_proved(play: &mut Play, now: Instant, demanded: Wanted, ahead: Vec<Wanted>) {
    play.fault.fetch_here(now, now, demanded, ahead);
    play.fault.unproved.clear();
}

/// A page is asked for; the agent has not answered.
fn asked(play: &mut Play, now: Instant) {
    let place = (ID, PageAddr::containing(play.page));
    let mut tables = lock(&play.shared.tables);
    let (mut leaving, mut wake) = (Vec::new(), Vec::new());
    tables.begin_evict(ID, &[place.1], &mut leaving);
    tables.finish_evict(leaving[0].1, EvictOutcome::Moved(7), &mut wake);
    for (slot, ..) in tables.start_write(AgentSet::of(AgentId(0)), 1) {
        tables.written(slot, AgentId(0), WriteOutcome::Stored);
    }
    let content = tables.begin_prefetch(ID, [place.1].into_iter(), 1)[0].1;
    tables.end_prefetch(place);
    drop(tables);
    fetch_proved(play, now, Wanted { place, content }, Vec::new());
}

/// Turns of the thread at these seconds after the page was asked for; whether the workload was stopped for want of it.
fn is_stopped_after(turns: impl IntoIterator<Item = u64>) -> bool {
    let (mut play, start) = (Play::with(None, 1, 1), Instant::now());
    asked(&mut play, start);
    for second in turns {
        let now = start + Duration::from_secs(second);
        play.fault.excuse(now);
        play.fault.repeat(now, &|| now);
    }
    play.shared.has_failed()
}

#[test]
fn an_agent_is_not_blamed_for_the_time_in_which_the_pager_was_stopped() {
    assert!(!is_stopped_after([1, 18, 19]), "it was stopped for 17 s");
    assert!(!is_stopped_after([17, 1000, 1001]), "and at once, and for long");
    assert!(!is_stopped_after([1, 18, 19, 20, 22, 24, 26, 28, 30]), "it had its time before");
    assert!(is_stopped_after(1..=18), "it ran all the time");
    assert!(is_stopped_after([1, 18].into_iter().chain(19..=34)), "and afterwards");
}

/// The page is asked for, and discarded by the program before the agent answers, whose link is up.
#[test]
fn a_page_that_is_no_longer_wanted_is_not_asked_for_again() {
    let (mut play, start) = (Play::with(None, 1, 1), Instant::now());
    asked(&mut play, start);
    play.fault.agents.take_sent();
    let place = (ID, PageAddr::containing(play.page));
    assert!(lock(&play.shared.tables).discarded(place));
    let later = start + RETRY + Duration::from_millis(100);
    play.fault.repeat(later, &|| later);
    assert!(play.fault.agents.take_sent().is_empty(), "it was asked for again");
    assert!(play.fault.pending.is_empty() && play.fault.fetches.is_empty());
    assert!(!play.shared.has_failed());
}

/// Between the look at what is still wanted and the end of the wait the page may have gone out again.
#[test]
fn a_page_that_was_cancelled_ends_nothing_if_it_is_wanted_again() {
    let (mut play, start) = (Play::with(None, 1, 1), Instant::now());
    asked(&mut play, start);
    let get = *play.fault.fetches.keys().next().expect("a get");
    play.fault.forsake(start, get, u64::MAX, None);
    assert!(!play.shared.has_failed() && play.fault.pending.is_empty());
}

/// The program discards the page, of which nothing is told, after its marker was looked for; then it turns out that nobody has it.
#[test]
fn a_page_that_was_discarded_untold_is_not_missed() {
    for (discarded, by_agent) in [(false, false), (false, true), (true, false), (true, true)] {
        let (mut play, now) = (Play::with(None, 1, 1), Instant::now());
        asked(&mut play, now);
        let sent = play.fault.agents.take_sent();
        if discarded {
            let (start, bytes) = (play.page as *mut libc::c_void, PAGE as usize);
            // SAFETY: the page is the test's own, and nobody refers to it.
            assert_eq!(unsafe { libc::madvise(start, bytes, libc::MADV_DONTNEED) }, 0);
        }
        if by_agent {
            play.fault.agents.answer_with(&sent[0], Status::NotFound, 0, Vec::new());
            play.fault.network(&|| now);
        } else {
            let get = *play.fault.fetches.keys().next().expect("a get");
            let wanted = play.fault.fetches[&get].pages[0];
            play.fault.not_held(now, wanted, &[]);
        }
        assert!(play.fault.pending.is_empty());
        assert_eq!(play.shared.has_failed(), !discarded, "{by_agent}");
    }
}

#[test]
fn a_process_that_has_ended_misses_no_page() {
    let (mut play, now) = (Play::with(Some(dead_userfaultfd()), 1, 1), Instant::now());
    asked(&mut play, now);
    let get = *play.fault.fetches.keys().next().expect("a get");
    let wanted = play.fault.fetches[&get].pages[0];
    play.fault.not_held(now, wanted, &[]);
    assert!(play.fault.pending.is_empty() && !play.shared.has_failed());
}

/// Two threads wait for pages that the program has discarded, as their missing markers tell; the agent does not answer.
#[test]
fn threads_that_wait_together_for_discarded_pages_do_not_wait_for_the_agent() {
    let (mut play, now) = (Play::with(None, 1, 2), Instant::now());
    let pages = [play.page, play.page + PAGE].map(PageAddr::containing);
    let mut tables = lock(&play.shared.tables);
    let (mut leaving, mut wake) = (Vec::new(), Vec::new());
    tables.begin_evict(ID, &pages, &mut leaving);
    for &(page, slot) in &leaving {
        tables.finish_evict(slot, EvictOutcome::Moved(page.get()), &mut wake);
    }
    for (slot, ..) in tables.start_write(AgentSet::of(AgentId(0)), 2) {
        tables.written(slot, AgentId(0), WriteOutcome::Stored);
    }
    drop(tables);
    let (start, bytes) = (play.page as *mut libc::c_void, 2 * PAGE as usize);
    // SAFETY: the pages are the test's own, and nobody refers to them.
    assert_eq!(unsafe { libc::madvise(start, bytes, libc::MADV_DONTNEED) }, 0);
    for page in pages {
        let FaultAction::Fetch(content) = lock(&play.shared.tables).fault((ID, page)) else {
            panic!("it is not at the agent");
        };
        play.fault.fetch(now, (ID, page), content);
    }
    assert_eq!((play.fault.pending.len(), play.fault.unproved.len()), (2, 2));
    let asked = play.fault.unproved[0].2;
    play.fault.prove_demanded(asked);
    assert_eq!(play.fault.unproved.len(), 2, "they may come at once");
    play.fault.prove_demanded(asked + Duration::from_millis(2));
    assert!(play.fault.unproved.is_empty());
    assert!(pages.iter().all(|&page| lock(&play.shared.tables).is_empty((ID, page))));
    let later = asked + RETRY + Duration::from_millis(100);
    play.fault.repeat(later, &|| later);
    assert!(play.fault.pending.is_empty() && !play.shared.has_failed());
}

/// Two agents have a page. The one that is asked says that it has not; the other one gives it.
#[test]
fn a_page_that_one_agent_does_not_give_is_asked_of_the_other() {
    let (mut play, now) = (Play::with(None, 2, 1), Instant::now());
    let both: AgentSet = [AgentId(0), AgentId(1)].into_iter().collect();
    let right = vec![5; PAGE as usize];
    let place = (ID, PageAddr::containing(play.page));
    let mut tables = lock(&play.shared.tables);
    let (mut leaving, mut wake) = (Vec::new(), Vec::new());
    tables.begin_evict(ID, &[place.1], &mut leaving);
    let moved = EvictOutcome::Moved(play.shared.checksum(&right));
    tables.finish_evict(leaving[0].1, moved, &mut wake);
    for (slot, ..) in tables.start_write(both, 1) {
        both.agents().for_each(|agent| tables.written(slot, agent, WriteOutcome::Stored));
    }
    let FaultAction::Fetch(content) = tables.fault(place) else { panic!("not away") };
    assert_eq!(content.holders, both);
    drop(tables);
    play.fault.agents.take_sent();
    play.fault.fetch(now, place, content);
    let asked = play.fault.agents.take_sent();
    let first = play.fault.agents.agent_of(asked[0].0);
    play.fault.agents.answer_with(&asked[0], Status::NotFound, 0, Vec::new());
    play.fault.network(&|| now);
    let asked = play.fault.agents.take_sent();
    assert_eq!(asked.len(), 1, "the other one is not asked");
    let second = play.fault.agents.agent_of(asked[0].0);
    assert!(both.has(second) && second != first && !play.shared.has_failed());
    play.fault.agents.answer(&asked[0], right);
    play.fault.network(&|| now);
    play.fault.repeat(now, &|| now);
    assert_eq!(play.shared.pages_in.load(Ordering::Relaxed), 1);
    assert!(play.fault.pending.is_empty() && play.fault.fetches.is_empty());
    assert!(lock(&play.shared.tables).is_empty(place), "it would be left where it is not");
}

/// Nor is it left where it came wrong.
#[test]
fn an_unchanged_page_of_which_a_copy_was_wrong_is_written_anew() {
    for is_wrong in [true, false] {
        let (mut play, now) = (Play::redundant(2), Instant::now());
        let (place, content, right) = replicated(&mut play);
        play.fault.fetch(now, place, content);
        let asked = play.fault.agents.take_sent();
        if is_wrong {
            play.fault.agents.answer(&asked[0], vec![6; PAGE as usize]);
            play.fault.network(&|| now);
            play.fault.hedge(now);
        }
        let asked = if is_wrong { play.fault.agents.take_sent() } else { asked };
        play.fault.agents.answer(asked.last().expect("another one has it"), right);
        play.fault.network(&|| now);
        assert_eq!(play.shared.pages_in.load(Ordering::Relaxed), 1);
        assert_eq!(lock(&play.shared.tables).is_empty(place), is_wrong);
    }
}

/// A page that two agents have, and what is its right content.
fn replicated(play: &mut Play) -> (Place, Content, Vec<u8>) {
    let both: AgentSet = play.fault.agents.lane().agents().collect();
    let (right, place) = (vec![5; PAGE as usize], (ID, PageAddr::containing(play.page)));
    let mut tables = lock(&play.shared.tables);
    let (mut leaving, mut wake) = (Vec::new(), Vec::new());
    tables.begin_evict(ID, &[place.1], &mut leaving);
    let moved = EvictOutcome::Moved(play.shared.checksum(&right));
    tables.finish_evict(leaving[0].1, moved, &mut wake);
    for (slot, ..) in tables.start_write(both, 1) {
        both.agents().for_each(|agent| tables.written(slot, agent, WriteOutcome::Stored));
    }
    let FaultAction::Fetch(content) = tables.fault(place) else { panic!("not away") };
    drop(tables);
    play.fault.agents.take_sent();
    (place, content, right)
}

fn assert_served(play: &Play) {
    assert_eq!(play.shared.pages_in.load(Ordering::Relaxed), 1);
    assert!(play.fault.pending.is_empty() && play.fault.fetches.is_empty());
    assert!(!play.shared.has_failed());
}

#[test]
fn a_page_that_takes_long_is_asked_of_another_agent_and_whoever_is_first_serves_it() {
    for first_wins in [true, false] {
        let (mut play, now) = (Play::redundant(2), Instant::now());
        let (place, content, right) = replicated(&mut play);
        play.fault.fetch(now, place, content);
        let first = play.fault.agents.take_sent();
        assert_eq!(first.len(), 1);
        let due = play.fault.hedge_due().expect("another one has it");
        play.fault.hedge(due - Duration::from_micros(1));
        assert!(play.fault.agents.take_sent().is_empty(), "too early");
        play.fault.hedge(due);
        let second = play.fault.agents.take_sent();
        assert_eq!(second.len(), 1);
        let agents = [&first[0], &second[0]].map(|sent| play.fault.agents.agent_of(sent.0));
        assert_ne!(agents[0], agents[1]);
        play.fault.hedge(due + Duration::from_secs(1));
        assert!(play.fault.agents.take_sent().is_empty(), "there is no third one");
        play.fault.agents.answer(if first_wins { &first[0] } else { &second[0] }, right);
        play.fault.network(&|| due);
        assert_served(&play);
    }
}

#[test]
fn a_page_of_an_agent_that_goes_away_is_asked_of_another_at_once() {
    let (mut play, now) = (Play::redundant(2), Instant::now());
    let (place, content, right) = replicated(&mut play);
    play.fault.fetch(now, place, content);
    let first = play.fault.agents.take_sent();
    play.fault.agents.lose(play.fault.agents.agent_of(first[0].0));
    play.fault.network(&|| now);
    play.fault.repeat(now, &|| now);
    play.fault.hedge(play.fault.hedge_due().expect("another one has it"));
    let second = play.fault.agents.take_sent();
    assert_eq!(second.len(), 1);
    play.fault.agents.answer(&second[0], right);
    play.fault.network(&|| now);
    assert_eq!(play.shared.pages_in.load(Ordering::Relaxed), 1);
    assert!(play.fault.pending.is_empty() && !play.shared.has_failed());
}

#[test]
fn a_wrong_page_is_asked_of_another_agent_and_its_agent_is_used_no_more_after_some() {
    let (mut play, now) = (Play::redundant(2), Instant::now());
    let (place, content, right) = replicated(&mut play);
    play.fault.fetch(now, place, content);
    let first = play.fault.agents.take_sent();
    let liar = play.fault.agents.agent_of(first[0].0);
    play.fault.agents.answer(&first[0], vec![6; PAGE as usize]);
    play.fault.network(&|| now);
    play.fault.hedge(now);
    let asked = play.fault.agents.take_sent();
    let other = asked.iter().find(|sent| play.fault.agents.agent_of(sent.0) != liar);
    play.fault.agents.answer(other.expect("the other one is asked"), right.clone());
    play.fault.network(&|| now);
    assert_eq!(play.shared.pages_in.load(Ordering::Relaxed), 1);
    // Two more times: then it is not asked first any more, and the workload goes on.
    play.shared.blame(liar, "a", "lies", true);
    play.fault.ask(now, liar, vec![Wanted { place, content }], false);
    let asked = play.fault.agents.take_sent();
    play.fault.agents.answer(&asked[0], vec![6; PAGE as usize]);
    play.fault.network(&|| now);
    assert_eq!(play.shared.unsound_agents(), AgentSet::of(liar));
    assert!(!play.shared.has_failed());
    assert_ne!(play.fault.source(content), Some(liar));
}

/// The page is discarded by the program after its marker was looked for, and before the second agent is asked.
#[test]
fn a_page_that_is_asked_of_a_second_agent_has_its_marker_looked_for_again() {
    let (mut play, now) = (Play::redundant(2), Instant::now());
    let (place, content, right) = replicated(&mut play);
    play.fault.fetch(now, place, content);
    play.fault.prove_demanded(now);
    assert!(play.fault.unproved.is_empty());
    let first = play.fault.agents.take_sent();
    // SAFETY: the page is the test's own, and nobody refers to it.
    let gone = unsafe {
        libc::madvise(play.page as *mut libc::c_void, PAGE as usize, libc::MADV_DONTNEED)
    };
    assert_eq!(gone, 0);
    let mut tables = lock(&play.shared.tables);
    tables.remove(ID, play.page..play.page + PAGE);
    tables.zeroed(ID, play.page..play.page + PAGE);
    drop(tables);
    play.space.removals.fetch_add(1, Ordering::Relaxed);
    play.fault.agents.answer_with(&first[0], Status::NotFound, 0, Vec::new());
    play.fault.network(&|| now);
    let second = play.fault.agents.take_sent();
    play.fault.agents.answer(&second[0], right);
    play.fault.network(&|| now);
    assert_eq!(play.shared.pages_in.load(Ordering::Relaxed), 0, "old bytes were installed");
}

/// A guard comes in the place of the marker of a page that is being fetched: no event tells of it.
#[test]
fn a_page_is_not_installed_over_a_guard() {
    const MADV_GUARD_INSTALL: libc::c_int = 102;
    let guard = |page: u64| {
        // SAFETY: the page is the test's own, and nobody refers to it.
        unsafe { libc::madvise(page as *mut libc::c_void, PAGE as usize, MADV_GUARD_INSTALL) == 0 }
    };
    for removed in [false, true] {
        let (mut play, now) = (Play::redundant(1), Instant::now());
        let (place, content, right) = replicated(&mut play);
        play.fault.fetch(now, place, content);
        play.fault.prove_demanded(now);
        let asked = play.fault.agents.take_sent();
        if removed {
            // Discarded before, which was told.
            lock(&play.shared.tables).remove(ID, play.page..play.page + PAGE);
        }
        if !guard(play.page) {
            return println!("SKIPPED, guards need Linux 6.13");
        }
        let later = now + Duration::from_millis(5);
        play.fault.agents.answer(&asked[0], right);
        play.fault.network(&|| later);
        assert_eq!(play.shared.pages_in.load(Ordering::Relaxed), 0, "the guard is overwritten");
        assert!(lock(&play.shared.tables).is_empty(place) && play.fault.pending.is_empty());
    }
}

/// Three agents have a page, and none of the two that were asked gives it.
#[test]
fn a_third_agent_is_asked_while_two_are_silent() {
    let (mut play, now) = (Play::redundant(3), Instant::now());
    let (place, content, right) = replicated(&mut play);
    play.fault.fetch(now, place, content);
    let mut asked = AgentSet::EMPTY;
    for _ in 0..3 {
        let later = play.fault.hedge_due().unwrap_or(now) + Duration::from_millis(300);
        let sent = play.fault.agents.take_sent();
        asked = sent
            .iter()
            .map(|(get, _)| AgentSet::of(play.fault.agents.agent_of(*get)))
            .fold(asked, AgentSet::union);
        if asked.len() == 3 {
            play.fault.agents.answer(&sent[0], right.clone());
        }
        play.fault.hedge(later);
    }
    play.fault.network(&|| now);
    assert_served(&play);
}

/// The agent of a window of pages is silent: a thread that waits for one of those ahead is not left to its time-out.
#[test]
fn pages_ahead_of_one_that_another_agent_gave_are_given_up() {
    let (mut play, now) = (Play::redundant(2), Instant::now());
    let (place, content, right) = replicated(&mut play);
    let ahead = (ID, PageAddr::containing(play.page + PAGE));
    play.fault.demand(now, Wanted { place, content });
    lock(&play.shared.tables).begin_prefetch(ID, [ahead.1].into_iter(), 1);
    play.fault.ask(
        now,
        AgentId(0),
        vec![Wanted { place, content }, Wanted { place: ahead, content }],
        true,
    );
    play.fault.agents.take_sent();
    play.fault.hedge(now + Duration::from_millis(300));
    let second = play.fault.agents.take_sent();
    play.fault.agents.answer(&second[0], right);
    play.fault.network(&|| now);
    assert_served(&play);
}

/// An agent gives the page that was awaited, and nothing of those ahead, for one of which a thread waits by now.
#[test]
fn a_thread_that_waits_for_a_page_ahead_is_not_left_to_a_silent_agent() {
    for (agents, waits) in [(2, true), (2, false), (1, true)] {
        let (mut play, now) = (Play::redundant(agents), Instant::now());
        let (place, content, right) = replicated(&mut play);
        let (ahead, wanted) = (place.1, Wanted { place, content });
        assert_eq!(lock(&play.shared.tables).begin_prefetch(ID, [ahead].into_iter(), 1).len(), 1);
        play.fault.ask(now, AgentId(0), vec![wanted], false);
        let first = play.fault.agents.take_sent();
        let answers = now + HEDGE_AFTER_MAX / 2;
        play.fault.agents.play_reply(&first[0], Status::Ok, |control| {
            *control = control.with_done(1);
            control.payload_len = PAGE as u32;
        });
        play.fault.network(&|| answers);
        if waits {
            assert_eq!(lock(&play.shared.tables).fault(place), FaultAction::Wait);
        }
        play.fault.turn(&|| answers + HEDGE_AFTER_MAX - Duration::from_millis(1));
        assert_eq!(play.fault.fetches.len(), 1, "it has its time");
        let late = play.fault.deadline(answers + HEDGE_AFTER_MAX);
        assert!(late < answers + HEDGE_AFTER_MAX * 2);
        play.fault.turn(&|| late);
        let is_given_up = play.fault.fetches.is_empty();
        assert_eq!(is_given_up, agents == 2 && waits, "{agents} {waits}");
        if is_given_up {
            assert_eq!(lock(&play.shared.tables).fault(place), FaultAction::Fetch(content));
            play.fault.fetch(late, place, content);
            play.fault.hedge(late + HEDGE_AFTER_MAX);
            let sent = play.fault.agents.take_sent();
            let other = sent.iter().find(|(get, _)| play.fault.agents.agent_of(*get) == AgentId(1));
            play.fault.agents.answer(other.expect("the other one has it"), right);
            play.fault.network(&|| late);
            assert_served(&play);
        }
    }
}

/// The link of an agent that was killed stays up for seconds: only the first thread waits until another one is asked.
#[test]
fn an_agent_that_is_silent_is_not_waited_for_again() {
    let (mut play, now) = (Play::redundant(2), Instant::now());
    let (place, content, right) = replicated(&mut play);
    let silent = AgentId(0);
    let id = content.id;
    let asked = vec![client::Wanted { id, check: None }];
    let get = play.fault.agents.get(now, silent, asked, Urgency::Demand);
    play.fault.agents.cancel(now + HEDGE_AFTER_MAX, get);
    // It is asked nevertheless: it may answer.
    play.fault.demand(now, Wanted { place, content });
    play.fault.agents.take_sent();
    play.fault.ask(now, silent, vec![Wanted { place, content }], true);
    assert_eq!(play.fault.hedge_due(), Some(now));
    play.fault.hedge(now);
    let sent = play.fault.agents.take_sent();
    assert_eq!(sent.len(), 2);
    assert_eq!(play.fault.hedge.after(), HEDGE_AFTER_MAX, "no read was hedged");
    play.fault.agents.answer(&sent[1], right);
    play.fault.network(&|| now);
    assert_served(&play);
}

#[test]
fn a_page_that_a_thread_waits_for_is_not_fetched_ahead_too() {
    let (mut play, now) = (Play::redundant(2), Instant::now());
    let (place, content, _) = replicated(&mut play);
    let ahead = |play: &mut Play| play.fault.begin_ahead(ID, None, [place.1].into_iter()).len();
    play.fault.demand(now, Wanted { place, content });
    assert_eq!(ahead(&mut play), 0);
    play.fault.end_demand(place);
    assert_eq!(ahead(&mut play), 1);
}

#[test]
fn an_agent_that_has_lost_what_it_said_to_have_is_used_no_more_after_some() {
    let (mut play, now) = (Play::redundant(2), Instant::now());
    let (place, content, right) = replicated(&mut play);
    play.shared.blame(AgentId(0), "a", "lies", true);
    play.shared.blame(AgentId(1), "b", "lies", true);
    for agent in [AgentId(0), AgentId(1)] {
        play.shared.blame(agent, "a", "lies", true);
    }
    play.shared.estate.begin(Box::new(|_| Ok(())));
    play.shared.estate.begin_writing();
    play.fault.fetch(now, place, content);
    let first = play.fault.agents.take_sent();
    let liar = play.fault.agents.agent_of(first[0].0);
    play.fault.agents.answer_with(&first[0], Status::NotFound, 0, Vec::new());
    play.fault.network(&|| now);
    let second = play.fault.agents.take_sent();
    play.fault.agents.answer(&second[0], right);
    play.fault.network(&|| now);
    assert_served(&play);
    assert_eq!(play.shared.unsound_agents(), AgentSet::of(liar));
    assert!(play.shared.estate.is_due(), "who goes on after this pager would trust it");
}

/// What is looked for is looked at once, whatever else becomes known meanwhile.
#[test]
fn a_marker_is_none_the_less_one_if_its_child_is_met_meanwhile() {
    let at = map(PAGE);
    let owner = Userfaultfd::of_child(own_userfaultfd());
    assert!(owner.register(at..at + PAGE));
    owner.mark(at..at + PAGE, true).expect("marked");
    let mut tables = Tables::new(2, 1024).expect("a memfd");
    tables.add_space(ID);
    tables.register(ID, at..at + PAGE, &RangeSet::default());
    let place = (ID, PageAddr::containing(at));
    let mut leaving = Vec::new();
    tables.begin_evict(ID, &[place.1], &mut leaving);
    tables.finish_evict(leaving[0].1, EvictOutcome::Moved(7), &mut Vec::new());

    let met: Arc<OnceLock<Arc<Space>>> = Arc::default();
    let mut hooked = Hooked::new(owner);
    let child = met.clone();
    hooked.before_probe = Some(Box::new(move || {
        let page_tables = Pagemap::open(std::process::id() as i32).expect("own page tables");
        let _ = child.get().expect("set below").page_tables.set(Box::new(page_tables));
    }));
    let space = Arc::new(Space::new(ID, Box::new(hooked)));
    assert!(met.set(space.clone()).is_ok());
    assert_eq!(look_for_marker(&mut tables, &space, place), Probe::Occupied);
    assert!(!tables.is_empty(place), "a page was forgotten that has a marker");
    // Known by now.
    assert!(space.has_marker(place.1));
}

/// Stripes of two pages and two sums: whoever has the page is asked once.
#[test]
fn a_page_that_takes_long_is_made_of_other_parts_of_its_stripe_that_do_not() {
    let shape = Shape::new(2, 2).expect("a shape");
    let mut play = Play::by(shared_of(1, Redundancy::Parity(shape)), None, 4, 2);
    let (now, shared) = (Instant::now(), play.shared.clone());
    let places = [0, PAGE].map(|more| (ID, PageAddr::containing(play.page + more)));
    let mut tables = lock(&shared.tables);
    for place in places {
        let (mut leaving, mut wake) = (Vec::new(), Vec::new());
        tables.begin_evict(ID, &[place.1], &mut leaving);
        tables.finish_evict(leaving[0].1, EvictOutcome::Moved(7), &mut wake);
    }
    let all: AgentSet = (0..4).map(AgentId).collect();
    let dealt = tables.deal(all, 1);
    dealt[0].parts.iter().for_each(|part| tables.answered(part.id, Answer::Stored));
    let FaultAction::Fetch(content) = tables.fault(places[0]) else { panic!("not away") };
    drop(tables);
    play.fault.agents.take_sent();
    play.fault.fetch(now, places[0], content);
    let first = play.fault.agents.take_sent();
    let due = play.fault.hedge_due().expect("it can be made");
    play.fault.hedge(due);
    play.fault.make_on(due);
    let sent = play.fault.agents.take_sent();
    let own = AgentSet::of(play.fault.agents.agent_of(first[0].0));
    let others: AgentSet = sent.iter().map(|get| play.fault.agents.agent_of(get.0)).collect();
    assert_eq!((others.len(), others.without(own)), (2, others));
    // One of those does not answer either.
    play.fault.agents.answer(&sent[0], vec![0; PAGE as usize]);
    play.fault.network(&|| due);
    play.fault.make_on(due + HEDGE_AFTER_MAX);
    assert!(play.fault.agents.take_sent().is_empty(), "they have their time");
    play.fault.make_on(due + 2 * HEDGE_AFTER_MAX);
    let more = play.fault.agents.take_sent();
    let more: Vec<AgentId> = more.iter().map(|get| play.fault.agents.agent_of(get.0)).collect();
    assert_eq!(more, all.without(own).without(others).agents().collect::<Vec<_>>());
}
