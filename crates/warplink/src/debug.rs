//! `Debug` of types by some of their fields, or by a text.

/// Implements `Debug` for a type with these fields, each computed from the value, and `..` for the others.
macro_rules! debug_fields {
    ($type:ident $(<$lifetime:lifetime>)? $(, |$value:ident| $($field:ident: $shown:expr),+)?) => {
        impl std::fmt::Debug for $type $(<$lifetime>)? {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                $(let $value = self;)?
                f.debug_struct(stringify!($type))
                    $($(.field(stringify!($field), &$shown))+)?
                    .finish_non_exhaustive()
            }
        }
    };
}

/// Implements `Debug` for a type as text, formatted from the value.
macro_rules! debug_text {
    ($type:ident $(<$parameter:ident>)?, |$value:ident| $($text:tt)+) => {
        impl $(<$parameter>)? std::fmt::Debug for $type $(<$parameter>)? {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let $value = self;
                write!(f, $($text)+)
            }
        }
    };
}

pub(crate) use {debug_fields, debug_text};
