//! Shapes and element types that the operations accept.

use super::Unroller;
use super::view::View;
use crate::device::{MAX_ELEMENTWISE_AXES, MatmulSpec};
use crate::dtype::DType;
use crate::named::{alternatives, comma};
use crate::program::area::{Area, simplified};
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::ir::{ElementwiseOp, Product, Role};
use crate::program::rank_program::{
    ElementwiseOperation, MatmulOperation, OperationKind, Range, StoredMatmul, TransferId,
};

pub(super) fn shape_of(view: &View) -> String {
    format!("{}[{}]", view.dtype, comma(&view.shape))
}

/// The operands of a product.
#[derive(Clone)]
pub(super) struct Factors {
    a: View,
    b: View,
    bias: Option<View>,
}

/// A product whose operands fit.
struct Matmul {
    a: Area,
    b: Area,
    bias: Option<Range>,
    spec: MatmulSpec,
}

impl Unroller<'_> {
    pub(super) fn mismatch(&self, message: impl Into<String>) -> Diagnostic {
        self.diagnostic(DiagnosticKind::Mismatch, message)
    }

    /// Refuses a write to what the caller lends for reading.
    pub(super) fn writable(&self, view: &View) -> Result<(), Diagnostic> {
        let tensor = &self.made.tensors[view.tensor];
        if tensor.role != Role::Input && !view.read_only {
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

    /// The range of a view whose elements are contiguous and in order; `what` is done with it.
    pub(super) fn range(&self, view: &View, what: &str) -> Result<Range, Diagnostic> {
        view.range().ok_or_else(|| {
            self.mismatch(format!(
                "{} of '{}' that is {what} is not in the order of memory; expected what is, such as all \
                 of a tensor or a range of its first axis",
                shape_of(view),
                self.made.tensors[view.tensor].name
            ))
        })
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
        // Contiguous copies are for the copy engine; others need a kernel by element.
        if let (Some(target), Some(source)) = (target.range(), source.range()) {
            return Ok(OperationKind::Copy { target, source });
        }
        self.on_areas(ElementwiseOp::Copy, target, std::slice::from_ref(source))
    }

    pub(super) fn elementwise(
        &self,
        op: ElementwiseOp,
        target: &View,
        sources: &[View],
    ) -> Result<OperationKind, Diagnostic> {
        self.writable(target)?;
        let Some(first) = sources.first() else {
            return Err(self.mismatch(format!("a {op} of nothing; expected at least one tensor")));
        };
        let cast = op == ElementwiseOp::Cast;
        if !cast && !DType::computed_elementwise().contains(&target.dtype) {
            let message = format!(
                "a {op} of {}; expected {}",
                target.dtype,
                alternatives(&DType::computed_elementwise())
            );
            return Err(self.mismatch(message));
        }
        let both = [target.dtype, first.dtype];
        if let Some(dtype) = both
            .iter()
            .find(|dtype| !DType::ELEMENTWISE.contains(dtype))
        {
            return Err(self.mismatch(format!(
                "a {op} of {dtype}; expected {}",
                alternatives(&DType::ELEMENTWISE)
            )));
        }
        for source in sources {
            let alike = cast || target.dtype == source.dtype;
            if !alike || target.squeezed() != source.squeezed() {
                let expected = if cast { "shape" } else { "shape and type" };
                return Err(self.mismatch(format!(
                    "a {op} of {} that goes to {}; expected the same {expected}",
                    shape_of(source),
                    shape_of(target)
                )));
            }
        }
        for source in sources {
            if source.dtype != first.dtype {
                return Err(self.mismatch(format!("a {op} of several types; expected one")));
            }
        }
        self.on_areas(op, target, sources)
    }

    /// An element-wise operation on parts of the same shape.
    fn on_areas(
        &self,
        op: ElementwiseOp,
        target: &View,
        sources: &[View],
    ) -> Result<OperationKind, Diagnostic> {
        let all = || std::iter::once(target).chain(sources);
        // All or none: a flat loop over contiguous operands, whatever their shapes are.
        let ranges: Option<Vec<Range>> = all().map(View::range).collect();
        let mut areas: Vec<Area> = match ranges {
            Some(ranges) => ranges.into_iter().map(Area::from).collect(),
            None => all().map(View::strided).collect(),
        };
        let axes = simplified(&areas).0.len();
        if axes > MAX_ELEMENTWISE_AXES {
            return Err(self.mismatch(format!(
                "a {op} of parts that lie in memory along {axes} axes; expected at most \
                 {MAX_ELEMENTWISE_AXES}"
            )));
        }
        let written = areas.remove(0);
        Ok(OperationKind::Elementwise(ElementwiseOperation {
            op,
            dtype: target.dtype,
            source_dtype: sources.first().map_or(target.dtype, |source| source.dtype),
            target: written,
            sources: areas,
        }))
    }

    /// The operands that `product` names.
    pub(super) fn operands(&self, product: &Product) -> Result<Factors, Diagnostic> {
        Ok(Factors {
            a: self.view(&product.a)?,
            b: self.view(&product.b)?,
            bias: self.bias(product.bias.as_ref())?,
        })
    }

    pub(super) fn matmul(
        &self,
        target: &View,
        operands: &Factors,
        accumulate: bool,
    ) -> Result<OperationKind, Diagnostic> {
        self.writable(target)?;
        // `C = matmul(A, B) + C`.
        let adds_target = operands.bias.as_ref().is_some_and(|bias| {
            let same = (bias.tensor, bias.offset) == (target.tensor, target.offset);
            same && bias.shape == target.shape && bias.strides == target.strides
        });
        let without;
        let (operands, accumulate) = if adds_target && target.shape.len() > 1 {
            without = Factors {
                bias: None,
                ..operands.clone()
            };
            (&without, true)
        } else {
            (operands, accumulate)
        };
        let product = self.product(target, operands)?;
        let Matmul {
            a,
            b,
            bias,
            mut spec,
        } = product;
        let (c, leading) = match target.matrix() {
            Some((c, false, leading)) => (c, leading),
            _ => (self.range(target, "written")?.into(), None),
        };
        spec.leading[2] = leading;
        spec.accumulate = accumulate;
        Ok(OperationKind::Matmul(MatmulOperation {
            spec,
            a,
            b,
            c,
            bias,
        }))
    }

    /// The product that is stored where the send `id` goes.
    pub(super) fn stored_matmul(
        &self,
        id: TransferId,
        operands: &Factors,
    ) -> Result<OperationKind, Diagnostic> {
        let send = &self.made.transfers[id];
        let columns = operands.b.shape.last().copied().unwrap_or(1);
        let elements = send.range.bytes / send.dtype.size();
        // The sent range has the length of the product; only the receiver interprets its shape.
        let shape = if elements.is_multiple_of(columns) {
            vec![elements / columns, columns]
        } else {
            vec![elements]
        };
        let offset = send.range.offset_bytes / send.dtype.size();
        let sent = View::row_major(send.range.tensor, send.dtype, offset, shape);
        let Matmul { a, b, bias, spec } = self.product(&sent, operands)?;
        // Operands of a posted product are ranges, which cannot describe gaps.
        if spec.leading != [None; 3] {
            return Err(self.mismatch(
                "an operand of a posted product has gaps between its rows; expected contiguous operands, \
                 or a copy",
            ));
        }
        Ok(OperationKind::PostMatmul(StoredMatmul {
            spec,
            group: vec![id],
            a: vec![a.span],
            b: b.span,
            bias,
        }))
    }

    /// Ranges and sizes of a product, if the shapes and types fit.
    fn product(&self, target: &View, operands: &Factors) -> Result<Matmul, Diagnostic> {
        let Factors { a, b, bias } = operands;
        let dtype = target.dtype;
        let mut all = [a, b].into_iter().chain(bias);
        let multiplies = || {
            format!(
                "multiplies {} by {} into {}",
                shape_of(a),
                shape_of(b),
                shape_of(target)
            )
        };
        // Types without a tolerance have no matmul either.
        if dtype.matmul_tolerance().is_none() || all.any(|view| view.dtype != dtype) {
            return Err(self.mismatch(format!(
                "{}; expected one type, {}",
                multiplies(),
                alternatives(&DType::MATMUL)
            )));
        }
        let wrong = || {
            self.mismatch(format!(
                "{}; expected […, m, k] by [k, n] into […, m, n]",
                multiplies()
            ))
        };
        let strided = |name: &str| {
            self.mismatch(format!(
                "{}, of which the {name} operand is neither in the order of memory nor the transpose \
                 of a matrix that is, with rows at even steps; expected one of these, or a copy",
                multiplies()
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
        let (left, transposed_a, leading_a) = a.matrix().ok_or_else(|| strided("left"))?;
        let (right, transposed_b, leading_b) = b.matrix().ok_or_else(|| strided("right"))?;
        let bias = bias.as_ref();
        if let Some(bias) = bias
            && bias.shape != [n]
        {
            return Err(self.mismatch(format!(
                "adds a bias {} to rows of {n} elements; expected one element for each, or the target",
                shape_of(bias)
            )));
        }
        let bias = bias.map(|bias| self.range(bias, "added")).transpose()?;
        Ok(Matmul {
            a: left,
            b: right,
            bias,
            spec: MatmulSpec {
                transposed_a,
                transposed_b,
                bias: bias.is_some(),
                leading: [leading_a, leading_b, None],
                ..MatmulSpec::new(m, n, *k, dtype)
            },
        })
    }
}
