//! Lowerings: programs that overlap a matrix multiplication with the communication that feeds or
//! follows it.
//!
//! A lowering is a program in a file next to this one. Its header declares the caller's parameters (sizes, element
//! type) and open parameters (`parts = 1 | 2 | 4`); a cost model selects among the lowerings of an operation and
//! among the alternatives of their open parameters. The file is executed unmodified, so it can be read, kept and
//! changed. A caller's own file is a lowering too ([`Lowering::parse`]).
//!
//! | module | subject |
//! |---|---|
//! | `problem` | the problems, and the parameters that they determine |
//! | `choose` | selection of a lowering and its open parameters |

mod choose;
mod problem;

pub use choose::{Choice, Decision, Estimate, choose, lower};
use problem::TRANSPOSED_B;
pub use problem::{AllGatherMatmul, MatmulReduceScatter, Problem};

use super::ir::Program;
use super::parameters::{Parameter, Parameters, Value};
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Result};
use crate::named::named;
use std::fmt;
use std::sync::{Arc, OnceLock};

/// Maximum combinations of alternatives of one lowering.
const MAX_COMBINATIONS: usize = 256;

/// A program that lowers an operation. Cheap to clone.
#[derive(Clone)]
pub struct Lowering {
    name: Arc<str>,
    text: Arc<str>,
    program: Arc<Program>,
}

impl Lowering {
    /// The lowering `name` in `text`. It has the parameters and tensors of the operation's other lowerings, and may
    /// have further parameters with listed alternatives.
    ///
    /// # Errors
    /// [`ErrorKind::Parse`] if `text` is not a program.
    pub fn parse(name: &str, text: &str) -> Result<Self> {
        Ok(Self {
            name: Arc::from(name),
            program: Arc::new(Program::parse(text)?),
            text: Arc::from(text),
        })
    }

    /// Name in tables and on the command line.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its text, comments included; lines in diagnostics are lines of it.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The program.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Every combination of alternatives for the parameters that `given` leaves open, whether or not it suits the
    /// sizes: only the chosen ones, to be [added](Parameters::and) to `given`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if there are more than 256.
    pub fn combinations(&self, given: &Parameters) -> Result<Vec<Parameters>> {
        let mut all = vec![Parameters::new()];
        for Parameter { name, kind } in &self.program.parameters {
            if given.value(name).is_some() {
                continue;
            }
            let alternatives = kind.alternatives();
            if all.len().saturating_mul(alternatives.len()) > MAX_COMBINATIONS {
                return Err(Error::invalid(format!(
                    "lowering '{}' leaves more than {MAX_COMBINATIONS} combinations open",
                    self.name
                ))
                .with_help("list fewer alternatives"));
            }
            let with = |combination: &Parameters| -> Vec<Parameters> {
                let values = alternatives.iter();
                values
                    .map(|value| combination.clone().with(name.as_str(), value.clone()))
                    .collect()
            };
            all = all.iter().flat_map(with).collect();
        }
        Ok(all)
    }

    /// The parameters among `given` that the program has. Programs without the parameter for transposed operands
    /// accept only operands that are not transposed.
    fn taken(&self, given: &Parameters) -> Parameters {
        let knows = |name: &str| self.program.parameters.iter().any(|p| p.name == name);
        // A caller's own file need not know of transposed operands; it is refused only where one is.
        let plain = given.value(TRANSPOSED_B) == Some(&Value::Integer(0));
        if plain && !knows(TRANSPOSED_B) {
            given.clone().without(TRANSPOSED_B)
        } else {
            given.clone()
        }
    }
}

impl fmt::Debug for Lowering {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lowering").field(&self.name).finish()
    }
}

impl PartialEq for Lowering {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && self.text == other.text
    }
}

/// A lowering with the values of all its parameters.
#[derive(Clone, Debug)]
pub struct Lowered {
    /// The lowering.
    pub lowering: Lowering,
    /// Sizes, element type, and the selected alternatives of open parameters.
    pub parameters: Parameters,
    /// Number of streams in the pool.
    pub streams: usize,
}

impl Lowered {
    /// The program.
    pub fn program(&self) -> &Program {
        self.lowering.program()
    }
}

/// Declares the lowerings of an operation, one line for each: its name, and the file that holds it.
macro_rules! lowerings {
    ($(#[$doc:meta])* $visibility:vis enum $operation:ident {
        $($(#[doc = $about:literal])+ $lowering:ident = $name:literal, $file:literal;)+
    }) => {
        named! {
            $(#[$doc])*
            $visibility enum $operation: "lowering" {
                $($(#[doc = $about])+ $lowering = $name,)+
            }
        }

        impl $operation {
            /// Program text.
            $visibility const fn text(self) -> &'static str {
                match self {
                    $(Self::$lowering => include_str!($file),)+
                }
            }

            /// Parses the program on the first call.
            ///
            /// # Errors
            /// None, as long as the library's own files are programs.
            $visibility fn lowering(self) -> Result<Lowering> {
                static PARSED: [OnceLock<Lowering>; $operation::ALL.len()] =
                    [const { OnceLock::new() }; $operation::ALL.len()];
                let parsed = &PARSED[self as usize];
                if let Some(lowering) = parsed.get() {
                    return Ok(lowering.clone());
                }
                let lowering = Lowering::parse(self.name(), self.text()).map_err(|error| {
                    Error::internal(format!("parse {}: {error}", self.name()))
                })?;
                Ok(parsed.get_or_init(|| lowering).clone())
            }
        }
    };
}

lowerings! {
    /// Lowerings of an all-gather + matmul. The head of each file describes its algorithm.
    pub enum AllGatherMatmulLowering {
        /// An all-gather, then one matmul: no overlap.
        Collective = "collective", "all_gather_matmul/collective.wlp";
        /// Puts and matmuls on the caller's stream alone: for small sizes.
        InOrder = "in-order", "all_gather_matmul/in-order.wlp";
        /// Each rank puts to all others, the last shard in parts.
        Push = "push", "all_gather_matmul/push.wlp";
        /// Around a ring by puts, in parts.
        RingPut = "ring-put", "all_gather_matmul/ring-put.wlp";
        /// Around a ring by gets.
        RingGet = "ring-get", "all_gather_matmul/ring-get.wlp";
    }
}

lowerings! {
    /// Lowerings of a matmul + reduce-scatter. The head of each file describes its algorithm.
    pub enum MatmulReduceScatterLowering {
        /// One matmul, then a reduce-scatter: no overlap.
        Collective = "collective", "matmul_reduce_scatter/collective.wlp";
        /// A matmul, puts and a sum on the caller's stream alone: for small sizes.
        InOrder = "in-order", "matmul_reduce_scatter/in-order.wlp";
        /// Each block is put to its owner, which sums them at the end.
        Push = "push", "matmul_reduce_scatter/push.wlp";
        /// Each rank adds its product to the received sum, around one ring or several.
        Rings = "rings", "matmul_reduce_scatter/rings.wlp";
        /// Matmuls store their tiles directly into the owners' memory.
        Store = "store", "matmul_reduce_scatter/store.wlp";
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::program::cost::find::shipped;
    use crate::program::verify;

    // One more lowering takes one more line.
    lowerings! {
        /// The lowerings of a library with one more.
        enum OneMore {
            /// There already.
            Push = "push", "all_gather_matmul/push.wlp";
            /// Added.
            Pairwise = "pairwise-get",
                "../../../../../examples/programs/all_gather_matmul_pairwise_get.wlp";
        }
    }

    #[test]
    fn a_lowering_is_a_file_and_a_line() {
        assert_eq!(
            "pairwise-get".parse::<OneMore>().unwrap(),
            OneMore::Pairwise
        );
        let error = "pairwise".parse::<OneMore>().unwrap_err().to_string();
        assert!(error.contains("expected push or pairwise-get"), "{error}");
        let problem = AllGatherMatmul {
            m: 64,
            k: 32,
            n: vec![16, 8],
            dtype: DType::F16,
            transposed_b: false,
            bias: true,
            keep: true,
        };
        let all = OneMore::ALL.iter().map(|one| one.lowering().unwrap());
        let choice = choose(
            &problem,
            &all.collect::<Vec<_>>(),
            4,
            2,
            &shipped("h200-8").unwrap(),
        )
        .unwrap();
        assert_eq!(choice.estimates.len(), 2);
        let added = [OneMore::Pairwise.lowering().unwrap()];
        let Lowered {
            lowering,
            parameters,
            streams,
        } = choose(&problem, &added, 4, 2, &shipped("h200-8").unwrap())
            .unwrap()
            .lowered;
        assert_eq!(lowering.name(), "pairwise-get");
        verify(lowering.program(), 4, streams, &parameters).unwrap();
    }
}
