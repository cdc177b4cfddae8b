//! Names of enum values: tables and JSON use the same names as clap.

use clap::builder::{PossibleValue, TypedValueParser};
use clap::{Arg, Command, ValueEnum};
use std::ffi::OsStr;
use std::str::FromStr;
use warplink::named::{self, Named};

/// Name of a value on the command line.
pub(crate) fn name_of<T: ValueEnum>(value: &T) -> String {
    let named = value.to_possible_value();
    named.map_or_else(String::new, |named| named.get_name().to_owned())
}

/// Names of values, as listed in errors.
pub(crate) fn names_of<T: ValueEnum>(values: &[T]) -> String {
    let names: Vec<String> = values.iter().map(name_of).collect();
    named::listed(names.iter().map(String::as_str))
}

/// Parses one of these values of a library enum by its name; help lists the names.
#[derive(Clone)]
pub(crate) struct OneOf<T: Named>(pub(crate) &'static [T]);

impl<T: Named> TypedValueParser for OneOf<T> {
    type Value = T;

    fn parse_ref(
        &self,
        command: &Command,
        argument: Option<&Arg>,
        value: &OsStr,
    ) -> Result<T, clap::Error> {
        let values = self.0;
        // By way of a closure, whose errors clap completes with the argument's name.
        let read = move |text: &str| named::parse(text, values).map_err(|unknown| unknown.message);
        read.parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let names = self.0.iter().map(|value| value.name());
        Some(Box::new(names.map(PossibleValue::new)))
    }
}

/// One value of an enum, or `both` for all.
#[derive(Clone, Debug)]
pub(crate) struct OneOrBoth<T>(pub(crate) Vec<T>);

impl<T: ValueEnum> FromStr for OneOrBoth<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = T::value_variants();
        match text {
            "both" => Ok(Self(all.to_vec())),
            text => T::from_str(text, false)
                .map(|one| Self(vec![one]))
                .map_err(|_| {
                    let names: Vec<String> = all.iter().map(name_of).collect();
                    let names = names.iter().map(String::as_str).chain(["both"]);
                    format!("expected {}", named::listed(names))
                }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
    enum Way {
        There,
        BackAgain,
    }

    #[test]
    fn values_have_the_names_of_the_command_line() {
        assert_eq!(name_of(&Way::BackAgain), "back-again");
        for (text, values) in [
            ("there", Ok(vec![Way::There])),
            ("both", Ok(vec![Way::There, Way::BackAgain])),
            ("back", Err("expected there, back-again or both".to_owned())),
        ] {
            let read = text.parse().map(|OneOrBoth(values)| values);
            assert_eq!(read, values, "{text}");
        }
    }
}
