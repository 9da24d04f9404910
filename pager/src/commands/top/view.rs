//! What `gms top` shows: workloads in an order, one of them selected.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::time::Instant;

use gms_transport::text::printable;
use ratatui::layout::Constraint;
use ratatui::widgets::TableState;

use super::keys::Key;
use crate::commands::status::state;
use crate::control::Workload;
use crate::size::Human;
use crate::stats::Stats;

/// Longest command line shown in the list.
const COMMAND_CHARS_MAX: usize = 120;

/// A column of the list.
#[derive(Clone, Copy)]
pub(super) struct Column {
    /// Its heading.
    pub title: &'static str,
    /// How wide it is.
    pub width: Constraint,
    letter: char,
    cell: Cell,
    /// Orders so that what matters most is first.
    order: Order,
}

type Cell = fn(&Stats, &Rates) -> String;
type Order = fn((&Stats, &Rates), (&Stats, &Rates)) -> Ordering;

/// The columns, from the left: 80 characters at least.
pub(super) const COLUMNS: [Column; 7] = [
    Column {
        title: "PID",
        width: Constraint::Length(7),
        letter: 'p',
        cell: |stats, _| stats.pid.to_string(),
        order: |a, b| a.0.pid.cmp(&b.0.pid),
    },
    Column {
        title: "RESIDENT",
        width: Constraint::Length(20),
        letter: 'r',
        cell: |stats, _| {
            format!("{} of {}", Human(stats.resident_bytes), Human(stats.budget_bytes))
        },
        order: |a, b| b.0.resident_bytes.cmp(&a.0.resident_bytes),
    },
    Column {
        title: "REMOTE",
        width: Constraint::Length(9),
        letter: 'm',
        cell: |stats, _| Human(stats.remote_bytes).to_string(),
        order: |a, b| b.0.remote_bytes.cmp(&a.0.remote_bytes),
    },
    Column {
        title: "FAULTS/s",
        width: Constraint::Length(8),
        letter: 'f',
        cell: |_, rates| format!("{:.0}", rates.faults),
        order: |a, b| b.1.faults.total_cmp(&a.1.faults),
    },
    Column {
        title: "P99 us",
        width: Constraint::Length(8),
        letter: 'l',
        cell: |stats, _| format!("{:.1}", stats.fault_us.p99),
        order: |a, b| b.0.fault_us.p99.total_cmp(&a.0.fault_us.p99),
    },
    Column {
        title: "STATE",
        width: Constraint::Length(12),
        letter: 's',
        cell: |stats, _| state(stats).into(),
        // What is not well first.
        order: |a, b| (state(a.0) == "ok", state(a.0)).cmp(&(state(b.0) == "ok", state(b.0))),
    },
    Column {
        title: "COMMAND",
        width: Constraint::Min(9),
        letter: 'c',
        cell: |stats, _| printable(&stats.command, COMMAND_CHARS_MAX),
        order: |a, b| a.0.command.cmp(&b.0.command),
    },
];

/// Per second since the look before; 0 for a new workload.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Rates {
    /// Faults.
    pub faults: f64,
    /// Pages fetched.
    pub pages_in: f64,
    /// Pages written to agents.
    pub pages_out: f64,
}

/// See the module's documentation.
#[derive(Default)]
pub(super) struct View {
    /// Which row is selected and which is at the top.
    pub state: TableState,
    /// Rows that the screen has room for.
    pub page_rows: usize,
    workloads: Vec<Workload>,
    rates: HashMap<i32, Rates>,
    looked: Option<Instant>,
    column: usize,
    reversed: bool,
}

impl View {
    /// Takes new figures. What was selected stays so, wherever it is in the order now.
    pub(super) fn update(&mut self, now: Instant, workloads: Vec<Workload>) {
        let seconds = self.looked.map_or(0.0, |then| (now - then).as_secs_f64());
        let before: HashMap<i32, &Stats> = self.by_pager().collect();
        let rates = workloads.iter().map(|Workload { stats, .. }| {
            let before = before.get(&stats.supervisor_pid);
            (stats.supervisor_pid, before.map_or(Rates::default(), |b| since(b, stats, seconds)))
        });
        self.rates = rates.collect();
        let chosen = self.selected().map(|workload| workload.stats.supervisor_pid);
        self.workloads = workloads;
        self.looked = Some(now);
        self.sort(chosen);
    }

    fn by_pager(&self) -> impl Iterator<Item = (i32, &Stats)> {
        self.workloads.iter().map(|one| (one.stats.supervisor_pid, &one.stats))
    }

    /// Does what a key asks for; false to quit.
    pub(super) fn handle(&mut self, key: Key) -> bool {
        let last = self.workloads.len().saturating_sub(1);
        let at = self.state.selected().unwrap_or(0);
        let target = match key {
            Key::Quit => return false,
            Key::Up => at.saturating_sub(1),
            Key::Down => at + 1,
            Key::PageUp => at.saturating_sub(self.page_rows),
            Key::PageDown => at + self.page_rows,
            Key::Home => 0,
            Key::End => last,
            Key::Letter(letter) => {
                self.sort_by(letter);
                return true;
            }
        };
        self.state.select((!self.workloads.is_empty()).then_some(target.min(last)));
        true
    }

    fn sort_by(&mut self, letter: char) {
        let Some(column) = COLUMNS.iter().position(|column| column.letter == letter) else {
            return;
        };
        self.reversed = column == self.column && !self.reversed;
        self.column = column;
        self.sort(self.selected().map(|workload| workload.stats.supervisor_pid));
    }

    fn sort(&mut self, chosen: Option<i32>) {
        let (order, rates, reversed) = (COLUMNS[self.column].order, &self.rates, self.reversed);
        let none = Rates::default();
        let key = |one: &Workload| *rates.get(&one.stats.supervisor_pid).unwrap_or(&none);
        self.workloads.sort_by(|a, b| {
            let ordering = order((&a.stats, &key(a)), (&b.stats, &key(b)));
            let ordering = if reversed { ordering.reverse() } else { ordering };
            ordering.then(a.stats.supervisor_pid.cmp(&b.stats.supervisor_pid))
        });
        let again = self.workloads.iter().position(|w| Some(w.stats.supervisor_pid) == chosen);
        let last = self.workloads.len().checked_sub(1);
        let kept = self.state.selected().unwrap_or(0);
        self.state.select(again.or_else(|| last.map(|last| kept.min(last))));
    }

    /// Number of workloads.
    pub(super) fn len(&self) -> usize {
        self.workloads.len()
    }

    /// What is selected; `None` if nothing is paged.
    pub(super) fn selected(&self) -> Option<&Workload> {
        self.workloads.get(self.state.selected()?)
    }

    /// By what the list is sorted, for people.
    pub(super) fn sorted_by(&self) -> String {
        let way = if self.reversed { ", the other way round" } else { "" };
        format!("{}{way}", COLUMNS[self.column].title)
    }

    /// How fast a workload's counters grow.
    pub(super) fn rates(&self, stats: &Stats) -> Rates {
        self.rates.get(&stats.supervisor_pid).copied().unwrap_or_default()
    }

    /// The list's cells.
    pub(super) fn rows(&self) -> Vec<[String; COLUMNS.len()]> {
        let row = |Workload { stats, .. }: &Workload| {
            let rates = self.rates(stats);
            COLUMNS.map(|column| (column.cell)(stats, &rates))
        };
        self.workloads.iter().map(row).collect()
    }
}

fn since(before: &Stats, now: &Stats, seconds: f64) -> Rates {
    let rate = |counter: fn(&Stats) -> u64| match seconds > 0.0 {
        true => counter(now).saturating_sub(counter(before)) as f64 / seconds,
        false => 0.0,
    };
    Rates {
        faults: rate(|stats| stats.faults),
        pages_in: rate(|stats| stats.pages_in),
        pages_out: rate(|stats| stats.pages_out),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn workload(pid: i32, resident: u64, faults: u64) -> Workload {
        let mut stats = Stats { pid, supervisor_pid: pid + 1, faults, ..Stats::default() };
        stats.resident_bytes = resident;
        Workload { stats, front_pid: 0 }
    }

    fn pids(view: &View) -> Vec<i32> {
        view.workloads.iter().map(|workload| workload.stats.pid).collect()
    }

    #[test]
    fn columns_sort_and_the_selection_stays() {
        let mut view = View::default();
        let start = Instant::now();
        view.update(start, vec![workload(10, 5, 0), workload(20, 9, 0), workload(30, 7, 0)]);
        assert_eq!(pids(&view), [10, 20, 30]);
        view.handle(Key::Down);
        assert_eq!(view.selected().unwrap().stats.pid, 20);
        view.handle(Key::Letter('r'));
        assert_eq!((pids(&view), view.state.selected()), (vec![20, 30, 10], Some(0)));
        view.handle(Key::Letter('r'));
        assert_eq!((pids(&view), view.state.selected()), (vec![10, 30, 20], Some(2)));
        view.handle(Key::Letter('x'));
        assert!(view.sorted_by().starts_with("RESIDENT, the other"));
        let later = start + Duration::from_secs(2);
        view.update(later, vec![workload(20, 1, 100), workload(30, 7, 400)]);
        assert_eq!(view.selected().unwrap().stats.pid, 20);
        view.handle(Key::Letter('f'));
        assert_eq!(pids(&view), [30, 20]);
        assert_eq!(view.rates(&view.workloads[0].stats.clone()).faults, 200.0);
    }

    #[test]
    fn the_selection_is_always_a_workload() {
        let mut view = View::default();
        for key in [Key::Down, Key::End, Key::PageDown, Key::Up, Key::Letter('c')] {
            assert!(view.handle(key));
            assert!(view.selected().is_none() && view.state.selected().is_none());
        }
        view.update(Instant::now(), vec![workload(1, 1, 1), workload(2, 2, 2)]);
        view.handle(Key::End);
        view.update(Instant::now(), vec![workload(1, 1, 1)]);
        assert_eq!(view.selected().unwrap().stats.pid, 1);
        view.update(Instant::now(), vec![]);
        assert!(view.selected().is_none());
    }
}
