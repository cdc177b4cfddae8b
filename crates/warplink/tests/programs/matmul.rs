//! Products over all ranks, with inputs that every rank draws in whole, and their reference.

use super::common::{allocate, downloaded};
use super::{gathers, scatters};
use std::collections::BTreeMap;
use warplink::device::{DeviceSlice, Stream};
use warplink::dtype::Element;
use warplink::overlap::{
    AllGatherMatmul, AllGatherMatmulBuffers, Lowering, MatmulReduceScatter,
    MatmulReduceScatterBuffers, Options, OverlapPlan,
};
use warplink::program::ir::Role;
use warplink::program::{Bindings, Executor, Prepared};
use warplink::{Communicator, DType, Result};
use zerocopy::IntoBytes;

/// A computation to test.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) m: usize,
    pub(crate) k: usize,
    n: usize,
    dtype: DType,
    bias: bool,
    transposed_b: bool,
    operands: usize,
    keep: bool,
    outer: usize,
    world: usize,
}

impl Case {
    /// A small product; `k` divides by the world size as well.
    pub(crate) fn of<T: Element>(comm: &Communicator, bias: bool) -> Self {
        let world = comm.world();
        Self {
            m: 6 * world,
            k: 8 * world,
            n: 24,
            dtype: T::DTYPE,
            bias,
            transposed_b: false,
            operands: 1,
            keep: false,
            outer: 1,
            world,
        }
    }

    pub(crate) fn operands(self, operands: usize) -> Self {
        Self { operands, ..self }
    }

    /// With right operands whose transposes are in memory.
    pub(crate) fn transposed(self) -> Self {
        Self {
            transposed_b: true,
            ..self
        }
    }

    pub(crate) fn keeping(self) -> Self {
        Self { keep: true, ..self }
    }

    pub(crate) fn outer(self, outer: usize) -> Self {
        Self { outer, ..self }
    }

    /// How often the whole is done.
    pub(crate) fn repeats(&self) -> usize {
        self.outer
    }

    pub(crate) fn gather(&self) -> AllGatherMatmul {
        AllGatherMatmul {
            transposed_b: self.transposed_b,
            m: self.m,
            k: self.k,
            n: (0..self.operands)
                .map(|index| self.columns(index))
                .collect(),
            dtype: self.dtype,
            bias: self.bias,
            keep: self.keep,
        }
    }

    pub(crate) fn scatter(&self) -> MatmulReduceScatter {
        MatmulReduceScatter {
            transposed_b: self.transposed_b,
            m: self.m,
            k: self.k,
            n: self.n,
            dtype: self.dtype,
            bias: self.bias,
        }
    }

    /// Rows of `n` elements of a right operand, as memory holds them.
    fn in_memory<T: Element>(&self, values: &[T], n: usize) -> Vec<T> {
        if !self.transposed_b {
            return values.to_vec();
        }
        let columns = 0..n;
        columns
            .flat_map(|column| values.iter().skip(column).step_by(n))
            .copied()
            .collect()
    }

    /// Columns of a right operand; each has others.
    fn columns(&self, operand: usize) -> usize {
        self.n + 8 * operand
    }
}

/// All of A, of every B and of every bias.
pub(crate) struct Inputs<T> {
    a: Vec<T>,
    b: Vec<Vec<T>>,
    bias: Vec<Vec<T>>,
}

/// `count` values between -1 and 1.
fn draw<T: Element>(seed: u64, count: usize) -> Vec<T> {
    let mut x = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..count)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            T::from_f64((x >> 32) as f64 / f64::from(1_u32 << 31) - 1.0)
        })
        .collect()
}

impl<T: Element> Inputs<T> {
    pub(crate) fn draw(case: &Case, seed: u64) -> Self {
        let seed = seed * 100;
        let operands = 0..case.operands;
        Self {
            a: draw(seed, case.outer * case.m * case.k),
            b: operands
                .clone()
                .map(|index| draw(seed + 1 + index as u64, case.k * case.columns(index)))
                .collect(),
            bias: operands
                .map(|index| draw(seed + 51 + index as u64, case.columns(index)))
                .collect(),
        }
    }

    /// Product `outer` with right operand `operand`, in double precision.
    fn reference(&self, case: &Case, outer: usize, operand: usize) -> Vec<f64> {
        let n = case.columns(operand);
        let a = &self.a[outer * case.m * case.k..][..case.m * case.k];
        let bias = case.bias.then(|| &self.bias[operand]);
        reference(a, &self.b[operand], bias.map(Vec::as_slice), case.k, n)
    }
}

fn reference<T: Element>(a: &[T], b: &[T], bias: Option<&[T]>, k: usize, n: usize) -> Vec<f64> {
    let mut c = Vec::new();
    for row in a.chunks_exact(k) {
        for column in 0..n {
            let sum: f64 = (0..k)
                .map(|p| row[p].to_f64() * b[p * n + column].to_f64())
                .sum();
            c.push(sum + bias.map_or(0.0, |bias| bias[column].to_f64()));
        }
    }
    c
}

/// An operation with lowerings.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    Gather,
    Scatter,
}

impl Operation {
    pub(crate) const ALL: [Self; 2] = [Self::Gather, Self::Scatter];

    /// Its lowerings and examples.
    pub(crate) fn lowerings(self) -> Vec<Lowering> {
        match self {
            Self::Gather => gathers(),
            Self::Scatter => scatters(),
        }
    }
}

/// This rank's buffers for an operation.
pub(crate) struct Memory {
    operation: Operation,
    a: DeviceSlice,
    b: Vec<DeviceSlice>,
    bias: Vec<DeviceSlice>,
    c: Vec<DeviceSlice>,
    gathered: Option<DeviceSlice>,
}

impl Memory {
    pub(crate) fn new(comm: &Communicator, case: &Case, operation: Operation) -> Self {
        let (part, depth) = (case.m / case.world, case.k / case.world);
        let (a, b, operands, rows) = match operation {
            Operation::Gather => (part * case.k, case.k, case.operands, case.m),
            Operation::Scatter => (case.m * depth, depth, 1, part),
        };
        let size = case.dtype.size();
        let allocate = |elements: usize| allocate(comm, elements * size);
        let each = |elements: &dyn Fn(usize) -> usize| -> Vec<DeviceSlice> {
            (0..operands)
                .map(|index| allocate(elements(index)))
                .collect()
        };
        Self {
            operation,
            a: allocate(case.outer * a),
            b: each(&|index| b * case.columns(index)),
            bias: each(&|index| case.columns(index)),
            c: each(&|index| case.outer * rows * case.columns(index)),
            gathered: case.keep.then(|| allocate(case.outer * case.m * case.k)),
        }
    }

    pub(crate) fn gather(comm: &Communicator, case: &Case) -> Self {
        Self::new(comm, case, Operation::Gather)
    }

    pub(crate) fn scatter(comm: &Communicator, case: &Case) -> Self {
        Self::new(comm, case, Operation::Scatter)
    }

    /// The plan of the operation on this memory.
    pub(crate) fn plan(
        &self,
        executor: &Executor,
        case: &Case,
        options: &Options,
    ) -> Result<OverlapPlan> {
        match self.operation {
            Operation::Gather => case
                .gather()
                .plan(executor, options, &self.gather_buffers(case)),
            Operation::Scatter => {
                case.scatter()
                    .plan(executor, options, &self.scatter_buffers(case))
            }
        }
    }

    pub(crate) fn gather_buffers(&self, case: &Case) -> AllGatherMatmulBuffers {
        AllGatherMatmulBuffers {
            a: self.a.clone(),
            b: self.b.clone(),
            bias: if case.bias {
                self.bias.clone()
            } else {
                Vec::new()
            },
            c: self.c.clone(),
            gathered: self.gathered.clone(),
        }
    }

    pub(crate) fn scatter_buffers(&self, case: &Case) -> MatmulReduceScatterBuffers {
        MatmulReduceScatterBuffers {
            a: self.a.clone(),
            b: self.b[0].clone(),
            bias: case.bias.then(|| self.bias[0].clone()),
            c: self.c[0].clone(),
        }
    }

    /// This memory with that of `other` in the place of the tensors `names`, and the bindings of these.
    pub(crate) fn replaced(&self, other: &Self, names: &[&str]) -> (Self, Bindings) {
        let mut bindings = Bindings::new();
        let mut choose = |name: &str, own: &DeviceSlice, other: &DeviceSlice| {
            if !names.contains(&name) {
                return own.clone();
            }
            bindings.insert(name.to_owned(), other.clone());
            other.clone()
        };
        let mut family = |name: &str, own: &[DeviceSlice], other: &[DeviceSlice]| {
            let pairs = own.iter().zip(other).enumerate();
            let each = pairs.map(|(index, (own, other))| {
                let own = choose(name, own, other);
                choose(&format!("{name}[{index}]"), &own, other)
            });
            each.collect::<Vec<_>>()
        };
        let one = std::slice::from_ref;
        let memory = Self {
            operation: self.operation,
            a: family("A", one(&self.a), one(&other.a)).remove(0),
            b: family("B", &self.b, &other.b),
            bias: family("bias", &self.bias, &other.bias),
            c: family("C", &self.c, &other.c),
            gathered: self.gathered.clone(),
        };
        (memory, bindings)
    }

    /// Uploads this rank's part of the inputs, and poisons the results.
    pub(crate) fn fill<T: Element>(&self, comm: &Communicator, case: &Case, inputs: &Inputs<T>) {
        match self.operation {
            Operation::Gather => {
                let rows = case.m / case.world;
                let mut a = Vec::new();
                for outer in 0..case.outer {
                    let first = (outer * case.m + comm.rank() * rows) * case.k;
                    a.extend_from_slice(&inputs.a[first..first + rows * case.k]);
                }
                upload(comm, &self.a, &a);
                for (operand, (slice, values)) in self.b.iter().zip(&inputs.b).enumerate() {
                    upload(comm, slice, &case.in_memory(values, case.columns(operand)));
                }
            }
            Operation::Scatter => {
                let depth = case.k / case.world;
                let first = comm.rank() * depth;
                let rows = inputs.a.chunks_exact(case.k);
                let a = rows.flat_map(|row| row[first..first + depth].to_vec());
                upload(comm, &self.a, &a.collect::<Vec<T>>());
                let n = case.n;
                let b = &inputs.b[0][first * n..(first + depth) * n];
                upload(comm, &self.b[0], &case.in_memory(b, n));
            }
        }
        for (slice, values) in self.bias.iter().zip(&inputs.bias) {
            upload(comm, slice, values);
        }
        for slice in self.c.iter().chain(&self.gathered) {
            // NaN in every type.
            let poison = vec![0xff; slice.bytes()];
            comm.device().upload(slice, &poison).unwrap();
        }
    }

    pub(crate) fn check<T: Element>(
        &self,
        comm: &Communicator,
        case: &Case,
        inputs: &Inputs<T>,
        what: &str,
    ) {
        for (operand, slice) in self.c.iter().enumerate() {
            let whole = (0..case.outer).map(|outer| inputs.reference(case, outer, operand));
            let expected: Vec<f64> = match self.operation {
                Operation::Gather => whole.flatten().collect(),
                Operation::Scatter => {
                    let part = case.m / case.world * case.n;
                    let own = comm.rank() * part..(comm.rank() + 1) * part;
                    whole
                        .flat_map(|whole| whole[own.clone()].to_vec())
                        .collect()
                }
            };
            let what = format!("{what}, {:?}, C{operand}", self.operation);
            close::<T>(comm, slice, &expected, &what);
        }
        let gathered = self.gathered.as_ref();
        if let (Operation::Gather, Some(gathered)) = (self.operation, gathered) {
            let expected: Vec<f64> = inputs.a.iter().map(|value| value.to_f64()).collect();
            let got: Vec<f64> = download::<T>(comm, gathered);
            let rank = comm.rank();
            assert_eq!(got, expected, "rank {rank}, {what}: the gathered A");
        }
    }
}

fn upload<T: Element>(comm: &Communicator, slice: &DeviceSlice, values: &[T]) {
    comm.device().upload(slice, values.as_bytes()).unwrap();
}

fn download<T: Element>(comm: &Communicator, slice: &DeviceSlice) -> Vec<f64> {
    downloaded(comm, slice)
        .chunks_exact(size_of::<T>())
        .map(|bytes| T::read_from_bytes(bytes).unwrap().to_f64())
        .collect()
}

fn close<T: Element>(comm: &Communicator, slice: &DeviceSlice, expected: &[f64], what: &str) {
    let got = download::<T>(comm, slice);
    assert_eq!(got.len(), expected.len());
    let difference: f64 = got.iter().zip(expected).map(|(a, b)| (a - b).powi(2)).sum();
    let norm: f64 = expected.iter().map(|value| value.powi(2)).sum();
    let error = (difference / norm).sqrt();
    assert!(
        error <= T::DTYPE.matmul_tolerance().unwrap(),
        "rank {} of {}, {}, {what}: relative error {error:e}",
        comm.rank(),
        comm.world(),
        T::DTYPE
    );
}

/// Runs an example of the folder on inputs of its own, twice, and checks what its name promises.
pub(crate) fn run_example(comm: &Communicator, stream: &Stream, name: &str, prepared: &Prepared) {
    let (rank, world) = (comm.rank(), comm.world());
    let outer = |role| {
        let tensors = prepared.rank_program().tensors.iter();
        tensors
            .filter(move |tensor| tensor.role == role)
            .map(|tensor| (tensor.name.to_string(), tensor.clone()))
            .collect::<BTreeMap<_, _>>()
    };
    let (inputs, outputs) = (outer(Role::Input), outer(Role::Output));
    let mut bindings = Bindings::new();
    for (name, tensor) in inputs.iter().chain(&outputs) {
        bindings.insert(name.clone(), allocate(comm, tensor.bytes));
    }
    let plan = prepared.bind(&bindings).unwrap();
    let gather = name.starts_with("all_gather_matmul");
    for round in 0..2_u64 {
        if gather || name.starts_with("matmul_reduce_scatter") {
            assert_eq!(inputs["A"].dtype, DType::BF16, "{name}");
            let case = Case {
                m: 64,
                k: 32,
                n: 32,
                dtype: DType::BF16,
                bias: false,
                transposed_b: false,
                operands: 1,
                keep: false,
                outer: 1,
                world,
            };
            let (b, c) = if gather { ("B[0]", "C[0]") } else { ("B", "C") };
            let memory = Memory {
                operation: if gather {
                    Operation::Gather
                } else {
                    Operation::Scatter
                },
                a: bindings["A"].clone(),
                b: vec![bindings[b].clone()],
                bias: Vec::new(),
                c: vec![bindings[c].clone()],
                gathered: None,
            };
            let inputs = Inputs::<half::bf16>::draw(&case, round);
            memory.fill(comm, &case, &inputs);
            plan.run(stream).unwrap();
            comm.synchronize(stream).unwrap();
            memory.check(comm, &case, &inputs, name);
        } else {
            assert_eq!(name, "ring_pass", "an example without a check");
            let of = |rank: usize| draw::<f32>(rank as u64 + 10 * round, 32);
            upload(comm, &bindings["A"], &of(rank));
            plan.run(stream).unwrap();
            comm.synchronize(stream).unwrap();
            let expected: Vec<f64> = of((rank + world - 1) % world)
                .into_iter()
                .map(f64::from)
                .collect();
            assert_eq!(download::<f32>(comm, &bindings["B"]), expected);
        }
    }
}
