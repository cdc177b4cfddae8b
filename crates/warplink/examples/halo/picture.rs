//! The picture of the heat equation's example: the plate at several times, and the ranks that have its pieces.

use std::fmt::Write;

/// Width of a plate and height of one, and what is around them, in pixels.
const SIZE: f64 = 200.0;
const LEFT: f64 = 24.0;
const TOP: f64 = 64.0;
const GAP: f64 = 20.0;

/// Cells that are drawn as one square, in each direction.
const SQUARE: usize = 2;

/// From cold to hot.
const COLOURS: [&str; 11] = [
    "#FCFBF9", "#FDF1E0", "#FCE4C2", "#F9D29D", "#F4BC78", "#EDA257", "#E2863E", "#D3692D",
    "#BE4C20", "#A53217", "#861B10",
];

/// How a plate is cut: rows and columns of pieces, each of `side` by `side` cells.
pub(crate) struct Plate {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) side: usize,
}

/// The plate after some steps: its cells, row by row.
pub(crate) struct Moment {
    pub(crate) steps: u32,
    pub(crate) cells: Vec<f64>,
}

/// The picture of a plate at several times, the earliest first, as SVG. Temperatures are from 0 to 100.
pub(crate) fn draw(plate: &Plate, moments: &[Moment]) -> String {
    let mut svg = String::new();
    let height = SIZE * plate.rows as f64 / plate.columns as f64;
    let right = LEFT + (SIZE + GAP) * moments.len() as f64;
    let (width, bottom) = (right + 64.0, TOP + height + 40.0);
    let mut line = |text: String| {
        // Writing to a string does not fail.
        let _ = writeln!(svg, "{text}");
    };
    line(format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom}" viewBox="0 0 {width} {bottom}" font-family="sans-serif" font-size="12" fill="#262C36">"##
    ));
    line(r##"<rect width="100%" height="100%" fill="#FFFFFF"/>"##.to_owned());
    let pieces = plate.rows * plate.columns;
    line(format!(
        r##"<text x="{LEFT}" y="24" font-size="15">Heat in a plate that is cut into {pieces} pieces</text>"##
    ));
    line(format!(
        r##"<text x="{LEFT}" y="44" fill="#68707C">before each step, neighbours put their outermost rows and columns into one another's ghosts</text>"##
    ));
    for (place, moment) in moments.iter().enumerate() {
        let left = LEFT + (SIZE + GAP) * place as f64;
        line(format!(
            r##"<g transform="translate({left} {TOP})" shape-rendering="crispEdges">"##
        ));
        let cold = COLOURS[0];
        line(format!(
            r##"<rect width="{SIZE}" height="{height}" fill="{cold}"/>"##
        ));
        for (colour, path) in squares(plate, moment) {
            line(format!(r##"<path fill="{colour}" d="{path}"/>"##));
        }
        line("</g>".to_owned());
        line(borders(plate, left, height));
        let (middle, below) = (left + SIZE / 2.0, TOP + height + 20.0);
        line(format!(
            r##"<text x="{middle}" y="{below}" text-anchor="middle">{} steps</text>"##,
            moment.steps
        ));
    }
    for rank in 0..pieces {
        let piece = SIZE / plate.columns as f64;
        let x = LEFT + piece * (rank % plate.columns) as f64 + 5.0;
        // At the outer edge, where it is cold.
        let row = rank / plate.columns;
        let below = if 2 * row < plate.rows {
            15.0
        } else {
            piece - 6.0
        };
        let y = TOP + piece * row as f64 + below;
        line(format!(
            r##"<text x="{x}" y="{y}" fill="#4C5562">rank {rank}</text>"##
        ));
    }
    for (place, colour) in COLOURS.iter().rev().enumerate() {
        let y = TOP + height / COLOURS.len() as f64 * place as f64;
        line(format!(
            r##"<rect x="{right}" y="{y:.1}" width="12" height="{:.1}" fill="{colour}"/>"##,
            height / COLOURS.len() as f64
        ));
    }
    for (temperature, y) in [(100, TOP + 10.0), (0, TOP + height)] {
        line(format!(
            r##"<text x="{:.1}" y="{y:.1}">{temperature} °C</text>"##,
            right + 18.0
        ));
    }
    line("</svg>".to_owned());
    svg
}

/// The squares of each colour but the coldest, as a path: next to one another in a row, they are one rectangle.
fn squares(plate: &Plate, moment: &Moment) -> Vec<(&'static str, String)> {
    let (height, width) = (plate.rows * plate.side, plate.columns * plate.side);
    let pixels = SIZE / width as f64;
    let mut paths = vec![String::new(); COLOURS.len()];
    for row in (0..height).step_by(SQUARE) {
        let colour = |column: usize| {
            let mean: f64 = (0..SQUARE * SQUARE)
                .map(|at| moment.cells[(row + at / SQUARE) * width + column + at % SQUARE])
                .sum::<f64>()
                / (SQUARE * SQUARE) as f64;
            (mean / 100.0 * COLOURS.len() as f64).min(COLOURS.len() as f64 - 1.0) as usize
        };
        let mut column = 0;
        while column < width {
            let start = column;
            while column < width && colour(column) == colour(start) {
                column += SQUARE;
            }
            let _ = write!(
                paths[colour(start)],
                "M{:.1} {:.1}h{:.1}v{:.1}H{:.1}z",
                start as f64 * pixels,
                row as f64 * pixels,
                (column - start) as f64 * pixels,
                SQUARE as f64 * pixels,
                start as f64 * pixels
            );
        }
    }
    let coloured = COLOURS.into_iter().zip(paths).skip(1);
    coloured.filter(|(_, path)| !path.is_empty()).collect()
}

/// The edges of all pieces of a plate that begins at `left`.
fn borders(plate: &Plate, left: f64, height: f64) -> String {
    let mut path = format!("M{left} {TOP}h{SIZE}v{height}H{left}z");
    for row in 1..plate.rows {
        let y = TOP + height / plate.rows as f64 * row as f64;
        let _ = write!(path, "M{left} {y}h{SIZE}");
    }
    for column in 1..plate.columns {
        let x = left + SIZE / plate.columns as f64 * column as f64;
        let _ = write!(path, "M{x} {TOP}v{height}");
    }
    format!(r##"<path d="{path}" fill="none" stroke="#4C5562"/>"##)
}
