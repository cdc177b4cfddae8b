//! A layer of experts for tests: what tokens hold and choose, the memory of its calls, and what has to come back.

use crate::common::{decode, downloaded, encode};
use crate::expected::Random;
use std::sync::Mutex;
use warplink::collective::{
    Dispatched, ExpertOptions, Experts, Overflow, Quantization, Routing, RowLayout, Tokens,
};
use warplink::device::{AllocationKind, DeviceSlice, Stream};
use warplink::{Communicator, DType, Error};

/// Content of memory without stores.
pub(crate) const GUARD_BYTE: u8 = 0xc3;

/// How tokens choose their experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choices {
    /// Different experts for each token.
    Random,
    /// All experts of the tokens are those of one rank.
    AllToOne(usize),
    /// One expert in all slots of all tokens.
    OneExpert(usize),
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
                    Choices::OneExpert(one) => one as i32,
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

/// A row that a rank sends: its token, and the slots that it serves.
struct Row {
    token: usize,
    slots: Vec<usize>,
}

/// The expert of a slot, if it has one.
fn chosen(options: &ExpertOptions, input: &Input, slot: usize) -> Option<usize> {
    let expert = usize::try_from(input.experts[slot]).ok()?;
    (expert < options.experts).then_some(expert)
}

/// The rows that a rank sends to another one, in order, as if there were memory for all.
fn wanted(options: &ExpertOptions, input: &Input, to: usize, ranks: usize) -> Vec<Row> {
    let each = options.experts / ranks;
    let mut rows: Vec<Row> = Vec::new();
    for slot in 0..input.experts.len() {
        if chosen(options, input, slot).map(|expert| expert / each) != Some(to) {
            continue;
        }
        let token = slot / options.top_k;
        let once = options.layout == RowLayout::OncePerRank;
        match rows.last_mut() {
            Some(last) if once && last.token == token => last.slots.push(slot),
            _ => rows.push(Row {
                token,
                slots: vec![slot],
            }),
        }
    }
    rows
}

/// The rows that arrive.
fn sent(options: &ExpertOptions, input: &Input, to: usize, ranks: usize) -> Vec<Row> {
    let mut rows = wanted(options, input, to, ranks);
    rows.truncate(options.rows_per_peer());
    rows
}

/// Where the rows for a rank are: source, row and place of each.
fn placed<'a>(
    options: &ExpertOptions,
    rows: &'a [Vec<Row>],
    inputs: &[Input],
) -> Vec<(usize, &'a Row, usize)> {
    let limit = options.rows_per_peer();
    let all = rows.iter().enumerate().flat_map(|(from, rows)| {
        let numbered = rows.iter().enumerate();
        numbered.map(move |(number, row)| (from, row, from * limit + number))
    });
    let mut all: Vec<_> = all.collect();
    if options.layout == RowLayout::ByExpert {
        // The sort is stable.
        all.sort_by_key(|(from, row, _)| inputs[*from].experts[row.slots[0]]);
        for (place, row) in all.iter_mut().enumerate() {
            row.2 = place;
        }
    }
    all
}

/// The result of a rank for a row, as numbers of single precision: of its expert, or the weighted sum of its experts'.
fn result(options: &ExpertOptions, input: &Input, row: &Row, element: usize) -> f64 {
    let value = input.tokens[row.token * options.elements + element];
    let of = |slot: usize| expert(chosen(options, input, slot).unwrap(), value);
    if options.layout != RowLayout::OncePerRank {
        return of(row.slots[0]);
    }
    let terms = row.slots.iter();
    let sum: f32 = terms
        .map(|slot| input.weights[*slot] * of(*slot) as f32)
        .sum();
    f64::from(sum)
}

/// Expected result of `combine` on a rank.
fn expected(options: &ExpertOptions, input: &Input, ranks: usize) -> Vec<u8> {
    let elements = options.elements;
    let count = input.tokens.len() / elements;
    // For each token, its rows with what multiplies their results, in the order of slots or ranks.
    let mut of_tokens: Vec<Vec<(usize, Row, f32)>> = (0..count).map(|_| Vec::new()).collect();
    for rank in 0..ranks {
        for row in sent(options, input, rank, ranks) {
            let (order, weight) = match options.layout {
                RowLayout::OncePerRank => (rank, 1.0),
                _ => (row.slots[0], input.weights[row.slots[0]]),
            };
            of_tokens[row.token].push((order, row, weight));
        }
    }
    let mut output = Vec::new();
    for mut rows in of_tokens {
        rows.sort_by_key(|(order, ..)| *order);
        for element in 0..elements {
            let mut total = 0_f32;
            for (_, row, weight) in &rows {
                let value = result(options, input, row, element);
                // Rounded to the type, as the expert's own result is.
                let value = decode(options.dtype, &encode(options.dtype, &[value]))[0];
                total += weight * value as f32;
            }
            output.extend(encode(options.dtype, &[f64::from(total)]));
        }
    }
    output
}

/// A row of tokens as it is sent, and its scales.
fn quantized(options: &ExpertOptions, values: &[f64]) -> (Vec<u8>, Vec<f32>) {
    let Some(quantization) = options.quantization else {
        return (encode(options.dtype, values), Vec::new());
    };
    let (mut row, mut scales) = (Vec::new(), Vec::new());
    for block in values.chunks(quantization.block().unwrap_or(values.len())) {
        let most = block
            .iter()
            .fold(0_f32, |most, value| most.max(value.abs() as f32));
        let mut scale = (most / 448.0).max(1e-10);
        if options.quantization == Some(Quantization::PerBlockPowerOfTwo) {
            scale = scale.log2().ceil().exp2();
        }
        let divided: Vec<f64> = block
            .iter()
            .map(|value| f64::from(*value as f32 / scale))
            .collect();
        row.extend(encode(DType::F8E4M3, &divided));
        scales.push(scale);
    }
    (row, scales)
}

fn bytes_of(floats: &[f32]) -> Vec<u8> {
    floats
        .iter()
        .flat_map(|float| float.to_le_bytes())
        .collect()
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

/// A layer of experts with the memory of its calls.
pub(crate) struct Layer<'a> {
    comm: &'a Communicator,
    options: ExpertOptions,
    pub(crate) experts: Experts,
    pub(crate) rows: DeviceSlice,
    scales: Option<DeviceSlice>,
    numbers: DeviceSlice,
    row_weights: Option<DeviceSlice>,
    pub(crate) counts: DeviceSlice,
    pub(crate) dropped: Option<DeviceSlice>,
    pub(crate) tokens: DeviceSlice,
    token_scales: Option<DeviceSlice>,
    pub(crate) choices: DeviceSlice,
    weights: DeviceSlice,
    /// Results of experts, unless they replace the rows.
    results: Option<DeviceSlice>,
    output: DeviceSlice,
    pub(crate) routing: Mutex<Option<Routing>>,
}

impl<'a> Layer<'a> {
    pub(crate) fn new(comm: &'a Communicator, experts: Experts, options: ExpertOptions) -> Self {
        let ranks = comm.world();
        let rows = ranks * options.rows_per_peer();
        let (tokens, slots) = (options.max_tokens, options.max_tokens * options.top_k);
        // Rows start at any element, numbers at any word.
        let [element, token, dispatched] = [
            options.dtype,
            options.token_dtype(),
            options.dispatched_dtype(),
        ]
        .map(|it| it.size());
        let some = |is_there: bool, bytes: usize| is_there.then(|| memory(comm, bytes, 4));
        let (quantized, once) = (
            options.quantization.is_some(),
            options.layout == RowLayout::OncePerRank,
        );
        Self {
            comm,
            options,
            experts,
            rows: memory(comm, rows * options.elements * dispatched, dispatched),
            scales: some(quantized, 4 * rows * options.scales()),
            numbers: memory(comm, 4 * rows * options.experts_per_row(), 4),
            row_weights: some(once, 4 * rows * options.top_k),
            counts: memory(comm, 4 * options.counts(ranks), 12),
            dropped: some(options.overflow == Overflow::Drop, 4 * options.experts),
            tokens: memory(comm, tokens * options.elements * token, 3 * token),
            token_scales: some(options.quantized_tokens, 4 * tokens * options.scales()),
            choices: memory(comm, 4 * slots, 8),
            weights: memory(comm, 4 * slots, 4),
            results: quantized.then(|| memory(comm, rows * options.row_bytes(), element)),
            output: memory(comm, tokens * options.row_bytes(), element),
            routing: Mutex::default(),
        }
    }

    pub(crate) fn dispatched(&self) -> Dispatched<'_> {
        Dispatched {
            scales: self.scales.as_ref(),
            weights: self.row_weights.as_ref(),
            dropped: self.dropped.as_ref(),
            ..Dispatched::new(&self.rows, &self.numbers, &self.counts)
        }
    }

    /// Tokens of an input.
    pub(crate) fn tokens_of(&self, input: &Input) -> usize {
        input.tokens.len() / self.options.elements
    }

    /// Dispatches and combines this rank's of all inputs, and compares what comes.
    pub(crate) fn round(&self, all: &[Input], stream: &Stream) {
        let own = &all[self.comm.rank()];
        let tokens = self.tokens_of(own);
        self.clear();
        self.fill(own);
        self.dispatch(tokens, stream).unwrap();
        self.comm.synchronize(stream).unwrap();
        self.work(all);
        self.combine(tokens, stream).unwrap();
        self.comm.synchronize(stream).unwrap();
        self.check(own);
    }

    pub(crate) fn fill(&self, input: &Input) {
        let (comm, options) = (self.comm, &self.options);
        let put = |memory: &DeviceSlice, bytes: &[u8]| {
            upload(comm, &memory.slice(0..bytes.len()).unwrap(), bytes);
        };
        if let Some(scales) = &self.token_scales {
            let rows = input.tokens.chunks(options.elements);
            let rows: Vec<_> = rows.map(|row| quantized(options, row)).collect();
            put(
                &self.tokens,
                &rows
                    .iter()
                    .flat_map(|(row, _)| row.clone())
                    .collect::<Vec<_>>(),
            );
            let all: Vec<f32> = rows.into_iter().flat_map(|(_, scales)| scales).collect();
            put(scales, &bytes_of(&all));
        } else {
            put(&self.tokens, &encode(options.dtype, &input.tokens));
        }
        let choices: Vec<u8> = input.experts.iter().flat_map(|n| n.to_le_bytes()).collect();
        put(&self.choices, &choices);
        put(&self.weights, &bytes_of(&input.weights));
    }

    pub(crate) fn dispatch(&self, tokens: usize, stream: &Stream) -> Result<(), Error> {
        let options = &self.options;
        let row = options.elements * options.token_dtype().size();
        let rows = self.tokens.slice(0..tokens * row)?;
        let choices = self.choices.slice(0..4 * tokens * options.top_k)?;
        let scales = self.token_scales.as_ref();
        let scales = scales.map(|it| it.slice(0..4 * tokens * options.scales()));
        let scales = scales.transpose()?;
        let weights = self.weights.slice(0..4 * tokens * options.top_k)?;
        let sent = Tokens {
            scales: scales.as_ref(),
            weights: self.row_weights.as_ref().map(|_| &weights),
            ..Tokens::new(&rows, &choices)
        };
        let routing = self.experts.dispatch(&sent, &self.dispatched(), stream)?;
        *self.routing.lock().unwrap() = Some(routing);
        Ok(())
    }

    pub(crate) fn combine(&self, tokens: usize, stream: &Stream) -> Result<(), Error> {
        self.combine_by(&self.experts, tokens, stream)
    }

    /// As [`combine`](Self::combine), by another layer.
    pub(crate) fn combine_by(
        &self,
        experts: &Experts,
        tokens: usize,
        stream: &Stream,
    ) -> Result<(), Error> {
        let options = &self.options;
        let output = self.output.slice(0..tokens * options.row_bytes())?;
        let weights = self.weights.slice(0..4 * tokens * options.top_k)?;
        let weights = self.row_weights.is_none().then_some(&weights);
        let routing = self.routing.lock().unwrap();
        let results = self.results.as_ref().unwrap_or(&self.rows);
        experts.combine(&output, results, routing.as_ref().unwrap(), weights, stream)
    }

    /// Compares what was dispatched with what all ranks sent, and does the experts' work on it.
    pub(crate) fn work(&self, inputs: &[Input]) {
        let (comm, options) = (self.comm, &self.options);
        let (rank, ranks) = (comm.rank(), comm.world());
        let each = options.experts / ranks;
        let counts = words(&download(comm, &self.counts));
        let numbers = words(&download(comm, &self.numbers));
        let of_rows = |memory: &Option<DeviceSlice>| memory.as_ref().map(|it| download(comm, it));
        let (scales, weights) = (of_rows(&self.scales), of_rows(&self.row_weights));
        let got = download(comm, &self.rows);
        let (limit, row) = (options.rows_per_peer(), options.row_bytes());
        let bytes_of_row = options.elements * options.dispatched_dtype().size();
        let all: Vec<Vec<Row>> = inputs
            .iter()
            .map(|input| sent(options, input, rank, ranks))
            .collect();
        let placed = placed(options, &all, inputs);
        let mut expected = vec![0; options.counts(ranks)];
        let mut results = vec![GUARD_BYTE; ranks * limit * row];
        let mut unused = vec![true; ranks * limit];
        for (from, sent, place) in placed {
            let input = &inputs[from];
            let local = |slot: usize| chosen(options, input, slot).unwrap() - rank * each;
            let group = match options.layout {
                RowLayout::ByExpert => local(sent.slots[0]),
                _ => from,
            };
            expected[group] += 1;
            unused[place] = false;
            let width = options.experts_per_row();
            for number in 0..width {
                let slot = match options.layout {
                    RowLayout::OncePerRank => sent.token * options.top_k + number,
                    _ => sent.slots[0],
                };
                let named = sent.slots.contains(&slot).then(|| local(slot) as i32);
                let got = numbers[place * width + number] as i32;
                assert_eq!(got, named.unwrap_or(-1), "row {place}, slot {number}");
            }
            let values = &input.tokens[sent.token * options.elements..][..options.elements];
            let (bytes, of_row) = quantized(options, values);
            assert!(
                got[place * bytes_of_row..(place + 1) * bytes_of_row] == bytes,
                "row {place} is wrong"
            );
            if let Some(scales) = &scales {
                let width = 4 * options.scales();
                let got = &scales[place * width..(place + 1) * width];
                assert!(got == bytes_of(&of_row), "scales of row {place} are wrong");
            }
            if let Some(weights) = &weights {
                let width = 4 * options.top_k;
                let token = sent.token * options.top_k;
                let of_token = bytes_of(&input.weights[token..token + options.top_k]);
                let got = &weights[place * width..(place + 1) * width];
                assert!(got == of_token, "weights of row {place} are wrong");
            }
            let made: Vec<f64> = (0..options.elements)
                .map(|element| result(options, input, sent, element))
                .collect();
            results[place * row..(place + 1) * row].copy_from_slice(&encode(options.dtype, &made));
        }
        assert_eq!(counts, expected, "counts of rows");
        for place in (0..unused.len()).filter(|place| unused[*place]) {
            let bytes = &got[place * bytes_of_row..(place + 1) * bytes_of_row];
            assert!(
                bytes.iter().all(|byte| *byte == GUARD_BYTE),
                "row {place} that nobody sent was stored to"
            );
        }
        upload(comm, self.results.as_ref().unwrap_or(&self.rows), &results);
        self.check_dropped(&inputs[rank]);
    }

    /// Compares the counts of this rank's dropped rows.
    fn check_dropped(&self, input: &Input) {
        let (comm, options) = (self.comm, &self.options);
        let Some(dropped) = &self.dropped else {
            return;
        };
        let ranks = comm.world();
        let mut expected = vec![0; options.experts];
        for to in 0..ranks {
            let rows = wanted(options, input, to, ranks);
            for row in rows.iter().skip(options.rows_per_peer()) {
                for slot in &row.slots {
                    expected[chosen(options, input, *slot).unwrap()] += 1;
                }
            }
        }
        assert_eq!(words(&download(comm, dropped)), expected, "dropped rows");
    }

    pub(crate) fn check(&self, input: &Input) {
        let comm = self.comm;
        let expected = expected(&self.options, input, comm.world());
        let got = download(comm, &self.output.slice(0..expected.len()).unwrap());
        assert!(got == expected, "the weighted sums are wrong");
        let optional = [
            &self.scales,
            &self.row_weights,
            &self.dropped,
            &self.results,
        ];
        let optional = optional.into_iter().flatten();
        for memory in [&self.rows, &self.numbers, &self.counts, &self.output]
            .into_iter()
            .chain(optional)
        {
            assert!(is_guarded(comm, memory), "bytes around it were touched");
        }
    }

    pub(crate) fn clear(&self) {
        for memory in [&self.rows, &self.output] {
            upload(self.comm, memory, &vec![GUARD_BYTE; memory.bytes()]);
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
