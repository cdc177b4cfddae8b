//! Tensors of kernels that other ranks access. One name may denote different tensors on two ranks, but names that
//! alias one tensor on one rank must alias one on all.

use super::diagnostics::{Diagnostics, place_of};
use crate::program::diagnostic::DiagnosticKind;
use crate::program::rank_program::{RankProgram, TensorId};
use std::collections::HashMap;

/// Reports inconsistent tensor names. Ranks exchange each tensor once, in the order in which kernels name them, and
/// all ranks launch the same kernels; so aliasing must agree.
pub(super) fn shared_tensors(ranks: &[RankProgram], diagnostics: &mut Diagnostics<'_>) {
    let Some((first, others)) = ranks.split_first() else {
        return;
    };
    let of_first = first.shared_names();
    let first_places = places(&of_first);
    for (own, rank) in others.iter().zip(1..) {
        let names = own.shared_names();
        let all = names.iter().zip(places(&names));
        let differs = |((_, place), other): &((_, usize), &usize)| place != *other;
        let Some((((operation, name, tensor), _), _)) = all.zip(&first_places).find(differs) else {
            continue;
        };
        let there = of_first
            .iter()
            .zip(&names)
            .find(|(_, it)| it.0 == *operation && it.1 == *name);
        let Some(((first_operation, _, first_tensor), _)) = there else {
            continue;
        };
        let there = place_of(ranks, 0, *first_operation);
        let places = [place_of(ranks, rank, *operation), there.clone()];
        let (here, theirs) = (&own.tensors[*tensor], &first.tensors[*first_tensor]);
        let (here, theirs) = (&here.name, &theirs.name);
        diagnostics.add(DiagnosticKind::Mismatch, places, |[kernel, _]| {
            format!(
                "{kernel} accesses '{name}' at other ranks, which is '{here}' here and '{theirs}' in {there}, and another \
                 name is the same tensor on one of these ranks only; expected names that are one tensor on all ranks or \
                 on none"
            )
        });
    }
}

/// For each name, the index of its tensor among the exchanged ones.
fn places(names: &[(usize, String, TensorId)]) -> Vec<usize> {
    let mut known: HashMap<TensorId, usize> = HashMap::new();
    let place = |(_, _, tensor): &(usize, String, TensorId)| {
        let next = known.len();
        *known.entry(*tensor).or_insert(next)
    };
    names.iter().map(place).collect()
}
