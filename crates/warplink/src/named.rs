//! Enums whose values have names: one declaration serves the library, the command, C and Python.
//!
//! `named!` declares such an enum. It is the only place of a value's documentation, its name and, if other languages use
//! numbers, its number: lists in errors, the C header and the command's help are derived from [`Named`].

use std::fmt::{self, Write as _};

/// An enum declared by `named!`.
pub trait Named: Copy + PartialEq + fmt::Debug + Send + Sync + 'static {
    /// The word for a value in errors, such as `element type`.
    const TERM: &'static str;

    /// Every value, in the order of their numbers.
    const ALL: &'static [Self];

    /// The name in text: of programs, options, variables, reports and Python.
    fn name(self) -> &'static str;

    /// Its documentation, as one line.
    fn about(self) -> &'static str;

    /// The number that C has for it, and that ranks send one another.
    fn number(self) -> i32;

    /// The value with that number.
    fn numbered(number: i32) -> Option<Self> {
        Self::ALL.iter().copied().find(|one| one.number() == number)
    }
}

/// No value has this name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownName {
    /// Which name, and those that there are.
    pub message: String,
}

impl UnknownName {
    /// The error for `text` in the place of one of `values`.
    pub fn new<T: Named>(text: &str, values: &[T]) -> Self {
        let (term, expected) = (T::TERM, alternatives(values));
        Self {
            message: format!("unknown {term} '{text}'; expected {expected}"),
        }
    }
}

/// The one of `values` that has that name.
///
/// # Errors
/// [`UnknownName`], which lists them.
pub fn parse<T: Named>(text: &str, values: &[T]) -> Result<T, UnknownName> {
    let named = values.iter().copied().find(|one| one.name() == text);
    named.ok_or_else(|| UnknownName::new(text, values))
}

/// The names of values as an error lists them: `a, b or c`.
pub fn alternatives<T: Named>(values: &[T]) -> String {
    listed(values.iter().map(|value| value.name()))
}

/// Items, separated by commas.
pub(crate) fn comma<T: fmt::Display>(items: impl IntoIterator<Item = T>) -> String {
    let mut text = String::new();
    for (number, item) in items.into_iter().enumerate() {
        let lead = if number == 0 { "" } else { ", " };
        // Writing to a string cannot fail.
        let _ = write!(text, "{lead}{item}");
    }
    text
}

/// Words as an error lists alternatives: `a, b or c`.
pub fn listed<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    let words: Vec<&str> = words.into_iter().collect();
    match words.split_last() {
        None => String::new(),
        Some((only, [])) => (*only).to_owned(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
    }
}

/// Declares an enum and its [`Named`]:
///
/// ```ignore
/// named! {
///     /// Which end of a transfer copies.
///     #[derive(Default)]
///     pub enum Protocol: "protocol" {
///         /// The receiver.
///         Get = "get",
///         /// The sender.
///         #[default]
///         Put = "put",
///     }
/// }
/// ```
///
/// Numbers count from 0, or stand behind the names, as in `Get = "get" (3)`. The enum gets `ALL` and `name`, prints as
/// its name, and is parsed and serialized by it. A text behind the term, `"path", help "use …"`, is the help of errors.
macro_rules! named {
    (
        $(#[$meta:meta])*
        $visibility:vis enum $Enum:ident: $term:literal $(, help $help:literal)? {
            $(
                $(#[doc = $about:literal])+
                $(#[default $($default:tt)?])?
                $Value:ident = $name:literal $(($number:literal))?
            ),+ $(,)?
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        $visibility enum $Enum {
            $(
                $(#[doc = $about])+
                $(#[default] $($default)?)?
                $Value $(= $number)?,
            )+
        }

        impl $Enum {
            /// Every value.
            $visibility const ALL: [Self; [$($name),+].len()] = [$(Self::$Value),+];

            /// Its name in text.
            $visibility const fn name(self) -> &'static str {
                match self {
                    $(Self::$Value => $name,)+
                }
            }
        }

        impl $crate::named::Named for $Enum {
            const TERM: &'static str = $term;
            const ALL: &'static [Self] = &Self::ALL;

            fn name(self) -> &'static str {
                Self::name(self)
            }

            fn about(self) -> &'static str {
                match self {
                    $(Self::$Value => concat!($($about),+).trim_ascii(),)+
                }
            }

            fn number(self) -> i32 {
                self as i32
            }
        }

        impl std::fmt::Display for $Enum {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl std::str::FromStr for $Enum {
            type Err = $crate::Error;

            fn from_str(text: &str) -> $crate::Result<Self> {
                $crate::named::parse(text, &Self::ALL).map_err(|unknown| {
                    let error = $crate::Error::from(unknown);
                    $(let error = error.with_help($help);)?
                    error
                })
            }
        }

        impl serde::Serialize for $Enum {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.serialize_str(self.name())
            }
        }

        impl<'de> serde::Deserialize<'de> for $Enum {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let text = <std::borrow::Cow<'de, str> as serde::Deserialize>::deserialize(from)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

pub(crate) use named;

#[cfg(test)]
mod tests {
    use super::*;

    named! {
        /// Sizes of shirts.
        #[derive(Default)]
        enum Size: "size", help "try one on" {
            /// For most,
            /// more or less.
            #[default]
            Middle = "middle" (3),
            /// For others.
            Large = "large" (7),
        }
    }

    #[test]
    fn a_declaration_gives_names_numbers_and_documentation() {
        assert_eq!(Size::default(), Size::Middle);
        assert_eq!(Size::Middle.about(), "For most, more or less.");
        for (number, size) in [
            (3, Some(Size::Middle)),
            (7, Some(Size::Large)),
            (0, None),
            (-1, None),
        ] {
            assert_eq!(Size::numbered(number), size);
        }
        for size in Size::ALL {
            assert_eq!(size.to_string().parse::<Size>().unwrap(), size);
            let text = serde_json::to_string(&size).unwrap();
            assert_eq!(text, format!("\"{size}\""));
            assert_eq!(serde_json::from_str::<Size>(&text).unwrap(), size);
        }
        assert_eq!(format!("[{:>8}]", Size::Large), "[   large]");
        let error = "huge".parse::<Size>().unwrap_err().to_string();
        assert_eq!(
            error,
            "unknown size 'huge'; expected middle or large; help: try one on"
        );
        assert!(serde_json::from_str::<Size>("\"huge\"").is_err());
    }

    #[test]
    fn alternatives_are_listed_in_prose() {
        for (words, list) in [
            (&[][..], ""),
            (&["a"][..], "a"),
            (&["a", "b"][..], "a or b"),
            (&["a", "b", "c"][..], "a, b or c"),
        ] {
            assert_eq!(listed(words.iter().copied()), list);
        }
    }
}
