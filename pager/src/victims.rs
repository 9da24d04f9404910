//! Which pages of a process go out next, and their way into the write-back slots.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use gms_policy::eviction::{Search, Step};
use gms_policy::ids::{PageAddr, SpaceId};
use gms_policy::limits::SCAN_WINDOW_MAX;
use nix::errno::Errno;

use crate::kernel::{Occupant, Occupied, Registration};
use crate::page_map::PAGE;
use crate::range_set::RangeSet;
use crate::shared::Shared;
use crate::space::Space;
use crate::sync::lock;
use crate::tables::{EvictOutcome, Place};
use crate::torture::{self, Point};

/// Most pages moved at once: bounds how long the gate is closed.
pub const BATCH: usize = 64;
/// A move of one run takes 1.5 us however short it is, and a fault may have to wait for all of a batch: its agent gets the CPU in between.
/// Where faults are of no single thread that the fault thread follows, they share what a batch costs besides.
const RUNS_MAX: usize = 16;
const RUNS_MAX_CROWD: usize = 32;

/// So much on both sides of a guard: the stack of a thread by default, at whose end it is (glibc since 2.42). What lies behind may be the heap, in the same mapping.
const GUARDED_AROUND: u64 = 8 << 20;

/// What may be evicted of a process, and what of it is to go next.
#[derive(Default)]
pub struct Sweep {
    /// Writable, registered when last looked at.
    pub ranges: RangeSet,
    /// Pages chosen to go out next.
    pub victims: VecDeque<PageAddr>,
    /// What lies around guards that were seen (MADV_GUARD_INSTALL): left resident, as guards come and go without an event.
    pub guarded: RangeSet,
}

impl Sweep {
    /// A guard was seen: what lies around it stays resident from now on.
    pub fn spare_guarded(&mut self, guard: Range<u64>) {
        let around = guard.start.saturating_sub(GUARDED_AROUND)..guard.end + GUARDED_AROUND;
        self.ranges.remove(around.clone());
        self.guarded.insert(around);
        let Sweep { victims, ranges, .. } = self;
        victims.retain(|page| ranges.contains(page.get()));
    }
}

/// A process whose pages are moved out, and how. The simulation has a model.
pub trait Evicted {
    /// Its memory.
    fn space(&self) -> &Arc<Space>;
    /// What of it is to go.
    fn sweep(&mut self) -> &mut Sweep;
    /// Frees the outbox, whose pages have been read, unless it has room for so many more. Before pages are noted as leaving: whoever looks for them there when
    /// this process has died is not to find others.
    fn make_way(&mut self, count: usize) -> Result<(), Errno>;
    /// Where in the outbox the next pages will go, for which there is room: one behind the other, from this place on.
    fn next_place(&self) -> u32;
    /// Of places in the outbox to which pages were to be moved when the pager before died, those that are taken.
    fn find_left(&self, places: &[u32]) -> Result<MovedPages, Errno>;
    /// Moves the pages out of the workload's way, into the outbox. The caller holds the gate and has marked them as leaving.
    fn move_out(&mut self, pages: &[PageAddr]) -> Result<MovedPages, Errno>;
    /// Copies moved pages from the outbox: `into[i]` is the frame for the page at place `places[i]`.
    fn read_outbox(&self, places: &[u32], into: &mut [&mut [u8]]) -> Result<(), Errno>;
    /// Ranges which children do not inherit as they are; `None` if that cannot be known.
    fn not_inherited(&self) -> Option<Vec<Range<u64>>>;
    /// After it could not be reached: whether the process has ended, with all that have its memory.
    fn ends(&self) -> bool;
    /// Why the workload ends when it cannot be reached and has not ended.
    fn unanswered(&self, errno: Errno) -> String;
    /// What is mapped is looked at anew, at once.
    fn look_again(&mut self);
}

/// What came of an attempt to move pages out.
pub struct MovedPages {
    /// For each page of the batch: its place in the outbox if it moved.
    pub places: Vec<Option<u32>>,
    /// Pages that stayed because another process shares them since a fork, and were not unshared before.
    pub shared: Vec<PageAddr>,
    /// How many are left out from now on, because the kernel does not move them.
    pub refused: usize,
}

impl MovedPages {
    /// None of so many.
    pub fn none(count: usize) -> MovedPages {
        MovedPages { places: vec![None; count], shared: Vec::new(), refused: 0 }
    }
}

/// Fills the victims of a process by a [`Search`].
pub fn choose_victims(shared: &Shared, process: &mut impl Evicted, random: u64) {
    let id = process.space().id;
    let (mut search, mut hand) = Search::begin(random, process.sweep().ranges.iter());
    loop {
        let (window, next) = window(shared, process, hand);
        let cold = match torture::sample(&window) {
            Some(pages) => pages,
            None => lock(&shared.tables).cool(id, &window),
        };
        match search.handle_window(window, cold, next) {
            Step::Scan(from) => hand = from,
            Step::Evict(pages) => return process.sweep().victims.extend(pages),
        }
    }
}

/// Present pages from the hand on, and where the hand stands then (`None`: at the end).
fn window(shared: &Shared, process: &mut impl Evicted, hand: u64) -> (Vec<PageAddr>, Option<u64>) {
    let mut found = Vec::with_capacity(SCAN_WINDOW_MAX);
    let mut regions = Vec::new();
    let mut guards = Vec::new();
    let mut end = None;
    let space = process.space().clone();
    let sweep = &process.sweep().ranges;
    'scan: for range in sweep.overlaps(hand..u64::MAX) {
        let mut at = range.start;
        while at < range.end {
            let room = (SCAN_WINDOW_MAX - found.len()) as u64;
            regions.clear();
            let Some(next) = scan(shared, &space, at..range.end, room, &mut regions) else {
                break;
            };
            for region in &regions {
                match region.by {
                    Occupant::Present => {
                        let pages = region.range.clone().step_by(PAGE as usize);
                        found.extend(pages.map(PageAddr::containing));
                    }
                    Occupant::Guard => guards.push(region.range.clone()),
                    Occupant::Elsewhere => {}
                }
            }
            if found.len() >= SCAN_WINDOW_MAX {
                end = Some(next);
                break 'scan;
            }
            if next <= at {
                break;
            }
            at = next;
        }
    }
    let sweep = process.sweep();
    guards.into_iter().for_each(|guard| sweep.spare_guarded(guard));
    found.retain(|page| sweep.ranges.contains(page.get()));
    (found, end)
}

/// Scans a range for what is there; returns where it ended. Where nothing is, removals are over.
fn scan(
    shared: &Shared,
    space: &Space,
    range: Range<u64>,
    room: u64,
    regions: &mut Vec<Occupied>,
) -> Option<u64> {
    let id = space.id;
    let page_tables = space.page_tables.get()?;
    let tables = lock(&shared.tables);
    let (removals, quarantined) = (tables.removals(id), tables.has_quarantine(id, &range));
    let range = if quarantined { range } else { tables.not_away(id, range) };
    drop(tables);
    if range.is_empty() {
        // Many such parts may follow, and others want the lock.
        std::thread::yield_now();
        return Some(range.end);
    }
    torture::at(Point::BeforeScan);
    let end = page_tables.occupied(range.clone(), room, regions).ok()?;
    torture::at(Point::AfterScan);
    if !quarantined {
        return Some(end);
    }
    let mut empty = RangeSet::default();
    empty.insert(range.start..end);
    regions.iter().for_each(|region| empty.remove(region.range.clone()));
    // A page that went out before its removal would come back with its old bytes.
    let marked = page_tables.marked(range.start..end).ok()?;
    marked.iter().for_each(|range| empty.remove(range));
    let mut tables = lock(&shared.tables);
    empty.iter().for_each(|range| tables.seen_absent(id, range, removals));
    Some(end)
}

/// Takes pages to be moved next: at most [`BATCH`], in at most [`RUNS_MAX`] or [`RUNS_MAX_CROWD`] runs of adjacent pages.
pub fn next_batch(shared: &Shared, victims: &mut VecDeque<PageAddr>) -> Vec<PageAddr> {
    let is_followed = shared.fault_cpu.load(Ordering::Relaxed) >= 0;
    let runs_max = if is_followed { RUNS_MAX } else { RUNS_MAX_CROWD };
    let count = victims.len().min(BATCH);
    let mut pages: Vec<PageAddr> = victims.drain(..count).collect();
    pages.sort_unstable();
    if let Some(&(end, _)) = runs(&pages).get(runs_max) {
        pages.drain(end..).rev().for_each(|page| victims.push_front(page));
    }
    pages
}

/// Pages on their way out, each with its slot.
pub type Leaving = Vec<(PageAddr, u32)>;

/// Notes pages as leaving, moves them to the outbox and leaves markers. The gate is closed from the one to the other: whatever happens to the mappings
/// is seen either before, or by the kernel as too late for the move. `None` if none can go or the workload must be stopped.
pub fn move_out(
    shared: &Shared,
    process: &mut impl Evicted,
    pages: &[PageAddr],
) -> Option<(Leaving, MovedPages)> {
    let space = process.space().clone();
    if let Err(errno) = process.make_way(pages.len()) {
        if !process.ends() {
            shared.fail(process.unanswered(errno));
        }
        return None;
    }
    let _gate = lock(&space.gate);
    if !space.ungated.is_intact() {
        return None;
    }
    let mut leaving = Vec::with_capacity(pages.len());
    let mut tables = lock(&shared.tables);
    tables.begin_evict(space.id, pages, &mut leaving);
    if leaving.is_empty() {
        return None;
    }
    tables.note_places(space.id, &leaving, process.next_place());
    drop(tables);
    let pages: Vec<PageAddr> = leaving.iter().map(|l| l.0).collect();
    if !are_registered(shared, process, &pages) {
        let moved = MovedPages::none(leaving.len());
        return Some((leaving, moved));
    }
    torture::at(Point::BeforeMove);
    let moved = process.move_out(&pages);
    torture::at(Point::AfterMove);
    match moved {
        Ok(moved) if space.ungated.is_intact() => {
            leave_markers(shared, process, &leaving, &moved);
            Some((leaving, moved))
        }
        Ok(_) => {
            // Perhaps they were of a mapping that came in the place of the one that was meant.
            shared.fail(format!("the memory of {} changed under an eviction", space.name()));
            None
        }
        // A fork that was read in between, and will be applied, was before the end.
        Err(_) if process.ends() && space.ungated.is_intact() => {
            let moved = MovedPages::none(leaving.len());
            Some((leaving, moved))
        }
        Err(errno) => {
            shared.fail(process.unanswered(errno));
            None
        }
    }
}

/// Whether a marker can be left at each of the pages, which are thought to be registered. Some calls replace mappings and raise no event (shmat with
/// SHM_REMAP): what is mapped there then is not registered, and a page of it that was moved out could not be brought back. Then nothing counts as
/// registered before it has been proved anew.
fn are_registered(shared: &Shared, process: &mut impl Evicted, pages: &[PageAddr]) -> bool {
    match registration(process.space(), pages) {
        Registration::Whole => true,
        Registration::Changing => false,
        Registration::Not => {
            lock(&shared.tables).unregister(process.space().id, 0..u64::MAX);
            process.look_again();
            false
        }
    }
}

/// That of all pages, which are in order: mostly they lie in one mapping.
fn registration(space: &Space, pages: &[PageAddr]) -> Registration {
    let [first, .., last] = pages else {
        return space.faults.registration(pages[0].get()..pages[0].get() + PAGE);
    };
    match space.faults.registration(first.get()..last.get() + PAGE) {
        Registration::Not => {
            let (low, high) = pages.split_at(pages.len() / 2);
            match registration(space, low) {
                Registration::Whole => registration(space, high),
                other => other,
            }
        }
        other => other,
    }
}

/// Runs of adjacent pages: (first index, count).
pub fn runs(pages: &[PageAddr]) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (i, page) in pages.iter().enumerate() {
        match runs.last_mut() {
            Some((first, count)) if pages[*first].get() + *count as u64 * PAGE == page.get() => {
                *count += 1;
            }
            _ => runs.push((i, 1)),
        }
    }
    runs
}

/// Leaves markers where pages were just moved from. That fails if the address space is being changed, or has been since the move: then
/// [`finish`] tries again when it is known how.
fn leave_markers(shared: &Shared, process: &impl Evicted, leaving: &Leaving, moved: &MovedPages) {
    let space = process.space();
    let gone = |i: &usize| moved.places[*i].is_some();
    let moved: Vec<usize> = (0..leaving.len()).filter(gone).collect();
    let pages: Vec<PageAddr> = moved.iter().map(|&i| leaving[i].0).collect();
    let (mut marked, mut left): (Vec<usize>, Vec<usize>) = (Vec::new(), Vec::new());
    for (first, count) in runs(&pages) {
        let start = pages[first].get();
        let run = &moved[first..first + count];
        match leave_marker(space, start..start + count as u64 * PAGE) {
            Ok(()) => marked.extend(run),
            Err(_) => left.extend(run),
        }
    }
    let mut tables = lock(&shared.tables);
    marked.into_iter().for_each(|i| tables.marked(leaving[i].1, (space.id, leaving[i].0)));
    drop(tables);
    if spare_wiped(shared, process, leaving, &left).is_err() {
        shared.fail(format!("what children of {} inherit cannot be read", space.name()));
    }
}

/// Leaves markers, for the gate's holder. EAGAIN also if an event has been read without the gate and is not applied: if it was a fork, the child has no
/// markers, and is to be known first. A marker left meanwhile is taken away, before anybody inherits what is not accounted for. It is nobody else's:
/// what brings another page's marker to a registered address raises two events, one of which would be unread.
fn leave_marker(space: &Space, range: Range<u64>) -> nix::Result<()> {
    if !space.ungated.is_intact() {
        return Err(Errno::EAGAIN);
    }
    let marked = space.faults.mark(range.clone(), true);
    if space.ungated.is_intact() {
        return marked;
    }
    if marked.is_ok() {
        let _ = space.faults.mark(range, false);
    }
    Err(Errno::EAGAIN)
}

/// Reads moved pages into their slots' frames. `None` if that failed: then nobody may ever see those frames.
pub fn read_moved(
    shared: &Shared,
    process: &mut impl Evicted,
    leaving: &Leaving,
    moved: &MovedPages,
    zero_hash: u64,
) -> Option<Vec<EvictOutcome>> {
    let mut outcomes = vec![EvictOutcome::Stayed; leaving.len()];
    let gone: Vec<(usize, u32)> =
        moved.places.iter().enumerate().filter_map(|(i, p)| Some((i, (*p)?))).collect();
    if gone.is_empty() {
        return Some(outcomes);
    }
    let places: Vec<u32> = gone.iter().map(|g| g.1).collect();
    let frame = |&(i, _): &(usize, u32)| {
        // SAFETY: the slots are leaving ones, each in the list once, which only this thread touches.
        unsafe {
            std::slice::from_raw_parts_mut(shared.frames.leaving(leaving[i].1), PAGE as usize)
        }
    };
    let mut frames: Vec<&mut [u8]> = gone.iter().map(frame).collect();
    match process.read_outbox(&places, &mut frames) {
        Ok(()) => {}
        // Nobody is left to see what becomes of them.
        Err(_) if process.ends() && !is_inherited(shared, process, leaving) => {
            return Some(outcomes);
        }
        Err(errno) => {
            let name = process.space().name();
            shared.fail(format!("evicted pages of {name} are lost: {errno}"));
            return None;
        }
    }
    for (&(i, _), frame) in gone.iter().zip(&frames) {
        let hash = shared.checksum(frame);
        let zero = hash == zero_hash && frame.iter().all(|&byte| byte == 0);
        outcomes[i] = if zero { EvictOutcome::Zero } else { EvictOutcome::Moved(hash) };
    }
    Some(outcomes)
}

/// What has become of pages that were leaving: of each slot.
pub type Fates = Vec<(u32, EvictOutcome)>;

/// What has become of the pages of a process that were leaving when the pager before died. Nothing has been read since, and whatever that pager had told is over: a
/// page that is in the outbox has moved there. Of zeros that is not sure (see `Process::find_moved`): their slots come second, for [`settle_zeros`].
///
/// # Errors
/// Why it cannot be known.
pub fn take_up(
    shared: &Shared,
    process: &mut impl Evicted,
    zero_hash: u64,
) -> Result<(Fates, Vec<u32>), &'static str> {
    let space = process.space().clone();
    let left = lock(&shared.tables).left_leaving(space.id);
    if left.is_empty() {
        return Ok((Fates::new(), Vec::new()));
    }
    let places: Vec<u32> = left.iter().map(|&(.., place)| place).collect();
    let leaving: Leaving = left.iter().map(|&(page, slot, _)| (page, slot)).collect();
    let found = process.find_left(&places);
    let is_inherited = {
        let tables = lock(&shared.tables);
        leaving.iter().any(|&(_, slot)| tables.is_inherited(slot, space.id))
    };
    let moved = match found {
        Ok(moved) if space.faults.is_alive() => moved,
        // Nobody is left to see what becomes of them.
        _ if !is_inherited && (!space.faults.is_alive() || process.ends()) => {
            MovedPages::none(places.len())
        }
        _ => return Err("what was being evicted cannot be found"),
    };
    let outcomes = read_moved(shared, process, &leaving, &moved, zero_hash);
    let outcomes = outcomes.ok_or("what was being evicted cannot be read")?;
    let was_settled = is_settled(&space);
    let has_marker: Vec<bool> = leaving.iter().map(|&(page, _)| space.has_marker(page)).collect();
    let is_settled = was_settled && is_settled(&space);
    let (mut fates, mut zeros, mut unmarked) = (Fates::new(), Vec::new(), Vec::new());
    let mut tables = lock(&shared.tables);
    for (i, &(page, slot)) in leaving.iter().enumerate() {
        let place = (space.id, page);
        let was_marked = !tables.unmarked(slot).any(|unmarked| unmarked == place);
        match outcomes[i] {
            EvictOutcome::Zero if !was_marked => zeros.push(slot),
            outcome => fates.push((slot, outcome)),
        }
        match outcomes[i] {
            EvictOutcome::Moved(_) if is_settled && has_marker[i] => tables.marked(slot, place),
            EvictOutcome::Moved(_) if !was_marked => unmarked.push(i),
            _ => {}
        }
    }
    drop(tables);
    spare_wiped(shared, process, &leaving, &unmarked)?;
    Ok((fates, zeros))
}

fn is_settled(space: &Space) -> bool {
    space.ungated.is_intact() && !space.faults.has_event()
}

/// What has become of pages that were leaving the process, if they have, and are zeros then: that is told by what is where they were. `None` if an event must be
/// applied first.
///
/// # Errors
/// Why it cannot be known.
pub fn settle_zeros(
    shared: &Shared,
    process: &impl Evicted,
    slots: &[u32],
) -> Result<Option<Fates>, &'static str> {
    let space = process.space();
    let _gate = lock(&space.gate);
    if !is_settled(space) {
        return Ok(None);
    }
    let left = lock(&shared.tables).left_leaving(space.id);
    let mut fates = Fates::new();
    for &slot in slots {
        let page = left.iter().find(|left| left.1 == slot).map(|left| left.0);
        let Some(page) = page else {
            if lock(&shared.tables).is_owned(slot) {
                return Err("only a child has a page of zeros that was perhaps evicted");
            }
            fates.push((slot, EvictOutcome::Stayed));
            continue;
        };
        let (has_marker, is_taken) = (space.has_marker(page), is_taken(space, page));
        if has_marker && lock(&shared.tables).was_remote(slot) {
            return Err("it is not known whether a page of zeros was evicted");
        }
        let has_stayed = is_taken && !has_marker;
        let outcome = if has_stayed { EvictOutcome::Stayed } else { EvictOutcome::Zero };
        fates.push((slot, outcome));
    }
    // A page may have been moved elsewhere before it was looked for.
    Ok(is_settled(space).then_some(fates))
}

fn is_taken(space: &Space, page: PageAddr) -> bool {
    let range = page.get()..page.get() + PAGE;
    let taken = space.page_tables.get().map(|page_tables| page_tables.taken(range));
    !matches!(taken, Some(Ok(taken)) if taken.is_empty())
}

/// Of some pages that were moved and have no markers: children that are forked meanwhile do not inherit those that they are not to.
fn spare_wiped(
    shared: &Shared,
    process: &impl Evicted,
    leaving: &Leaving,
    unmarked: &[usize],
) -> Result<(), &'static str> {
    if unmarked.is_empty() {
        return Ok(());
    }
    // If a fork is under way, its child has no markers either, whether it inherits the page or not.
    let wiped = process.not_inherited();
    if wiped.is_none() && !process.ends() {
        return Err("what children inherit cannot be read");
    }
    let wiped = wiped.unwrap_or_default();
    let mut tables = lock(&shared.tables);
    for &i in unmarked.iter().filter(|&&i| wiped.iter().any(|r| r.contains(&leaving[i].0.get()))) {
        tables.make_private(leaving[i].1);
    }
    Ok(())
}

/// Whether a child of a process that has ended was forked after the pages were moved: they are its too.
fn is_inherited(shared: &Shared, process: &impl Evicted, leaving: &Leaving) -> bool {
    let _gate = process.space().settled_gate();
    let tables = lock(&shared.tables);
    leaving.iter().any(|&(_, slot)| tables.is_inherited(slot, process.space().id))
}

/// Ends the leaving of those pages that have all their markers, or have stayed; returns how many have gone. The others remain in the list.
pub fn finish_marked(
    shared: &Shared,
    leaving: &mut Vec<(u32, EvictOutcome)>,
    wake: &mut Vec<Place>,
) -> u64 {
    let mut moved = 0;
    let mut tables = lock(&shared.tables);
    leaving.retain(|&(slot, outcome)| {
        let ends = match outcome {
            EvictOutcome::Stayed => true,
            EvictOutcome::Zero => false,
            EvictOutcome::Moved(_) => tables.unmarked(slot).next().is_none(),
        };
        if ends {
            moved += u64::from(outcome != EvictOutcome::Stayed);
            tables.finish_evict(slot, outcome, wake);
        }
        !ends
    });
    moved
}

/// Ends the leaving of a page of zeros if it has one address, from which its marker is taken away; false if it cannot be so, `None` if an event must be
/// applied first.
fn finish_zeros(
    shared: &Shared,
    spaces: &BTreeMap<SpaceId, Arc<Space>>,
    slot: u32,
    wake: &mut Vec<Place>,
) -> Option<bool> {
    let Some(place) = lock(&shared.tables).only_owner(slot) else { return Some(false) };
    let Some(space) = spaces.get(&place.0) else { return Some(false) };
    let range = place.1.get()..place.1.get() + PAGE;
    let _gate = lock(&space.gate);
    // Locked until it is known whether the marker is to be missed.
    let mut tables = lock(&shared.tables);
    if tables.only_owner(slot) != Some(place) {
        return Some(false);
    }
    if !space.ungated.is_intact() {
        return None;
    }
    if space.faults.mark(range.clone(), false).is_err() {
        return Some(false);
    }
    if space.ungated.is_intact() {
        tables.finish_evict(slot, EvictOutcome::Zero, wake);
        return Some(true);
    }
    // A child that was forked before has a marker, of which it is to be known. If it cannot be left again, a page without one is zeros.
    let _ = space.faults.mark(range, true);
    None
}

/// Ends a page's leaving, if its markers are as they must be: at every address that has it, or at none if it holds zeros. Returns what became of
/// it, or `None` if an event must be read first. Appends the places whose threads must be woken.
///
/// What address has the page may have changed since it was moved, so that the gates of those spaces are closed, one after the other.
pub fn finish(
    shared: &Shared,
    spaces: &BTreeMap<SpaceId, Arc<Space>>,
    slot: u32,
    outcome: EvictOutcome,
    zero_hash: u64,
    wake: &mut Vec<Place>,
) -> Option<EvictOutcome> {
    let mut outcome = outcome;
    if outcome == EvictOutcome::Zero {
        if finish_zeros(shared, spaces, slot, wake)? {
            return Some(outcome);
        }
        // Zeros like any other bytes then.
        outcome = EvictOutcome::Moved(zero_hash);
    }
    loop {
        let mut tables = lock(&shared.tables);
        let next = tables.unmarked(slot).next();
        let Some(place) = next.filter(|_| outcome != EvictOutcome::Stayed) else {
            tables.finish_evict(slot, outcome, wake);
            return Some(outcome);
        };
        drop(tables);
        // A child of which the fault thread has not told yet.
        let space = spaces.get(&place.0)?;
        let _gate = lock(&space.gate);
        let mut tables = lock(&shared.tables);
        if !tables.unmarked(slot).any(|unmarked| unmarked == place) {
            continue;
        }
        match leave_marker(space, place.1.get()..place.1.get() + PAGE) {
            Ok(()) => tables.marked(slot, place),
            // Without memory for page tables it is tried again like a change that does not end.
            Err(Errno::EAGAIN | Errno::ENOMEM) => return None,
            // It may have been moved out of what is there now.
            Err(Errno::ENOENT) if space.is_anonymous(place.1) && space.faults.is_alive() => {
                let name = space.name();
                shared.fail(format!("memory of {name} was replaced untold while it was evicted"));
                return None;
            }
            // It is not mapped any more, or the process has ended.
            Err(Errno::ENOENT | Errno::ESRCH) => tables.unowned(place),
            Err(errno) => {
                shared.fail(format!(
                    "it cannot be noted in the page tables what was evicted: {errno}"
                ));
                return None;
            }
        }
    }
}
