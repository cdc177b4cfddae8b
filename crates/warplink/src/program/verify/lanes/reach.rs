//! Reachability of announced tensors per lane, and the order of launches in which its variants are simulated.

use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::section::SectionInstance;
use std::rc::Rc;

/// Limit on the launches of a sequence through all orders of cases.
// Orders grow as cases^depth, and each of them simulates all lanes once more.
const MAX_ORDERS: usize = 1 << 10;

/// Reachable announced tensors per lane: one case in lanes with a given bit of their number set, the other case in
/// the remaining lanes.
#[derive(Clone, Debug)]
pub(in crate::program::verify) struct Reach {
    bit: u32,
    with: Rc<[usize]>,
    without: Rc<[usize]>,
}

/// Variants of a kernel that are simulated.
#[derive(Debug)]
pub(in crate::program::verify) struct Reaches {
    /// Number of cases.
    cases: usize,
    /// For each case, that case in all lanes; and every pair of cases in alternating lanes. These follow one another
    /// in any order.
    pub(super) main: Vec<Reach>,
    /// Every pair of cases in lanes that differ in a bit other than the lowest, so that any two lanes are simulated
    /// in any two cases.
    pub(super) further: Vec<Reach>,
}

impl Reach {
    pub(super) fn holds(&self, lane: usize, tensor: usize) -> bool {
        let case = match lane >> self.bit & 1 {
            0 => &self.without,
            _ => &self.with,
        };
        case.contains(&tensor)
    }
}

impl Reaches {
    /// Variants of a kernel, whose section is the same on all ranks.
    ///
    /// # Errors
    /// The section has more cases than can be simulated.
    pub(in crate::program::verify) fn of(section: &SectionInstance) -> Result<Self, Diagnostic> {
        let cases = section.reachable_cases().map_err(|message| {
            let at = (section.rank, &section.site);
            Diagnostic::at(DiagnosticKind::Malformed, at, message)
        })?;
        let cases: Vec<Rc<[usize]>> = cases.into_iter().map(Rc::from).collect();
        let both = |bit: u32, with: &Rc<[usize]>, without: &Rc<[usize]>| Reach {
            bit,
            with: with.clone(),
            without: without.clone(),
        };
        let mut main: Vec<Reach> = cases.iter().map(|case| both(0, case, case)).collect();
        let mut further = Vec::new();
        // Two different lane numbers differ in at least one bit, so one variant per bit and ordered pair of cases
        // covers every pair of lanes in every pair of cases, with log2(lanes) variants instead of lanes^2.
        for bit in 0..usize::BITS - (section.lanes - 1).leading_zeros() {
            let list = if bit == 0 { &mut main } else { &mut further };
            for (number, with) in cases.iter().enumerate() {
                let others = cases
                    .iter()
                    .enumerate()
                    .filter(|(other, _)| *other != number);
                list.extend(others.map(|(_, without)| both(bit, with, without)));
            }
        }
        let cases = cases.len();
        Ok(Self {
            cases,
            main,
            further,
        })
    }

    /// The main variants.
    pub(in crate::program::verify) fn main(&self) -> &[Reach] {
        &self.main
    }

    pub(super) const fn len(&self) -> usize {
        self.main.len() + self.further.len()
    }
}

/// Order in which the launches of a program's kernels are simulated, each with its variant; `None` if there are more
/// than `most`. `runs` is the number of runs simulated per variant, which cover the period twice.
pub(super) fn sequence(
    kernels: &[Reaches],
    (period, runs): (usize, usize),
    most: usize,
) -> Option<Vec<usize>> {
    let mut first = Vec::with_capacity(kernels.len());
    let mut next = 0;
    for kernel in kernels {
        first.push(next);
        next += kernel.len();
    }
    let main = |kernel: usize, form: usize| first[kernel] + form % kernels[kernel].main.len();
    let further = |kernel: usize, form: usize| match kernels[kernel].further.len() {
        0 => main(kernel, form),
        count => first[kernel] + kernels[kernel].main.len() + form % count,
    };
    let count = kernels.len();
    let forms = kernels.iter().map(|it| it.main.len()).max().unwrap_or(1);
    let more = kernels.iter().map(|it| it.further.len()).max().unwrap_or(0);
    // With several variants, every variant follows every other at each remainder of the epoch. Variants that are
    // uniform over lanes also appear in every order of as many launches as it takes until a slot is reused, if that
    // is not too many.
    // Steps depend on the kernel and on the epoch modulo the period: the place of a launch in this cycle.
    let places = count * period;
    let turns = if forms > 1 {
        forms.checked_mul(forms)?.checked_mul(period)?
    } else {
        0
    };
    let cases = kernels.iter().map(|it| it.cases).max().unwrap_or(1);
    let orders = |depth: usize| cases.checked_pow(depth as u32)?.checked_mul(places);
    let in_a_row = (3..=places + 1)
        .take_while(|depth| orders(*depth).is_some_and(|all| all <= MAX_ORDERS))
        .last()
        .filter(|_| cases > 1);
    let all = [
        forms.checked_mul(runs)?,
        turns,
        in_a_row.map_or(0, |depth| orders(depth).unwrap_or(0) / count + 1),
        more.checked_mul(period + 1)?,
    ];
    let runs_in_all = all.into_iter().try_fold(0_usize, usize::checked_add)?;
    if runs_in_all.checked_mul(count)? > most {
        return None;
    }
    let mut sequence = Vec::with_capacity((runs_in_all + 1) * count);
    for form in 0..forms {
        for _ in 0..runs {
            sequence.extend((0..count).map(|kernel| main(kernel, form)));
        }
    }
    let mut follow = |forms: usize, in_a_row: usize| {
        let walk = each_in_a_row(forms, in_a_row, places);
        let walk = walk.into_iter().enumerate();
        sequence.extend(walk.map(|(number, form)| main(number % count, form)));
        // Completes the last run, since runs start with the program's first kernel.
        while !sequence.len().is_multiple_of(count) {
            sequence.push(main(sequence.len() % count, 0));
        }
    };
    if forms > 1 {
        follow(forms, 2);
    }
    if let Some(in_a_row) = in_a_row {
        follow(cases, in_a_row);
    }
    for form in 0..more {
        for _ in 0..=period {
            sequence.extend((0..count).map(|kernel| further(kernel, form)));
        }
    }
    Some(sequence)
}

/// A list of `forms` that contains every order of `in_a_row` forms at each place modulo `places`: an Eulerian cycle.
fn each_in_a_row(forms: usize, in_a_row: usize, places: usize) -> Vec<usize> {
    // Node of the graph: a place, and the last `in_a_row - 1` forms, the latest in the lowest digit.
    let histories = forms.pow(in_a_row as u32 - 1);
    let mut taken = vec![0; histories * places];
    let (mut open, mut closed) = (vec![0], Vec::new());
    while let Some(&at) = open.last() {
        if taken[at] < forms {
            let place = (at / histories + 1) % places;
            open.push(place * histories + (at * forms + taken[at]) % histories);
            taken[at] += 1;
        } else {
            open.pop();
            closed.push(at % forms);
        }
    }
    closed.reverse();
    closed
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_order_of_forms_is_at_each_place() {
        for (forms, in_a_row, places) in [
            (1, 2, 1),
            (2, 2, 1),
            (2, 2, 3),
            (4, 2, 2),
            (3, 2, 4),
            (2, 3, 2),
            (4, 3, 2),
            (2, 5, 4),
        ] {
            let walk = each_in_a_row(forms, in_a_row, places);
            let orders = forms.pow(in_a_row as u32) * places;
            assert_eq!(walk.len(), orders + 1);
            // The cycle is closed, so it continues with its first forms.
            let again = walk[1..in_a_row - 1].iter().copied();
            let walk: Vec<usize> = walk.iter().copied().chain(again).collect();
            let steps = walk.windows(in_a_row).enumerate();
            let seen: BTreeSet<_> = steps.map(|(at, row)| (at % places, row)).collect();
            assert_eq!(seen.len(), orders, "{walk:?}");
        }
    }
}
