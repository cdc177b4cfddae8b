//! Figures as SVG: lines over sizes, or bars.

use crate::report::digits;
use anyhow::{Result, ensure};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

const WIDTH: i32 = 1100;
const HEADING: i32 = 40;
/// The height of a panel of lines.
const PANEL: i32 = 340;
/// Of bars: where they begin, their height, and the distance from one to the next.
const LEFT: i32 = 280;
const BAR: i32 = 18;
const PITCH: i32 = 22;
/// Above the bars of a panel, and below them.
const ABOVE: i32 = 54;
const BELOW: i32 = 26;
/// Room for a number to the right of the longest bar.
const NUMBER: i32 = 120;

/// Colours of lines, of which the first is Warplink's; as many as `bench p2p` has methods.
const COLOURS: [RGBColor; 9] = [
    RGBColor(30, 85, 150),
    RGBColor(214, 140, 60),
    RGBColor(110, 160, 70),
    RGBColor(170, 80, 130),
    RGBColor(120, 120, 120),
    RGBColor(80, 180, 190),
    RGBColor(200, 60, 60),
    RGBColor(130, 95, 60),
    RGBColor(20, 20, 20),
];

/// Bars of the same kind have the same colour.
pub(crate) const BASELINE: RGBColor = RGBColor(150, 150, 150);
pub(crate) const PEER: RGBColor = RGBColor(214, 140, 60);
pub(crate) const OWN: RGBColor = RGBColor(70, 130, 190);
pub(crate) const CHOSEN: RGBColor = RGBColor(30, 85, 150);

pub(crate) enum Drawing {
    /// By panel and line, in the order of their first points.
    Lines(Vec<Point>),
    Bars(Vec<Bars>),
}

/// A point of a line.
pub(crate) struct Point {
    pub(crate) panel: String,
    pub(crate) line: String,
    /// Its position on the horizontal axis, on which sizes are equidistant.
    pub(crate) size: String,
    pub(crate) value: f64,
    /// Of its panel's vertical axis.
    pub(crate) logarithmic: bool,
}

/// A panel of bars, and a limit that they are compared with.
pub(crate) struct Bars {
    pub(crate) title: String,
    pub(crate) unit: &'static str,
    pub(crate) bars: Vec<Bar>,
    pub(crate) limit: Option<(f64, &'static str)>,
}

pub(crate) struct Bar {
    pub(crate) label: String,
    pub(crate) value: f64,
    pub(crate) colour: RGBColor,
}

type Canvas<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// The drawing, as SVG.
pub(crate) fn draw(title: &str, drawing: &Drawing) -> Result<String> {
    let mut text = String::new();
    match drawing {
        Drawing::Lines(points) => {
            let panels = distinct(points.iter().map(|point| &point.panel));
            ensure!(!panels.is_empty(), "nothing was measured");
            let rows = panels.len().div_ceil(2);
            let area = canvas(&mut text, title, PANEL * rows as i32)?;
            let (_, below) = area.split_vertically(HEADING);
            for (name, area) in panels.iter().zip(below.split_evenly((rows, 2))) {
                let points = points.iter().filter(|point| point.panel == *name);
                lines(&area, name, &points.collect::<Vec<_>>())?;
            }
            // Explicitly, since the drop of the backend, which would do it too, ignores errors.
            area.present()?;
        }
        Drawing::Bars(panels) => {
            let height = |panel: &Bars| ABOVE + panel.bars.len() as i32 * PITCH + BELOW;
            let area = canvas(&mut text, title, panels.iter().map(height).sum())?;
            let mut top = HEADING;
            for panel in panels {
                bars(&area, panel, top)?;
                top += height(panel);
            }
            area.present()?;
        }
    }
    Ok(text)
}

fn canvas<'a>(text: &'a mut String, title: &str, height: i32) -> Result<Canvas<'a>> {
    let size = (WIDTH as u32, (HEADING + height) as u32);
    let area = SVGBackend::with_string(text, size).into_drawing_area();
    area.fill(&WHITE)?;
    area.draw(&Text::new(title.to_owned(), (16, 12), ("sans-serif", 18)))?;
    Ok(area)
}

/// Each name once, in order of appearance.
fn distinct<'p>(all: impl Iterator<Item = &'p String>) -> Vec<&'p str> {
    let mut names: Vec<&str> = Vec::new();
    for name in all {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    names
}

fn lines(area: &Canvas<'_>, title: &str, points: &[&Point]) -> Result<()> {
    let logarithmic = points.first().is_some_and(|point| point.logarithmic);
    let points = || points.iter().copied();
    let sizes = distinct(points().map(|point| &point.size));
    let named = distinct(points().map(|point| &point.line));
    let values = points().map(|point| point.value);
    // Not from 0, whose logarithm is infinite, and which would leave an empty axis.
    let (least, most) = values.fold((f64::MAX, f64::MIN_POSITIVE), |(least, most), value| {
        (least.min(value), most.max(value))
    });
    let scale = |value: f64| if logarithmic { value.log10() } else { value };
    let (bottom, top) = if logarithmic {
        (least.log10().floor(), most.log10().ceil())
    } else {
        (0.0, most * 1.08)
    };
    // An axis from 0 to 0, for a single size, cannot be drawn.
    let last = (sizes.len().max(2) - 1) as f64;
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 15))
        .margin(12)
        .margin_right(30)
        .x_label_area_size(34)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..last, bottom..top)?;
    let size = |at: &f64| {
        let size = sizes.get(at.round() as usize);
        // The axis also has ticks between two sizes, where there is no name for them.
        let size = size.filter(|_| at.fract().abs() < 1e-6);
        size.map_or_else(String::new, |size| (*size).to_owned())
    };
    let number = |at: &f64| match logarithmic {
        // The axis is linear in the logarithm: only ticks at whole numbers are round.
        true if at.fract().abs() < 1e-6 => format!("{}", 10f64.powf(*at)),
        true => String::new(),
        false if *at == 0.0 => "0".to_owned(),
        false => digits(*at),
    };
    chart
        .configure_mesh()
        .x_labels(sizes.len().min(11))
        .x_label_formatter(&size)
        .y_label_formatter(&number)
        .light_line_style(WHITE)
        .draw()?;
    for (number, name) in named.iter().enumerate() {
        let of_line = points().filter(|point| point.line == *name);
        let of_line: Vec<(f64, f64)> = of_line
            .filter_map(|point| {
                let at = sizes.iter().position(|size| *size == point.size)?;
                Some((at as f64, scale(point.value)))
            })
            .collect();
        let colour = COLOURS[number % COLOURS.len()];
        let dots = of_line
            .iter()
            .map(|&at| Circle::new(at, 3, colour.filled()));
        chart.draw_series(dots)?;
        let line = PathElement::new(of_line.clone(), colour.stroke_width(2));
        chart
            .draw_series([line])?
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(RGBColor(200, 200, 200))
        .draw()?;
    Ok(())
}

/// The bars of one panel, from `top` down.
fn bars(area: &Canvas<'_>, panel: &Bars, top: i32) -> Result<()> {
    let limit = panel.limit.map(|(limit, _)| limit);
    let most = panel
        .bars
        .iter()
        .map(|bar| bar.value)
        .chain(limit)
        // Not 0, by which `x` would divide if all values are 0.
        .fold(f64::MIN_POSITIVE, f64::max);
    let x = |value: f64| LEFT + (value / most * f64::from(WIDTH - LEFT - NUMBER)) as i32;
    let label = |anchor| {
        let style = ("sans-serif", 13).into_text_style(area);
        style.pos(Pos::new(anchor, VPos::Center))
    };
    let write = |text: String, at: (i32, i32), style: TextStyle<'_>| {
        Ok(area.draw(&Text::new(text, at, style))?)
    };
    let heading = ("sans-serif", 15).into_text_style(area);
    write(panel.title.clone(), (16, top), heading)?;
    let first = top + 28;
    for (index, bar) in panel.bars.iter().enumerate() {
        let (y, end) = (first + index as i32 * PITCH, x(bar.value));
        let corners = [(LEFT, y), (end, y + BAR)];
        area.draw(&Rectangle::new(corners, bar.colour.filled()))?;
        let middle = y + BAR / 2;
        write(bar.label.clone(), (LEFT - 8, middle), label(HPos::Right))?;
        let value = format!("{} {}", digits(bar.value), panel.unit);
        // Inside a bar that is long enough, so that the line of the limit does not cross it.
        let (at, style) = if end - LEFT > NUMBER {
            (end - 6, label(HPos::Right).color(&WHITE))
        } else {
            (end + 6, label(HPos::Left))
        };
        write(value, (at, middle), style)?;
    }
    let Some((limit, name)) = panel.limit else {
        return Ok(());
    };
    let bottom = first + panel.bars.len() as i32 * PITCH;
    let path = [(x(limit), first - 4), (x(limit), bottom)];
    area.draw(&PathElement::new(path, RED.stroke_width(1)))?;
    let style = label(HPos::Right).color(&RED);
    write(format!("limit: {name}"), (x(limit), bottom + 6), style)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_bars_are_drawn() {
        let point = |panel: &str, line: &str, size: &str, value| Point {
            panel: panel.to_owned(),
            line: line.to_owned(),
            size: size.to_owned(),
            value,
            logarithmic: panel == "time",
        };
        let points = vec![
            point("time", "own", "1 KiB", 20.0),
            point("time", "own", "4 KiB", 30.0),
            point("time", "peer", "4 KiB", 25.0),
            point("rate", "own", "1 KiB", 1.5),
        ];
        let bars = Bars {
            title: "a shape".to_owned(),
            unit: "TFLOP/s",
            bars: vec![Bar {
                label: "ring".to_owned(),
                value: 3.25,
                colour: OWN,
            }],
            limit: Some((4.0, "the link")),
        };
        for (drawing, parts) in [
            (
                Drawing::Lines(points),
                &["time", "rate", "own", "peer", "4 KiB", "a title"][..],
            ),
            (
                Drawing::Bars(vec![bars]),
                &["a shape", "ring", "3.25 TFLOP/s", "limit: the link"],
            ),
        ] {
            let text = draw("a title", &drawing).unwrap();
            for part in parts {
                assert!(text.contains(part), "no '{part}' in {text}");
            }
        }
        assert!(draw("nothing", &Drawing::Lines(Vec::new())).is_err());
    }
}
