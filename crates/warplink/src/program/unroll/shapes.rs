//! What shapes and element types the operations take.

use super::Unroller;
use super::scope::View;
use crate::dtype::DType;
use crate::error::Rank;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::ir::{Collective, Role};
use crate::program::rank_program::{OperationKind, TransferId};
use std::fmt::Write as _;

fn shape_of(view: &View) -> String {
    let mut text = format!("{}[", view.dtype);
    for (axis, extent) in view.shape.iter().enumerate() {
        let lead = if axis == 0 { "" } else { ", " };
        // Writing to a string cannot fail.
        let _ = write!(text, "{lead}{extent}");
    }
    text.push(']');
    text
}

impl Unroller<'_> {
    fn mismatch(&self, message: impl Into<String>) -> Diagnostic {
        self.diagnostic(DiagnosticKind::Mismatch, message)
    }

    /// Refuses a write to what the caller lends for reading.
    pub(super) fn writable(&self, view: &View) -> Result<(), Diagnostic> {
        let tensor = &self.made.tensors[view.tensor];
        if tensor.role != Role::Input {
            return Ok(());
        }
        Err(self.diagnostic(
            DiagnosticKind::InputWritten,
            format!(
                "the input '{}' is written; expected an output or an allocated tensor",
                tensor.name
            ),
        ))
    }

    pub(super) fn copy(&self, target: &View, source: &View) -> Result<OperationKind, Diagnostic> {
        self.writable(target)?;
        if target.dtype != source.dtype || target.squeezed() != source.squeezed() {
            return Err(self.mismatch(format!(
                "copies {} to {}; expected the same shape and type",
                shape_of(source),
                shape_of(target)
            )));
        }
        Ok(OperationKind::Copy {
            target: target.range(),
            source: source.range(),
        })
    }

    pub(super) fn sum(&self, target: &View, sources: &[View]) -> Result<OperationKind, Diagnostic> {
        self.writable(target)?;
        if sources.is_empty() {
            return Err(self.mismatch("a sum has no operand; expected at least one"));
        }
        if target.dtype == DType::U8 {
            return Err(self.mismatch("a sum of u8; expected f16, bf16, f32, f64 or i32"));
        }
        for source in sources {
            if target.dtype != source.dtype || target.squeezed() != source.squeezed() {
                return Err(self.mismatch(format!(
                    "adds {} to a sum that goes to {}; expected the same shape and type",
                    shape_of(source),
                    shape_of(target)
                )));
            }
        }
        Ok(OperationKind::Sum {
            dtype: target.dtype,
            target: target.range(),
            sources: sources.iter().map(View::range).collect(),
        })
    }

    pub(super) fn matmul(
        &self,
        (target, a, b): (&View, &View, &View),
        bias: Option<&View>,
        accumulate: bool,
    ) -> Result<OperationKind, Diagnostic> {
        self.writable(target)?;
        let [m, n, k] = self.product(target, a, b, bias)?;
        Ok(OperationKind::Matmul {
            a: a.range(),
            b: b.range(),
            c: target.range(),
            bias: bias.map(View::range),
            dtype: target.dtype,
            m,
            n,
            k,
            accumulate,
        })
    }

    /// The product that is stored where the send `id` goes.
    pub(super) fn stored_matmul(
        &self,
        id: TransferId,
        a: &View,
        b: &View,
        bias: Option<&View>,
    ) -> Result<OperationKind, Diagnostic> {
        let send = &self.made.transfers[id];
        let columns = b.shape.last().copied().unwrap_or(1);
        let elements = send.range.bytes / send.dtype.size();
        // What is sent is as long as the product; its shape is the receiver's affair.
        let sent = View {
            tensor: send.range.tensor,
            dtype: send.dtype,
            offset: send.range.offset_bytes / send.dtype.size(),
            shape: if elements.is_multiple_of(columns) {
                vec![elements / columns, columns]
            } else {
                vec![elements]
            },
        };
        let [m, n, k] = self.product(&sent, a, b, bias)?;
        Ok(OperationKind::PostMatmul {
            group: vec![id],
            a: vec![a.range()],
            b: b.range(),
            bias: bias.map(View::range),
            dtype: send.dtype,
            m,
            n,
            k,
        })
    }

    /// `m`, `n` and `k` of a product, if the shapes and types fit.
    fn product(
        &self,
        target: &View,
        a: &View,
        b: &View,
        bias: Option<&View>,
    ) -> Result<[usize; 3], Diagnostic> {
        let dtype = target.dtype;
        let all = || [a, b].into_iter().chain(bias);
        if dtype.matmul_tolerance().is_none() || all().any(|view| view.dtype != dtype) {
            return Err(self.mismatch(format!(
                "multiplies {} by {} into {}; expected one type, f16, bf16 or f32",
                shape_of(a),
                shape_of(b),
                shape_of(target)
            )));
        }
        let wrong = || {
            self.mismatch(format!(
                "multiplies {} by {} into {}; expected […, m, k] by [k, n] into […, m, n]",
                shape_of(a),
                shape_of(b),
                shape_of(target)
            ))
        };
        let ([rows @ .., k], &[depth, n], [out @ .., columns]) =
            (&a.shape[..], &b.shape[..], &target.shape[..])
        else {
            return Err(wrong());
        };
        let m = rows.iter().product::<usize>();
        let fits = *k == depth
            && *columns == n
            && !rows.is_empty()
            && !out.is_empty()
            && out.iter().product::<usize>() == m;
        if !fits {
            return Err(wrong());
        }
        if let Some(bias) = bias
            && bias.shape != [n]
        {
            return Err(self.mismatch(format!(
                "adds a bias {} to rows of {n} elements; expected one element for each",
                shape_of(bias)
            )));
        }
        Ok([m, n, *k])
    }

    pub(super) fn collective(
        &self,
        target: &View,
        source: &View,
        collective: Collective<Rank>,
    ) -> Result<OperationKind, Diagnostic> {
        let writes = !matches!(collective, Collective::Reduce(_, root) if root != self.made.rank);
        if writes {
            self.writable(target)?;
        }
        let world = self.made.world;
        let (to, from) = (target.elements(), source.elements());
        let (fits, rule) = match collective {
            Collective::AllGather => (
                from.checked_mul(world) == Some(to),
                "a target as long as the sources of all ranks",
            ),
            Collective::ReduceScatter(_) => (
                to.checked_mul(world) == Some(from),
                "a source as long as the targets of all ranks",
            ),
            Collective::AllToAll => (
                to == from && from.is_multiple_of(world),
                "two of one length that divides by the number of ranks",
            ),
            Collective::AllReduce(_) | Collective::Broadcast(_) | Collective::Reduce(..) => {
                (to == from, "two of one length")
            }
        };
        if !fits || target.dtype != source.dtype {
            return Err(self.mismatch(format!(
                "{} of {} into {} on {world} ranks; expected {rule}, of one type",
                collective.name(),
                shape_of(source),
                shape_of(target)
            )));
        }
        Ok(OperationKind::Collective {
            collective,
            dtype: target.dtype,
            target: target.range(),
            source: source.range(),
        })
    }
}
