//! The figures as a drawing: for each shape, bars of the rates that the GEMM alone, the
//! collective with it, and the lowerings reach, and a line at the limit.

use super::Report;
use super::measure::Figures;
use crate::gemm::Problem;
use crate::report::{counted, digits};
use anyhow::{Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

const WIDTH: i32 = 980;
const LEFT: i32 = 250;
const BAR: i32 = 18;
const PITCH: i32 = 22;
const HEADING: i32 = 54;
const GAP: i32 = 26;

/// A bar: its label, its rate in TFLOP/s, and its colour.
struct Bar {
    label: String,
    rate: f64,
    colour: RGBColor,
}

const ALONE: RGBColor = RGBColor(150, 150, 150);
const COLLECTIVE: RGBColor = RGBColor(214, 140, 60);
const LOWERING: RGBColor = RGBColor(70, 130, 190);
const CHOSEN: RGBColor = RGBColor(30, 85, 150);

/// The drawing, as SVG.
pub(super) fn draw(report: &Report) -> Result<String> {
    let heights: Vec<i32> = report
        .shapes
        .iter()
        .map(|shape| HEADING + bars(shape).len() as i32 * PITCH + GAP)
        .collect();
    let height = HEADING + heights.iter().sum::<i32>();
    let mut text = String::new();
    {
        let area =
            SVGBackend::with_string(&mut text, (WIDTH as u32, height as u32)).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        let title = format!("{} on {}", counted(report.ranks, "rank"), report.device);
        area.draw(&Text::new(title, (16, 16), ("sans-serif", 18)))
            .map_err(failed)?;
        let mut top = HEADING;
        for (shape, height) in report.shapes.iter().zip(heights) {
            panel(&area, shape, top)?;
            top += height;
        }
        area.present().map_err(failed)?;
    }
    Ok(text)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// The bars of one shape, from `top` down.
fn panel(area: &Area<'_>, shape: &Figures, top: i32) -> Result<()> {
    let Problem {
        op, m, k, n, dtype, ..
    } = shape.problem;
    let bars = bars(shape);
    let limit = shape.flops / shape.limit() / 1e12;
    let most = bars
        .iter()
        .map(|bar| bar.rate)
        .chain([limit])
        .fold(f64::MIN_POSITIVE, f64::max);
    let x = |rate: f64| LEFT + (rate / most * f64::from(WIDTH - LEFT - 110)) as i32;
    let label = |right| {
        let anchor = if right { HPos::Right } else { HPos::Left };
        ("sans-serif", 13)
            .into_text_style(area)
            .pos(Pos::new(anchor, VPos::Center))
    };
    let what = format!("{op}: m {m}, k {k}, n {n}, {dtype}");
    area.draw(&Text::new(what, (16, top), ("sans-serif", 15)))
        .map_err(failed)?;
    let first = top + 28;
    for (index, bar) in bars.iter().enumerate() {
        let y = first + index as i32 * PITCH;
        let corners = [(LEFT, y), (x(bar.rate), y + BAR)];
        area.draw(&Rectangle::new(corners, bar.colour.filled()))
            .map_err(failed)?;
        let middle = y + BAR / 2;
        area.draw(&Text::new(
            bar.label.clone(),
            (LEFT - 8, middle),
            label(true),
        ))
        .map_err(failed)?;
        let rate = format!("{} TFLOP/s", digits(bar.rate));
        // Inside the bar where there is room, so that the limit's line does not cross it.
        let end = x(bar.rate);
        let (at, style) = if end - LEFT > 110 {
            (end - 6, label(true).color(&WHITE))
        } else {
            (end + 6, label(false))
        };
        area.draw(&Text::new(rate, (at, middle), style))
            .map_err(failed)?;
    }
    let bottom = first + bars.len() as i32 * PITCH;
    area.draw(&PathElement::new(
        [(x(limit), first - 4), (x(limit), bottom)],
        RED.stroke_width(1),
    ))
    .map_err(failed)?;
    let bound = if shape.link_limit > shape.compute.best() {
        "limit: the link"
    } else {
        "limit: the GEMM"
    };
    let style = label(true).color(&RED);
    area.draw(&Text::new(bound, (x(limit), bottom + 6), style))
        .map_err(failed)
}

fn bars(shape: &Figures) -> Vec<Bar> {
    let rate = |seconds: f64| shape.flops / seconds / 1e12;
    let alone = [
        ("GEMM alone", &shape.compute),
        ("GEMM in chunks", &shape.compute_chunks),
    ];
    let alone = alone.map(|(label, times)| Bar {
        label: label.to_owned(),
        rate: rate(times.best()),
        colour: ALONE,
    });
    let collective = shape.collective().map(|row| &row.lowering);
    let fastest = shape.fastest().map(|row| &row.lowering);
    let lowerings = shape.lowerings.iter().map(|row| {
        let mut label = row.lowering.clone();
        if Some(&row.lowering) == fastest {
            label += ", fastest";
        }
        if row.chosen {
            label += ", chosen";
        }
        Bar {
            label,
            rate: rate(row.times.best()),
            colour: match row {
                _ if Some(&row.lowering) == collective => COLLECTIVE,
                row if row.chosen => CHOSEN,
                _ => LOWERING,
            },
        }
    });
    alone.into_iter().chain(lowerings).collect()
}

fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("{error}")
}
