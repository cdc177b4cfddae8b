//! The picture of the heat equation's example: the rod at several times, and the ranks that have its pieces.

use std::fmt::Write;

/// The area of the curves, and what is around it, in pixels.
const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 240.0;
const LEFT: f64 = 56.0;
const TOP: f64 = 64.0;

/// From late to early; the last is the start.
const COLOURS: [&str; 5] = ["#8F1D14", "#C2452D", "#E0803F", "#EDB26A", "#9AA3AF"];

/// The rod after some steps.
pub(crate) struct Moment {
    pub(crate) steps: u32,
    pub(crate) cells: Vec<f64>,
}

/// The picture of a rod of `ranks` pieces at several times, the earliest first, as SVG. Temperatures are from
/// 0 to 100.
pub(crate) fn draw(moments: &[Moment], ranks: usize) -> String {
    let mut svg = String::new();
    let (width, height) = (LEFT + WIDTH + 24.0, TOP + HEIGHT + 64.0);
    let mut line = |text: String| {
        // Writing to a string does not fail.
        let _ = writeln!(svg, "{text}");
    };
    line(format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="#262C36">"##
    ));
    line(r##"<rect width="100%" height="100%" fill="#FFFFFF"/>"##.to_owned());
    line(format!(
        r##"<text x="{LEFT}" y="24" font-size="15">Heat in a rod that is cut into {ranks} pieces</text>"##
    ));
    line(format!(
        r##"<text x="{LEFT}" y="44" fill="#68707C">before each step, neighbours put their outermost cells into one another's ghost cells</text>"##
    ));
    for rank in 0..ranks {
        let piece = WIDTH / ranks as f64;
        let x = LEFT + piece * rank as f64;
        let shade = ["#F6F8FA", "#ECF0F4"][rank % 2];
        line(format!(
            r##"<rect x="{x:.1}" y="{TOP}" width="{piece:.1}" height="{HEIGHT}" fill="{shade}"/>"##
        ));
        let (middle, below) = (x + piece / 2.0, TOP + HEIGHT + 20.0);
        line(format!(
            r##"<text x="{middle:.1}" y="{below}" text-anchor="middle">rank {rank}</text>"##
        ));
        if rank > 0 {
            let (from, to, y) = (x - 16.0, x + 16.0, TOP + HEIGHT + 36.0);
            line(format!(
                r##"<path d="M{from:.1} {y}H{to:.1}m-5 -4l5 4l-5 4M{from:.1} {y}m5 -4l-5 4l5 4" fill="none" stroke="#3471B2" stroke-width="1.5"/>"##
            ));
        }
    }
    for temperature in [0, 50, 100] {
        let y = height_of(temperature.into());
        line(format!(
            r##"<text x="{:.1}" y="{:.1}" text-anchor="end">{temperature} °C</text>"##,
            LEFT - 6.0,
            y + 4.0
        ));
        line(format!(
            r##"<path d="M{LEFT} {y:.1}h{WIDTH}" stroke="#D6DBE2"/>"##
        ));
    }
    for (place, moment) in moments.iter().enumerate() {
        let colour = COLOURS[(moments.len() - 1 - place) % COLOURS.len()];
        let points: Vec<String> = thinned(&moment.cells)
            .map(|(x, cell)| format!("{:.1},{:.1}", LEFT + WIDTH * x, height_of(cell)))
            .collect();
        line(format!(
            r##"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="2"/>"##,
            points.join(" ")
        ));
        let (x, y) = (LEFT + WIDTH - 96.0, TOP + 20.0 + 18.0 * place as f64);
        line(format!(
            r##"<path d="M{x:.1} {:.1}h20" stroke="{colour}" stroke-width="2"/>"##,
            y - 4.0
        ));
        line(format!(
            r##"<text x="{:.1}" y="{y:.1}">{} steps</text>"##,
            x + 26.0,
            moment.steps
        ));
    }
    line("</svg>".to_owned());
    svg
}

/// Where a temperature is drawn.
fn height_of(temperature: f64) -> f64 {
    TOP + HEIGHT * (1.0 - temperature / 110.0)
}

/// Where cells lie, from 0 to 1, and what they have: every second one, and all where it is steep.
fn thinned(cells: &[f64]) -> impl Iterator<Item = (f64, f64)> {
    let steep = |i: usize| {
        let next = cells.get(i + 1).copied().unwrap_or(cells[i]);
        let before = i.checked_sub(1).map_or(cells[i], |before| cells[before]);
        (next - before).abs() > 1.0
    };
    let drawn = move |&(i, _): &(usize, &f64)| i % 8 == 0 || i + 1 == cells.len() || steep(i);
    let all = cells.iter().enumerate().filter(drawn);
    all.map(|(i, cell)| ((i as f64 + 0.5) / cells.len() as f64, *cell))
}
