//! Detects whether all ranks do the same in rotation, so that one of them can represent all.

use super::class;
use super::link::Partners;
use crate::dtype::DType;
use crate::program::{MatmulOperation, OperationKind, RankProgram, StoredMatmul};
use std::mem::{Discriminant, discriminant};

/// Whether every rank does what rank 0 does, with peers at equal distance: the same streams, operations and sizes,
/// and matching ends of transfers at the same index of the peer's list. Offsets in tensors do not matter.
pub(super) fn is_symmetric(ranks: &[RankProgram], partners: &Partners) -> bool {
    let Some((first, rest)) = ranks.split_first() else {
        return true;
    };
    let world = ranks.len();
    let classes: Vec<Vec<usize>> = first.sections().map(class::classes).collect();
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
            && rank.operations.iter().zip(&first.operations).all(|(a, b)| {
                let signature = signature(&a.kind);
                a.stream == b.stream && signature.is_some() && signature == self::signature(&b.kind)
            })
            && first
                .sections()
                .zip(rank.sections())
                .zip(&classes)
                .all(|((a, b), classes)| class::same(a, classes, b))
    })
}

/// Discriminant, name, element type and sizes of an operation: operations with equal signatures take equal time.
type Signature<'k> = (
    Discriminant<OperationKind>,
    &'k str,
    Option<DType>,
    Vec<usize>,
);

/// Signature of an operation, without the lanes of a kernel; `None` if its time depends on the rank.
fn signature(kind: &OperationKind) -> Option<Signature<'_>> {
    let (name, dtype, sizes) = match kind {
        OperationKind::Allocate(_)
        | OperationKind::Deallocate(_)
        | OperationKind::Share(_)
        | OperationKind::Kernel(_) => ("", None, Vec::new()),
        OperationKind::Copy { target, .. } | OperationKind::Zero(target) => {
            ("", None, vec![target.bytes])
        }
        OperationKind::Matmul(MatmulOperation { spec, .. }) => {
            ("", Some(spec.dtype), vec![spec.m, spec.n, spec.k])
        }
        OperationKind::PostMatmul(StoredMatmul { spec, group, .. }) => {
            let sizes = [spec.m, spec.n, spec.k].into_iter();
            // Numbers of transfers, whose peers and sizes are compared above.
            let sizes = sizes.chain(group.iter().copied());
            ("", Some(spec.dtype), sizes.collect())
        }
        OperationKind::Elementwise(it) => {
            let axes = it.target.axes.iter();
            let axes = axes.flat_map(|axis| [axis.extent, axis.stride]);
            let sizes = [it.sources.len(), it.target.span.bytes];
            let sizes = sizes.into_iter().chain(axes);
            ("", Some(it.source_dtype), sizes.collect())
        }
        OperationKind::Post(group) | OperationKind::Wait(group) => ("", None, group.clone()),
        // Ranks that are no members do something else meanwhile.
        OperationKind::Collective(it) if it.members.is_some() => return None,
        OperationKind::Collective(it) => {
            let sizes = vec![it.target.bytes, it.source.bytes];
            (it.collective.name(), None, sizes)
        }
        OperationKind::Synchronize(stream) => ("", None, vec![*stream]),
    };
    Some((discriminant(kind), name, dtype, sizes))
}
