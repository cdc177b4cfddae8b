//! Times and bus bandwidths by size as a drawing: a row of two panels for each place and submission, a line for each
//! method.

use super::Place;
use super::report::{Figures, Report, Row};
use crate::commands::bench::timing::Submission;
use crate::report::bytes::Bytes;
use crate::report::digits;
use anyhow::{Result, anyhow};
use plotters::prelude::*;

const WIDTH: u32 = 1100;
const PANEL: u32 = 340;
const HEADING: u32 = 40;

/// Of the methods, Warplink first.
const COLOURS: [RGBColor; 6] = [
    RGBColor(30, 85, 150),
    RGBColor(214, 140, 60),
    RGBColor(110, 160, 70),
    RGBColor(170, 80, 130),
    RGBColor(120, 120, 120),
    RGBColor(80, 180, 190),
];

/// The drawing, as SVG.
pub(super) fn draw(report: &Report) -> Result<String> {
    let measured: Vec<(String, Vec<&Row>)> = [Place::Out, Place::In]
        .into_iter()
        .flat_map(|place| Submission::BOTH.map(|submission| (place, submission)))
        .map(|(place, submission)| {
            let of = |row: &&Row| (row.place, row.submission) == (place, submission);
            let place = match place {
                Place::Out => "",
                Place::In => "in place, ",
            };
            let how = format!("{place}{submission:?}").to_lowercase();
            (how, report.rows.iter().filter(of).collect())
        })
        .filter(|(_, rows): &(_, Vec<&Row>)| !rows.is_empty())
        .collect();
    if measured.is_empty() {
        return Err(anyhow!("nothing was measured"));
    }
    let methods = report.methods();
    let mut text = String::new();
    {
        let height = HEADING + PANEL * measured.len() as u32;
        let area = SVGBackend::with_string(&mut text, (WIDTH, height)).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        let (heading, panels) = area.split_vertically(HEADING);
        heading
            .draw(&Text::new(report.title(), (16, 12), ("sans-serif", 18)))
            .map_err(failed)?;
        let panels = panels.split_evenly((measured.len(), 2));
        for ((how, rows), panels) in measured.iter().zip(panels.chunks(2)) {
            let [times, rates] = panels else {
                return Err(anyhow!("a row has two panels"));
            };
            let time = |figures: &Figures| figures.seconds.median * 1e6;
            panel(
                times,
                &format!("{how}: time in us"),
                (rows, &methods),
                true,
                time,
            )?;
            let rate = |figures: &Figures| figures.bus_bandwidth;
            panel(
                rates,
                &format!("{how}: bus bandwidth in GB/s"),
                (rows, &methods),
                false,
                rate,
            )?;
        }
        area.present().map_err(failed)?;
    }
    Ok(text)
}

/// One panel: a line for each method, over the sizes, of which each is as far from the next.
fn panel(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    title: &str,
    (rows, methods): (&[&Row], &[&str]),
    logarithmic: bool,
    value: impl Fn(&Figures) -> f64,
) -> Result<()> {
    let values = rows.iter().flat_map(|row| row.methods.iter().map(&value));
    let (least, most) = values.fold((f64::MAX, f64::MIN_POSITIVE), |(least, most), value| {
        (least.min(value), most.max(value))
    });
    let scale = |value: f64| if logarithmic { value.log10() } else { value };
    let (bottom, top) = if logarithmic {
        (least.log10().floor(), most.log10().ceil())
    } else {
        (0.0, most * 1.08)
    };
    let last = (rows.len().max(2) - 1) as f64;
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 15))
        .margin(12)
        .margin_right(30)
        .x_label_area_size(34)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..last, bottom..top)
        .map_err(failed)?;
    let size = |at: &f64| {
        let row = rows
            .get(at.round() as usize)
            .filter(|_| at.fract().abs() < 1e-6);
        row.map(|row| Bytes(row.bytes as u64).to_string())
            .unwrap_or_default()
    };
    let number = |at: &f64| match logarithmic {
        true if at.fract().abs() < 1e-6 => format!("{}", 10f64.powf(*at)),
        true => String::new(),
        false if *at == 0.0 => "0".to_owned(),
        false => digits(*at),
    };
    chart
        .configure_mesh()
        .x_labels(rows.len().min(11))
        .x_label_formatter(&size)
        .y_label_formatter(&number)
        .light_line_style(WHITE)
        .draw()
        .map_err(failed)?;
    for (number, method) in methods.iter().enumerate() {
        let points: Vec<(f64, f64)> = rows
            .iter()
            .enumerate()
            .filter_map(|(at, row)| {
                let figures = row.figures(method)?;
                Some((at as f64, scale(value(figures))))
            })
            .collect();
        let colour = COLOURS[number % COLOURS.len()];
        let dots = points.iter().map(|&at| Circle::new(at, 3, colour.filled()));
        chart.draw_series(dots).map_err(failed)?;
        let line = PathElement::new(points.clone(), colour.stroke_width(2));
        chart
            .draw_series([line])
            .map_err(failed)?
            .label(*method)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(RGBColor(200, 200, 200))
        .draw()
        .map_err(failed)?;
    Ok(())
}

fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("{error}")
}
