//! Parameter values, and the set of optional tensors that the caller binds.

use crate::device::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::named::comma;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The value of a parameter.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Value {
    /// `m`, and one of `parts = 1 | 2 | 4`.
    Integer(i64),
    /// `n[]`.
    List(Vec<i64>),
    /// One of `T = bf16 | f16`.
    ElementType(DType),
    /// One of `op = sum | max`.
    Operator(ReduceOp),
}

impl Value {
    /// Whether `other` equals this value or is one of its alternatives: operators with a factor admit one another.
    fn admits(&self, other: &Self) -> bool {
        let scales = |value: &Self| matches!(value, Self::Operator(op) if op.factor().is_some());
        // Factors are only known at run time: a declared scaled sum admits any factor.
        self == other || scales(self) && scales(other)
    }
}

impl From<i64> for Value {
    fn from(value: i64) -> Self {
        Self::Integer(value)
    }
}

impl From<i32> for Value {
    fn from(value: i32) -> Self {
        Self::Integer(value.into())
    }
}

impl From<Vec<i64>> for Value {
    fn from(values: Vec<i64>) -> Self {
        Self::List(values)
    }
}

impl From<DType> for Value {
    fn from(dtype: DType) -> Self {
        Self::ElementType(dtype)
    }
}

impl From<ReduceOp> for Value {
    fn from(operator: ReduceOp) -> Self {
        Self::Operator(operator)
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer(value) => value.fmt(f),
            Self::List(values) => {
                let values: Vec<String> = values.iter().map(i64::to_string).collect();
                f.write_str(&values.join(","))
            }
            Self::ElementType(dtype) => dtype.fmt(f),
            Self::Operator(operator) => operator.fmt(f),
        }
    }
}

/// A parameter, set by the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its name.
    pub name: String,
    /// Accepted values.
    pub kind: ParameterKind,
}

/// Accepted values of a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParameterKind {
    /// `m`: an integer.
    Integer,
    /// `n[]`: a list of `count(n)` integers, `n[0]`, `n[1]`, ….
    List,
    /// `parts = 1 | 2 | 4`, `T = bf16 | f16`, `op = sum | max`: one of these, all integers, all element types or all
    /// operators. If the caller leaves it open, it is the first, or the one that a cost model predicts to be fastest.
    OneOf(Vec<Value>),
}

impl ParameterKind {
    /// Alternatives if the caller leaves the parameter open; empty if a value is required.
    pub fn alternatives(&self) -> &[Value] {
        match self {
            Self::Integer | Self::List => &[],
            Self::OneOf(alternatives) => alternatives,
        }
    }
}

impl fmt::Display for ParameterKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer => f.write_str("an integer"),
            Self::List => f.write_str("a list of integers"),
            Self::OneOf(alternatives) => {
                let words: Vec<String> = alternatives.iter().map(Value::to_string).collect();
                f.write_str(&words.join(" or "))
            }
        }
    }
}

/// Parameter values by name, and the names of the optional tensors that the caller binds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    values: BTreeMap<String, Value>,
    given: BTreeSet<String>,
}

impl Parameters {
    /// No values.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets `name` to `value`.
    pub fn with(mut self, name: impl Into<String>, value: impl Into<Value>) -> Self {
        self.insert(name, value);
        self
    }

    /// Marks the optional tensor `name` as bound by the caller.
    pub fn with_tensor(mut self, name: impl Into<String>) -> Self {
        self.given.insert(name.into());
        self
    }

    /// Merges `other` into this one; its values replace those of the same name.
    pub fn and(mut self, other: &Self) -> Self {
        let values = other.values.clone();
        self.values.extend(values);
        self.given.extend(other.given.iter().cloned());
        self
    }

    /// Removes the value of `name`.
    pub(crate) fn without(mut self, name: &str) -> Self {
        self.values.remove(name);
        self
    }

    /// Sets the value of `name`.
    pub fn insert(&mut self, name: impl Into<String>, value: impl Into<Value>) {
        self.values.insert(name.into(), value.into());
    }

    /// The value of `name`.
    pub fn value(&self, name: &str) -> Option<&Value> {
        self.values.get(name)
    }

    /// Every name and its value.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.values
            .iter()
            .map(|(name, value)| (name.as_str(), value))
    }

    /// Whether the caller binds the optional tensor `name`.
    pub fn has_tensor(&self, name: &str) -> bool {
        self.given.contains(name)
    }

    /// The optional tensors that the caller binds.
    pub fn tensors(&self) -> impl Iterator<Item = &str> {
        self.given.iter().map(String::as_str)
    }

    /// The required parameters that have no value.
    pub fn missing<'p>(
        &self,
        parameters: &'p [Parameter],
    ) -> impl Iterator<Item = &'p Parameter> + use<'_, 'p> {
        let is_open = |parameter: &&Parameter| {
            self.value(&parameter.name).is_none() && parameter.kind.alternatives().is_empty()
        };
        parameters.iter().filter(is_open)
    }

    /// Value of `parameter`: the given value, or the first alternative.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if there is neither, or if the given value
    /// has another kind or is not among the alternatives.
    pub(crate) fn resolve(&self, parameter: &Parameter) -> Result<Value> {
        let Parameter { name, kind } = parameter;
        let Some(value) = self.values.get(name) else {
            // The first alternative is the default.
            return kind.alternatives().first().cloned().ok_or_else(|| {
                Error::invalid(format!("parameter '{name}' has no value; expected {kind}"))
            });
        };
        let fits = match (kind, value) {
            (ParameterKind::Integer, Value::Integer(_)) | (ParameterKind::List, Value::List(_)) => {
                true
            }
            // A list of one element is written like a number.
            (ParameterKind::List, Value::Integer(only)) => return Ok(Value::List(vec![*only])),
            (ParameterKind::OneOf(alternatives), value) => {
                alternatives.iter().any(|one| one.admits(value))
            }
            _ => false,
        };
        if fits {
            Ok(value.clone())
        } else {
            Err(Error::invalid(format!(
                "parameter '{name}' is {value}; expected {kind}"
            )))
        }
    }
}

impl<N: Into<String>, V: Into<Value>> FromIterator<(N, V)> for Parameters {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(values: I) -> Self {
        let mut parameters = Self::new();
        for (name, value) in values {
            parameters.insert(name, value);
        }
        parameters
    }
}

impl<N: Into<String>, V: Into<Value>, const COUNT: usize> From<[(N, V); COUNT]> for Parameters {
    fn from(values: [(N, V); COUNT]) -> Self {
        values.into_iter().collect()
    }
}

impl fmt::Display for Parameters {
    /// `m=4096, n=1024,512, T=bf16`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.iter().map(|(name, value)| format!("{name}={value}"));
        f.write_str(&comma(all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameter(kind: ParameterKind) -> Parameter {
        Parameter {
            name: "p".to_owned(),
            kind,
        }
    }

    #[test]
    fn the_first_alternative_is_the_default() {
        let parts = parameter(ParameterKind::OneOf(vec![2.into(), 4.into()]));
        let resolve = |parameters: Parameters| parameters.resolve(&parts);
        assert_eq!(resolve(Parameters::new()).unwrap(), Value::Integer(2));
        assert_eq!(resolve([("p", 4)].into()).unwrap(), Value::Integer(4));
        let error = resolve([("p", 3)].into()).unwrap_err().to_string();
        assert!(
            error.contains("parameter 'p' is 3; expected 2 or 4"),
            "{error}"
        );
    }

    #[test]
    fn values_are_of_the_kind_that_is_declared() {
        let list = parameter(ParameterKind::List);
        let one = Parameters::from([("p", 7)]);
        assert_eq!(one.resolve(&list).unwrap(), Value::List(vec![7]));
        let number = parameter(ParameterKind::Integer);
        assert!(Parameters::new().resolve(&number).is_err());
        let many = Parameters::new().with("p", vec![1, 2]);
        assert!(many.resolve(&number).is_err());
        let dtype = parameter(ParameterKind::OneOf(vec![DType::BF16.into()]));
        assert!(one.resolve(&dtype).is_err());
        assert_eq!(many.to_string(), "p=1,2");
    }
}
