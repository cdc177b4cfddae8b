//! Memory of the calls of a layer.

use super::{ExpertOptions, WORD};
use crate::device::DeviceSlice;
use crate::error::{Error, Result};

/// The tokens that [`Experts::dispatch`](super::Experts::dispatch) sends: up to `max_tokens` tokens.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// Their rows: `[n, elements]`.
    pub rows: &'a DeviceSlice,
    /// If they are quantised already, their scales: `f32[n, scales]`.
    pub scales: Option<&'a DeviceSlice>,
    /// The experts of each: `i32[n, top_k]`. Out-of-range numbers are empty slots.
    pub experts: &'a DeviceSlice,
    /// With [`RowLayout::OncePerRank`](super::RowLayout::OncePerRank), the weight of each expert: `f32[n, top_k]`.
    pub weights: Option<&'a DeviceSlice>,
}

/// Output of [`Experts::dispatch`](super::Experts::dispatch): rows for this rank's experts. All of it is the caller's
/// memory. The shapes are those of the layout; sizes are in the options.
#[derive(Clone, Copy, Debug)]
pub struct Dispatched<'a> {
    /// Rows, `world * max_rows` of them. By source rank `[world, max_rows, elements]`: those of rank p are the first
    /// `counts[p]`, in the order of its tokens. By expert `[world * max_rows, elements]`: first `counts[0]` for local expert
    /// 0, then `counts[1]` for local expert 1, and so on.
    pub rows: &'a DeviceSlice,
    /// Scales of each row, if rows are quantised: `f32[world * max_rows, scales]`.
    pub scales: Option<&'a DeviceSlice>,
    /// Local index of the expert of each row: `i32[world * max_rows]`; with
    /// [`RowLayout::OncePerRank`](super::RowLayout::OncePerRank) of the expert in each slot, -1 for those of other ranks and
    /// for empty ones: `i32[world, max_rows, top_k]`.
    pub experts: &'a DeviceSlice,
    /// With [`RowLayout::OncePerRank`](super::RowLayout::OncePerRank), the weights of the token in all slots:
    /// `f32[world, max_rows, top_k]`.
    pub weights: Option<&'a DeviceSlice>,
    /// Number of rows from each rank: `i32[world]`. By expert, the number of rows of each local expert:
    /// `i32[experts / world]`.
    pub counts: &'a DeviceSlice,
    /// With [`Overflow::Drop`](super::Overflow::Drop), and if it is of interest, how many rows of this rank's own tokens were
    /// dropped for each of all experts: `i32[experts]`. Expert e is one of rank `e / (experts / world)`.
    pub dropped: Option<&'a DeviceSlice>,
}

impl<'a> Tokens<'a> {
    /// Tokens without scales and weights.
    pub const fn new(rows: &'a DeviceSlice, experts: &'a DeviceSlice) -> Self {
        Self {
            rows,
            scales: None,
            experts,
            weights: None,
        }
    }

    /// The number of tokens.
    pub(super) fn check(&self, options: &ExpertOptions) -> Result<usize> {
        let row = options.elements * options.token_dtype().size();
        let count = rows_in("the tokens", self.rows, row, options)?;
        let slots = WORD * count * options.top_k;
        // Everything is validated before a kernel stores anything.
        check_bytes("the numbers of experts", self.experts, slots, WORD)?;
        let scales = options.quantized_tokens.then(|| count * options.scales());
        check_given("the scales of tokens", self.scales, scales)?;
        let weights = options.sends_weights().then(|| count * options.top_k);
        check_given("the weights of tokens", self.weights, weights)?;
        Ok(count)
    }

    /// All memory, with its names.
    pub(super) fn named(&self) -> Vec<(&'static str, &'a DeviceSlice)> {
        let all = [
            ("tokens", Some(self.rows)),
            ("scales of tokens", self.scales),
            ("numbers of experts", Some(self.experts)),
            ("weights", self.weights),
        ];
        given(&all)
    }
}

impl<'a> Dispatched<'a> {
    /// Rows, their experts and their numbers, and nothing else.
    pub const fn new(
        rows: &'a DeviceSlice,
        experts: &'a DeviceSlice,
        counts: &'a DeviceSlice,
    ) -> Self {
        Self {
            rows,
            scales: None,
            experts,
            weights: None,
            counts,
            dropped: None,
        }
    }

    pub(super) fn check(&self, options: &ExpertOptions, world: usize) -> Result<()> {
        let rows = world * options.rows_per_peer();
        let dtype = options.dispatched_dtype();
        let bytes = rows * options.elements * dtype.size();
        check_bytes("the dispatched rows", self.rows, bytes, dtype.size())?;
        let experts = WORD * rows * options.experts_per_row();
        check_bytes("the experts of rows", self.experts, experts, WORD)?;
        let counts = WORD * options.counts(world);
        check_bytes("the counts of rows", self.counts, counts, WORD)?;
        let scales = options.quantization.map(|_| rows * options.scales());
        check_given("the scales of rows", self.scales, scales)?;
        let weights = options.sends_weights().then(|| rows * options.top_k);
        check_given("the weights of rows", self.weights, weights)?;
        // Not everyone looks at them.
        let Some(dropped) = self.dropped else {
            return Ok(());
        };
        let drops = options.overflow == super::Overflow::Drop;
        let experts = drops.then_some(options.experts);
        check_given("the counts of dropped rows", Some(dropped), experts)
    }

    /// All memory, with its names.
    pub(super) fn named(&self) -> Vec<(&'static str, &'a DeviceSlice)> {
        let all = [
            ("rows", Some(self.rows)),
            ("scales of rows", self.scales),
            ("experts of rows", Some(self.experts)),
            ("weights of rows", self.weights),
            ("counts", Some(self.counts)),
            ("counts of dropped rows", self.dropped),
        ];
        given(&all)
    }
}

fn given<'a>(
    all: &[(&'static str, Option<&'a DeviceSlice>)],
) -> Vec<(&'static str, &'a DeviceSlice)> {
    all.iter()
        .filter_map(|(name, memory)| Some((*name, (*memory)?)))
        .collect()
}

/// Number of tokens whose rows fit the memory exactly.
pub(super) fn rows_in(
    what: &str,
    memory: &DeviceSlice,
    row: usize,
    options: &ExpertOptions,
) -> Result<usize> {
    if memory.bytes().is_multiple_of(row) && memory.bytes() / row <= options.max_tokens {
        // The length is right; this checks the alignment to an element.
        check_bytes(what, memory, memory.bytes(), row / options.elements)?;
        return Ok(memory.bytes() / row);
    }
    Err(Error::invalid(format!(
        "{what} have {} bytes; expected rows of {row}, at most {} of them",
        memory.bytes(),
        options.max_tokens
    ))
    .with_help("pass whole rows, and no more than max_tokens"))
}

/// Fails if memory is given that the options have no use for, or not given though they ask for so many words.
fn check_given(what: &str, memory: Option<&DeviceSlice>, words: Option<usize>) -> Result<()> {
    match (memory, words) {
        (Some(memory), Some(words)) => check_bytes(what, memory, WORD * words, WORD),
        (None, None) => Ok(()),
        (given, _) => {
            let (is, expected) = match given {
                Some(_) => ("given", "none with these options"),
                None => ("not given", "memory for them"),
            };
            Err(
                Error::invalid(format!("{what} are {is}; expected {expected}"))
                    .with_help("see ExpertOptions and Dispatched for what belongs together"),
            )
        }
    }
}

/// Fails if memory has the wrong length, or is not aligned to `unit` bytes.
pub(super) fn check_bytes(
    what: &str,
    memory: &DeviceSlice,
    expected: usize,
    unit: usize,
) -> Result<()> {
    if memory.bytes() != expected {
        return Err(Error::invalid(format!(
            "{what} have {} bytes; expected {expected}",
            memory.bytes()
        ))
        .with_help("see ExpertOptions and Dispatched for the shapes"));
    }
    // Empty memory is never accessed, and may be anywhere.
    if memory.bytes() > 0 && !memory.address().is_multiple_of(unit as u64) {
        return Err(Error::invalid(format!(
            "{what} begin at {:#x}; expected a multiple of {unit}",
            memory.address()
        ))
        .with_help("align it to the element size"));
    }
    Ok(())
}
