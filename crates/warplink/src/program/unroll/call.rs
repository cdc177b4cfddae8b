//! Calls of other programs of the text.

use super::scope::{Bound, Named, OpenLoop};
use super::shapes::shape_of;
use super::view::View;
use super::{Unroller, WORK_PER_STEP};
use crate::dtype::DType;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::expr::Expr;
use crate::program::ir::{
    Argument, ArgumentValue, Declaration, NodeKind, Role, Selection, StatementKind, Subprogram,
};
use crate::program::parameters::{Parameters, Value};
use crate::program::rank_program::CallSite;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem::{replace, take};
use std::sync::Arc;

/// Cost of a call in steps: it saves the caller's names and binds the arguments.
const STEPS_OF_CALL: usize = 8;

/// State of a called program.
#[derive(Default)]
pub(super) struct Called<'p> {
    /// The programs that it may call.
    programs: &'p [Subprogram],
    /// The tensors that it is lent by the caller, by their names in it; none in the program that is run.
    pub(super) lent: Option<HashMap<String, View>>,
    /// Blocks that were open at the call.
    blocks: usize,
}

impl<'p> Called<'p> {
    /// Within the program that is run.
    pub(super) fn outermost(programs: &'p [Subprogram]) -> Self {
        Self {
            programs,
            ..Self::default()
        }
    }

    /// Whether a block of the program is open beside its own, where `blocks` are open in all.
    pub(super) const fn is_nested(&self, blocks: usize) -> bool {
        blocks > self.blocks + 1
    }

    /// Whether the program is lent the tensor `name`.
    pub(super) fn is_lent(&self, name: &str) -> bool {
        self.lent
            .as_ref()
            .is_some_and(|lent| lent.contains_key(name))
    }
}

/// Caller state saved during a call.
struct Aside<'p> {
    called: Called<'p>,
    names: Vec<&'p str>,
    bound: FxHashMap<&'p str, Bound>,
    loops: Vec<OpenLoop>,
    transfers: BTreeMap<&'p str, Named>,
    given: BTreeSet<String>,
    optional: BTreeMap<&'p str, bool>,
}

impl<'p> Unroller<'p> {
    pub(super) fn call(
        &mut self,
        name: &'p str,
        arguments: &'p [Argument],
    ) -> Result<(), Diagnostic> {
        self.work
            .set(self.work.get() + WORK_PER_STEP * STEPS_OF_CALL);
        let programs = self.called.programs;
        let Some(index) = programs.iter().position(|program| program.name == name) else {
            let message = format!(
                "'{name}' is not a program defined before this one; expected one that is (no program calls itself)"
            );
            return Err(self.malformed(message));
        };
        let program = &programs[index];
        let (mut values, mut lent, mut given) =
            (Parameters::new(), HashMap::new(), BTreeSet::new());
        for argument in arguments {
            let bound = self.argument(program, argument)?;
            let name = &argument.name;
            match bound {
                Bound::Integer(value) => values.insert(name, value),
                Bound::List(list) => values.insert(name, list.to_vec()),
                Bound::ElementType(dtype) => values.insert(name, Value::ElementType(dtype)),
                Bound::Operator(operator) => values.insert(name, operator),
                Bound::Tensor(view) => {
                    given.insert(name.clone());
                    lent.insert(name.clone(), view);
                }
                // Under the members' names, by which the called program's declarations look them up.
                Bound::Family(members) => {
                    given.insert(name.clone());
                    let members = members.iter().enumerate();
                    lent.extend(
                        members.map(|(index, view)| (format!("{name}[{index}]"), view.clone())),
                    );
                }
                // As where the caller leaves it out.
                Bound::Absent | Bound::Stream(_) | Bound::Scratch(_) | Bound::Function(_) => {}
            }
        }
        let (current, site) = (self.current, self.site.clone());
        self.site.call = Some(Arc::new(CallSite {
            program: Arc::from(name),
            site: site.clone(),
        }));
        // Loop indices of the caller are in the call's site; those of the called program start anew.
        self.site.indices = Arc::default();
        let aside = Aside {
            called: replace(
                &mut self.called,
                Called {
                    // Only earlier programs can be called: calls cannot recurse, and unrolling ends.
                    programs: &programs[..index],
                    lent: Some(lent),
                    blocks: self.blocks,
                },
            ),
            // Nothing of the caller is visible in the called program but its arguments.
            names: take(&mut self.names),
            bound: take(&mut self.bound),
            loops: take(&mut self.loops),
            transfers: take(&mut self.transfers),
            given: replace(&mut self.given, given),
            optional: take(&mut self.optional),
        };
        let done = self
            .bind_parameters(program, &values)
            .and_then(|()| self.block(&program.body));
        self.called = aside.called;
        self.names = aside.names;
        self.bound = aside.bound;
        self.loops = aside.loops;
        self.transfers = aside.transfers;
        self.given = aside.given;
        self.optional = aside.optional;
        // A called program may set its stream; the caller goes on in its own.
        self.current = current;
        self.site = site;
        done
    }

    /// Resolves an argument in the caller's scope.
    fn argument(&self, program: &Subprogram, argument: &Argument) -> Result<Bound, Diagnostic> {
        let Argument { name, value } = argument;
        let parameter = program.parameters.iter().any(|it| it.name == *name);
        if !parameter && !interface(program).any(|it| it.name == *name) {
            let parameters = program.parameters.iter().map(|it| it.name.as_str());
            let names = parameters.chain(interface(program).map(|it| it.name.as_str()));
            let message = format!(
                "'{}' has no parameter, input or output '{name}'; expected one of {}",
                program.name,
                names.collect::<Vec<_>>().join(", ")
            );
            return Err(self.malformed(message));
        }
        let bound = match value {
            ArgumentValue::Integer(value) => Bound::Integer(self.integer(value)?),
            ArgumentValue::ElementType(dtype) => Bound::ElementType(*dtype),
            ArgumentValue::Reference(reference) => {
                let known = self.lookup(&reference.name);
                match (known, &reference.selections[..], reference.transposed) {
                    (Some(Bound::List(_)), [Selection::Index(index)], false) => {
                        let list = reference.name.clone();
                        let element = Expr::Element(list, Box::new(index.clone()));
                        Bound::Integer(self.integer(&element)?)
                    }
                    // Anything with selections must be a tensor, also where the name is unknown: `view` reports that.
                    (None | Some(Bound::Tensor(_)), ..) | (_, [_, ..], _) | (_, _, true) => {
                        Bound::Tensor(self.view(reference)?)
                    }
                    (Some(bound), [], false) => bound.clone(),
                }
            }
        };
        let fits = match &bound {
            Bound::Integer(_) | Bound::List(_) | Bound::ElementType(_) | Bound::Operator(_) => {
                parameter
            }
            Bound::Tensor(_) | Bound::Family(_) | Bound::Absent => !parameter,
            Bound::Stream(_) | Bound::Scratch(_) | Bound::Function(_) => false,
        };
        if fits {
            return Ok(bound);
        }
        let (is, expected) = match (&bound, parameter) {
            (Bound::Function(_), true) => ("a function", "a value"),
            (Bound::Function(_), false) => ("a function", "a tensor"),
            (Bound::Scratch(_), true) => ("scratch", "a value"),
            (Bound::Scratch(_), false) => ("scratch", "a tensor"),
            (Bound::Stream(_), true) => ("a stream", "a value"),
            (Bound::Stream(_), false) => ("a stream", "a tensor"),
            (_, true) => ("a tensor", "a value"),
            (_, false) => ("a value", "a tensor"),
        };
        let message = format!(
            "the argument '{name}' of '{}' is {is}; expected {expected}",
            program.name
        );
        Err(self.diagnostic(DiagnosticKind::Mismatch, message))
    }

    fn bind_parameters(
        &mut self,
        program: &'p Subprogram,
        values: &Parameters,
    ) -> Result<(), Diagnostic> {
        for parameter in &program.parameters {
            let bound = match values.resolve(parameter) {
                Ok(value) => value.into(),
                Err(error) => {
                    let message = format!("'{}': {}", program.name, error.message());
                    return Err(self.diagnostic(DiagnosticKind::Requirement, message));
                }
            };
            self.bind(&parameter.name, bound)?;
        }
        Ok(())
    }

    /// The tensor that the caller lends for `declaration`, called `name`; `None` in the program that is
    /// run, whose caller binds memory.
    pub(super) fn lent(
        &mut self,
        declaration: &Declaration,
        name: &str,
        (dtype, shape): (DType, &[usize]),
    ) -> Result<Option<View>, Diagnostic> {
        let Some(lent) = &self.called.lent else {
            return Ok(None);
        };
        let Some(view) = lent.get(name) else {
            let message = format!("'{name}' is not given by the call; expected a tensor for it");
            return Err(self.malformed(message));
        };
        let mut view = view.clone();
        if view.dtype != dtype || view.shape != shape {
            let expected = View::row_major(view.tensor, dtype, 0, shape.to_vec());
            return Err(self.mismatch(format!(
                "'{name}' is {}; expected {}",
                shape_of(&view),
                shape_of(&expected)
            )));
        }
        match declaration.role {
            // The tensor may be an output of the caller, which the called program must still not write.
            Role::Input => view.read_only = true,
            _ => self.writable(&view)?,
        }
        if declaration.zero {
            let range = self.range(&view, "set to 0")?;
            self.zeros.start(&range, self.declared_here());
        }
        Ok(Some(view))
    }
}

/// The inputs and outputs of a program.
fn interface(program: &Subprogram) -> impl Iterator<Item = &Declaration> {
    program.body.iter().filter_map(|it| match &it.kind {
        NodeKind::Do(StatementKind::Declare(declaration)) if declaration.role != Role::Local => {
            Some(declaration)
        }
        _ => None,
    })
}
