//! `gms top`: the workloads of this machine, live on a terminal.
//!
//! [`View`] is the state (what is selected, how it is sorted), [`draw`] shows it, [`run`] is the only reader of the clock and of keys.

mod keys;
mod view;

use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use gms_transport::text::printable;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode, size,
};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Block, Gauge, Row, Scrollbar, ScrollbarOrientation, ScrollbarState, Table};
use ratatui::{Frame, Terminal, TerminalOptions, Viewport};

use self::keys::Key;
use self::view::{COLUMNS, View};
use super::Failure;
use super::summary::zone_of;
use crate::control::{self, Workload};
use crate::exit::EXIT_USAGE;
use crate::launch::Signals;
use crate::size::Human;
use crate::stats::AgentStats;

/// Between two looks at the workloads.
const REFRESH: Duration = Duration::from_secs(1);
/// Lines for the selected workload: frame, gauge, figures, and its agents.
const DETAIL_LINES: u16 = 10;
/// What a terminal has that does not say.
const SIZE_DEFAULT: Rect = Rect::new(0, 0, 80, 24);
/// Longest text shown of what comes from elsewhere.
const TEXT_CHARS_MAX: usize = 256;

/// Shows the workloads until `q`.
pub(super) fn top() -> Result<u8, Failure> {
    let dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() || dumb {
        return Err(Failure::new(
            EXIT_USAGE,
            "top needs a terminal that can do more than TERM=dumb: use 'gms status' or 'gms status --json'",
        ));
    }
    let signals = Signals::block()?;
    let mut screen = Screen::enter()?;
    run(&mut screen.terminal, &signals)?;
    Ok(0)
}

fn run(terminal: &mut Terminal<Backend>, signals: &Signals) -> io::Result<()> {
    let colours = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let mut view = View::default();
    let mut next = Instant::now();
    loop {
        if next <= Instant::now() {
            view.update(Instant::now(), control::workloads());
            next = Instant::now() + REFRESH;
        }
        terminal.draw(|frame| draw(frame, &mut view, colours))?;
        for key in wait(signals, next)? {
            if !view.handle(key) {
                return Ok(());
            }
        }
    }
}

/// Waits for keys or signals, or for the time of the next look.
fn wait(signals: &Signals, until: Instant) -> io::Result<Vec<Key>> {
    let stdin = io::stdin();
    let mut fds = [stdin.as_fd(), signals.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
    let patience = until.saturating_duration_since(Instant::now()).as_millis() + 1;
    poll(&mut fds, PollTimeout::try_from(patience as u64).unwrap_or(PollTimeout::ZERO))?;
    let typed = fds[0].any().unwrap_or(false);
    let mut keys = Vec::new();
    while let Some(arrival) = signals.next() {
        // Others tell of a new size or of the end of a stop, after which the screen is drawn anyway.
        if [libc::SIGTERM, libc::SIGHUP, libc::SIGINT, libc::SIGQUIT].contains(&arrival.number) {
            keys.push(Key::Quit);
        }
    }
    if typed {
        let mut bytes = [0; 64];
        // Not through the standard library, whose buffer poll does not know of.
        match nix::unistd::read(stdin.as_fd(), &mut bytes)? {
            0 => keys.push(Key::Quit),
            count => keys.extend(keys::parse(&bytes[..count])),
        }
    }
    Ok(keys)
}

type Backend = CrosstermBackend<io::Stdout>;

/// The terminal's second screen, without line editing; left as it was when dropped.
struct Screen {
    terminal: Terminal<Backend>,
}

impl Screen {
    fn enter() -> io::Result<Screen> {
        enable_raw_mode()?;
        let screen = execute!(io::stdout(), EnterAlternateScreen).and_then(|()| {
            let viewport = match size()? {
                (1.., 1..) => Viewport::Fullscreen,
                _ => Viewport::Fixed(SIZE_DEFAULT),
            };
            let backend = CrosstermBackend::new(io::stdout());
            Terminal::with_options(backend, TerminalOptions { viewport })
        });
        match screen {
            Ok(terminal) => Ok(Screen { terminal }),
            Err(error) => {
                leave();
                Err(error)
            }
        }
    }
}

fn leave() {
    let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
    let _ = disable_raw_mode();
}

impl Drop for Screen {
    fn drop(&mut self) {
        leave();
    }
}

fn draw(frame: &mut Frame<'_>, view: &mut View, colours: bool) {
    let detail = if view.selected().is_some() { DETAIL_LINES } else { 0 };
    let parts = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(3),
        Constraint::Length(detail),
        Constraint::Length(1),
    ]);
    let [head, list, below, foot] = parts.areas(frame.area());
    let text = format!("gms top: {} workloads, sorted by {}", view.len(), view.sorted_by());
    frame.render_widget(Line::from(text).bold(), head);
    draw_list(frame, list, view, colours);
    if let Some(workload) = view.selected() {
        draw_detail(frame, below, view, workload, colours);
    }
    let help = "q quit   up/down/PgUp/PgDn/Home/End move   sort: p pid  r resident  m remote  f faults  l p99  s state  c command";
    frame.render_widget(Line::from(help).dim(), foot);
}

fn draw_list(frame: &mut Frame<'_>, area: Rect, view: &mut View, colours: bool) {
    let rows: Vec<Row<'static>> = view.rows().into_iter().map(Row::new).collect();
    let count = rows.len();
    let chosen = if colours {
        Style::new().bg(Color::Blue).fg(Color::White)
    } else {
        Style::new().reversed()
    };
    let table = Table::new(rows, COLUMNS.map(|column| column.width))
        .header(Row::new(COLUMNS.map(|column| column.title)).underlined())
        .row_highlight_style(chosen)
        .highlight_symbol(">");
    view.page_rows = usize::from(area.height.saturating_sub(1)).max(1);
    frame.render_stateful_widget(table, area, &mut view.state);
    if count > view.page_rows {
        let mut state = ScrollbarState::new(count).position(view.state.selected().unwrap_or(0));
        let bar = Scrollbar::new(ScrollbarOrientation::VerticalRight);
        frame.render_stateful_widget(bar, area, &mut state);
    }
}

fn draw_detail(frame: &mut Frame<'_>, area: Rect, view: &View, workload: &Workload, colours: bool) {
    let stats = &workload.stats;
    let title = format!(" {} {} ", stats.pid, printable(&stats.command, TEXT_CHARS_MAX));
    let block = Block::bordered().title(title);
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let [gauge, text] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(inner);
    let share = match stats.budget_bytes {
        0 => 0.0,
        budget => (stats.resident_bytes as f64 / budget as f64).clamp(0.0, 1.0),
    };
    let label = format!(
        "resident {} of {}   remote {}",
        Human(stats.resident_bytes),
        Human(stats.budget_bytes),
        Human(stats.remote_bytes)
    );
    let style = match (colours, share > 0.95) {
        (false, _) => Style::new().reversed(),
        (true, false) => Style::new().fg(Color::Green),
        (true, true) => Style::new().fg(Color::Yellow),
    };
    frame.render_widget(Gauge::default().ratio(share).label(label).gauge_style(style), gauge);
    let rates = view.rates(stats);
    let mut lines = vec![format!(
        "faults {:.0}/s  p50 {:.1} us  p99 {:.1} us   in {:.0}/s  out {:.0}/s",
        rates.faults, stats.fault_us.p50, stats.fault_us.p99, rates.pages_in, rates.pages_out
    )];
    lines.extend(stats.agents.iter().map(agent));
    let lines = lines.into_iter().map(|line| Line::from(printable(&line, TEXT_CHARS_MAX)));
    frame.render_widget(ratatui::text::Text::from_iter(lines), text);
}

fn agent(agent: &AgentStats) -> String {
    let drains = if agent.draining { "  drains" } else { "" };
    let state = match agent.up {
        true => {
            format!("round trip {:.0} us  queue {:.0} us{drains}", agent.rtt_us, agent.queue_us)
        }
        false if agent.reason.is_empty() => "no connection".into(),
        false => format!("no connection: {}", agent.reason),
    };
    let zone = zone_of(agent, "  ");
    format!("agent {}{zone}  {} pages  {state}", agent.addr, agent.pages_held)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Stats;
    use ratatui::backend::TestBackend;

    fn workload(pid: i32, resident: u64, command: &str) -> Workload {
        let agents =
            vec![AgentStats { addr: "node7:7400".into(), pages_held: 3, ..AgentStats::default() }];
        let mut stats = Stats { pid, supervisor_pid: pid + 1, agents, ..Stats::default() };
        (stats.resident_bytes, stats.budget_bytes) = (resident << 20, 64 << 20);
        stats.command = command.into();
        Workload { stats, front_pid: pid + 2 }
    }

    fn screen(view: &mut View, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, view, true)).unwrap();
        let buffer = terminal.backend().buffer();
        let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..height).map(row).collect()
    }

    #[test]
    fn a_screen_shows_the_selected_workload_and_its_agents() {
        let mut view = View::default();
        let evil = "evil \x1b[2J ".repeat(20);
        view.update(Instant::now(), vec![workload(7, 16, &evil)]);
        let lines = screen(&mut view, 100, 24);
        let text = lines.join("\n");
        assert!(text.contains("16 MiB of 64 MiB") && text.contains("1 workloads"), "{text}");
        assert!(text.contains("agent node7:7400  3 pages  no connection"), "{text}");
        let drains = AgentStats { up: true, draining: true, ..AgentStats::default() };
        assert!(agent(&drains).ends_with("queue 0 us  drains"));
        let away = AgentStats { reason: "it fell silent".into(), ..AgentStats::default() };
        assert!(agent(&away).ends_with("no connection: it fell silent"));
        let sited = AgentStats { zone: "rack-7".into(), addr: "a:1".into(), ..drains };
        assert!(agent(&sited).starts_with("agent a:1  zone rack-7  0 pages"));
        assert!(!text.contains('\x1b'), "{text:?}");
    }

    #[test]
    fn on_80_columns_the_state_and_the_command_are_seen() {
        let mut view = View::default();
        let mut well = workload(4_194_303, 63, "well");
        well.stats.agents.clear();
        view.update(Instant::now(), vec![well, workload(7, 16, "ill")]);
        view.handle(Key::Letter('s'));
        let lines = screen(&mut view, 80, 24);
        let of = |what: &str| lines.iter().position(|line| line.contains(what));
        let (ill, well) = (of("agent down   ill"), of("ok           well"));
        assert!(ill.is_some() && ill < well, "{lines:#?}");
        assert!(lines.iter().any(|line| line.contains("4194303 63 MiB of 64 MiB")), "{lines:#?}");
    }

    #[test]
    fn a_long_list_scrolls_to_what_is_selected() {
        let mut view = View::default();
        let many = (0..50).map(|n| workload(1000 + 10 * n, 1, &format!("command-{n}"))).collect();
        view.update(Instant::now(), many);
        let shows = |lines: &[String], what: &str| {
            lines.iter().any(|line| line.starts_with(['>', ' ']) && line.contains(what))
        };
        let lines = screen(&mut view, 120, 24);
        assert!(shows(&lines, "command-0 ") && !shows(&lines, "command-49"), "{lines:#?}");
        assert!(view.handle(Key::End));
        let lines = screen(&mut view, 120, 24);
        assert!(shows(&lines, "command-49") && !shows(&lines, "command-0 "), "{lines:#?}");
        assert!(view.handle(Key::PageUp));
        assert_ne!(view.selected().unwrap().stats.pid, 1490);
        assert!(!view.handle(Key::Quit));
    }

    #[test]
    fn a_screen_of_any_size_is_drawn() {
        let mut view = View::default();
        for (width, height) in [(1, 1), (10, 3), (20, 6), (500, 4), (80, 200)] {
            screen(&mut view, width, height);
        }
        view.update(Instant::now(), vec![workload(7, 100, "x")]);
        for (width, height) in [(1, 1), (10, 3), (20, 6), (500, 4), (80, 200)] {
            screen(&mut view, width, height);
        }
    }
}
