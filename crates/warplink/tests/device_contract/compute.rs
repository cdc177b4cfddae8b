//! Matmuls and sums of a device, against double precision.

use crate::common::values;
use crate::{computing, download, soon, upload};
use warplink::device::{
    AllocationKind, DeviceSlice, Elementwise, ElementwiseOp, MatmulSpec, Stream,
};
use warplink::{DType, ErrorKind};

/// Numbers from -1 to 1.
fn random(seed: usize, round: usize, count: usize) -> Vec<f64> {
    let bytes = values(seed, round, count);
    bytes
        .iter()
        .map(|byte| f64::from(*byte) / 128.0 - 1.0)
        .collect()
}

#[test]
fn products_and_sums_agree_with_double_precision() {
    let (device, stream, compute) = computing();
    let sum = |stream: &Stream, dtype: DType, target: &DeviceSlice, sources: &[DeviceSlice]| {
        let request = Elementwise::new(ElementwiseOp::Sum, dtype, target, sources);
        compute.elementwise(stream, &request)
    };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (bias, accumulate) in [(false, false), (true, false), (false, true)] {
            for (transposed_a, transposed_b) in
                [(false, false), (false, true), (true, false), (true, true)]
            {
                let spec = MatmulSpec {
                    bias,
                    accumulate,
                    transposed_a,
                    transposed_b,
                    ..MatmulSpec::new(48, 40, 72, dtype)
                };
                check_product(&*device, &*compute, &stream, &spec);
            }
        }
    }
    for dtype in DType::ELEMENTWISE
        .into_iter()
        .filter(|dtype| *dtype != DType::U8)
    {
        let bytes = 1003 * dtype.size();
        let parts: Vec<_> = (1..=5)
            .map(|number| upload(&*device, dtype, &[f64::from(number); 1003]))
            .collect();
        let target = device.allocate(bytes, AllocationKind::Plain).unwrap();
        sum(&stream, dtype, &target, &parts).unwrap();
        sum(&stream, dtype, &parts[0], &parts[..2]).unwrap();
        stream.synchronize(soon()).unwrap();
        let seen = |slice| download(&*device, dtype, slice);
        assert_eq!(seen(&target), vec![15.0; 1003], "{dtype}");
        assert_eq!(seen(&parts[0]), vec![3.0; 1003], "{dtype}, in place");
    }
    let a = device.allocate(64, AllocationKind::Plain).unwrap();
    let spec = MatmulSpec::new(4, 4, 4, DType::F32);
    let with_bias = MatmulSpec { bias: true, ..spec };
    for (spec, c) in [(spec, &a.slice(0..32).unwrap()), (with_bias, &a)] {
        let refused = compute.matmul(&stream, &spec, &a, &a, c, None);
        assert!(refused.is_err(), "{spec:?}");
    }
    assert!(sum(&stream, DType::F32, &a, &[]).is_err());
}

/// A product of blocks of larger matrices is that of the same blocks by themselves, and leaves what is
/// around its result alone.
#[test]
fn blocks_with_leading_dimensions_are_multiplied() {
    let (device, stream, compute) = computing();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (transposed_a, transposed_b) in
            [(false, false), (false, true), (true, false), (true, true)]
        {
            for (m, n, k, apart) in [(48, 40, 72, 8), (5, 3, 7, 1)] {
                let spec = MatmulSpec {
                    transposed_a,
                    transposed_b,
                    accumulate: true,
                    ..MatmulSpec::new(m, n, k, dtype)
                };
                let shape = |rows: usize, columns: usize, transposed: bool| {
                    if transposed {
                        (columns, rows)
                    } else {
                        (rows, columns)
                    }
                };
                let shapes = [shape(m, k, transposed_a), shape(k, n, transposed_b), (m, n)];
                // Each operand by itself, and as a block of a matrix with longer rows.
                let mut alone = Vec::new();
                let mut blocks = Vec::new();
                let mut whole = Vec::new();
                for (seed, (rows, length)) in shapes.into_iter().enumerate() {
                    let step = length + apart;
                    let values = random(seed, 5, rows * step);
                    let packed: Vec<f64> = values
                        .chunks_exact(step)
                        .flat_map(|row| row[..length].to_vec())
                        .collect();
                    alone.push(upload(&*device, dtype, &packed));
                    let all = upload(&*device, dtype, &values);
                    let end = (rows - 1) * step + length;
                    blocks.push(all.slice(0..end * dtype.size()).unwrap());
                    whole.push((all, step, length));
                }
                let leading = whole.iter().map(|(_, step, _)| Some(*step));
                let leading: Vec<Option<usize>> = leading.collect();
                let blocked = MatmulSpec {
                    leading: leading.try_into().unwrap(),
                    ..spec
                };
                let (c, step, length) = &whole[2];
                let read = |slice| download(&*device, dtype, slice);
                let before = read(c);
                compute.prepare_matmul(&blocked).unwrap();
                compute
                    .matmul(&stream, &spec, &alone[0], &alone[1], &alone[2], None)
                    .unwrap();
                compute
                    .matmul(&stream, &blocked, &blocks[0], &blocks[1], &blocks[2], None)
                    .unwrap();
                stream.synchronize(soon()).unwrap();
                let (wanted, after) = (read(&alone[2]), read(c));
                for (row, (seen, old)) in after
                    .chunks_exact(*step)
                    .zip(before.chunks_exact(*step))
                    .enumerate()
                {
                    assert_eq!(seen[*length..], old[*length..], "{blocked:?}");
                    let wanted = &wanted[row * length..(row + 1) * length];
                    for (seen, wanted) in seen.iter().zip(wanted) {
                        let most = 4.0 * dtype.matmul_tolerance().unwrap() * wanted.abs().max(4.0);
                        assert!(
                            (seen - wanted).abs() <= most,
                            "{blocked:?}: {seen}, {wanted}"
                        );
                    }
                }
                let short = MatmulSpec {
                    leading: [Some(1), None, None],
                    ..spec
                };
                let refused =
                    compute.matmul(&stream, &short, &alone[0], &alone[1], &alone[2], None);
                refused.unwrap_err();
            }
        }
    }
}

#[test]
fn a_batch_of_products_is_its_products() {
    let (device, stream, compute) = computing();
    let upload = |dtype, seed, count| upload(&*device, dtype, &random(seed, 3, count));
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        // Rows that are and are not multiples of 16 bytes, with and without a bias, transposed or not.
        for (m, n, k, bias, transposed_a, transposed_b) in [
            (48, 40, 72, false, false, false),
            (7, 5, 3, false, false, false),
            (256, 128, 64, false, false, false),
            (256, 512, 192, false, false, false),
            (16, 16, 16, true, false, false),
            (48, 40, 72, false, false, true),
            (256, 512, 192, false, true, true),
            (7, 5, 3, false, true, false),
        ] {
            let spec = MatmulSpec {
                bias,
                transposed_a,
                transposed_b,
                ..MatmulSpec::new(m, n, k, dtype)
            };
            let (b, vector) = (upload(dtype, 1, k * n), upload(dtype, 2, n));
            let vector = bias.then_some(&vector);
            let products: Vec<_> = (0..3)
                .map(|index| (upload(dtype, 3 + index, m * k), upload(dtype, 9, m * n)))
                .collect();
            compute.prepare_matmul(&spec).unwrap();
            let wanted: Vec<_> = products
                .iter()
                .map(|(a, _)| {
                    let c = upload(dtype, 10, m * n);
                    compute.matmul(&stream, &spec, a, &b, &c, vector).unwrap();
                    c
                })
                .collect();
            let batch = compute
                .clone()
                .prepare_matmuls(&spec, &products, &b, vector)
                .unwrap();
            stream.begin_capture().unwrap();
            batch.enqueue(&stream).unwrap();
            let graph = stream.end_capture().unwrap();
            for captured in [false, true] {
                for (_, c) in &products {
                    device.upload(c, &vec![0xff; c.bytes()]).unwrap();
                }
                if captured {
                    graph.launch(&stream).unwrap()
                } else {
                    batch.enqueue(&stream).unwrap()
                }
                stream.synchronize(soon()).unwrap();
                for ((_, c), wanted) in products.iter().zip(&wanted) {
                    let [seen, wanted] = [c, wanted].map(|slice| download(&*device, dtype, slice));
                    let off: f64 = seen.iter().zip(&wanted).map(|(a, b)| (a - b).powi(2)).sum();
                    let norm: f64 = wanted.iter().map(|value| value * value).sum();
                    let error = (off / norm).sqrt();
                    assert!(
                        error < dtype.matmul_tolerance().unwrap(),
                        "{spec:?}, captured: {captured}: {error:.2e}"
                    );
                }
            }
        }
    }
    let (a, c) = (upload(DType::F32, 1, 64), upload(DType::F32, 2, 64));
    let spec = MatmulSpec::new(8, 8, 8, DType::F32);
    let short = [(a.clone(), c.slice(0..128).unwrap())];
    let error = compute.prepare_matmuls(&spec, &short, &a, None);
    assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidArgument);
}

fn check_product(
    device: &dyn warplink::Device,
    compute: &dyn warplink::device::Compute,
    stream: &warplink::device::Stream,
    spec: &MatmulSpec,
) {
    let (m, n, k, dtype) = (spec.m, spec.n, spec.k, spec.dtype);
    let counts = [m * k, k * n, m * n, n];
    let given = std::array::from_fn(|at| upload(device, dtype, &random(1 + at, 7, counts[at])));
    // As the type holds them.
    let [a, b, c, bias] = given.each_ref().map(|slice| download(device, dtype, slice));
    let [da, db, dc, dbias] = given;
    compute.prepare_matmul(spec).unwrap();
    compute
        .matmul(stream, spec, &da, &db, &dc, spec.bias.then_some(&dbias))
        .unwrap();
    stream.synchronize(soon()).unwrap();
    let seen = download(device, dtype, &dc);
    let (mut off, mut norm) = (0.0, 0.0);
    for row in 0..m {
        for column in 0..n {
            let left = |i: usize| {
                if spec.transposed_a {
                    a[i * m + row]
                } else {
                    a[row * k + i]
                }
            };
            let right = |i: usize| {
                if spec.transposed_b {
                    b[column * k + i]
                } else {
                    b[i * n + column]
                }
            };
            let mut want: f64 = (0..k).map(|i| left(i) * right(i)).sum();
            want += if spec.bias { bias[column] } else { 0.0 };
            want += if spec.accumulate {
                c[row * n + column]
            } else {
                0.0
            };
            off += (seen[row * n + column] - want).powi(2);
            norm += want * want;
        }
    }
    let error = (off / norm).sqrt();
    assert!(
        error < dtype.matmul_tolerance().unwrap(),
        "{spec:?}: error {error:.2e}"
    );
}
