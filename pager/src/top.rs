//! `gms top`: the workloads of this machine, live on a terminal.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};

use crate::commands::{EXIT_USAGE, Failure, printable};
use crate::control::{self, Workload};
use crate::launch::Signals;
use crate::size::Human;
use crate::stats::Stats;

/// Between two looks at the workloads.
const REFRESH: Duration = Duration::from_secs(1);
/// Cells of a resident/budget bar.
const BAR_CELLS: usize = 32;
/// What a terminal has when it does not say.
const SIZE_DEFAULT: (usize, usize) = (80, 24);
const CTRL_C: u8 = 3;

/// Shows the workloads until `q`.
pub fn top() -> Result<u8, Failure> {
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        return Err(Failure::new(
            EXIT_USAGE,
            "top needs a terminal: use 'gms status' or 'gms status --json'",
        ));
    }
    let signals = Signals::block()?;
    let screen = Screen::enter()?;
    let mut rates = Rates::default();
    let mut next = Instant::now();
    loop {
        if next <= Instant::now() {
            next = Instant::now() + REFRESH;
            let workloads = control::workloads();
            let (width, height) = size();
            let mut lines = frame(&workloads, &rates, width);
            lines.truncate(height);
            screen.draw(&lines)?;
            rates.remember(Instant::now(), workloads);
        }
        match wait(&signals, next)? {
            Input::Quit => return Ok(0),
            Input::Redraw => next = Instant::now(),
            Input::Nothing => {}
        }
    }
}

enum Input {
    Quit,
    Redraw,
    Nothing,
}

fn wait(signals: &Signals, until: Instant) -> io::Result<Input> {
    let stdin = io::stdin();
    let mut fds = [stdin.as_fd(), signals.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
    let patience = until.saturating_duration_since(Instant::now()).as_millis() + 1;
    poll(&mut fds, PollTimeout::try_from(patience as u64).unwrap_or(PollTimeout::ZERO))?;
    let typed = fds[0].any().unwrap_or(false);
    while let Some(arrival) = signals.next() {
        match arrival.number {
            libc::SIGTERM | libc::SIGHUP | libc::SIGINT | libc::SIGQUIT => return Ok(Input::Quit),
            libc::SIGWINCH | libc::SIGCONT => return Ok(Input::Redraw),
            _ => {}
        }
    }
    let mut keys = [0; 64];
    if typed {
        let count = stdin.lock().read(&mut keys)?;
        if count == 0 || keys[..count].iter().any(|key| [b'q', b'Q', CTRL_C].contains(key)) {
            return Ok(Input::Quit);
        }
    }
    Ok(Input::Nothing)
}

/// Columns and rows.
fn size() -> (usize, usize) {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: TIOCGWINSZ writes one winsize.
    let asked = unsafe { libc::ioctl(io::stdout().as_raw_fd(), libc::TIOCGWINSZ, &raw mut size) };
    match asked {
        0 if size.ws_col > 0 && size.ws_row > 0 => (size.ws_col.into(), size.ws_row.into()),
        _ => SIZE_DEFAULT,
    }
}

/// The terminal's second screen, without line editing; left as it was when dropped.
struct Screen {
    before: Termios,
}

impl Screen {
    fn enter() -> io::Result<Screen> {
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        tcsetattr(io::stdin(), SetArg::TCSANOW, &raw)?;
        let screen = Screen { before };
        screen.write("\x1b[?1049h\x1b[?25l")?;
        Ok(screen)
    }

    fn draw(&self, lines: &[String]) -> io::Result<()> {
        let body = lines.join("\x1b[K\r\n");
        self.write(&format!("\x1b[H{body}\x1b[K\x1b[J"))
    }

    fn write(&self, text: &str) -> io::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes()).and_then(|()| out.flush())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.write("\x1b[?25h\x1b[?1049l");
        let _ = tcsetattr(io::stdin(), SetArg::TCSANOW, &self.before);
    }
}

/// The figures of the look before, by pager.
#[derive(Default)]
struct Rates {
    before: HashMap<i32, Stats>,
    when: Option<Instant>,
}

impl Rates {
    fn remember(&mut self, now: Instant, workloads: Vec<Workload>) {
        self.when = Some(now);
        self.before =
            workloads.into_iter().map(|one| (one.stats.supervisor_pid, one.stats)).collect();
    }

    /// Per second since the look before; 0 for a new workload.
    fn of(&self, stats: &Stats, counter: fn(&Stats) -> u64) -> f64 {
        let seconds = self.when.map_or(0.0, |when| when.elapsed().as_secs_f64());
        match self.before.get(&stats.supervisor_pid) {
            Some(before) if seconds > 0.0 => {
                counter(stats).saturating_sub(counter(before)) as f64 / seconds
            }
            _ => 0.0,
        }
    }
}

fn frame(workloads: &[Workload], rates: &Rates, width: usize) -> Vec<String> {
    let mut lines = vec![format!("gms top: {} workloads, q quits", workloads.len())];
    for Workload { stats, .. } in workloads {
        lines.push(String::new());
        lines.push(format!("{}  {}", stats.pid, stats.command));
        lines.push(format!(
            "  resident {} {} of {}   remote {}",
            bar(stats.resident_bytes, stats.budget_bytes),
            Human(stats.resident_bytes),
            Human(stats.budget_bytes),
            Human(stats.remote_bytes)
        ));
        lines.push(format!(
            "  faults {:.0}/s  p50 {:.1} us  p99 {:.1} us   in {:.0}/s  out {:.0}/s",
            rates.of(stats, |stats| stats.faults),
            stats.fault_us.p50,
            stats.fault_us.p99,
            rates.of(stats, |stats| stats.pages_in),
            rates.of(stats, |stats| stats.pages_out)
        ));
        lines.extend(stats.agents.iter().map(|agent| {
            let mut line = format!("  agent {}  {} pages", agent.addr, agent.pages_held);
            let _ = match agent.up {
                true => write!(
                    line,
                    "  round trip {:.0} us  queue {:.0} us",
                    agent.rtt_us, agent.queue_us
                ),
                false => write!(line, "  connection lost"),
            };
            line
        }));
    }
    lines.iter().map(|line| printable(line, width)).collect()
}

fn bar(part: u64, whole: u64) -> String {
    let share = if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
    let full = ((share * BAR_CELLS as f64).round() as usize).min(BAR_CELLS);
    format!("[{}{}]", "#".repeat(full), "-".repeat(BAR_CELLS - full))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::AgentStats;

    #[test]
    fn bars_stay_in_their_frame() {
        assert_eq!(bar(0, 0).len(), BAR_CELLS + 2);
        assert_eq!(bar(1, 2).matches('#').count(), BAR_CELLS / 2);
        assert_eq!(bar(9, 2).len(), BAR_CELLS + 2);
    }

    #[test]
    fn a_frame_fits_and_shows_rates() {
        let agents =
            vec![AgentStats { addr: "node7:7400".into(), pages_held: 3, ..AgentStats::default() }];
        let mut stats =
            Stats { pid: 7, supervisor_pid: 8, faults: 100, agents, ..Stats::default() };
        stats.command = "evil \x1b[2J ".repeat(20);
        let mut rates = Rates::default();
        let start = Instant::now() - Duration::from_secs(1);
        rates.remember(start, vec![Workload { stats: stats.clone(), front_pid: 6 }]);
        stats.faults = 1100;
        let rate = rates.of(&stats, |stats| stats.faults);
        assert!((900.0..=1000.0).contains(&rate), "{rate}");
        let lines = frame(&[Workload { stats, front_pid: 6 }], &rates, 60);
        assert!(
            lines.iter().all(|line| line.chars().count() <= 60 && !line.contains('\x1b')),
            "{lines:?}"
        );
        assert!(lines.iter().any(|line| line.contains("node7:7400  3 pages  connection lost")));
    }
}
