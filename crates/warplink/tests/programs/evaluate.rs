//! The evaluator against devices: every lowering, in every type that matmuls have.

use crate::common::{encode, kind, threads, values, world};
use warplink::device::{AllocationKind, Priority};
use warplink::program::evaluate::Evaluator;
use warplink::program::ir::Role;
use warplink::program::lower::{
    AllGatherMatmul, AllGatherMatmulLowering, MatmulReduceScatter, MatmulReduceScatterLowering,
    lower,
};
use warplink::program::{Bindings, Parameters, PrepareOptions, Program, TensorInstance};
use warplink::{Communicator, DType, DeviceKind};

const STREAMS: usize = 2;

/// Random elements: floats between -1 and 1, and integers of which few fit in a sum.
fn elements(rank: usize, number: usize, tensor: &TensorInstance) -> Vec<u8> {
    let count = tensor.bytes / tensor.dtype.size();
    let most = if tensor.dtype.is_float() {
        1.0
    } else {
        0.75 * 2f64.powi(8 * tensor.dtype.size() as i32 - 1)
    };
    let random = values(rank, number, 2 * count);
    let random = random.chunks_exact(2).map(|pair| {
        let word = u16::from_le_bytes([pair[0], pair[1]]);
        most * (f64::from(word) / 32768.0 - 1.0)
    });
    encode(tensor.dtype, &random.collect::<Vec<_>>())
}

/// Runs `program`, eagerly or as a graph, and compares every output with what it means.
fn compare(comm: &Communicator, program: &Program, parameters: &Parameters, as_graph: bool) {
    let (rank, world) = (comm.rank(), comm.world());
    let evaluator = Evaluator::new(program, world, STREAMS, parameters).unwrap();
    let expected = evaluator.run(elements).unwrap();
    let options = PrepareOptions {
        streams: STREAMS,
        ..PrepareOptions::default()
    };
    let prepared = comm
        .executor()
        .prepare(program, parameters, options)
        .unwrap();
    let device = comm.device();
    let mut bindings = Bindings::new();
    let tensors = &prepared.rank_program().tensors;
    for (id, tensor) in tensors.iter().enumerate() {
        if tensor.role == Role::Local {
            continue;
        }
        let slice = device
            .allocate(tensor.bytes, AllocationKind::Plain)
            .unwrap();
        let bytes = match tensor.role {
            Role::Input => elements(rank, id, tensor),
            _ => vec![0xff; tensor.bytes],
        };
        device.upload(&slice, &bytes).unwrap();
        bindings.insert(tensor.name.to_string(), slice);
    }
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let plan = prepared.bind(&bindings).unwrap();
    if as_graph && plan.eager_only().is_none() {
        let captured = plan.capture().unwrap();
        captured.launch(&stream).unwrap();
        comm.synchronize(&stream).unwrap();
    } else {
        plan.run(&stream).unwrap();
        comm.synchronize(&stream).unwrap();
    }
    for (id, tensor) in tensors.iter().enumerate() {
        if tensor.role != Role::Output {
            continue;
        }
        let mut bytes = vec![0; tensor.bytes];
        device
            .download(&bindings[&*tensor.name], &mut bytes)
            .unwrap();
        let compared = expected.compare(rank, id, &bytes).unwrap();
        assert!(
            compared.is_right(),
            "{}: '{}' of rank {rank}: {compared}",
            program.name,
            tensor.name
        );
        // The bounds are not so wide that they allow anything: one changed element is found.
        let size = tensor.dtype.size();
        let last = bytes.len() - size;
        for byte in &mut bytes[last..] {
            *byte ^= 0x55;
        }
        let compared = expected.compare(rank, id, &bytes).unwrap();
        assert_eq!((compared.wrong, compared.is_right()), (1, false));
        assert_eq!(compared.first.map(|first| first.0), Some(last / size));
    }
}

#[test]
fn every_lowering_gives_what_it_means() {
    let types: &[DType] = match kind() {
        DeviceKind::Host => &[DType::BF16, DType::F16, DType::F32],
        // What a machine without tensor cores for f32 rounds differently is not what is tested.
        DeviceKind::Cuda => &[DType::BF16, DType::F16],
    };
    threads(world(3), |comm| {
        let world = comm.world();
        for (&dtype, transposed_b) in types.iter().zip([false, true, true]) {
            let gather = AllGatherMatmul {
                m: 16 * world,
                k: 24,
                n: vec![16, 8],
                dtype,
                bias: true,
                keep: true,
                transposed_b,
            };
            let scatter = MatmulReduceScatter {
                m: 16 * world,
                k: 8 * world,
                n: 16,
                dtype,
                bias: true,
                transposed_b,
            };
            for one in AllGatherMatmulLowering::ALL {
                let lowering = one.lowering().unwrap();
                let lowered = lower(&gather, &lowering, world, STREAMS).unwrap();
                compare(comm, lowered.program(), &lowered.parameters, true);
            }
            for one in MatmulReduceScatterLowering::ALL {
                let lowering = one.lowering().unwrap();
                let lowered = lower(&scatter, &lowering, world, STREAMS).unwrap();
                compare(comm, lowered.program(), &lowered.parameters, false);
            }
        }
    });
}

/// Collectives, the engine's transfers, sums that wrap, and copies of bytes.
#[test]
fn collectives_and_integers_give_what_they_mean() {
    let body = "program p(n, T = f16 | bf16 | f32 | f64 | i32) {
        input A: T[world, n]
        input U: u8[n]
        output B: T[world, world, n]
        output C: T[n]
        output D: T[world, n]
        output E: T[world, n]
        output F: T[world, n]
        output G: T[world, n]
        output S: T[n]
        output V: u8[n]
        B = all_gather(A)
        C = reduce_scatter(A, sum)
        D = all_reduce(A, max)
        E = all_to_all(A)
        F = broadcast(A from 1)
        G = copy(A)
        G = reduce(A, sum to 0)
        S = sum(A[0], A[1], C)
        share {
            s = send U to (rank + 1) % world via nccl
            r = receive V from (rank - 1) % world via nccl
        }
        post s, r
        wait s, r
    }";
    let program = Program::parse(body).unwrap();
    if kind() == DeviceKind::Host {
        threads(3, |comm| {
            for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64, DType::I32] {
                let parameters = Parameters::new().with("n", 40).with("T", dtype);
                compare(comm, &program, &parameters, true);
                compare(comm, &program, &parameters, false);
            }
        });
    }
}

/// A sum of more sources than a launch takes, that reads its target twice, and averages of bytes whose sums do not fit in one.
#[test]
fn long_sums_and_averages_of_bytes_give_what_they_mean() {
    let texts = [
        "program twice(n) {
            input A: f32[15, n]
            input B: f32[n]
            output S: f32[n]
            S = copy(B)
            S = sum(S, A[i] for i in 0..15, S)
        }",
        "program averages(n) {
            input X: i8[n]
            input U: u8[n]
            output Y: i8[n]
            output V: u8[n]
            kernel lane in 0..1 threads 64 {
                barrier
                Y = reduce(X on r for r in 0..world, average)
                V = reduce(U on r for r in 0..world, average)
                barrier
            }
        }",
    ];
    threads(world(3), |comm| {
        for text in texts {
            let program = Program::parse(text).unwrap();
            compare(comm, &program, &Parameters::new().with("n", 40), false);
        }
    });
}

#[test]
fn a_program_that_hangs_has_no_meaning() {
    let text = "program p(n) {
        input A: f32[n]
        output C: f32[n]
        share {
            s = send A to 1 - rank via put
            r = receive C from 1 - rank via put
        }
        post s
        post r
        wait s, r
    }";
    let program = Program::parse(text).unwrap();
    let parameters = Parameters::new().with("n", 4);
    let error = Evaluator::new(&program, 2, 1, &parameters).unwrap_err();
    assert!(error.to_string().contains("deadlock"), "{error}");
}
