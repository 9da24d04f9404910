//! What /proc tells of a process. Parsers take text, so that they can be tested; readers return `None` when the process is gone.

use std::fs::{self, File};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// Longest chain of parents followed.
const ANCESTORS_MAX: usize = 1 << 16;
/// Fields of /proc/PID/stat, counted from behind the command's name: how many threads there are, and where the stack starts; from behind
/// the state, its flags.
const THREADS: usize = 17;
const START_STACK: usize = 25;
const FLAGS: usize = 5;

/// One line of /proc/PID/maps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Addresses.
    pub range: Range<u64>,
    /// `r`, `w`, `x`, `p`/`s`.
    pub perms: [u8; 4],
    /// 0 for anonymous memory.
    pub inode: u64,
    /// Path or `[name]`, empty if none.
    pub name: String,
}

impl Mapping {
    /// Private anonymous memory: what userfaultfd can page (file-backed private mappings are not anonymous to the kernel).
    pub fn is_anonymous(&self) -> bool {
        let named = self.name.is_empty()
            || self.name == "[heap]"
            || self.name.starts_with("[stack")
            || self.name.starts_with("[anon:");
        self.perms[3] == b'p' && self.inode == 0 && named
    }

    /// Whether the workload may write to it now; UFFDIO_MOVE takes pages of writable mappings only.
    pub fn is_writable(&self) -> bool {
        self.perms[1] == b'w'
    }

    /// Whether it holds code that may be executed (a JIT's).
    pub fn is_executable(&self) -> bool {
        self.perms[2] == b'x'
    }
}

/// The text of a file; names of processes in it need not be UTF-8.
fn read(path: &str) -> Option<String> {
    let bytes = fs::read(path).ok()?;
    Some(String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into()))
}

/// Parses /proc/PID/maps; malformed lines are skipped.
pub fn parse_maps(text: &str) -> Vec<Mapping> {
    text.lines().filter_map(parse_mapping).collect()
}

fn parse_mapping(line: &str) -> Option<Mapping> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let perms: [u8; 4] = fields.next()?.as_bytes().try_into().ok()?;
    let inode = fields.nth(2)?.parse().ok()?;
    Some(Mapping {
        range: u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?,
        perms,
        inode,
        name: fields.next().unwrap_or("").to_owned(),
    })
}

/// The mappings of a process.
pub fn maps(pid: i32) -> Option<Vec<Mapping>> {
    let bytes = fs::read(format!("/proc/{pid}/maps")).ok()?;
    Some(parse_maps(&String::from_utf8_lossy(&bytes)))
}

/// Ranges of a process which its children do not inherit as they are: MADV_DONTFORK (`dc`) and MADV_WIPEONFORK (`wf`).
pub fn not_inherited(pid: i32) -> Option<Vec<Range<u64>>> {
    let bytes = fs::read(format!("/proc/{pid}/smaps")).ok()?;
    Some(parse_not_inherited(&String::from_utf8_lossy(&bytes)))
}

/// Whether an unmap of a process may be refused after it has been told of, as far as can be seen: by a limit, strict overcommit or a sealed mapping.
pub fn may_refuse_unmaps(pid: i32) -> bool {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).ok();
    let is_limited = limits.is_none_or(|limits| {
        ["Max address space", "Max data size"].iter().any(|limit| {
            let soft = limits.lines().find_map(|line| line.strip_prefix(limit));
            soft.is_none_or(|soft| !soft.trim_start().starts_with("unlimited"))
        })
    });
    let overcommit = fs::read_to_string("/proc/sys/vm/overcommit_memory");
    let is_strict = overcommit.map_or(true, |mode| mode.trim() == "2");
    is_limited || is_strict || has_sealed(pid)
}

fn has_sealed(pid: i32) -> bool {
    let Ok(smaps) = fs::read(format!("/proc/{pid}/smaps")) else { return true };
    let smaps = String::from_utf8_lossy(&smaps);
    let mut flags = smaps.lines().filter_map(|line| line.strip_prefix("VmFlags:"));
    flags.any(|flags| flags.split_ascii_whitespace().any(|flag| flag == "sl"))
}

/// All processes.
pub fn all() -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok()).collect()
}

fn parse_not_inherited(smaps: &str) -> Vec<Range<u64>> {
    let mut current = None;
    let mut found = Vec::new();
    for line in smaps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let range: Option<Range<u64>> = current.take();
            let skipped = flags.split_ascii_whitespace().any(|f| f == "dc" || f == "wf");
            found.extend(range.filter(|_| skipped));
        } else if let Some(mapping) = parse_mapping(line) {
            current = Some(mapping.range);
        }
    }
    found
}

/// Resident anonymous memory in bytes.
pub fn resident_anonymous(pid: i32) -> Option<u64> {
    Some(parse_statm(&read(&format!("/proc/{pid}/statm"))?)?.resident)
}

/// How large a process is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statm {
    /// Size of the address space in pages: changes when something is mapped or unmapped.
    pub pages: u64,
    /// Resident anonymous memory in bytes.
    pub resident: u64,
}

fn parse_statm(text: &str) -> Option<Statm> {
    let mut fields = text.split_ascii_whitespace().map(|f| f.parse::<u64>().ok());
    let (pages, resident, shared) = (fields.next()??, fields.next()??, fields.next()??);
    Some(Statm { pages, resident: resident.saturating_sub(shared) * 4096 })
}

/// For processes that are measured often: /proc/PID/statm, kept open.
pub struct Measure(fs::File);

impl Measure {
    /// Of a process, whatever it executes.
    pub fn open(pid: i32) -> std::io::Result<Measure> {
        Ok(Measure(fs::File::open(format!("/proc/{pid}/statm"))?))
    }

    /// By its file, opened before.
    pub fn of(file: OwnedFd) -> Measure {
        Measure(file.into())
    }

    /// Its file.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// What it is now; `None` once the process is gone.
    pub fn take(&self) -> Option<Statm> {
        let mut text = [0; 256];
        let length = self.0.read_at(&mut text, 0).ok()?;
        parse_statm(std::str::from_utf8(&text[..length]).ok()?)
    }
}

/// The process's share of anonymous memory in bytes: pages shared after a fork are divided among their users.
/// Walks the page tables: about 0.03 us a resident page.
pub fn proportional_anonymous(pid: i32) -> Option<u64> {
    let text = read(&format!("/proc/{pid}/smaps_rollup"))?;
    kib_field(&text, "Pss_Anon:")
}

fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    Some(line.split_ascii_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// Thread ids of a process.
pub fn threads(pid: i32) -> Vec<i32> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok()).collect()
}

/// Children of every thread of a process.
pub fn children(pid: i32) -> Vec<i32> {
    let of_thread = |tid| {
        let text = read(&format!("/proc/{pid}/task/{tid}/children")).unwrap_or_default();
        text.split_ascii_whitespace().filter_map(|f| f.parse().ok()).collect::<Vec<i32>>()
    };
    threads(pid).into_iter().flat_map(of_thread).collect()
}

/// Tells whether anybody has been born.
pub struct Births(Option<File>);

impl Births {
    /// Watches this PID namespace.
    pub fn watch() -> Births {
        Births(File::open("/proc/loadavg").ok())
    }

    /// The process (or thread) id given last: while it stays the same, nobody has been born.
    pub fn last_pid(&self) -> Option<i32> {
        let mut text = [0u8; 128];
        let length = self.0.as_ref()?.read_at(&mut text, 0).ok()?;
        std::str::from_utf8(&text[..length]).ok()?.split_ascii_whitespace().last()?.parse().ok()
    }
}

/// State letter of a process or thread (`R`, `S`, `D`, `Z`, `T` ...).
pub fn state(pid: i32) -> Option<char> {
    let text = read(&format!("/proc/{pid}/stat"))?;
    text.rsplit_once(')')?.1.trim_start().chars().next()
}

/// Where in the kernel a process sleeps, as /proc/PID/wchan has it.
pub fn asleep_in(pid: i32) -> Option<String> {
    read(&format!("/proc/{pid}/wchan")).map(|text| text.trim().to_owned())
}

/// PF_USER_WORKER: a thread that never leaves the kernel (of io_uring, of vhost), so that nothing can be injected into it.
const WORKER: u64 = 0x4000;

/// PF_EXITING: a thread that ends, or has ended.
const EXITING: u64 = 0x4;

/// State letter and flags of a thread.
fn state_and_flags(tid: i32) -> Option<(char, u64)> {
    let text = read(&format!("/proc/{tid}/stat"))?;
    let mut fields = text.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(FLAGS)?.parse().ok()?))
}

/// State of a thread of a program: not of one that the kernel has added.
fn state_of_own(tid: i32) -> Option<char> {
    state_and_flags(tid).filter(|(_, flags)| flags & WORKER == 0).map(|(state, _)| state)
}

/// Whether a process whose first thread lives as long as itself is seen to end: what it had open is closed long before it has ended, by the milliseconds that
/// its memory takes to be freed. Of one that is hidden (hidepid), or gone, nothing is seen.
pub fn is_ending(pid: i32) -> bool {
    state_and_flags(pid).is_some_and(|(_, flags)| flags & EXITING != 0)
}

/// Threads of a process in one of these states, but those `known`, and those that the kernel has added.
pub fn in_state(pid: i32, states: &str, known: impl Fn(i32) -> bool) -> Vec<i32> {
    let Some(text) = read(&format!("/proc/{pid}/stat")) else { return Vec::new() };
    let fields = text.rsplit_once(')').map_or("", |(_, fields)| fields);
    let mut fields = fields.split_ascii_whitespace();
    // Most processes have one thread, and then no more need be read.
    let (state_of_first, count) = (fields.next(), fields.nth(THREADS - 1));
    if count == Some("1") {
        let is_one = state_of_first.is_some_and(|state| states.contains(state)) && !known(pid);
        return if is_one { vec![pid] } else { Vec::new() };
    }
    let mut found = threads(pid);
    found.retain(|&tid| {
        !known(tid) && state_of_own(tid).is_some_and(|state| states.contains(state))
    });
    found
}

/// Tells programs that a process executes, one after the other, from each other: where the stack starts, which is random.
pub fn image(pid: i32) -> Option<u64> {
    let text = read(&format!("/proc/{pid}/stat"))?;
    text.rsplit_once(')')?.1.split_ascii_whitespace().nth(START_STACK)?.parse().ok()
}

/// The system call in which a thread is blocked, -1 if in none; `None` while it runs, or if that cannot be read.
pub fn blocked_in(tid: i32) -> Option<i64> {
    read(&format!("/proc/{tid}/syscall"))?.split_ascii_whitespace().next()?.parse().ok()
}

/// Whether a thread sleeps until a page comes, whatever it is doing.
pub fn waits_for_page(tid: i32) -> bool {
    asleep_in(tid).is_some_and(|place| place == "handle_userfault")
}

/// Whether a thread is one that the kernel has added, which it tells nothing of; and whether that waits for work (io_uring's), or for a page.
pub fn is_worker(tid: i32) -> (bool, bool) {
    let is_worker = state_and_flags(tid).is_none_or(|(_, flags)| flags & WORKER != 0);
    let places = ["io_wq_worker", "io_sq_thread"];
    let idle = || asleep_in(tid).is_some_and(|place| places.contains(&&*place));
    (is_worker, is_worker && (waits_for_page(tid) || idle()))
}

/// Whether process ids mean the same to the process as to us.
pub fn shares_pid_namespace(pid: i32) -> bool {
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    namespace(&pid.to_string()) == namespace("self")
}

/// Whether the next child of the process is to be the first process of a PID namespace, or to join another one.
pub fn starts_pid_namespace(pid: i32) -> bool {
    let namespace = |name: &str| fs::read_link(format!("/proc/{pid}/ns/{name}")).ok();
    // Before the first child the new namespace cannot be read.
    namespace("pid") != namespace("pid_for_children")
}

/// The id by which a process knows itself, in its own PID namespace.
pub fn own_id(pid: i32) -> Option<i32> {
    let text = read(&format!("/proc/{pid}/status"))?;
    let ids = text.lines().find_map(|l| l.strip_prefix("NSpid:"))?;
    ids.split_ascii_whitespace().last()?.parse().ok()
}

/// Name of a thread.
pub fn thread_name(tid: i32) -> Option<String> {
    read(&format!("/proc/{tid}/comm"))
}

/// A numeric field of /proc/PID/status, such as `Seccomp:` or `TracerPid:`; of several numbers the first.
pub fn status_field(pid: i32, name: &str) -> Option<i64> {
    status_line(pid, name)?.split_ascii_whitespace().next()?.parse().ok()
}

/// All that is behind a name in /proc/PID/status.
pub fn status_line(pid: i32, name: &str) -> Option<String> {
    let text = read(&format!("/proc/{pid}/status"))?;
    Some(text.lines().find_map(|l| l.strip_prefix(name))?.to_string())
}

/// The command line, arguments separated by spaces; empty for kernel threads and zombies.
pub fn command_line(pid: i32) -> String {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).trim_end_matches('\0').replace('\0', " ")
}

/// This process.
pub fn self_pid() -> i32 {
    nix::unistd::getpid().as_raw()
}

/// A process and those above it, the nearest first.
pub fn ancestors(pid: i32) -> Vec<i32> {
    let parent = |&pid: &i32| match status_field(pid, "PPid:") {
        Some(parent @ 1..) => Some(parent as i32),
        _ => None,
    };
    std::iter::successors(Some(pid), parent).take(ANCESTORS_MAX).collect()
}

/// Whether `pid` is `ancestor` or runs below it now.
pub fn descends(pid: i32, ancestor: i32) -> bool {
    ancestors(pid).contains(&ancestor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_lines_are_parsed() {
        let maps = parse_maps(
            "55d0c0a00000-55d0c0a21000 rw-p 00000000 00:00 0                          [heap]\n\
             7f0000000000-7f0000021000 ---p 00000000 00:00 0 \n\
             7f1000000000-7f1000021000 rw-p 00001000 fe:00 1234                       /lib/x y.so\n\
             bad line\n\
             7ffc00000000-7ffc00021000 rw-s 00000000 00:01 99                         /dev/zero (deleted)\n",
        );
        assert_eq!(maps.len(), 4);
        assert!(maps[0].is_anonymous() && maps[0].is_writable());
        assert!(maps[1].is_anonymous() && !maps[1].is_writable());
        assert!(!maps[2].is_anonymous() && !maps[3].is_anonymous());
        assert_eq!(maps[0].range, 0x55d0c0a00000..0x55d0c0a21000);
    }

    #[test]
    fn ranges_that_children_do_not_inherit_are_found() {
        let smaps = "1000-2000 rw-p 00000000 00:00 0 \nRss: 4 kB\nVmFlags: rd wr mr mw me wf \n\
                     3000-4000 rw-p 00000000 00:00 0 \nVmFlags: rd wr \n\
                     5000-6000 rw-p 00000000 00:00 0 \nVmFlags: rd dc \n";
        assert_eq!(parse_not_inherited(smaps), vec![0x1000..0x2000, 0x5000..0x6000]);
    }

    #[test]
    fn own_process_is_readable() {
        let pid = std::process::id() as i32;
        assert!(resident_anonymous(pid).is_some_and(|b| b > 0));
        let taken = Measure::open(pid).ok().and_then(|measure| measure.take());
        assert!(taken.is_some_and(|statm| statm.resident > 0 && statm.pages > 0));
        assert!(proportional_anonymous(pid).is_some_and(|b| b > 0));
        assert!(threads(pid).contains(&pid) || !threads(pid).is_empty());
        assert!(!maps(pid).unwrap_or_default().is_empty());
        assert!(state(pid).is_some());
        assert_eq!(status_field(pid, "TracerPid:"), Some(0));
        assert!(Births::watch().last_pid().is_some_and(|last| last > 0));
    }
}
