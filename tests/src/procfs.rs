//! What `/proc` says about processes: an opinion independent of gms's own statistics.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Most processes looked at in one tree.
const TREE_MAX: usize = 1024;

/// Whether the process exists and is not a zombie.
pub fn exists(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

/// The file that a process executes; `None` once it is gone.
pub(crate) fn executable(pid: i32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/exe")).ok()
}

fn children(pid: i32) -> Vec<i32> {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    threads
        .flatten()
        .filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok())
        .flat_map(|list| {
            list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<i32>>()
        })
        .collect()
}

/// The processes below `pid`, parents first.
pub fn descendants(pid: i32) -> Vec<i32> {
    let mut tree = children(pid);
    let mut next = 0;
    while next < tree.len() && tree.len() < TREE_MAX {
        tree.extend(children(tree[next]));
        next += 1;
    }
    tree
}

/// What every thread of a tree is doing, for the report of a hang: name, state, where it waits in the kernel, its system call.
pub(crate) fn tasks(root: i32) -> String {
    let mut text = String::new();
    for pid in std::iter::once(root).chain(descendants(root)) {
        let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for thread in threads.flatten() {
            let read = |file: &str| {
                let found = fs::read_to_string(thread.path().join(file)).unwrap_or_default();
                found.lines().next().unwrap_or("?").to_string()
            };
            let stat = read("stat");
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            let (name, waits, call) = (read("comm"), read("wchan"), read("syscall"));
            let (tid, state) = (thread.file_name(), state.unwrap_or('?'));
            let _ = writeln!(text, "  {pid}/{tid:?} {name} {state} in {waits}, system call {call}");
        }
    }
    text
}

/// The mappings of a process but for its stack, which grows: addresses, access and name. Neighbours with equal access and name are one: the kernel
/// may split and join them.
pub(crate) fn mappings(pid: i32) -> Vec<String> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let mut found: Vec<(Range<u64>, String)> = Vec::new();
    for line in maps.lines().filter(|line| !line.ends_with("[stack]")) {
        let Some(range) = range_of(line) else { continue };
        let fields: Vec<&str> = line.split_whitespace().collect();
        let what = format!("{} {}", fields[1], fields.get(5..).unwrap_or_default().join(" "));
        match found.last_mut() {
            Some((last, same)) if last.end == range.start && *same == what => last.end = range.end,
            _ => found.push((range, what)),
        }
    }
    found.into_iter().map(|(range, what)| format!("{range:x?} {what}")).collect()
}

/// The name of a process, or thread; empty once it is gone.
pub fn name(pid: i32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().into()
}

/// Whether gms has made the process, or thread: they are named so.
pub fn is_of_gms(pid: i32) -> bool {
    name(pid).starts_with("far-")
}

/// The processes of gms that have the memory of another one. Those of its children, which have the same addresses, are found too.
pub(crate) fn evictors_of(pid: i32) -> Vec<i32> {
    let stack = |pid: i32| {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        maps.lines().find(|line| line.ends_with("[stack]")).map(String::from)
    };
    let own = stack(pid);
    let all = fs::read_dir("/proc").expect("/proc").flatten();
    let others = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let has_it = |other: &i32| is_of_gms(*other) && own.is_some() && stack(*other) == own;
    others.filter(has_it).collect()
}

/// The process of gms that has the memory of another one.
pub fn evictor_of(pid: i32) -> i32 {
    *evictors_of(pid).first().expect("no evictor")
}

/// Resident anonymous memory of one process in bytes; `None` once it is gone.
pub fn rss_anon(pid: i32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

/// The same, as the kernel counts it for `statm`, which is read sooner.
pub(crate) fn anon_of_statm(pid: i32) -> Option<u64> {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages = |at: usize| statm.split(' ').nth(at)?.parse::<u64>().ok();
    Some((pages(1)? - pages(2)?.min(pages(1)?)) * 4096)
}

/// The process's share of anonymous memory in bytes; `None` once it is gone.
pub(crate) fn pss_anon(pid: i32) -> Option<u64> {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss_Anon:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

/// Whether any mapping of the process is registered with a userfaultfd.
pub fn has_uffd(pid: i32) -> bool {
    let maps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
    maps.lines()
        .filter_map(|line| line.strip_prefix("VmFlags:"))
        .any(|flags| flags.split_whitespace().any(|flag| flag == "um" || flag == "uw"))
}

/// How many userfaultfds the process has open.
pub fn userfaultfds(pid: i32) -> usize {
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let targets = fds.filter_map(|fd| fs::read_link(fd.path()).ok());
    targets.filter(|target| target.as_os_str() == "anon_inode:[userfaultfd]").count()
}

/// How many epoll instances of the process wait for userfaultfds: its threads that serve faults.
pub fn fault_readers(pid: i32) -> usize {
    let is = |fd: &str, what: &str| {
        let link = fs::read_link(format!("/proc/{pid}/fd/{fd}"));
        link.is_ok_and(|link| link.as_os_str() == format!("anon_inode:[{what}]").as_str())
    };
    let reads = |fd: &str| {
        let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).unwrap_or_default();
        let targets = info.lines().filter_map(|line| line.strip_prefix("tfd:"));
        let mut targets = targets.filter_map(|line| line.split_whitespace().next());
        targets.any(|target| is(target, "userfaultfd"))
    };
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let names = fds.filter_map(|fd| fd.file_name().into_string().ok());
    names.filter(|fd| is(fd, "eventpoll") && reads(fd)).count()
}

/// Changes pages of a range of addresses, of those that are in memory; returns how often `change` says that it did.
fn change_pages(
    pid: i32,
    range: Range<u64>,
    mut change: impl FnMut(&mut [u8]) -> u64,
) -> std::io::Result<u64> {
    let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
    let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
    let (mut entries, mut page, mut changed) = (vec![0; 8 * 4096], vec![0; 4096], 0);
    for part in range.clone().step_by(4096 * 4096) {
        let count = (range.end - part).div_ceil(4096).min(4096) as usize;
        pagemap.read_exact_at(&mut entries[..8 * count], part / 4096 * 8)?;
        // Bit 63: it is in memory.
        let present = (0..count).filter(|at| entries[8 * at + 7] >> 7 == 1);
        for at in present.map(|at| part + at as u64 * 4096) {
            memory.read_exact_at(&mut page, at)?;
            let count = change(&mut page);
            if count > 0 {
                memory.write_all_at(&page, at)?;
            }
            changed += count;
        }
    }
    Ok(changed)
}

/// Changes a byte of each page of the largest private anonymous mapping of a process; returns of how many.
pub(crate) fn spoil(pid: i32) -> std::io::Result<u64> {
    change_pages(pid, largest_mapping(pid)?, |page| {
        page[77] ^= 0x10;
        1
    })
}

/// What two words of a page that `check.h` fills differ by, the second being the one behind the first.
const PATTERN_STEP: u64 = 0xD6E8_FEB8_6659_FD93;
/// Bytes of a pattern of that, long enough not to be there by chance.
const PATTERN_LEN: usize = 64;

/// Occurrences of the pattern of `check.h` anywhere in the writable memory of a process, none within another one.
pub(crate) fn patterns(pid: i32) -> std::io::Result<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let memory = File::open(format!("/proc/{pid}/mem"))?;
    let writable =
        |line: &&str| line.split_whitespace().nth(1).is_some_and(|a| a.starts_with("rw"));
    let (mut found, mut bytes) = (0, vec![0; 1 << 20]);
    for range in maps.lines().filter(writable).filter_map(range_of) {
        let (mut at, mut kept) = (range.start, 0);
        while at < range.end {
            let count = (range.end - at).min((bytes.len() - kept) as u64) as usize;
            memory.read_exact_at(&mut bytes[kept..kept + count], at)?;
            let (there, left) = count_patterns(&bytes[..kept + count]);
            found += there;
            bytes.copy_within(kept + count - left..kept + count, 0);
            (at, kept) = (at + count as u64, left);
        }
    }
    Ok(found)
}

/// Patterns in `bytes`, and how many of the last bytes may be the beginning of another.
fn count_patterns(bytes: &[u8]) -> (u64, usize) {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let steps = |at: &usize| word(at + 8).wrapping_sub(word(*at)) == PATTERN_STEP;
    let (mut found, mut at) = (0, 0);
    while at + PATTERN_LEN <= bytes.len() {
        match (at..at + PATTERN_LEN - 8).step_by(8).all(|at| steps(&at)) {
            true => (found, at) = (found + 1, at + PATTERN_LEN),
            false => at += 1,
        }
    }
    (found, bytes.len() - at)
}

/// Makes a pager believe of each page at an agent that it is in the write-back buffer, at a place which that does not have (its `page_map.rs`
/// says how entries are stored). Returns of how many pages. It has to be stopped, or it meets the first and ends before the rest.
pub fn spoil_page_map(pager: i32) -> std::io::Result<u64> {
    let nowhere = (u64::MAX << 20 | 1).to_le_bytes();
    let maps = fs::read_to_string(format!("/proc/{pager}/maps"))?;
    let line = maps.lines().find(|line| line.contains("memfd:gms-page-map"));
    let range = line.and_then(range_of).ok_or_else(|| std::io::Error::other("no such mapping"))?;
    let spoil = |page: &mut [u8]| {
        let mut changed = 0;
        for entry in page.chunks_exact_mut(16).filter(|entry| entry[0] & 7 == 2) {
            entry[..8].copy_from_slice(&nowhere);
            changed += 1;
        }
        changed
    };
    change_pages(pager, range, spoil)
}

/// The addresses of a line of /proc/PID/maps.
fn range_of(line: &str) -> Option<Range<u64>> {
    let (from, to) = line.split_whitespace().next()?.split_once('-')?;
    Some(u64::from_str_radix(from, 16).ok()?..u64::from_str_radix(to, 16).ok()?)
}

/// The largest private anonymous mapping of a process.
fn largest_mapping(pid: i32) -> std::io::Result<Range<u64>> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let plain = |line: &&str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields.len() == 5 && fields[1] == "rw-p"
    };
    let ranges = maps.lines().filter(plain).filter_map(range_of);
    ranges
        .max_by_key(|range| range.end - range.start)
        .ok_or_else(|| std::io::Error::other("no anonymous mapping"))
}

/// Overwrites memory in the middle of the largest private anonymous mapping of a process.
pub fn write_memory(pid: i32, bytes: &[u8]) -> std::io::Result<()> {
    let largest = largest_mapping(pid)?;
    let middle = (largest.start + (largest.end - largest.start) / 2) & !4095;
    OpenOptions::new().write(true).open(format!("/proc/{pid}/mem"))?.write_all_at(bytes, middle)
}

/// A capability set of each thread of a process, by its name in `/proc/PID/status`. Threads that end meanwhile are left out.
pub fn capabilities(pid: i32, set: &str) -> Vec<u64> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("threads of a process");
    let of = |task: fs::DirEntry| {
        let status = match fs::read_to_string(task.path().join("status")) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return None,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
            status => status.expect("a thread"),
        };
        let bits = status.lines().find_map(|line| line.strip_prefix(set)?.strip_prefix(':'));
        Some(u64::from_str_radix(bits.expect(set).trim(), 16).expect("a set"))
    };
    tasks.filter_map(|task| of(task.expect("a thread"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_found_wherever_it_lies() {
        let words = (0..16u64).map(|n| 77u64.wrapping_add(n.wrapping_mul(PATTERN_STEP)));
        let pattern: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        for before in [0, 1, 7, 100] {
            let bytes = [&vec![0; before], &pattern[..PATTERN_LEN], &[0; 9]].concat();
            assert_eq!(count_patterns(&bytes).0, 1);
        }
        assert_eq!(count_patterns(&pattern), (2, 0));
        // The end of one part of the memory and the beginning of the next.
        let (found, left) = count_patterns(&pattern[..PATTERN_LEN + 30]);
        assert_eq!((found, left), (1, 30));
        let spoiled: Vec<u8> = pattern.iter().map(|byte| byte ^ 1).collect();
        assert_eq!(count_patterns(&spoiled).0, 0);
    }
}
