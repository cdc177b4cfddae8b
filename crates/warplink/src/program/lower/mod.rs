//! Lowering: from a matrix product whose operand or result is spread over the ranks to a program
//! that overlaps the communication with the product.
//!
//! A lowering writes a program's text, with its sizes as parameters, so that what runs can be read,
//! kept and changed; [`Lowered::text`] is that text, comments included.

mod choose;
mod gather;
mod scatter;
mod template;

pub use choose::{
    Choice, Estimate, Machine, choose_all_gather_matmul, choose_matmul_reduce_scatter,
};
pub use gather::{AllGatherMatmul, lower_all_gather_matmul};
pub use scatter::{MatmulReduceScatter, lower_matmul_reduce_scatter};

use super::ir::Program;
use super::parameters::Parameters;
use crate::error::{Error, ErrorKind, Result};
use std::fmt;
use std::str::FromStr;

/// How the communication is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Variant {
    /// Around a ring, each rank fetching from its predecessor.
    RingGet,
    /// Around a ring, each rank putting to its successor.
    RingPut,
    /// Around rings by puts, in parts. All-gather: parts of shards travel on two streams, so that the
    /// handover of one is hidden by the transfer of another; for where the link is the bound.
    /// Reduce-scatter: each product adds to what arrived, around as many rings as a part has steps to
    /// arrive in; for large blocks.
    RingFine,
    /// All-gather: around a ring by gets, and few, large products of several shards at once.
    /// Reduce-scatter: fetched by the owners, who add up early what arrives early. For where the
    /// products are the bound.
    RingCoarse,
    /// Directly between each two ranks, the receiver fetching.
    PairwiseGet,
    /// Directly between each two ranks, the sender putting, each step in a stream with its product.
    PairwisePut,
    /// Directly between each two ranks: one stream of high priority puts to all, in rotated order.
    PushRotated,
    /// Directly between each two ranks, in the smallest pieces. All-gather: as rotated puts, but with
    /// the last shard in parts, so that little is left to multiply after the last arrival.
    /// Reduce-scatter: without copies, every tile of the products being stored where it is added up.
    PushFine,
    /// The engine's collective, and one product before or after it: no overlap.
    Collective,
}

impl Variant {
    /// Every variant.
    pub const ALL: [Self; 9] = [
        Self::RingGet,
        Self::RingPut,
        Self::RingFine,
        Self::RingCoarse,
        Self::PairwiseGet,
        Self::PairwisePut,
        Self::PushRotated,
        Self::PushFine,
        Self::Collective,
    ];

    /// How many streams the products of an all-gather + matmul best take turns on: with two, one
    /// fills the device while the last tiles of the other run.
    pub const fn gather_streams(self) -> usize {
        2
    }

    /// How many streams the products of a matmul + reduce-scatter best take turns on. What one
    /// leaves must leave early, and of two streams a device may run the later product first. There are
    /// two where there are just two products, one for the others and the own, and where the later
    /// product waits for an arrival.
    pub const fn scatter_streams(self) -> usize {
        match self {
            Self::PushFine | Self::RingFine => 2,
            _ => 1,
        }
    }

    /// Its name in tables and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::RingGet => "ring-get",
            Self::RingPut => "ring-put",
            Self::RingFine => "ring-fine",
            Self::RingCoarse => "ring-coarse",
            Self::PairwiseGet => "pairwise-get",
            Self::PairwisePut => "pairwise-put",
            Self::PushRotated => "push-rotated",
            Self::PushFine => "push-fine",
            Self::Collective => "collective",
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Variant {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|variant| variant.name() == text)
            .ok_or_else(|| {
                let names: Vec<&str> = Self::ALL.into_iter().map(Self::name).collect();
                Error::new(ErrorKind::Parse, format!("'{text}' is no variant"))
                    .help(format!("use {}", names.join(", ")))
            })
    }
}

/// What a lowering makes.
#[derive(Clone, Debug)]
pub struct Lowered {
    /// The variant.
    pub variant: Variant,
    /// The program's text, with comments; lines in diagnostics are lines of it.
    pub text: String,
    /// The program.
    pub program: Program,
    /// The sizes that it was made for.
    pub parameters: Parameters,
    /// How many streams the pool has.
    pub streams: usize,
}

/// What both lowerings refuse.
fn check(world: usize, sizes: &[(&str, usize)], divided: &[&str], streams: usize) -> Result<()> {
    if world == 0 || streams == 0 || streams > super::unroll::MAX_STREAMS {
        return Err(Error::invalid(format!(
            "a program for {world} ranks with {streams} streams: there is at least one of each"
        )));
    }
    for (name, size) in sizes {
        if *size == 0 {
            return Err(Error::invalid(format!("{name} is 0")));
        }
        if divided.contains(name) && !size.is_multiple_of(world) {
            let padded = size.next_multiple_of(world);
            return Err(Error::invalid(format!(
                "{name} = {size} does not divide by the {world} ranks that share it"
            ))
            .help(format!("pad it to {padded}")));
        }
    }
    Ok(())
}

/// Sizes as parameters of a program.
fn parameters(sizes: &[(&str, usize)]) -> Result<Parameters> {
    sizes
        .iter()
        .map(|(name, size)| {
            let value = i64::try_from(*size)
                .map_err(|_| Error::invalid(format!("{name} = {size} is too large")))?;
            Ok(((*name).to_owned(), value))
        })
        .collect()
}

/// Parses what a lowering wrote.
fn made(
    variant: Variant,
    text: String,
    sizes: &[(&str, usize)],
    streams: usize,
) -> Result<Lowered> {
    let program = Program::parse(&text)
        .map_err(|error| Error::new(ErrorKind::Internal, format!("a lowered program: {error}")))?;
    Ok(Lowered {
        variant,
        program,
        parameters: parameters(sizes)?,
        streams,
        text,
    })
}
