//! Element-wise operations of a device, against the same in `f64`.

use crate::common::{decode, encode};
use crate::{computing, download, soon, upload};
use warplink::device::{DeviceSlice, Elementwise, ElementwiseOp, Operand};
use warplink::{DType, ErrorKind};

const COMBINING: [ElementwiseOp; 4] = [
    ElementwiseOp::Sum,
    ElementwiseOp::Product,
    ElementwiseOp::Max,
    ElementwiseOp::Min,
];

/// Small values, of which every type holds sums and products exactly.
fn value(source: usize, element: usize) -> f64 {
    [1.0, 2.0, -1.0, 3.0, -2.0][(3 * source + element) % 5]
}

fn combined(op: ElementwiseOp, values: impl Iterator<Item = f64>) -> f64 {
    values
        .reduce(|a, b| match op {
            ElementwiseOp::Product => a * b,
            ElementwiseOp::Max => a.max(b),
            ElementwiseOp::Min => a.min(b),
            _ => a + b,
        })
        .unwrap()
}

#[test]
fn elements_are_combined_in_every_type() {
    let (device, stream, compute) = computing();
    let numbers = DType::ELEMENTWISE
        .into_iter()
        .filter(|dtype| *dtype != DType::U8);
    for dtype in numbers {
        for op in COMBINING {
            // Aligned to 16 bytes and not, with and without a rest; 11 sources take two rounds of loads.
            for (count, skipped, number) in [(1003, 0, 3), (640, 1, 2), (257, 0, 11), (1, 0, 1)] {
                let values = |source: usize| (0..count).map(move |at| value(source, at));
                let whole = |source: usize| -> Vec<f64> {
                    let skip = std::iter::repeat_n(9.0, skipped);
                    skip.chain(values(source)).collect()
                };
                let skip = skipped * dtype.size();
                let part = |slice: &DeviceSlice| slice.slice(skip..slice.bytes()).unwrap();
                let sources: Vec<DeviceSlice> = (0..number)
                    .map(|source| part(&upload(&*device, dtype, &whole(source))))
                    .collect();
                let expected: Vec<f64> = (0..count)
                    .map(|at| combined(op, (0..number).map(|source| value(source, at))))
                    .collect();
                let target = part(&upload(&*device, dtype, &whole(0)));
                let request = Elementwise::new(op, dtype, &target, &sources);
                compute.elementwise(&stream, &request).unwrap();
                // And in place, made ready before.
                let request = Elementwise::new(op, dtype, &sources[0], &sources);
                let launch = compute.clone().prepare_elementwise(&request).unwrap();
                launch.enqueue(&stream).unwrap();
                stream.synchronize(soon()).unwrap();
                for slice in [&target, &sources[0]] {
                    let seen = download(&*device, dtype, slice);
                    assert_eq!(seen, expected, "{op} of {number} x {count} {dtype}");
                }
            }
        }
    }
}

#[test]
fn sums_of_halves_are_rounded_once_and_integers_wrap() {
    let (device, stream, compute) = computing();
    let run = |op: ElementwiseOp, dtype: DType, values: &[f64]| {
        let sources: Vec<_> = values
            .iter()
            .map(|value| upload(&*device, dtype, &[*value]))
            .collect();
        let target = upload(&*device, dtype, &[0.0]);
        let request = Elementwise::new(op, dtype, &target, &sources);
        compute.elementwise(&stream, &request).unwrap();
        stream.synchronize(soon()).unwrap();
        download(&*device, dtype, &target)[0]
    };
    // 256 + 1 is no bf16, and 2048 + 1 no f16: each addend counts only where the sum is wider.
    let sum = ElementwiseOp::Sum;
    assert_eq!(run(sum, DType::BF16, &[256.0, 1.0, 1.0]), 258.0);
    assert_eq!(run(sum, DType::F16, &[2048.0, 1.0, 1.0]), 2050.0);
    let most = f64::from(i32::MAX);
    assert_eq!(run(sum, DType::I32, &[most, 1.0]), f64::from(i32::MIN));
    let product = run(ElementwiseOp::Product, DType::I32, &[65537.0, 65539.0]);
    assert_eq!(product, f64::from(65537_i32.wrapping_mul(65539)));
    assert_eq!(run(ElementwiseOp::Max, DType::F32, &[f64::NAN, 2.0]), 2.0);
    assert_eq!(run(ElementwiseOp::Min, DType::F64, &[3.0, f64::NAN]), 3.0);
}

#[test]
fn every_type_is_cast_to_every_other() {
    let (device, stream, compute) = computing();
    let values = [
        0.0, 1.0, -1.0, 2.75, -2.75, 100.5, 255.0, 300.0, -70.0, 2049.0, 65504.0, 1e6, 3e9, -3e9,
    ];
    for from in DType::ELEMENTWISE {
        for to in DType::ELEMENTWISE {
            let source = upload(&*device, from, &values);
            let target = upload(&*device, to, &values);
            let request = Elementwise::cast((to, &target), (from, &source));
            compute.elementwise(&stream, &request).unwrap();
            stream.synchronize(soon()).unwrap();
            // What the source holds; a cast to a half goes by way of `f32`.
            let held = download(&*device, from, &source);
            let single: Vec<f64> = held.iter().map(|v| f64::from(*v as f32)).collect();
            let half = matches!(to, DType::F16 | DType::BF16);
            let expected = decode(to, &encode(to, if half { &single } else { &held }));
            assert_eq!(
                download(&*device, to, &target),
                expected,
                "from {from} to {to}"
            );
        }
    }
    let source = upload(&*device, DType::F32, &[f64::NAN, f64::INFINITY]);
    let target = upload(&*device, DType::I32, &[7.0, 7.0]);
    let request = Elementwise::cast((DType::I32, &target), (DType::F32, &source));
    compute.elementwise(&stream, &request).unwrap();
    stream.synchronize(soon()).unwrap();
    let seen = download(&*device, DType::I32, &target);
    assert_eq!(seen, [0.0, f64::from(i32::MAX)]);
}

/// Operands are parts of tensors of `SHAPE`; what no operand names keeps its values.
#[test]
fn operands_may_have_strides() {
    const SHAPE: [usize; 3] = [5, 7, 6];
    let strides = [SHAPE[1] * SHAPE[2], SHAPE[2], 1];
    let count: usize = SHAPE.iter().product();
    let (device, stream, compute) = computing();
    // Extents; first elements of target and sources; strides of target and sources.
    let (a, b, c) = (strides[0], strides[1], strides[2]);
    type Case<'a> = (&'a [usize], [usize; 3], [&'a [usize]; 3]);
    let cases: [Case<'_>; 5] = [
        // A column, a row, every other of these.
        (&[5], [3, 0, 8], [&[a], &[c], &[2 * c]]),
        // [:, :, 1..4], [:, :, 2..5], [:, :, 0..3]
        (&[5, 7, 3], [1, 2, 0], [&strides; 3]),
        // [:, 2..6, 1..3], its transpose, and the same element again and again.
        (&[4, 2], [13, 20, 9], [&[b, c], &[c, b], &[0, 0]]),
        (
            &[2, 5, 2, 3],
            [0, 1, 2],
            [&[3 * b, a, b, c], &[3 * b, a, b, c], &[3 * b, a, b, c]],
        ),
        (&[1], [209, 0, 1], [&[1], &[1], &[1]]),
    ];
    for dtype in DType::ELEMENTWISE {
        for op in ElementwiseOp::ALL {
            if dtype == DType::U8 && !op.is_unary() {
                continue;
            }
            for (shape, firsts, steps) in cases {
                let from = if op == ElementwiseOp::Cast {
                    DType::F32
                } else {
                    dtype
                };
                let number = if op.is_unary() { 1 } else { 2 };
                let tensor = |which: usize| -> Vec<f64> {
                    (0..count).map(|at| value(which, at).abs()).collect()
                };
                let places = |which: usize| -> Vec<usize> {
                    let mut all = vec![firsts[which]];
                    for (extent, step) in shape.iter().zip(steps[which]) {
                        all = all
                            .iter()
                            .flat_map(|at| (0..*extent).map(move |i| at + i * step))
                            .collect();
                    }
                    all
                };
                let operand = |which: usize, dtype: DType, slice: &DeviceSlice| {
                    let places = places(which);
                    let (first, last) = (firsts[which], places[places.len() - 1] + 1);
                    let bytes = first * dtype.size()..last * dtype.size();
                    Operand {
                        slice: slice.slice(bytes).unwrap(),
                        strides: steps[which].to_vec(),
                    }
                };
                let target = upload(&*device, dtype, &tensor(0));
                let sources: Vec<Operand> = (1..=number)
                    .map(|which| operand(which, from, &upload(&*device, from, &tensor(which))))
                    .collect();
                let request = Elementwise {
                    op,
                    dtype,
                    source_dtype: from,
                    shape: shape.to_vec(),
                    target: operand(0, dtype, &target),
                    sources,
                };
                compute.elementwise(&stream, &request).unwrap();
                stream.synchronize(soon()).unwrap();
                let mut expected = tensor(0);
                for (index, place) in places(0).into_iter().enumerate() {
                    let values = (1..=number).map(|which| tensor(which)[places(which)[index]]);
                    expected[place] = combined(op, values);
                }
                let seen = download(&*device, dtype, &target);
                assert_eq!(seen, expected, "{op} of {shape:?} {dtype}");
            }
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let (device, stream, compute) = computing();
    let whole = upload(&*device, DType::F32, &[0.0; 64]);
    let part = |from: usize, to: usize| whole.slice(4 * from..4 * to).unwrap();
    let sum = |dtype: DType, target: &DeviceSlice, sources: &[DeviceSlice]| {
        Elementwise::new(ElementwiseOp::Sum, dtype, target, sources)
    };
    let good = sum(DType::F32, &part(0, 8), &[part(8, 16)]);
    let with = |change: &dyn Fn(&mut Elementwise)| {
        let mut request = good.clone();
        change(&mut request);
        request
    };
    let refused = [
        sum(DType::F32, &part(0, 8), &[]),
        sum(DType::F32, &part(0, 8), &[part(8, 15)]),
        sum(DType::F32, &part(0, 8), &vec![part(8, 16); 17]),
        sum(DType::F32, &part(0, 8), &[part(4, 12)]),
        with(&|request| request.source_dtype = DType::I32),
        with(&|request| request.shape = vec![2, 4]),
        with(&|request| request.shape = vec![1; 5]),
        with(&|request| request.target.strides = vec![2]),
        with(&|request| {
            request.op = ElementwiseOp::Cast;
            request.sources.push(Operand::contiguous(part(16, 24)));
        }),
    ];
    for request in refused {
        let error = compute.elementwise(&stream, &request).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{request:?}");
    }
    let bytes = sum(DType::U8, &part(0, 8), &[part(8, 16)]);
    let error = compute.elementwise(&stream, &bytes).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}
