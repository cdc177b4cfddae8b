//! Declarations: tensors and families of them, and the end of tensors.

use super::scope::Bound;
use super::view::View;
use super::{MAX_AXES, MAX_TENSOR_BYTES, Unroller};
use crate::dtype::DType;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::ir::{Declaration, ElementType, Order, Role, Sharding, TensorRef};
use crate::program::rank_program::{OperationKind, TensorInstance};
use std::sync::Arc;

impl<'p> Unroller<'p> {
    pub(super) fn declare(&mut self, declaration: &'p Declaration) -> Result<(), Diagnostic> {
        let name = &declaration.name;
        if declaration.role != Role::Local && self.called.is_nested(self.blocks) {
            let message = format!(
                "'{name}' is an input or output inside a loop or branch; expected it outside, since it is \
                 the same on every rank"
            );
            return Err(self.malformed(message));
        }
        let mut role = declaration.role;
        if declaration.optional {
            let given = self.given.contains(name.as_str());
            self.optional.insert(name, given);
            match (given, role) {
                (true, _) => {}
                (false, Role::Input) => return self.bind(name, Bound::Absent),
                // An output that the caller does not want is still written by the program.
                (false, _) => role = Role::Local,
            }
        }
        let dtype = self.element_type(name, &declaration.dtype)?;
        let Some(over) = &declaration.family else {
            let view = self.tensor(declaration, Arc::from(name.as_str()), dtype, role)?;
            return self.bind(name, Bound::Tensor(view));
        };
        let (from, to) = (self.integer(&over.from)?, self.integer(&over.to)?);
        if from != 0 {
            let message = format!("the members of '{name}' are counted from {from}; expected 0");
            return Err(self.diagnostic(DiagnosticKind::OutOfBounds, message));
        }
        let mut members = Vec::new();
        for index in from..to {
            self.step()?;
            let member = Arc::from(format!("{name}[{index}]"));
            members.push(self.scoped(|unroller| {
                unroller.bind(&over.index, Bound::Integer(index))?;
                unroller.tensor(declaration, member, dtype, role)
            })?);
        }
        self.bind(name, Bound::Family(members.into()))
    }

    pub(super) fn deallocate(&mut self, name: &str) -> Result<(), Diagnostic> {
        let whole = TensorRef {
            name: name.to_owned(),
            selections: Vec::new(),
            transposed: false,
        };
        let view = self.view(&whole)?;
        let tensor = &self.made.tensors[view.tensor];
        let own = tensor.role == Role::Local && *tensor.name == *name;
        // By name as well: an alias of a part must not end the whole tensor.
        if !own || self.called.is_lent(name) {
            let message = format!(
                "'{name}' is not allocated by the program; expected the name of an 'allocate'"
            );
            return Err(self.malformed(message));
        }
        self.deallocated.insert(view.tensor, self.site.position());
        self.enqueue(OperationKind::Deallocate(view.tensor));
        Ok(())
    }

    /// The element type of what is declared as `declared`.
    pub(super) fn element_type(
        &self,
        declared: &str,
        dtype: &ElementType,
    ) -> Result<DType, Diagnostic> {
        match dtype {
            ElementType::Fixed(dtype) => Ok(*dtype),
            ElementType::Parameter(name) => match self.lookup(name) {
                Some(Bound::ElementType(dtype)) => Ok(*dtype),
                _ => {
                    let message = format!(
                        "the element type of '{declared}' is '{name}', which is neither an element type \
                         nor a parameter that is one"
                    );
                    Err(self.malformed(message))
                }
            },
        }
    }

    /// Enters one tensor under the name that callers bind it by.
    fn tensor(
        &mut self,
        declaration: &'p Declaration,
        name: Arc<str>,
        dtype: DType,
        role: Role,
    ) -> Result<View, Diagnostic> {
        let axes = declaration.shape.len();
        let sharded = match declaration.sharding {
            Sharding::Whole => axes > 0,
            Sharding::Loop => axes > 1,
            Sharding::Ranks(axis) => axis < axes,
        };
        if !sharded || axes > MAX_AXES {
            let message = format!(
                "'{name}' has {axes} axes; expected 1 to {MAX_AXES}, with the axis that it is \
                 sharded over among them, and another beside a loop's"
            );
            return Err(self.diagnostic(DiagnosticKind::Mismatch, message));
        }
        let mut shape = Vec::with_capacity(axes);
        let (mut bytes, limit) = (dtype.size(), MAX_TENSOR_BYTES);
        for expression in &declaration.shape {
            let value = self.integer(expression)?;
            let extent = usize::try_from(value).ok().filter(|extent| *extent > 0);
            let Some(extent) = extent else {
                let message =
                    format!("extent {expression} of '{name}' is {value}; expected at least 1");
                return Err(self.diagnostic(DiagnosticKind::OutOfBounds, message));
            };
            // Checked at each axis: every product of extents and strides below then fits without further checks.
            bytes = match bytes.checked_mul(extent) {
                Some(bytes) if bytes <= limit => bytes,
                _ => {
                    let message = format!("'{name}' is too large; expected at most {limit} bytes");
                    return Err(self.diagnostic(DiagnosticKind::OutOfBounds, message));
                }
            };
            shape.push(extent);
        }
        if role != Role::Local
            && let Some(view) = self.lent(declaration, &name, (dtype, &shape))?
        {
            return Ok(view);
        }
        let column_major = match &declaration.order {
            Order::RowMajor => false,
            Order::ColumnMajor => true,
            Order::ColumnMajorIf(condition) => self.condition(condition)?,
        };
        let tensor = self.made.tensors.len();
        let mut view = View::row_major(tensor, dtype, 0, shape.clone());
        if column_major {
            let mut memory = shape.clone();
            if axes >= 2 {
                memory.swap(axes - 2, axes - 1);
            }
            // Laid out with the last two axes swapped in memory and then transposed, so that indices are as in the
            // text.
            view = View::row_major(tensor, dtype, 0, memory);
            if !view.transpose() {
                let message =
                    format!("'{name}' is column-major and has {axes} axes; expected at least 2");
                return Err(self.diagnostic(DiagnosticKind::Mismatch, message));
            }
        }
        let site = self.here();
        self.made.tensors.push(TensorInstance {
            name,
            dtype,
            shape,
            column_major,
            sharding: declaration.sharding,
            bytes,
            role,
            value_bound: None,
            site,
        });
        if role == Role::Local {
            self.enqueue(OperationKind::Allocate(tensor));
        }
        if declaration.zero {
            let whole = self.made.whole(tensor);
            self.zeros.start(&whole, self.declared_here());
        }
        Ok(view)
    }
}
