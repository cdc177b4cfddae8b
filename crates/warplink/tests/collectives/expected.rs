//! Calls with random inputs, what they have to give, and the comparison.

use crate::arithmetic::{integer, largest, off, precision, reduced_integers};
use crate::common::{decode, downloaded, encode};
use std::collections::HashMap;
use std::fmt::Display;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock};
use warplink::collective::{BoundCall, Call, CollectiveKind, CollectivePath};
use warplink::device::{AllocationKind, DeviceSlice, ReduceOp, Stream};
use warplink::{Collectives, Communicator, DType, Result};

/// Bytes on both sides of an output that no collective may touch.
const GUARD: usize = 64;

/// Guard bytes.
const GUARD_BYTE: u8 = 0xa5;

/// About the most bytes of values that ranks share.
const MAX_SHARED_BYTES: usize = 128 << 20;

/// Size of a value besides its elements, and maximum size of these.
const VALUE_BYTES: usize = 1 << 10;
const ELEMENT_BYTES: usize = size_of::<(f64, f64)>();

/// Pseudo-random numbers, the same for the same seed.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// One that reduces values of a type.
    pub(crate) fn operator(&mut self, dtype: DType) -> ReduceOp {
        let plain = ReduceOp::ALL;
        let kinds = plain.len() + usize::from(dtype.is_float());
        let factor = self.below(400) as f64 / 100.0 - 2.0;
        let chosen = plain.get(self.below(kinds)).copied();
        chosen.unwrap_or(ReduceOp::scaled_sum(factor))
    }

    /// A call of a kind, of any type, operator and root, with as many elements as `count` says for the type.
    pub(crate) fn call(
        &mut self,
        kind: CollectiveKind,
        world: usize,
        count: impl FnOnce(DType, &mut Self) -> usize,
    ) -> Call {
        let dtype = if kind.reduces() {
            DType::ALL[self.below(DType::ALL.len())]
        } else {
            DType::U8
        };
        Call {
            kind,
            op: kind.reduces().then(|| self.operator(dtype)),
            dtype,
            count: count(dtype, self),
            root: kind.has_root().then(|| self.below(world)),
        }
    }
}

/// Collectives that move or reduce data.
pub(crate) fn kinds() -> impl Iterator<Item = CollectiveKind> {
    let kinds = CollectiveKind::ALL.into_iter();
    kinds.filter(|kind| *kind != CollectiveKind::Barrier)
}

/// Those that reduce it.
pub(crate) const REDUCTIONS: [CollectiveKind; 3] = [
    CollectiveKind::AllReduce,
    CollectiveKind::ReduceScatter,
    CollectiveKind::Reduce,
];

/// A sum over all ranks of so many integers.
pub(crate) fn sum_of(count: usize) -> Call {
    let (kind, op) = (CollectiveKind::AllReduce, ReduceOp::Sum);
    Call::new(kind, op, DType::I32, count, 0)
}

/// Fails where ranks have other bytes.
pub(crate) fn assert_alike(comm: &Communicator, own: &[u8], what: impl Display) {
    let all = comm.all_gather_bytes(own).unwrap();
    assert!(all.iter().all(|one| one == own), "{what}: ranks differ");
}

/// How a call is made, the same on every rank but for where its memory starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Case {
    pub(crate) call: Call,
    pub(crate) in_place: bool,
    /// Bytes from a multiple of 256 to the start of the memory.
    pub(crate) shift: usize,
    pub(crate) seed: u64,
}

/// A call that was enqueued, and its memory.
#[derive(Debug)]
pub(crate) struct Made {
    case: Case,
    memory: DeviceSlice,
    output: DeviceSlice,
    input: DeviceSlice,
    /// Whether the vendor's library made the call.
    by_library: AtomicBool,
}

impl Case {
    /// Into other memory, from where its allocation starts.
    pub(crate) fn new(call: Call, seed: u64) -> Self {
        Self {
            call,
            in_place: false,
            shift: 0,
            seed,
        }
    }

    /// With a random place, shifted by up to three elements.
    pub(crate) fn placed(random: &mut Random, call: Call) -> Self {
        Self {
            call,
            in_place: random.below(2) == 0,
            shift: random.below(4) * call.dtype.size(),
            seed: random.next(),
        }
    }

    /// A call of random kind, type, operator, root, place and length up to `most` elements.
    pub(crate) fn random(random: &mut Random, world: usize, most: usize) -> Self {
        let kind = CollectiveKind::ALL[random.below(8)];
        // Nothing at all now and then.
        let call = random.call(kind, world, |_, random| {
            (1 + random.below(most)) * usize::from(random.below(12) != 0)
        });
        let size = call.dtype.size();
        Self {
            call,
            in_place: random.below(2) == 0,
            shift: [0, 16, size, 3 * size][random.below(4)],
            seed: random.next(),
        }
    }

    /// The input of a rank.
    fn input(&self, rank: usize, world: usize) -> Arc<Vec<u8>> {
        static INPUTS: Shared<Vec<u8>> = Shared::new();
        INPUTS.get((*self, rank, world), || self.new_input(rank, world))
    }

    fn new_input(&self, rank: usize, world: usize) -> Vec<u8> {
        let mut random = Random::new(self.seed ^ (rank as u64 + 1).wrapping_mul(0x51_7c_c1));
        let count = self.call.count * self.call.kind.rows(world).0;
        if !self.call.dtype.is_float() {
            let mut bytes = vec![0; count * self.call.dtype.size()];
            // As many as a number has.
            for some in bytes.chunks_mut(6) {
                some.copy_from_slice(&random.next().to_le_bytes()[..some.len()]);
            }
            return bytes;
        }
        // From -2 to 2, of as many bits as any type has, so that sums depend on the order.
        let numbers = (0..count).map(|_| random.next() as f64 / (1_u64 << 51) as f64 - 2.0);
        encode(self.call.dtype, &numbers.collect::<Vec<_>>())
    }

    /// Bytes of memory that the call takes.
    pub(crate) fn memory_bytes(&self, world: usize) -> usize {
        let (input_rows, output_rows) = self.call.kind.rows(world);
        let most = input_rows.max(output_rows) * self.call.bytes();
        GUARD + self.shift + most + GUARD + 512 + input_rows * self.call.bytes()
    }

    /// A [random](Self::random) call of a kind, with the elements that `takes` takes.
    pub(crate) fn random_of(
        kind: CollectiveKind,
        random: &mut Random,
        (world, most): (usize, usize),
        takes: impl Fn(usize) -> bool,
    ) -> Self {
        loop {
            let case = Self::random(random, world, most);
            if case.call.kind == kind && takes(case.call.count) {
                return case;
            }
        }
    }

    /// Makes the call with fresh memory and fresh inputs.
    pub(crate) fn make(
        self,
        comm: &Communicator,
        collectives: &Collectives,
        stream: &Stream,
    ) -> Result<Made> {
        let made = self.on_new_memory(comm)?;
        made.fill(comm)?;
        made.enqueue(collectives, stream)?;
        Ok(made)
    }

    /// [Makes](Self::make) the call, waits for it, and checks its output.
    pub(crate) fn run(
        self,
        comm: &Communicator,
        collectives: &Collectives,
        stream: &Stream,
    ) -> Made {
        let made = self.make(comm, collectives, stream).unwrap();
        comm.synchronize(stream).unwrap();
        made.check(comm);
        made
    }

    /// Divides new memory for the call.
    pub(crate) fn on_new_memory(self, comm: &Communicator) -> Result<Made> {
        let bytes = self.memory_bytes(comm.world());
        let memory = comm.device().allocate(bytes, AllocationKind::Plain)?;
        self.place(comm, memory)
    }

    /// Divides memory for the call, as much as it takes.
    pub(crate) fn place(self, comm: &Communicator, memory: DeviceSlice) -> Result<Made> {
        let (rank, world) = (comm.rank(), comm.world());
        let (input_rows, output_rows) = self.call.kind.rows(world);
        let unit = self.call.bytes();
        let (input_bytes, output_bytes) = (unit * input_rows, unit * output_rows);
        let most = input_bytes.max(output_bytes);
        let start = GUARD + self.shift;
        let whole = memory.slice(start..start + most)?;
        let part = |bytes: usize| {
            if bytes < most {
                whole.slice(rank * bytes..(rank + 1) * bytes)
            } else {
                Ok(whole.clone())
            }
        };
        let output = part(output_bytes)?;
        let input = if self.in_place {
            part(input_bytes)?
        } else {
            // Not aligned as the output is.
            let from = start + most + GUARD + (self.seed % 4) as usize * self.call.dtype.size();
            memory.slice(from..from + input_bytes)?
        };
        Ok(Made {
            case: self,
            memory,
            output,
            input,
            by_library: AtomicBool::new(false),
        })
    }

    /// Expected output of a rank; `None` if it is left unchanged.
    fn expected(&self, rank: usize, world: usize) -> Arc<Option<Expected>> {
        static EXPECTED: Shared<Option<Expected>> = Shared::new();
        // All ranks have the same output, but for some.
        let whose = match self.call.kind {
            CollectiveKind::AllReduce | CollectiveKind::AllGather | CollectiveKind::Broadcast => 0,
            _ => rank,
        };
        EXPECTED.get((*self, whose, world), || self.new_expected(whose, world))
    }

    fn new_expected(&self, rank: usize, world: usize) -> Option<Expected> {
        let unit = self.call.bytes();
        let inputs: Vec<_> = (0..world).map(|rank| self.input(rank, world)).collect();
        let inputs: Vec<&[u8]> = inputs.iter().map(|input| &***input).collect();
        let part = |input: &[u8], rank: usize| input[rank * unit..(rank + 1) * unit].to_vec();
        if self.call.root.is_some_and(|root| root != rank)
            && matches!(
                self.call.kind,
                CollectiveKind::Reduce | CollectiveKind::Gather
            )
        {
            return None;
        }
        let root = self.call.root.unwrap_or(0);
        Some(match self.call.kind {
            CollectiveKind::AllGather | CollectiveKind::Gather => Expected::Bytes(inputs.concat()),
            CollectiveKind::AllToAll => {
                let parts = inputs.iter().map(|input| part(input, rank));
                Expected::Bytes(parts.collect::<Vec<_>>().concat())
            }
            CollectiveKind::Broadcast => Expected::Bytes(inputs[root].to_vec()),
            CollectiveKind::Scatter => Expected::Bytes(part(inputs[root], rank)),
            CollectiveKind::ReduceScatter => {
                let parts = inputs.iter().map(|input| &input[rank * unit..][..unit]);
                self.reduced(&parts.collect::<Vec<_>>())
            }
            _ => self.reduced(&inputs),
        })
    }

    /// The reduction of all.
    fn reduced(&self, inputs: &[&[u8]]) -> Expected {
        let (dtype, world) = (self.call.dtype, inputs.len());
        let op = self.call.op.unwrap_or(ReduceOp::Sum);
        if !dtype.is_float() {
            let size = dtype.size();
            let (mut bytes, mut values) = (Vec::new(), Vec::new());
            for from in (0..self.call.bytes()).step_by(size) {
                let of = |input: &&[u8]| integer(dtype, &input[from..from + size]);
                values.clear();
                values.extend(inputs.iter().map(of));
                bytes.extend(&reduced_integers(op, dtype, &values).to_le_bytes()[..size]);
            }
            return Expected::Bytes(bytes);
        }
        let all: Vec<Vec<f64>> = inputs.iter().map(|input| decode(dtype, input)).collect();
        let of = |index: usize| {
            let values = all.iter().map(|values| values[index]);
            let value = match op {
                ReduceOp::Max => values.fold(f64::NEG_INFINITY, f64::max),
                ReduceOp::Min => values.fold(f64::INFINITY, f64::min),
                ReduceOp::Product => values.product(),
                ReduceOp::Average => values.sum::<f64>() / world as f64,
                // Nothing of it is lost in double precision, but in 64 bits.
                ReduceOp::ScaledSum(factor) => {
                    let factor = factor.rounded(dtype).value();
                    values.map(|value| value * factor).sum()
                }
                ReduceOp::Sum => values.sum(),
            };
            (value, off(op, dtype, world, value))
        };
        Expected::Near((0..self.call.count).map(of).collect())
    }
}

/// A call, a rank and how many there are.
type Key = (Case, usize, usize);

/// Data shared by several ranks of this process, computed once.
struct Shared<T>(LazyLock<Mutex<Cache<T>>>);

/// The values that there are, and about how many bytes they have.
type Cache<T> = (HashMap<Key, Slot<T>>, usize);

type Slot<T> = Arc<OnceLock<Arc<T>>>;

impl<T> Shared<T> {
    const fn new() -> Self {
        Self(LazyLock::new(Mutex::default))
    }

    fn get(&self, key: Key, make: impl FnOnce() -> T) -> Arc<T> {
        let call = key.0.call;
        let (input_rows, output_rows) = call.kind.rows(key.2);
        let bytes = VALUE_BYTES + ELEMENT_BYTES * call.count * input_rows.max(output_rows);
        let mut guard = self.0.lock().unwrap();
        let (known, known_bytes) = &mut *guard;
        if *known_bytes + bytes > MAX_SHARED_BYTES {
            known.clear();
            *known_bytes = 0;
        }
        let slot = match known.get(&key) {
            Some(slot) => slot.clone(),
            None => {
                *known_bytes += bytes;
                known.entry(key).or_default().clone()
            }
        };
        drop(guard);
        slot.get_or_init(|| Arc::new(make())).clone()
    }
}

/// Expected content of an output.
#[derive(Debug)]
enum Expected {
    Bytes(Vec<u8>),
    /// Numbers, and how far each may be off.
    Near(Vec<(f64, f64)>),
}

impl Made {
    /// Sets the guard bytes and the input.
    pub(crate) fn fill(&self, comm: &Communicator) -> Result<()> {
        let device = comm.device();
        device.upload(&self.memory, &vec![GUARD_BYTE; self.memory.bytes()])?;
        device.upload(&self.input, &self.case.input(comm.rank(), comm.world()))
    }

    /// As [`fill`](Self::fill), with the inputs of another seed.
    pub(crate) fn fill_again(&mut self, comm: &Communicator, seed: u64) -> Result<()> {
        self.case.seed = seed;
        self.fill(comm)
    }

    /// Makes the call once more, on the same memory with the same inputs.
    pub(crate) fn again(
        &self,
        comm: &Communicator,
        collectives: &Collectives,
        stream: &Stream,
    ) -> Result<()> {
        self.fill(comm)?;
        self.enqueue(collectives, stream)
    }

    /// Makes the call once [more](Self::again), waits for it, and checks its output.
    pub(crate) fn run_again(
        &self,
        comm: &Communicator,
        collectives: &Collectives,
        stream: &Stream,
    ) {
        self.again(comm, collectives, stream).unwrap();
        comm.synchronize(stream).unwrap();
        self.check(comm);
    }

    /// Whether the output overwrites the input.
    pub(crate) fn is_in_place(&self) -> bool {
        self.case.in_place
    }

    /// The call alone.
    pub(crate) fn call(&self) -> &Call {
        &self.case.call
    }

    /// Binds the call to its memory.
    pub(crate) fn bind(&self, collectives: &Collectives) -> Result<BoundCall> {
        self.note_path(collectives);
        collectives.bind(&self.case.call, &self.output, &self.input)
    }

    /// The same memory with other inputs.
    pub(crate) fn renewed(&mut self, comm: &Communicator) {
        // Where the input begins depends on the rest.
        self.case.seed += 4;
        self.fill(comm).unwrap();
    }

    /// Enqueues the call.
    pub(crate) fn enqueue(&self, collectives: &Collectives, stream: &Stream) -> Result<()> {
        let Call {
            kind,
            op,
            dtype,
            root,
            ..
        } = self.case.call;
        self.note_path(collectives);
        let (output, input) = (&self.output, &self.input);
        let (op, root) = (op.unwrap_or(ReduceOp::Sum), root.unwrap_or(0));
        match kind {
            CollectiveKind::AllReduce => collectives.all_reduce(output, input, dtype, op, stream),
            CollectiveKind::AllGather => collectives.all_gather(output, input, stream),
            CollectiveKind::ReduceScatter => {
                collectives.reduce_scatter(output, input, dtype, op, stream)
            }
            CollectiveKind::AllToAll => collectives.all_to_all(output, input, stream),
            CollectiveKind::Broadcast => collectives.broadcast(output, input, root, stream),
            CollectiveKind::Reduce => collectives.reduce(output, input, dtype, op, root, stream),
            CollectiveKind::Gather => collectives.gather(output, input, root, stream),
            CollectiveKind::Scatter => collectives.scatter(output, input, root, stream),
            _ => collectives.barrier(stream),
        }
    }

    fn note_path(&self, collectives: &Collectives) {
        let by_library = collectives.path_of(&self.case.call) == CollectivePath::Engine;
        self.by_library.store(by_library, Ordering::Relaxed);
    }

    /// Fails where the output is wrong, or anything else was touched: bytes around it, or the input.
    pub(crate) fn check(&self, comm: &Communicator) {
        self.compare(comm).unwrap();
    }

    /// As [`check`](Self::check), but what ends the rank's work meanwhile is an error.
    pub(crate) fn compare(&self, comm: &Communicator) -> Result<()> {
        let (rank, world) = (comm.rank(), comm.world());
        let case = &self.case;
        let mut all = vec![0; self.memory.bytes()];
        comm.device().download(&self.memory, &mut all)?;
        let output = self.range(&self.output);
        let got = &all[output.clone()];
        let expected = case.expected(rank, world);
        match &*expected {
            Some(Expected::Bytes(bytes)) if got != bytes => {
                let wrong = got.iter().zip(bytes).position(|(got, byte)| got != byte);
                panic!("{case:?}: rank {rank} of {world}: byte {wrong:?} is wrong");
            }
            None | Some(Expected::Bytes(_)) => {}
            Some(Expected::Near(numbers)) => {
                let got = decode(case.call.dtype, got);
                // NCCL rounds each product by a factor to the elements' type before it sums them.
                let more = match case.call.op {
                    Some(op @ ReduceOp::ScaledSum(_))
                        if self.by_library.load(Ordering::Relaxed) =>
                    {
                        largest(op, world) * precision(case.call.dtype)[1]
                    }
                    _ => 0.0,
                };
                for (at, (got, (number, off))) in got.iter().zip(numbers).enumerate() {
                    let off = off + more;
                    assert!(
                        (got - number).abs() <= off,
                        "{case:?}: rank {rank} of {world}: element {at} is {got}; expected {number} ± {off}"
                    );
                }
            }
        }
        let mut untouched = vec![GUARD_BYTE; all.len()];
        untouched[self.range(&self.input)].copy_from_slice(&case.input(rank, world));
        if expected.is_some() {
            untouched[output.clone()].copy_from_slice(got);
        }
        if all != untouched {
            let touched = all.iter().zip(&untouched).position(|(a, b)| a != b);
            let input = self.range(&self.input);
            panic!(
                "{case:?}: rank {rank} of {world}: byte {touched:?} was touched; the output is {output:?}, the input {input:?}"
            );
        }
        Ok(())
    }

    /// Where a slice lies in the memory.
    fn range(&self, slice: &DeviceSlice) -> Range<usize> {
        let from = (slice.address() - self.memory.address()) as usize;
        from..from + slice.bytes()
    }

    /// The bytes of an output that all ranks have alike.
    pub(crate) fn reduced(&self, comm: &Communicator) -> Vec<u8> {
        downloaded(comm, &self.output)
    }
}
