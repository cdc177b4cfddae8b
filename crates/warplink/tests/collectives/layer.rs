//! A layer of experts for tests: what tokens hold and choose, the memory of its calls, and what has to come back.

use crate::common::{decode, downloaded, encode};
use crate::expected::Random;
use warplink::collective::{Dispatched, ExpertOptions, Experts};
use warplink::device::{AllocationKind, DeviceSlice, Stream};
use warplink::{Communicator, Error};

/// Content of memory without stores.
pub(crate) const GUARD_BYTE: u8 = 0xc3;

/// How tokens choose their experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choices {
    /// Different experts for each token.
    Random,
    /// All experts of the tokens are those of one rank.
    AllToOne(usize),
    /// Any number, also the same one twice, and some that are none.
    Careless,
    /// None at all.
    Nobody,
}

/// Input of one rank in a round.
pub(crate) struct Input {
    pub(crate) tokens: Vec<f64>,
    /// `[tokens][top_k]`.
    pub(crate) experts: Vec<i32>,
    pub(crate) weights: Vec<f32>,
}

impl Input {
    pub(crate) fn new(
        options: &ExpertOptions,
        choices: Choices,
        rank: usize,
        ranks: usize,
        round: usize,
    ) -> Self {
        let mut random = Random::new((round * 64 + rank) as u64 + 5);
        // Ranks have other numbers of tokens, some none.
        let count = random.below(options.max_tokens + 1);
        let values = count * options.elements;
        let tokens = (0..values).map(|_| random.below(512) as f64 / 64.0 - 4.0);
        let tokens: Vec<f64> = tokens.collect();
        let each = options.experts / ranks;
        let mut experts = Vec::new();
        for _ in 0..count {
            let mut all: Vec<i32> = (0..options.experts as i32).collect();
            for slot in 0..options.top_k {
                let expert = match choices {
                    Choices::Random => all.swap_remove(random.below(all.len())),
                    Choices::AllToOne(one) => (one * each + slot % each) as i32,
                    Choices::Careless => random.below(options.experts + 4) as i32 - 2,
                    Choices::Nobody => -1,
                };
                experts.push(expert);
            }
        }
        let weights = (0..experts.len()).map(|_| random.below(1000) as f32 / 999.0);
        Self {
            tokens,
            weights: weights.collect(),
            experts,
        }
    }
}

/// Result of an expert for a row: different for each expert, and exact.
fn expert(number: usize, value: f64) -> f64 {
    value * if number.is_multiple_of(2) { 2.0 } else { -1.0 } + (number % 4) as f64
}

/// The rows that `from` sends to `to`, with the experts there.
fn rows(options: &ExpertOptions, input: &Input, to: usize, ranks: usize) -> Vec<(usize, usize)> {
    let each = options.experts / ranks;
    let slots = input.experts.iter().enumerate();
    let rows = slots.filter_map(|(slot, expert)| {
        let expert = usize::try_from(*expert).ok()?;
        (expert < options.experts && expert / each == to)
            .then_some((slot / options.top_k, expert % each))
    });
    rows.collect()
}

/// Expected result of `combine` on a rank.
fn expected(options: &ExpertOptions, input: &Input) -> Vec<u8> {
    let mut output = Vec::new();
    let elements = options.elements;
    let count = input.tokens.len() / elements;
    for token in 0..count {
        for element in 0..elements {
            let mut total = 0_f32;
            for slot in token * options.top_k..(token + 1) * options.top_k {
                let Ok(number) = usize::try_from(input.experts[slot]) else {
                    continue;
                };
                if number < options.experts {
                    let value = expert(number, input.tokens[token * elements + element]);
                    // Rounded to the type, as the expert's own result is.
                    let value = decode(options.dtype, &encode(options.dtype, &[value]))[0];
                    total += input.weights[slot] * value as f32;
                }
            }
            output.extend(encode(options.dtype, &[f64::from(total)]));
        }
    }
    output
}

fn memory(comm: &Communicator, bytes: usize, shift: usize) -> DeviceSlice {
    let device = comm.device();
    let all = device
        .allocate(bytes + shift + 64, AllocationKind::Plain)
        .unwrap();
    device.upload(&all, &vec![GUARD_BYTE; all.bytes()]).unwrap();
    all.slice(shift..shift + bytes).unwrap()
}

/// Whether nothing around a slice was stored to.
fn is_guarded(comm: &Communicator, slice: &DeviceSlice) -> bool {
    let whole = slice.allocation();
    let bytes = downloaded(comm, &whole);
    let (from, to) = (slice.offset(), slice.offset() + slice.bytes());
    let mut around = bytes[..from].iter().chain(&bytes[to..]);
    around.all(|byte| *byte == GUARD_BYTE)
}

fn upload(comm: &Communicator, slice: &DeviceSlice, bytes: &[u8]) {
    if !bytes.is_empty() {
        comm.device().upload(slice, bytes).unwrap();
    }
}

pub(crate) fn download(comm: &Communicator, slice: &DeviceSlice) -> Vec<u8> {
    let mut bytes = vec![0; slice.bytes()];
    if !bytes.is_empty() {
        comm.device().download(slice, &mut bytes).unwrap();
    }
    bytes
}

fn words(bytes: &[u8]) -> Vec<u32> {
    let words = bytes.chunks_exact(4);
    words
        .map(|word| u32::from_le_bytes(word.try_into().unwrap()))
        .collect()
}

/// The memory of a layer's calls.
pub(crate) struct Buffers {
    pub(crate) rows: DeviceSlice,
    experts: DeviceSlice,
    pub(crate) counts: DeviceSlice,
    pub(crate) tokens: DeviceSlice,
    pub(crate) choices: DeviceSlice,
    weights: DeviceSlice,
    output: DeviceSlice,
}

impl Buffers {
    pub(crate) fn new(comm: &Communicator, options: &ExpertOptions) -> Self {
        let (ranks, row) = (comm.world(), options.row_bytes());
        let rows = ranks * options.rows_per_peer(ranks);
        let (tokens, slots) = (options.max_tokens, options.max_tokens * options.top_k);
        // Rows start at any element, numbers at any word.
        let element = options.dtype.size();
        Self {
            rows: memory(comm, rows * row, element),
            experts: memory(comm, 4 * rows, 4),
            counts: memory(comm, 4 * ranks, 12),
            tokens: memory(comm, tokens * row, 3 * element),
            choices: memory(comm, 4 * slots, 8),
            weights: memory(comm, 4 * slots, 4),
            output: memory(comm, tokens * row, element),
        }
    }

    pub(crate) fn dispatched(&self) -> Dispatched<'_> {
        Dispatched {
            rows: &self.rows,
            experts: &self.experts,
            counts: &self.counts,
        }
    }

    pub(crate) fn fill(&self, comm: &Communicator, options: &ExpertOptions, input: &Input) {
        upload(
            comm,
            &self
                .tokens
                .slice(0..input.tokens.len() * options.dtype.size())
                .unwrap(),
            &encode(options.dtype, &input.tokens),
        );
        let choices: Vec<u8> = input.experts.iter().flat_map(|n| n.to_le_bytes()).collect();
        upload(
            comm,
            &self.choices.slice(0..choices.len()).unwrap(),
            &choices,
        );
        let weights: Vec<u8> = input.weights.iter().flat_map(|w| w.to_le_bytes()).collect();
        upload(
            comm,
            &self.weights.slice(0..weights.len()).unwrap(),
            &weights,
        );
    }

    pub(crate) fn dispatch(
        &self,
        layer: &Experts,
        options: &ExpertOptions,
        tokens: usize,
        stream: &Stream,
    ) -> Result<(), Error> {
        let rows = self.tokens.slice(0..tokens * options.row_bytes())?;
        let choices = self.choices.slice(0..4 * tokens * options.top_k)?;
        layer.dispatch(&rows, &choices, &self.dispatched(), stream)
    }

    pub(crate) fn combine(
        &self,
        layer: &Experts,
        options: &ExpertOptions,
        tokens: usize,
        stream: &Stream,
    ) -> Result<(), Error> {
        let output = self.output.slice(0..tokens * options.row_bytes())?;
        let weights = self.weights.slice(0..4 * tokens * options.top_k)?;
        layer.combine(&output, &self.dispatched(), &weights, stream)
    }

    /// Compares what was dispatched with what all ranks sent, and does the experts' work on it.
    pub(crate) fn work(&self, comm: &Communicator, options: &ExpertOptions, inputs: &[Input]) {
        let (rank, ranks) = (comm.rank(), comm.world());
        let counts = words(&download(comm, &self.counts));
        let numbers = words(&download(comm, &self.experts));
        let mut got = download(comm, &self.rows);
        let (limit, row) = (options.rows_per_peer(ranks), options.row_bytes());
        for (from, input) in inputs.iter().enumerate() {
            let sent = rows(options, input, rank, ranks);
            assert_eq!(counts[from] as usize, sent.len(), "rows from rank {from}");
            for (place, (token, local)) in sent.iter().enumerate() {
                let place = from * limit + place;
                assert_eq!(numbers[place] as usize, *local, "row {place}");
                let values = &input.tokens[token * options.elements..][..options.elements];
                let bytes = &mut got[place * row..(place + 1) * row];
                assert!(
                    *bytes == encode(options.dtype, values),
                    "row {place} is wrong"
                );
                let number = rank * (options.experts / ranks) + local;
                let made: Vec<f64> = values.iter().map(|value| expert(number, *value)).collect();
                bytes.copy_from_slice(&encode(options.dtype, &made));
            }
            let unused = &got[(from * limit + sent.len()) * row..(from + 1) * limit * row];
            assert!(
                unused.iter().all(|byte| *byte == GUARD_BYTE),
                "rows that nobody sent were stored to"
            );
        }
        upload(comm, &self.rows, &got);
    }

    pub(crate) fn check(&self, comm: &Communicator, options: &ExpertOptions, input: &Input) {
        let expected = expected(options, input);
        let got = download(comm, &self.output.slice(0..expected.len()).unwrap());
        assert!(got == expected, "the weighted sums are wrong");
        for memory in [&self.rows, &self.experts, &self.counts, &self.output] {
            assert!(is_guarded(comm, memory), "bytes around it were touched");
        }
    }

    pub(crate) fn clear(&self, comm: &Communicator) {
        for memory in [&self.rows, &self.output] {
            upload(comm, memory, &vec![GUARD_BYTE; memory.bytes()]);
        }
    }
}

pub(crate) fn inputs(
    options: &ExpertOptions,
    choices: Choices,
    ranks: usize,
    round: usize,
) -> Vec<Input> {
    (0..ranks)
        .map(|rank| Input::new(options, choices, rank, ranks, round))
        .collect()
}
