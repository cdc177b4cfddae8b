//! Products over all ranks, with inputs that every rank draws in whole, and their reference.

use std::collections::BTreeMap;
use warplink::device::{AllocationKind, DeviceSlice, Stream};
use warplink::dtype::Element;
use warplink::overlap::{
    AllGatherMatmul, AllGatherMatmulBuffers, MatmulReduceScatter, MatmulReduceScatterBuffers,
};
use warplink::program::ir::Role;
use warplink::program::{Bindings, Prepared};
use warplink::{Communicator, DType};
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

/// This rank's buffers.
pub(crate) struct Memory {
    a: DeviceSlice,
    b: Vec<DeviceSlice>,
    bias: Vec<DeviceSlice>,
    c: Vec<DeviceSlice>,
    gathered: Option<DeviceSlice>,
}

impl Memory {
    fn new(
        comm: &Communicator,
        case: &Case,
        a: usize,
        b: usize,
        operands: usize,
        rows: usize,
    ) -> Self {
        let size = case.dtype.size();
        let allocate = |elements: usize| {
            comm.device()
                .allocate(elements * size, AllocationKind::Plain)
                .unwrap()
        };
        let each = |elements: &dyn Fn(usize) -> usize| -> Vec<DeviceSlice> {
            (0..operands)
                .map(|index| allocate(elements(index)))
                .collect()
        };
        Self {
            a: allocate(case.outer * a),
            b: each(&|index| b * case.columns(index)),
            bias: each(&|index| case.columns(index)),
            c: each(&|index| case.outer * rows * case.columns(index)),
            gathered: case.keep.then(|| allocate(case.outer * case.m * case.k)),
        }
    }

    pub(crate) fn gather(comm: &Communicator, case: &Case) -> Self {
        let part = case.m / case.world * case.k;
        Self::new(comm, case, part, case.k, case.operands, case.m)
    }

    pub(crate) fn scatter(comm: &Communicator, case: &Case) -> Self {
        let depth = case.k / case.world;
        Self::new(comm, case, case.m * depth, depth, 1, case.m / case.world)
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
            a: family("A", one(&self.a), one(&other.a)).remove(0),
            b: family("B", &self.b, &other.b),
            bias: family("bias", &self.bias, &other.bias),
            c: family("C", &self.c, &other.c),
            gathered: self.gathered.clone(),
        };
        (memory, bindings)
    }

    /// Uploads this rank's part of the inputs, and poisons the results.
    pub(crate) fn fill_gather<T: Element>(
        &self,
        comm: &Communicator,
        case: &Case,
        inputs: &Inputs<T>,
    ) {
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
        self.fill_rest(comm, inputs);
    }

    pub(crate) fn fill_scatter<T: Element>(
        &self,
        comm: &Communicator,
        case: &Case,
        inputs: &Inputs<T>,
    ) {
        let depth = case.k / case.world;
        let first = comm.rank() * depth;
        let a: Vec<T> = inputs
            .a
            .chunks_exact(case.k)
            .flat_map(|row| row[first..first + depth].to_vec())
            .collect();
        upload(comm, &self.a, &a);
        let n = case.n;
        let b = &inputs.b[0][first * n..(first + depth) * n];
        upload(comm, &self.b[0], &case.in_memory(b, n));
        self.fill_rest(comm, inputs);
    }

    fn fill_rest<T: Element>(&self, comm: &Communicator, inputs: &Inputs<T>) {
        for (slice, values) in self.bias.iter().zip(&inputs.bias) {
            upload(comm, slice, values);
        }
        for slice in self.c.iter().chain(&self.gathered) {
            // NaN in every type.
            comm.device()
                .upload(slice, &vec![0xff; slice.bytes()])
                .unwrap();
        }
    }

    pub(crate) fn check_gather<T: Element>(
        &self,
        comm: &Communicator,
        case: &Case,
        inputs: &Inputs<T>,
        what: &str,
    ) {
        for (operand, slice) in self.c.iter().enumerate() {
            let expected: Vec<f64> = (0..case.outer)
                .flat_map(|outer| inputs.reference(case, outer, operand))
                .collect();
            close::<T>(comm, slice, &expected, &format!("{what}, C{operand}"));
        }
        if let Some(gathered) = &self.gathered {
            let expected: Vec<f64> = inputs.a.iter().map(|value| value.to_f64()).collect();
            let got: Vec<f64> = download::<T>(comm, gathered);
            assert_eq!(
                got,
                expected,
                "rank {}, {what}: the gathered A",
                comm.rank()
            );
        }
    }

    pub(crate) fn check_scatter<T: Element>(
        &self,
        comm: &Communicator,
        case: &Case,
        inputs: &Inputs<T>,
        what: &str,
    ) {
        let part = case.m / case.world * case.n;
        let expected: Vec<f64> = (0..case.outer)
            .flat_map(|outer| {
                let whole = inputs.reference(case, outer, 0);
                whole[comm.rank() * part..(comm.rank() + 1) * part].to_vec()
            })
            .collect();
        close::<T>(comm, &self.c[0], &expected, &format!("{what}, scattered"));
    }
}

fn upload<T: Element>(comm: &Communicator, slice: &DeviceSlice, values: &[T]) {
    comm.device().upload(slice, values.as_bytes()).unwrap();
}

fn download<T: Element>(comm: &Communicator, slice: &DeviceSlice) -> Vec<f64> {
    let mut bytes = vec![0; slice.bytes()];
    comm.device().download(slice, &mut bytes).unwrap();
    bytes
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
        let slice = comm
            .device()
            .allocate(tensor.bytes, AllocationKind::Plain)
            .unwrap();
        bindings.insert(name.clone(), slice);
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
                a: bindings["A"].clone(),
                b: vec![bindings[b].clone()],
                bias: Vec::new(),
                c: vec![bindings[c].clone()],
                gathered: None,
            };
            let inputs = Inputs::<half::bf16>::draw(&case, round);
            if gather {
                memory.fill_gather(comm, &case, &inputs);
            } else {
                memory.fill_scatter(comm, &case, &inputs);
            }
            plan.run(stream).unwrap();
            comm.synchronize(stream).unwrap();
            if gather {
                memory.check_gather(comm, &case, &inputs, name);
            } else {
                memory.check_scatter(comm, &case, &inputs, name);
            }
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
