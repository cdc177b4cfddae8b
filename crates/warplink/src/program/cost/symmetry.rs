//! Whether all ranks do the same in rotation, so that one of them stands for all.

use super::class;
use super::launch::sections;
use super::link::Partners;
use crate::program::{OperationKind, RankProgram};

/// Whether every rank does what rank 0 does, with peers at the same distance: the same streams,
/// operations and sizes, and other ends of transfers at the same place of the peer's list. Where in
/// a tensor the bytes lie does not matter.
pub(super) fn is_symmetric(ranks: &[RankProgram], partners: &Partners) -> bool {
    let Some((first, rest)) = ranks.split_first() else {
        return true;
    };
    let world = ranks.len();
    let classes: Vec<Vec<usize>> = sections(first).map(class::classes).collect();
    rest.iter().zip(1..).all(|(rank, number)| {
        let distance = |peer: usize, from: usize| (peer + world - from) % world;
        rank.streams == first.streams
            && rank.transfers.len() == first.transfers.len()
            && rank.operations.len() == first.operations.len()
            && partners[number] == partners[0]
            && rank.transfers.iter().zip(&first.transfers).all(|(a, b)| {
                (a.direction, a.backend, a.range.bytes) == (b.direction, b.backend, b.range.bytes)
                    && distance(a.peer, number) == distance(b.peer, 0)
            })
            && rank
                .operations
                .iter()
                .zip(&first.operations)
                .all(|(a, b)| a.stream == b.stream && costs_the_same(&a.kind, &b.kind))
            && sections(first)
                .zip(sections(rank))
                .zip(&classes)
                .all(|((a, b), classes)| class::same(a, classes, b))
    })
}

fn costs_the_same(a: &OperationKind, b: &OperationKind) -> bool {
    use OperationKind::*;
    match (a, b) {
        (Allocate(_), Allocate(_)) | (Deallocate(_), Deallocate(_)) | (Share(_), Share(_)) => true,
        (Copy { target: a, .. }, Copy { target: b, .. }) | (Zero(a), Zero(b)) => a.bytes == b.bytes,
        (
            Matmul {
                dtype: dtype_a,
                m: m_a,
                n: n_a,
                k: k_a,
                ..
            },
            Matmul {
                dtype: dtype_b,
                m: m_b,
                n: n_b,
                k: k_b,
                ..
            },
        ) => (dtype_a, m_a, n_a, k_a) == (dtype_b, m_b, n_b, k_b),
        (
            PostMatmul {
                group: group_a,
                dtype: dtype_a,
                m: m_a,
                n: n_a,
                k: k_a,
                ..
            },
            PostMatmul {
                group: group_b,
                dtype: dtype_b,
                m: m_b,
                n: n_b,
                k: k_b,
                ..
            },
        ) => (group_a, dtype_a, m_a, n_a, k_a) == (group_b, dtype_b, m_b, n_b, k_b),
        (
            Elementwise {
                target: target_a,
                sources: sources_a,
                source_dtype: dtype_a,
                ..
            },
            Elementwise {
                target: target_b,
                sources: sources_b,
                source_dtype: dtype_b,
                ..
            },
        ) => {
            let same = (sources_a.len(), dtype_a) == (sources_b.len(), dtype_b);
            same && target_a.span.bytes == target_b.span.bytes && target_a.axes == target_b.axes
        }
        (Post(a), Post(b)) | (Wait(a), Wait(b)) => a == b,
        (
            Collective {
                collective: a,
                members: None,
                target: target_a,
                source: source_a,
                ..
            },
            Collective {
                collective: b,
                members: None,
                target: target_b,
                source: source_b,
                ..
            },
        ) => {
            a.name() == b.name()
                && (target_a.bytes, source_a.bytes) == (target_b.bytes, source_b.bytes)
        }
        (Synchronize(a), Synchronize(b)) => a == b,
        // Their lanes are compared beside this.
        (Kernel(_), Kernel(_)) => true,
        _ => false,
    }
}
