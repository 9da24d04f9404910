//! `gms-bench report`: one page with plots from the JSON files of other commands. It refers to nothing outside itself.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use crate::cli::PageOptions;
use crate::error::{BenchError, Trying};
use crate::report::{Figure, LatencyRow, Report};
use crate::slow_down;
use crate::stages;
use crate::svg::{Bar, Scale, Series, bars, digits, escape, lines, stacked};

/// Bytes of a file: hundreds of times what a command writes.
const FILE_MAX: u64 = 16 << 20;
/// Lines of the plot of all latencies.
const SERIES_MAX: usize = 16;
/// Quantiles of that plot.
const QUANTILES: [&str; 5] = ["p50", "p90", "p99", "p99.9", "max"];
/// The plots of latencies: heading, and what the names of the rows begin with. Those of an emulated guest are apart from the others.
const PLOTS: [(&str, &[&str]); 2] = [
    ("Faults, floors and peers", &["remote fault", "fault, ", "floor:"]),
    ("In an emulated guest: only ratios mean something", &["guest: fault, ", "guest: floor:"]),
];
/// Begins the names of the rows of an emulated guest.
pub(crate) const GUEST: &str = "guest: ";
/// Begins the names of the figures of which scaling is drawn: `faults/s, WHAT: COUNT`.
const SCALED: &str = "faults/s, ";

const HEAD: &str =
    "<!DOCTYPE html>\n<html lang='en'><meta charset='utf-8'><title>gms-bench</title><style>
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:900px;margin:2em auto;padding:0 1em}
svg{max-width:100%;height:auto;fill:currentColor;font-size:12px}
polyline{fill:none;stroke-width:2}
.grid{stroke:currentColor;opacity:.2}
.span{stroke:currentColor;stroke-width:1.5}
.legend{list-style:none;padding:0;columns:2}
.legend i{display:inline-block;width:1.6em;margin-right:.5em;vertical-align:middle}
table{border-collapse:collapse}
td,th{padding:.15em .9em .15em 0;text-align:left;border-bottom:1px solid #8886}
pre{overflow-x:auto;font-size:12px}
.missed{font-weight:bold;color:#d1622b}
</style>
<h1>gms-bench</h1>
";

/// Reads the files and writes the page.
pub(crate) fn run(options: &PageOptions) -> Result<(), BenchError> {
    let reports: Result<Vec<Report>, BenchError> =
        options.files.iter().map(|path| read(path)).collect();
    fs::write(&options.output, page(&reports?)).trying(&options.output.display().to_string())
}

fn read(path: &Path) -> Result<Report, BenchError> {
    let file = path.display().to_string();
    let mut text = String::new();
    let opened = File::open(path).trying(&file)?;
    opened.take(FILE_MAX).read_to_string(&mut text).trying(&file)?;
    serde_json::from_str(&text)
        .map_err(|error| BenchError::NoReport { file, problem: error.to_string() })
}

fn page(reports: &[Report]) -> String {
    let mut out = String::from(HEAD);
    judged(&mut out, reports);
    PLOTS.iter().for_each(|(heading, drawn)| latencies(&mut out, reports, heading, drawn));
    breakdown(&mut out, reports);
    scaling(&mut out, reports);
    slow_downs(&mut out, reports);
    for report in reports {
        each(&mut out, report);
    }
    out + "</html>\n"
}

/// Figures which have a target.
fn judged(out: &mut String, reports: &[Report]) {
    let figures = reports.iter().flat_map(|report| report.figures.iter().map(move |f| (report, f)));
    let rows: Vec<(&Report, &Figure)> = figures.filter(|(_, f)| f.target.is_some()).collect();
    if rows.is_empty() {
        return;
    }
    out.push_str("<h2>Targets</h2><table><tr><th>figure<th>median<th>spread<th>target<th>of</tr>");
    for (report, figure) in rows {
        let Some(target) = figure.target else { continue };
        let (class, verdict) =
            if target.is_met(figure.median) { ("met", "") } else { ("missed", "missed: ") };
        let (low, high) = figure.spread;
        let (divided, few) = (figure.divided(), figure.few());
        let _ = write!(
            out,
            "<tr class={class}><td>{}<td>{} {}<td>{}&ndash;{}<td>{verdict}{target}{divided}{few}<td>{}</tr>",
            escape(&figure.name),
            digits(figure.median),
            escape(&figure.unit),
            digits(low),
            digits(high),
            escape(&title(report)),
        );
    }
    out.push_str("</table>");
}

/// Quantiles of the rows whose names begin with one of `begins`, all files together.
fn latencies(out: &mut String, reports: &[Report], heading: &str, begins: &[&str]) {
    let several = reports.len() > 1;
    let mut series = Vec::new();
    for report in reports {
        let drawn = |row: &&LatencyRow| begins.iter().any(|begin| row.name.starts_with(begin));
        for row in report.latencies.iter().filter(drawn) {
            let m = &row.median;
            let name = if several {
                format!("{} ({})", row.name, title(report))
            } else {
                row.name.clone()
            };
            let values = [m.p50, m.p90, m.p99, m.p999, m.max].map(Some).to_vec();
            series.push(Series { name, values });
        }
    }
    if series.is_empty() {
        return;
    }
    let _ = write!(out, "<h2>{heading}</h2><p>Medians of the quantiles over the runs.");
    if series.len() > SERIES_MAX {
        let _ = write!(out, " The first {SERIES_MAX} of {}.", series.len());
        series.truncate(SERIES_MAX);
    }
    out.push_str(&lines(&QUANTILES.map(String::from), &series, Scale::Log, "us"));
}

/// The stages of faults: a row for what was measured in each report.
fn breakdown(out: &mut String, reports: &[Report]) {
    let texts = [
        "Medians of the stages, which need not sum up to the median of the whole.",
        "Of the slowest hundredth of the faults: the mean of each stage.",
    ];
    let mut heading = "<h2>Where the time of a fault goes</h2>";
    for (begin, text) in stages::ROWS.into_iter().zip(texts) {
        let mut names: Vec<String> = Vec::new();
        let mut rows = Vec::new();
        for report in reports {
            let latencies = report.latencies.iter().map(|row| (&row.name, row.median.p50));
            let figures = report.figures.iter().map(|figure| (&figure.name, figure.median));
            let mut of: BTreeMap<&str, BTreeMap<usize, f64>> = BTreeMap::new();
            for (name, value) in latencies.chain(figures) {
                let rest = name.strip_prefix(begin).and_then(|rest| rest.split_once(": "));
                let Some((what, stage)) = rest else { continue };
                let number = names.iter().position(|name| name == stage).unwrap_or_else(|| {
                    names.push(stage.to_owned());
                    names.len() - 1
                });
                of.entry(what).or_default().insert(number, value.max(0.0));
            }
            let name = |what: &str| match reports.len() {
                1 => what.to_owned(),
                _ => format!("{what}: {}", report.command.join(" ")),
            };
            rows.extend(of.into_iter().map(|(what, parts)| (name(what), parts)));
        }
        if rows.is_empty() {
            continue;
        }
        let all = |parts: &BTreeMap<usize, f64>| {
            (0..names.len()).map(|number| parts.get(&number).copied().unwrap_or(0.0)).collect()
        };
        let rows: Vec<(String, Vec<f64>)> =
            rows.into_iter().map(|(name, parts)| (name, all(&parts))).collect();
        let _ = write!(out, "{heading}<p>{text}</p>{}", stacked(&names, &rows, "us"));
        heading = "";
    }
}

/// Faults/s over the number of what there are more and more of.
fn scaling(out: &mut String, reports: &[Report]) {
    for report in reports {
        let mut of: BTreeMap<&str, BTreeMap<u32, f64>> = BTreeMap::new();
        for figure in &report.figures {
            let rest = figure.name.strip_prefix(SCALED).and_then(|rest| rest.rsplit_once(": "));
            if let Some((what, count)) = rest
                && let Ok(count) = count.parse()
            {
                of.entry(what).or_default().insert(count, figure.median);
            }
        }
        let mut counts: Vec<u32> = of.values().flat_map(|points| points.keys().copied()).collect();
        counts.sort_unstable();
        counts.dedup();
        if counts.len() < 2 {
            continue;
        }
        let line = |(what, points): (&&str, &BTreeMap<u32, f64>)| Series {
            name: (*what).to_owned(),
            values: counts.iter().map(|count| points.get(count).copied()).collect(),
        };
        let series: Vec<Series> = of.iter().map(line).collect();
        let ticks: Vec<String> = counts.iter().map(u32::to_string).collect();
        let _ = write!(out, "<h2>Scaling</h2><p>Faults/s, {}.", escape(&title(report)));
        out.push_str(&lines(&ticks, &series, Scale::Linear, ""));
    }
}

/// Slow-down over the share of memory that is local, one plot for each program.
fn slow_downs(out: &mut String, reports: &[Report]) {
    for report in reports.iter().filter(|report| !report.slow_downs.is_empty()) {
        let all = &report.slow_downs;
        let _ = write!(
            out,
            "<h2>Programs</h2><p>Slow-down over the share of memory that is local, {}.",
            escape(&title(report))
        );
        let ticks: Vec<String> =
            slow_down::shares(all).iter().map(|share| format!("{share} %")).collect();
        for program in slow_down::programs(all) {
            let _ = write!(out, "<h3>{}</h3>", escape(program));
            out.push_str(&lines(&ticks, &slow_down::series(all, program), Scale::Log, "x"));
        }
    }
}

/// All of one file.
fn each(out: &mut String, report: &Report) {
    let _ = write!(out, "<h2>{}</h2>", escape(&title(report)));
    let rates = report.figures.iter().filter(|figure| figure.unit == "MB/s");
    let rates: Vec<Bar> =
        rates.map(|f| Bar { name: f.name.clone(), value: f.median, span: f.spread }).collect();
    if !rates.is_empty() {
        out.push_str("<p>Throughput; the thin lines go from the least run to the greatest.</p>");
        out.push_str(&bars(&rates, "MB/s"));
    }
    let bar = |row: &LatencyRow| Bar {
        name: row.name.clone(),
        value: row.median.p50,
        span: (row.median.p50, row.median.p90),
    };
    // What an emulated guest takes is of another scale.
    let (guest, own): (Vec<&LatencyRow>, Vec<&LatencyRow>) =
        report.latencies.iter().partition(|row| row.name.starts_with(GUEST));
    for rows in [own, guest].into_iter().filter(|rows| !rows.is_empty()) {
        out.push_str("<p>Latency: p50; the thin lines go on to p90.</p>");
        out.push_str(&bars(&rows.into_iter().map(bar).collect::<Vec<Bar>>(), "us"));
    }
    let text = escape(&report.text());
    let _ = write!(out, "<details><summary>All figures</summary><pre>{text}</pre></details>");
}

fn title(report: &Report) -> String {
    let machine = &report.machine;
    format!("{}, {}, commit {}", report.command.join(" "), machine.date, machine.commit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Target;
    use crate::samples::Latency;
    use crate::slow_down::{Memory, Run};

    #[test]
    fn stages_are_stacked() {
        let mut report = Report::new();
        let of =
            |p50| Latency { count: 9, mean: 1.0, p50, p90: 99.0, p99: 99.0, p999: 99.0, max: 99.0 };
        for (name, p50) in [("4k: lookup", 2.0), ("4k: COPY", 3.0), ("8k: COPY", 4.0)] {
            report.latency(&format!("stage, {name}"), of(p50));
            report.figure(&format!("slowest 1 %, {name}"), "us", 10.0 * p50);
        }
        let page = page(&[report]);
        let (plots, _) = page.split_once("Latency: p50").expect("the other plots");
        for shown in ["<title>lookup: 2.00 us<", "5.00 us<", "<title>COPY: 40.0 us<", "50.0 us<"] {
            assert_eq!(plots.matches(shown).count(), 1, "{shown} in {plots}");
        }
        assert_eq!(plots.matches("Where the time").count(), 1);
    }

    #[test]
    fn an_emulated_guest_has_plots_of_its_own() {
        let mut report = Report::new();
        let quantiles =
            Latency { count: 9, mean: 1.0, p50: 2.0, p90: 3.0, p99: 4.0, p999: 5.0, max: 6.0 };
        for name in ["fault, gms", "fault, disk swap", "guest: fault, gms", "other"] {
            report.latency(name, quantiles);
        }
        let page = page(&[report]);
        let (own, guest) = page.split_once("In an emulated guest").expect("two plots");
        assert!(own.contains("fault, disk swap") && !own.contains("guest: fault"), "{page}");
        assert_eq!(page.matches("<svg").count(), 4, "of each two: quantiles and bars");
        assert!(guest.contains("guest: fault, gms"));
    }

    #[test]
    fn a_page_shows_what_files_say_and_obeys_none_of_it() {
        let mut report = Report::new();
        let quantiles =
            Latency { count: 9, mean: 1.0, p50: 20.0, p90: 30.0, p99: 40.0, p999: 50.0, max: 60.0 };
        report.latency("remote fault, <script>", quantiles);
        report.judged("gain", "x<br>", 2.0, Some(Target::AtLeast(5.0)));
        report.figure("scan", "MB/s", 500.0);
        for (count, rate) in [(1, 100.0), (8, 321.0)] {
            report.figure(&format!("faults/s, threads & more: {count}"), "1/s", rate);
        }
        for share in [100, 50] {
            let memory = Memory { limit_mib: 9.0, set_mib: 9.0, peak_mib: 9.0, pool_mib: None };
            let run = Run { seconds: 6.0, free_s: 2.0, memory, gms: None };
            report.slow_down(("sort", "<i>gms", share), run);
        }
        let text = serde_json::to_string(&report).expect("JSON");
        let page = page(&[serde_json::from_str(&text).expect("a report"), report]);
        assert!(!page.contains("<script") && !page.contains("x<br>"), "{page}");
        for shown in ["remote fault, &lt;script&gt;", "missed: at least 5", "500.0 MB/s"] {
            assert!(page.contains(shown), "{shown} is not in {page}");
        }
        assert_eq!(page.matches("<title>threads &amp; more: 321.0 ").count(), 2);
        assert!(page.contains("<h3>sort</h3><svg"), "{page}");
        assert_eq!(page.matches("<title>&lt;i&gt;gms: 3.00 x</title>").count(), 4);
        assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
        assert!(!page.contains("http"), "nothing from elsewhere");
    }
}
