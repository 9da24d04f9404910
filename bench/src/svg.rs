//! Plots as inline SVG. Three kinds are all that a report needs, so that a plotting library would be the larger part.

use std::fmt::Write as _;

const WIDTH: f64 = 860.0;
/// Of the plots of lines.
const HEIGHT: f64 = 320.0;
/// Space left of the lines for the ticks' labels, and left of the bars for their names.
const LEFT: (f64, f64) = (84.0, 360.0);
const RIGHT: f64 = 90.0;
const MARGIN: f64 = 24.0;
const BAR: f64 = 22.0;
/// Distinct on white and on black, as many as a fault has stages; a series beyond them begins again with dashes.
const COLOURS: [&str; 9] = [
    "#3778c2", "#d1622b", "#2e9a5c", "#9a4fb5", "#b8921a", "#1d9aa8", "#c2407a", "#7a7a7a",
    "#8a5a3c",
];

/// A line of a plot.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Series {
    /// For the legend.
    pub name: String,
    /// The value at each tick of the x axis, where there is one.
    pub values: Vec<Option<f64>>,
}

/// A bar of a plot.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Bar {
    /// Of its row.
    pub name: String,
    /// Its length.
    pub value: f64,
    /// From where to where a thin line goes: the spread, or another quantile.
    pub span: (f64, f64),
}

/// The y axis of a plot of lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scale {
    /// From zero.
    Linear,
    /// Powers of ten.
    Log,
}

/// Makes any text safe between tags and in attributes.
pub(crate) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            c => safe.push(c),
        }
    }
    safe
}

/// Three digits or more.
pub(crate) fn digits(value: f64) -> String {
    let decimals = if value.abs() < 10.0 { 2 } else { usize::from(value.abs() < 1000.0) };
    format!("{value:.decimals$}")
}

/// Lines over equidistant ticks, with a legend.
pub(crate) fn lines(ticks: &[String], series: &[Series], scale: Scale, unit: &str) -> String {
    let all = || series.iter().flat_map(|one| one.values.iter().flatten().copied());
    let (low, high, marks) = axis(scale, all);
    let position = |value: f64| match scale {
        Scale::Linear => value,
        Scale::Log => value.max(f64::MIN_POSITIVE).log10(),
    };
    let y = |value: f64| {
        let share = (position(value) - low) / (high - low);
        HEIGHT - MARGIN - share.clamp(0.0, 1.0) * (HEIGHT - 2.0 * MARGIN)
    };
    let step = (WIDTH - LEFT.0 - RIGHT) / ticks.len().saturating_sub(1).max(1) as f64;
    let x = |at: usize| LEFT.0 + step * at as f64;
    let mut out = open(HEIGHT);
    for mark in marks {
        let (y, end, left) = (y(mark), WIDTH - RIGHT, LEFT.0);
        let _ = write!(out, "<path class=grid d='M{left} {y:.1}H{end}'/>");
        text(&mut out, LEFT.0 - 8.0, y + 4.0, "end", &format!("{} {unit}", plain(mark)));
    }
    for (at, tick) in ticks.iter().enumerate() {
        text(&mut out, x(at), HEIGHT - 4.0, "middle", tick);
    }
    let mut legend = String::from("<ul class=legend>");
    for (number, one) in series.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let dash = if number < COLOURS.len() { "none" } else { "5 4" };
        let known = one.values.iter().enumerate().filter_map(|(at, v)| Some((at, (*v)?)));
        let points: Vec<(usize, f64)> = known.collect();
        let path: Vec<String> =
            points.iter().map(|(at, v)| format!("{:.1},{:.1}", x(*at), y(*v))).collect();
        let _ = write!(
            out,
            "<polyline points='{}' stroke='{colour}' stroke-dasharray='{dash}'/>",
            path.join(" ")
        );
        for (at, value) in points {
            let (x, y, name) = (x(at), y(value), escape(&one.name));
            let title = format!("{name}: {} {unit}", digits(value));
            let _ = write!(
                out,
                "<circle cx='{x:.1}' cy='{y:.1}' r='3.5' fill='{colour}'><title>{title}</title></circle>"
            );
        }
        let style = if number < COLOURS.len() { "solid" } else { "dashed" };
        let _ = write!(
            legend,
            "<li><i style='border-top:3px {style} {colour}'></i>{}</li>",
            escape(&one.name)
        );
    }
    out + "</svg>" + &legend + "</ul>"
}

/// Bars on one linear axis from zero, each with its name and value.
pub(crate) fn bars(bars: &[Bar], unit: &str) -> String {
    let greatest = bars.iter().map(|bar| bar.value).fold(f64::MIN_POSITIVE, f64::max);
    let x = |value: f64| {
        LEFT.1 + (value / greatest).clamp(0.0, 1.0) * (WIDTH - LEFT.1 - RIGHT - MARGIN)
    };
    let mut out = open(bars.len() as f64 * BAR + 6.0);
    for (row, bar) in bars.iter().enumerate() {
        let (top, end) = (row as f64 * BAR + 4.0, x(bar.value));
        let (width, height, middle) = ((end - LEFT.1).max(1.0), BAR - 6.0, top + (BAR - 6.0) / 2.0);
        let (from, to) = (x(bar.span.0), x(bar.span.1));
        let (left, colour) = (LEFT.1, COLOURS[0]);
        text(&mut out, LEFT.1 - 8.0, middle + 4.0, "end", &bar.name);
        let _ = write!(
            out,
            "<rect x='{left}' y='{top}' width='{width:.1}' height='{height}' fill='{colour}'/>\
             <path class=span d='M{from:.1} {middle}H{to:.1}'/>"
        );
        let value = format!("{} {unit}", digits(bar.value));
        text(&mut out, end.max(to) + 6.0, middle + 4.0, "start", &value);
    }
    out + "</svg>"
}

/// Bars of parts one after the other, on one linear axis from zero, with a legend. All rows have the parts `names`, none below zero.
pub(crate) fn stacked(names: &[String], rows: &[(String, Vec<f64>)], unit: &str) -> String {
    let sum = |parts: &[f64]| parts.iter().sum::<f64>();
    let greatest = rows.iter().map(|row| sum(&row.1)).fold(f64::MIN_POSITIVE, f64::max);
    let scale = (WIDTH - LEFT.1 - RIGHT - MARGIN) / greatest;
    let colour = |number: usize| COLOURS[number % COLOURS.len()];
    let mut out = open(rows.len() as f64 * BAR + 6.0);
    for (row, (name, parts)) in rows.iter().enumerate() {
        let (top, height, mut x) = (row as f64 * BAR + 4.0, BAR - 6.0, LEFT.1);
        text(&mut out, LEFT.1 - 8.0, top + height / 2.0 + 4.0, "end", name);
        for (number, (part, name)) in parts.iter().zip(names).enumerate() {
            let (width, fill) = (part * scale, colour(number));
            let title = format!("{}: {} {unit}", escape(name), digits(*part));
            let _ = write!(
                out,
                "<rect x='{x:.1}' y='{top}' width='{width:.1}' height='{height}' fill='{fill}'>\
                 <title>{title}</title></rect>"
            );
            x += width;
        }
        let total = format!("{} {unit}", digits(sum(parts)));
        text(&mut out, x + 6.0, top + height / 2.0 + 4.0, "start", &total);
    }
    let mut legend = String::from("<ul class=legend>");
    for (number, name) in names.iter().enumerate() {
        let (colour, name) = (colour(number), escape(name));
        let _ = write!(legend, "<li><i style='border-top:9px solid {colour}'></i>{name}</li>");
    }
    out + "</svg>" + &legend + "</ul>"
}

/// Beginning and end of the y axis, as positions, and its marks, as values.
fn axis<I: Iterator<Item = f64>>(scale: Scale, values: impl Fn() -> I) -> (f64, f64, Vec<f64>) {
    let greatest = values().fold(f64::MIN_POSITIVE, f64::max);
    match scale {
        Scale::Linear => {
            let power = 10f64.powf(greatest.log10().floor());
            let steps = [1.0, 2.0, 2.5, 5.0, 10.0];
            let step = steps.map(|step| step * power / 5.0);
            let step = step.into_iter().find(|step| step * 5.0 >= greatest).unwrap_or(power * 2.0);
            (0.0, step * 5.0, (0..=5).map(|n| step * f64::from(n)).collect())
        }
        Scale::Log => {
            let positive = values().filter(|value| *value > 0.0);
            let low = positive.fold(greatest, f64::min).log10().floor();
            let high = greatest.log10().ceil().max(low + 1.0);
            let powers = low as i32..=high as i32;
            (low, high, powers.map(|power| 10f64.powi(power)).collect())
        }
    }
}

/// Without digits that say nothing.
fn plain(value: f64) -> String {
    if value >= 1.0 { format!("{value:.0}") } else { format!("{value}") }
}

fn open(height: f64) -> String {
    format!("<svg viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' role='img'>")
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, text: &str) {
    let _ =
        write!(out, "<text x='{x:.1}' y='{y:.1}' text-anchor='{anchor}'>{}</text>", escape(text));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_leave_its_place() {
        assert_eq!(escape("<a href='x'>\"&"), "&lt;a href=&#39;x&#39;&gt;&quot;&amp;");
        let bar = Bar { name: "</svg><script>".into(), value: 1.0, span: (1.0, 1.0) };
        assert!(!bars(&[bar], "us").contains("<script>"));
        let series = Series { name: "<b>".into(), values: vec![Some(1.0)] };
        assert!(!lines(&["<i>".into()], &[series], Scale::Log, "us").contains("<b>"));
    }

    #[test]
    fn parts_lie_one_after_the_other() {
        let names = ["<a>".to_owned(), "b".to_owned()];
        let plot =
            stacked(&names, &[("x".into(), vec![1.0, 3.0]), ("<y>".into(), vec![0.0, 2.0])], "us");
        let numbers = |key: &str| -> Vec<f64> {
            let values = plot.split(key).skip(1).map(|rest| rest.split('\'').next());
            values.map(|value| value.expect("a value").parse().expect("a number")).collect()
        };
        let (x, width) = (numbers("rect x='"), numbers(" width='"));
        // The first width is the whole picture's.
        assert!((x[0] + width[1] - x[1]).abs() < 0.2 && (width[2] - 3.0 * width[1]).abs() < 0.2);
        assert!(x[1] + width[2] <= WIDTH - RIGHT && plot.contains("4.00 us"));
        assert!(!plot.contains("<a>") && !plot.contains("<y>"));
    }

    #[test]
    fn axes_hold_all_values() {
        for greatest in [0.0, 0.3, 1.0, 7.0, 39_000.0] {
            let (low, high, marks) = axis(Scale::Linear, || [greatest].into_iter());
            assert!(low == 0.0 && high >= greatest && high <= greatest.max(1e-300) * 2.6);
            assert_eq!(marks.len(), 6, "{greatest}");
        }
        let (low, high, marks) = axis(Scale::Log, || [0.2, 30.0].into_iter());
        assert_eq!((low, high), (-1.0, 2.0));
        assert_eq!(marks.len(), 4);
    }
}
