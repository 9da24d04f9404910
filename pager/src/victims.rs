//! Which pages of a process go out next, and their way into the write-back slots.

use std::collections::VecDeque;
use std::ops::Range;

use gms_policy::ids::PageAddr;
use gms_policy::limits::SCAN_WINDOW_MAX;

use crate::page_map::PAGE;
use crate::process::{BATCH, MovedPages, Process, runs};
use crate::shared::{Shared, lock};
use crate::tables::EvictOutcome;

/// A move of one run takes 1.5 us however short it is, and a fault may have to wait for all of a batch: its agent gets the CPU in between.
const RUNS_MAX: usize = 16;

/// Fills `process.victims` from a window of present pages anywhere, and where all of those are hot from the next ones; after a lap of hot
/// pages some of those go. A hand that went round in the order of addresses would go before a program that reads its memory over and over:
/// it would evict just what is read next.
pub fn choose_victims(shared: &Shared, process: &mut Process, random: u64) {
    let id = process.space.id;
    let mut wrapped = false;
    let mut hand = anywhere(process, random);
    while process.victims.is_empty() {
        let (window, next) = window(shared, process, hand);
        hand = next.unwrap_or(0);
        lock(&shared.tables).choose(id, &window, &mut process.victims);
        if next.is_none() && std::mem::replace(&mut wrapped, true) {
            if process.victims.is_empty() {
                process.victims.extend(window);
            }
            break;
        }
    }
}

/// An address of what may be evicted, each page as likely as the others.
fn anywhere(process: &Process, random: u64) -> u64 {
    let length = |range: &Range<u64>| range.end - range.start;
    let total: u64 = process.sweep.iter().map(|range| length(&range)).sum();
    let mut at = random % total.max(1);
    for range in process.sweep.iter() {
        if at < length(&range) {
            return (range.start + at) / PAGE * PAGE;
        }
        at -= length(&range);
    }
    0
}

/// Present pages from the hand on, and where the hand stands then (`None`: at the end).
fn window(shared: &Shared, process: &Process, hand: u64) -> (Vec<PageAddr>, Option<u64>) {
    let id = process.space.id;
    let mut found = Vec::with_capacity(SCAN_WINDOW_MAX);
    let mut regions = Vec::new();
    for range in process.sweep.overlaps(hand..u64::MAX) {
        let mut at = range.start;
        while at < range.end {
            let room = (SCAN_WINDOW_MAX - found.len()) as u64;
            regions.clear();
            let removals = lock(&shared.tables).removals(id);
            let Ok(end) = process.page_tables.occupied(at..range.end, room, &mut regions) else {
                break;
            };
            let mut tables = lock(&shared.tables);
            let mut absent_from = at;
            for region in &regions {
                tables.seen_absent(id, absent_from..region.range.start, removals);
                absent_from = region.range.end;
                if region.present {
                    let pages = region.range.clone().step_by(PAGE as usize);
                    found.extend(pages.map(PageAddr::containing));
                }
            }
            tables.seen_absent(id, absent_from..end.max(absent_from), removals);
            drop(tables);
            if found.len() >= SCAN_WINDOW_MAX {
                return (found, Some(end));
            }
            if end <= at {
                break;
            }
            at = end;
        }
    }
    (found, None)
}

/// Takes pages to be moved next: at most [`BATCH`], in at most [`RUNS_MAX`] runs of adjacent pages.
pub fn next_batch(victims: &mut VecDeque<PageAddr>) -> Vec<PageAddr> {
    let count = victims.len().min(BATCH);
    let mut pages: Vec<PageAddr> = victims.drain(..count).collect();
    pages.sort_unstable();
    if let Some(&(end, _)) = runs(&pages).get(RUNS_MAX) {
        pages.drain(end..).rev().for_each(|page| victims.push_front(page));
    }
    pages
}

/// Pages on their way out, each with its slot.
pub type Leaving = Vec<(PageAddr, u32)>;

/// Marks pages as leaving and moves them to the outbox. The gate is closed from the one to the other: whatever happens to the mappings
/// is seen either before the marks, or by the kernel as too late for the move. `None` if none can go or the workload must be stopped.
pub fn move_out(
    shared: &Shared,
    process: &mut Process,
    pages: &[PageAddr],
) -> Option<(Leaving, MovedPages)> {
    let space = process.space.clone();
    let _gate = lock(&space.gate);
    if !space.ungated.is_intact() {
        return None;
    }
    let mut leaving = Vec::with_capacity(pages.len());
    lock(&shared.tables).begin_evict(space.id, pages, &mut leaving);
    if leaving.is_empty() {
        return None;
    }
    let pages: Vec<PageAddr> = leaving.iter().map(|l| l.0).collect();
    match process.move_out(&pages) {
        Ok(moved) if space.ungated.is_intact() => Some((leaving, moved)),
        Ok(_) => {
            // Perhaps they were of a mapping that came in the place of the one that was meant.
            shared.fail(format!("the memory of process {} changed under an eviction", process.pid));
            None
        }
        Err(_) if process.has_ended() => {
            let moved = MovedPages { places: vec![None; leaving.len()], shared: Vec::new() };
            Some((leaving, moved))
        }
        Err(errno) => {
            shared.fail(format!("the evictor of process {} does not answer: {errno}", process.pid));
            None
        }
    }
}

/// Reads moved pages into their slots' frames. `None` if that failed: then nobody may ever see those frames.
pub fn read_moved(
    shared: &Shared,
    process: &mut Process,
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
    let read = process.read_outbox(&places, &mut frames);
    match read {
        Ok(()) => {}
        Err(_) if process.has_ended() => return Some(outcomes),
        Err(errno) => {
            shared.fail(format!("evicted pages of process {} are lost: {errno}", process.pid));
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
