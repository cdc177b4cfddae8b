//! Calls with random inputs, what they have to give, and the comparison.

use crate::common::{decode, encode};
use warplink::collective::{Call, CollectiveKind};
use warplink::device::{AllocationKind, DeviceSlice, ReduceOp, Stream};
use warplink::{Collectives, Communicator, DType, Result};

/// Bytes on both sides of an output that no collective may touch.
const GUARD: usize = 64;

/// What the guard bytes are.
const GUARD_BYTE: u8 = 0xa5;

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
}

/// How a call is made, the same on every rank but for where its memory starts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) call: Call,
    pub(crate) in_place: bool,
    /// Bytes from a multiple of 256 to the start of the memory.
    pub(crate) shift: usize,
    pub(crate) seed: u64,
}

/// A call that was enqueued, and its memory.
pub(crate) struct Made {
    case: Case,
    memory: DeviceSlice,
    output: DeviceSlice,
}

impl Case {
    /// A call of random kind, type, operator, root, place and length up to `most` elements.
    pub(crate) fn random(random: &mut Random, world: usize, most: usize) -> Self {
        let kind = CollectiveKind::ALL[random.below(8)];
        let dtype = if kind.reduces() {
            DType::ALL[random.below(DType::ALL.len())]
        } else {
            DType::U8
        };
        let rooted = matches!(
            kind,
            CollectiveKind::Broadcast
                | CollectiveKind::Reduce
                | CollectiveKind::Gather
                | CollectiveKind::Scatter
        );
        let call = Call {
            kind,
            op: kind
                .reduces()
                .then(|| ReduceOp::ALL[random.below(ReduceOp::ALL.len())]),
            dtype,
            count: 1 + random.below(most),
            root: rooted.then(|| random.below(world)),
        };
        Self {
            call,
            in_place: random.below(2) == 0,
            shift: [0, 16, dtype.size(), 3 * dtype.size()][random.below(4)],
            seed: random.next(),
        }
    }

    fn rows(&self, world: usize) -> (usize, usize) {
        match self.call.kind {
            CollectiveKind::AllGather | CollectiveKind::Gather => (1, world),
            CollectiveKind::ReduceScatter | CollectiveKind::Scatter => (world, 1),
            CollectiveKind::AllToAll => (world, world),
            _ => (1, 1),
        }
    }

    /// The input of a rank.
    fn input(&self, rank: usize, world: usize) -> Vec<u8> {
        let mut random = Random::new(self.seed ^ (rank as u64 + 1).wrapping_mul(0x51_7c_c1));
        let count = self.call.count * self.rows(world).0;
        let numbers = (0..count).map(|_| {
            let number = random.next();
            match self.call.dtype {
                DType::U8 => (number % 256) as f64,
                DType::I32 => f64::from(number as i32),
                _ => (number % 4096) as f64 / 512.0 - 4.0,
            }
        });
        encode(self.call.dtype, &numbers.collect::<Vec<_>>())
    }

    /// Makes the call with fresh memory and fresh inputs.
    pub(crate) fn make(
        self,
        comm: &Communicator,
        collectives: &Collectives,
        stream: &Stream,
    ) -> Result<Made> {
        let (rank, world) = (comm.rank(), comm.world());
        let (input_rows, output_rows) = self.rows(world);
        let unit = self.call.bytes();
        let (input_bytes, output_bytes) = (unit * input_rows, unit * output_rows);
        let device = comm.device();
        let most = input_bytes.max(output_bytes);
        let memory = device.allocate(
            GUARD + self.shift + most + GUARD + 512 + input_bytes,
            AllocationKind::Plain,
        )?;
        device.upload(&memory, &vec![GUARD_BYTE; memory.bytes()])?;
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
        device.upload(&input, &self.input(rank, world))?;
        let Call {
            kind,
            op,
            dtype,
            root,
            ..
        } = self.call;
        let (op, root) = (op.unwrap_or(ReduceOp::Sum), root.unwrap_or(0));
        match kind {
            CollectiveKind::AllReduce => collectives.all_reduce(&output, &input, dtype, op, stream),
            CollectiveKind::AllGather => collectives.all_gather(&output, &input, stream),
            CollectiveKind::ReduceScatter => {
                collectives.reduce_scatter(&output, &input, dtype, op, stream)
            }
            CollectiveKind::AllToAll => collectives.all_to_all(&output, &input, stream),
            CollectiveKind::Broadcast => collectives.broadcast(&output, &input, root, stream),
            CollectiveKind::Reduce => collectives.reduce(&output, &input, dtype, op, root, stream),
            CollectiveKind::Gather => collectives.gather(&output, &input, root, stream),
            CollectiveKind::Scatter => collectives.scatter(&output, &input, root, stream),
            _ => collectives.barrier(stream),
        }?;
        Ok(Made {
            case: self,
            memory,
            output,
        })
    }

    /// What a rank's output is; `None` where it is left alone. With how far it may be off.
    fn expected(&self, rank: usize, world: usize) -> Option<(Vec<u8>, f64)> {
        let unit = self.call.bytes();
        let inputs: Vec<Vec<u8>> = (0..world).map(|rank| self.input(rank, world)).collect();
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
        let exact = match self.call.kind {
            CollectiveKind::AllGather | CollectiveKind::Gather => inputs.concat(),
            CollectiveKind::AllToAll => inputs.iter().flat_map(|input| part(input, rank)).collect(),
            CollectiveKind::Broadcast => inputs[root].clone(),
            CollectiveKind::Scatter => part(&inputs[root], rank),
            CollectiveKind::ReduceScatter => {
                let parts: Vec<Vec<u8>> = inputs.iter().map(|input| part(input, rank)).collect();
                return Some(self.reduced(&parts));
            }
            _ => return Some(self.reduced(&inputs)),
        };
        Some((exact, 0.0))
    }

    /// The reduction of all, and how far an element may be off it.
    fn reduced(&self, inputs: &[Vec<u8>]) -> (Vec<u8>, f64) {
        let (dtype, world) = (self.call.dtype, inputs.len());
        let all: Vec<Vec<f64>> = inputs.iter().map(|input| decode(dtype, input)).collect();
        let of = |index: usize| {
            let values = all.iter().map(|values| values[index]);
            match self.call.op {
                Some(ReduceOp::Max) => values.fold(f64::NEG_INFINITY, f64::max),
                Some(ReduceOp::Min) => values.fold(f64::INFINITY, f64::min),
                _ => values.sum::<f64>(),
            }
        };
        let numbers: Vec<f64> = (0..self.call.count).map(of).collect();
        if dtype == DType::I32 {
            // Overflow wraps around.
            let wrapped = numbers.iter().map(|number| *number as i64 as i32);
            return (wrapped.flat_map(i32::to_le_bytes).collect(), 0.0);
        }
        if dtype == DType::U8 {
            return (
                numbers.iter().map(|number| *number as u64 as u8).collect(),
                0.0,
            );
        }
        let exact = !matches!(self.call.op, None | Some(ReduceOp::Sum));
        // Inputs are at most 4 in magnitude: of sums of `world`, the unit of the last place.
        let unit = match dtype {
            DType::F16 => 2f64.powi(-11),
            DType::BF16 => 2f64.powi(-8),
            DType::F32 => 2f64.powi(-24) * world as f64,
            _ => 2f64.powi(-53) * world as f64,
        };
        let off = if exact {
            0.0
        } else {
            4.0 * world as f64 * unit
        };
        (encode(dtype, &numbers), off)
    }
}

impl Made {
    /// Fails where the output is wrong, or bytes around it were touched.
    pub(crate) fn check(&self, comm: &Communicator) {
        let (rank, world) = (comm.rank(), comm.world());
        let case = &self.case;
        let mut all = vec![0; self.memory.bytes()];
        comm.device().download(&self.memory, &mut all).unwrap();
        let start = GUARD + case.shift;
        let from = (self.output.address() - self.memory.address()) as usize;
        let got = &all[from..from + self.output.bytes()];
        let expected = case.expected(rank, world);
        if let Some((expected, off)) = &expected {
            let (got, expected) = (
                decode(case.call.dtype, got),
                decode(case.call.dtype, expected),
            );
            let wrong = got
                .iter()
                .zip(&expected)
                .position(|(got, expected)| (got - expected).abs() > *off || got.is_nan());
            if let Some(at) = wrong {
                panic!(
                    "{case:?}: rank {rank} of {world}: element {at} is {}; expected {}",
                    got[at], expected[at]
                );
            }
        }
        // Around the output; in place, what belongs to the input lies beside it.
        let (input_rows, output_rows) = case.rows(world);
        let most = case.call.bytes() * input_rows.max(output_rows);
        let untouched = all[..start]
            .iter()
            .chain(&all[start + most..start + most + GUARD]);
        assert!(
            untouched.clone().all(|byte| *byte == GUARD_BYTE),
            "{case:?}: rank {rank} of {world}: bytes around the output were touched"
        );
        let beside = all[start..from]
            .iter()
            .chain(&all[from + self.output.bytes()..start + most]);
        let alone = case.in_place || expected.is_none();
        assert!(
            alone || beside.clone().all(|byte| *byte == GUARD_BYTE),
            "{case:?}: rank {rank} of {world}: bytes beside the output were touched"
        );
        if case.in_place && case.call.kind == CollectiveKind::ReduceScatter {
            let input = case.input(rank, world);
            let kept = input.iter().enumerate().filter(|(at, _)| {
                let at = start + at;
                at < from || at >= from + self.output.bytes()
            });
            assert!(
                kept.clone().all(|(at, byte)| all[start + at] == *byte),
                "{case:?}: rank {rank} of {world}: the rest of the input was touched"
            );
        }
    }

    /// The output's bytes.
    pub(crate) fn output(&self, comm: &Communicator) -> Vec<u8> {
        let mut bytes = vec![0; self.output.bytes()];
        comm.device().download(&self.output, &mut bytes).unwrap();
        bytes
    }
}
