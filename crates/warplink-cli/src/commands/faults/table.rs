//! The table as text.

use super::Report;
use super::cell::{Cell, Fault, Phase};
use crate::names::name_of;
use crate::report::table::{Align, Table};

/// The table of `faults` by `phases`, followed by the problems.
pub(super) fn text(report: &Report, faults: &[Fault], phases: &[Phase]) -> String {
    let columns: Vec<String> = phases.iter().map(name_of).collect();
    let heading = [("fault", Align::Left)].into_iter();
    let mut table = Table::new(heading.chain(columns.iter().map(|name| (&**name, Align::Left))));
    let ran = |fault| report.cells.iter().any(|judged| judged.cell.fault == fault);
    for &fault in faults.iter().filter(|&&fault| ran(fault)) {
        let cells = phases
            .iter()
            .map(|&phase| cell(report, Cell { fault, phase }));
        table.row([name_of(&fault)].into_iter().chain(cells));
    }
    if report.cells.is_empty() {
        return format!("no cell was finished, {} were not run\n", report.not_run);
    }
    let mut text = format!(
        "errors on the other ranks after rank {} of {} failed, and their delays ({}, measured in {:.0} s)\n\n{table}",
        report.victim, report.ranks, report.device, report.seconds
    );
    for judged in &report.cells {
        for problem in &judged.problems {
            text.push_str(&format!("\n{}: {problem}", judged.cell));
        }
    }
    for judged in &report.cells {
        if let [first, ..] = &judged.spoiled[..] {
            text.push_str(&format!(
                "\n{}: repeated, since the multi-process service had failed ({first})",
                judged.cell
            ));
        }
    }
    let ran = report.cells.len();
    text.push_str(&match (report.wrong, report.not_run) {
        (0, 0) => "\nevery cell is right\n".to_owned(),
        (wrong, 0) => format!("\n\n{wrong} of {ran} cells are wrong\n"),
        (wrong, not_run) => {
            format!("\n\n{wrong} of {ran} cells are wrong, {not_run} were not run\n")
        }
    });
    text
}

fn cell(report: &Report, cell: Cell) -> String {
    let Some(judged) = report.cells.iter().find(|judged| judged.cell == cell) else {
        return "not run".to_owned();
    };
    let wrong = if judged.problems.is_empty() {
        ""
    } else {
        "WRONG: "
    };
    match judged.seconds {
        Some(seconds) => format!("{wrong}{} {seconds:.2} s", judged.summary),
        None => format!("{wrong}{}", judged.summary),
    }
}
