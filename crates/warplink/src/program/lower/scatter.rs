//! `C = matmul(A, B)`, with the contraction sharded over the ranks and the rows of C scattered.

use super::template::{Fill, with_streams};
use super::{Lowered, Variant, check, made};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// A product of which every rank has a part of the contraction and wants a part of C's rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatmulReduceScatter {
    /// Rows of A; every rank gets its part of as many rows of C.
    pub m: usize,
    /// Columns of A and rows of B on all ranks together.
    pub k: usize,
    /// Columns of B.
    pub n: usize,
    /// Element type; partial sums travel in it.
    pub dtype: DType,
    /// Whether a bias is added.
    pub bias: bool,
}

const HEAD: &str = "    require m % world == 0
    require k % world == 0

    input A: $T[world, m / world, k / world over ranks]
    @operands
    @results
";

/// Get: the send is offered where the product is; the receives follow one another.
const PAIRWISE_GET: &str = "
    # Products for the others, by rank, and what the others have for this one.
    allocate P: $T[world over loop, m / world, n]
    allocate R: $T[world, m / world, n]

    share {
        for s in 1..world {
            let target = (rank + s) % world
            let source = (rank - s) % world
            give = send P[target] to target tag s via get
            take = receive R[source] from source tag s via get
        }
    }
@fork
    # Own block last: by then the others' have arrived.
    for s in 1..world + 1 {
        let block = (rank + s) % world
        set_stream pool(s % streams)
        if s < world {
            @multiply P[block] A[block]
            post give[s]
            set_stream high(0)
            post take[s]
        } else {
            @multiply R[rank] A[rank] biased
        }
    }
@join
    C = sum(R[r] for r in 0..world)
    # The others may still be reading what they were offered.
    wait give[s] for s in 1..world
";

/// Put, each step in the stream of its product.
const PAIRWISE_PUT: &str = "
    # Products for the others, by rank, and what the others have for this one.
    allocate P: $T[world over loop, m / world, n]
    allocate R: $T[world, m / world, n]

    share {
        for s in 1..world {
            let target = (rank + s) % world
            let source = (rank - s) % world
            give = send P[target] to target tag s via put
            take = receive R[source] from source tag s via put
        }
    }

    get_stream main
    post take[s] for s in 1..world
    for i in 0..streams {
        set_stream pool(i)
        synchronize main
    }

    # Own block last: by then the others' have arrived.
    for s in 1..world + 1 {
        let block = (rank + s) % world
        set_stream pool(s % streams)
        if s < world {
            @multiply P[block] A[block]
            post give[s]
        } else {
            @multiply R[rank] A[rank] biased
        }
    }

    set_stream main
    for i in 0..streams {
        synchronize pool(i)
    }
    wait take[s] for s in 1..world
    C = sum(R[r] for r in 0..world)
";

/// Put, all from one stream of high priority.
const PUSH_ROTATED: &str = "
    # Products for the others, by rank, and what the others have for this one.
    allocate P: $T[world over loop, m / world, n]
    allocate R: $T[world, m / world, n]

    share {
        for s in 1..world {
            let target = (rank + s) % world
            let source = (rank - s) % world
            give = send P[target] to target tag s via put
            take = receive R[source] from source tag s via put
        }
    }
@fork
    set_stream high(0)
    post take[s] for s in 1..world

    # Own block last: by then the others' have arrived.
    for s in 1..world + 1 {
        let block = (rank + s) % world
        set_stream pool(s % streams)
        if s < world {
            @multiply P[block] A[block]
            set_stream high(0)
            synchronize pool(s % streams)
            post give[s]
        } else {
            @multiply R[rank] A[rank] biased
        }
    }
@join
    wait take[s] for s in 1..world
    C = sum(R[r] for r in 0..world)
";

/// Put, by the products' own stores.
const PUSH_FINE: &str = "
    # What the others have for this rank, and its own. P is the others' only by name: their products
    # are stored where they are received.
    allocate P: $T[world, m / world, n]
    allocate R: $T[world, m / world, n]

    share {
        for s in 1..world {
            let target = (rank + s) % world
            let source = (rank - s) % world
            give = send P[target] to target tag s via put
            take = receive R[source] from source tag s via put
        }
    }

    get_stream main
    post take[s] for s in 1..world
    for i in 0..streams {
        set_stream pool(i)
        synchronize main
    }

    # The own block, while the others say that they are ready.
    set_stream pool(1 % streams)
    @multiply R[rank] A[rank] biased

    set_stream pool(0)
    post give[s] = matmul(A[(rank + s) % world], B) for s in 1..world

    set_stream main
    for i in 0..streams {
        synchronize pool(i)
    }
    wait take[s] for s in 1..world
    C = sum(R[r] for r in 0..world)
";

const RING_GET: &str = "
    # Products by block, and the sums of the ranks before this one.
    allocate P: $T[world over loop, m / world, n]
    allocate R: $T[world, m / world, n]

    let next = (rank + 1) % world
    let previous = (rank - 1) % world

    # A block starts at the rank after its owner and ends at its owner, adding up on the way.
    share {
        for s in 1..world {
            let done = (rank - s) % world
            pass = send P[done] to next tag s via get
            take = receive R[(done - 1) % world] from previous tag s via get
        }
    }
@fork
    for s in 0..world {
        let block = (rank - 1 - s) % world
        if s > 0 {
            set_stream high(0)
            post take[s]
        }
        set_stream pool(s % streams)
        if s < world - 1 {
            @multiply P[block] A[block]
        } else {
            @multiply P[block] A[block] biased
        }
        if s > 0 {
            wait take[s]
            if s < world - 1 {
                P[block] = sum(P[block], R[block])
            } else {
                C = sum(P[block], R[block])
            }
        } else if world == 1 {
            C = copy(P[block])
        }
        if s < world - 1 {
            post pass[s + 1]
        }
    }
@join
    # The successor may still be reading what it was offered.
    wait pass[s] for s in 1..world
";

const RING_PUT: &str = "
    # Products by block, and the sums of the ranks before this one.
    allocate P: $T[world over loop, m / world, n]
    allocate R: $T[world, m / world, n]

    let next = (rank + 1) % world
    let previous = (rank - 1) % world

    # A block starts at the rank after its owner and ends at its owner, adding up on the way.
    share {
        for s in 1..world {
            let done = (rank - s) % world
            pass = send P[done] to next tag s via put
            take = receive R[(done - 1) % world] from previous tag s via put
        }
    }
@fork
    for s in 0..world {
        let block = (rank - 1 - s) % world
        if s > 0 {
            # What the step before added up goes on while this step multiplies. One group: the put
            # waits for the successor's receive, which must not wait behind it.
            set_stream high(0)
            synchronize pool((s - 1) % streams)
            post take[s], pass[s]
        }
        set_stream pool(s % streams)
        if s < world - 1 {
            @multiply P[block] A[block]
        } else {
            @multiply P[block] A[block] biased
        }
        if s > 0 {
            wait take[s]
            if s < world - 1 {
                P[block] = sum(P[block], R[block])
            } else {
                C = sum(P[block], R[block])
            }
        } else if world == 1 {
            C = copy(P[block])
        }
    }
@join";

/// Put, around one ring or more.
const RING_FINE: &str = "
    # A block goes from a rank to the one so many after it, and each adds its product. With a stride of d
    # there are d sums of every block, each of every d-th rank, and each has d steps to arrive in before
    # it is added to.
    let stride = $stride

    # Sums by block and, behind them, those of the own block that do not come around to it.
    allocate P: $T[world - 1 + stride, m / world, n]

    # A block travels in so many parts: while one part is under way, the product of another runs.
    let parts = $parts
    let rows = m / world / parts

    share {
        for s in 0..world - 1 {
            let block = (rank - 1 - s) % world
            let left = world - 1 - s
            for p in 0..parts {
                let start = p * rows
                let end = start + rows
                if left >= stride {
                    pass = send P[block][start..end] to (rank + stride) % world tag s * parts + p via put
                } else {
                    pass = send P[block][start..end] to block tag s * parts + p via put
                }
                if left > stride {
                    let same = (block - stride) % world
                    take = receive P[same][start..end] from (rank - stride) % world tag s * parts + p via put
                } else if left == stride {
                    take = receive C[start..end] from (rank - stride) % world tag s * parts + p via put
                } else {
                    let last = world - 1 + left
                    take = receive P[last][start..end] from (rank - left) % world tag s * parts + p via put
                }
            }
        }
    }

    # On two streams, one put is handed over beside another. Around one ring, the other would only delay
    # the part that is needed first.
    let lanes = $lanes
@fork lanes
    # Every part has a place of its own, so nobody need ask before each put.
    set_stream high(0)
    for p in 0..parts {
        post take[s][p] for s in 0..world - 1
    }

    for s in 0..world {
        let block = (rank - 1 - s) % world
        for p in 0..parts {
            let turn = s * parts + p
            let start = p * rows
            let end = start + rows
            set_stream pool(turn % streams)
            if s >= stride {
                wait take[s - stride][p]
            }
            if world == 1 {
                @multiply C[start..end] A[block][start..end] biased
            } else if s < stride {
                @multiply P[block][start..end] A[block][start..end]
            } else if s < world - 1 {
                @accumulate P[block][start..end] A[block][start..end]
            } else {
                @accumulate C[start..end] A[block][start..end] biased
            }
            if s < world - 1 {
                set_stream high(turn % lanes)
                synchronize pool(turn % streams)
                post pass[s][p]
            } else if stride > 1 {
                wait take[s - j][p] for j in 1..stride
                C[start..end] = sum(C[start..end], P[s + j][start..end] for j in 1..stride)
            }
        }
    }
@join lanes
";

/// Get, with an early sum.
const RING_COARSE: &str = "
    # Products for the others, by rank, and what the others have for this one.
    allocate P: $T[world over loop, m / world, n]
    allocate R: $T[world, m / world, n]

    # A block travels in so many parts: the first leaves early, and little is left to add up after the
    # last.
    let parts = $parts
    let rows = m / world / parts

    share {
        for s in 1..world {
            let target = (rank + s) % world
            let source = (rank - s) % world
            for p in 0..parts {
                let start = p * rows
                let end = start + rows
                give = send P[target][start..end] to target tag s * parts + p via get
                take = receive R[source][start..end] from source tag s * parts + p via get
            }
        }
    }

    # One stream fetches, one adds up, and one offers, so that no product waits for an offer.
    let lanes = 3
@fork lanes
    for s in 1..world {
        let block = (rank + s) % world
        for p in 0..parts {
            let start = p * rows
            let end = start + rows
            set_stream pool((s * parts + p) % streams)
            @multiply P[block][start..end] A[block][start..end]
            set_stream high(2)
            synchronize pool((s * parts + p) % streams)
            post give[s][p]
            set_stream high(0)
            post take[s][p]
        }
    }

    # What arrives in the first half of the steps is added up during the last products.
    let early = (world + 1) / 2
    for p in 0..parts {
        let start = p * rows
        let end = start + rows
        if world > 1 {
            set_stream high(1)
            wait take[s][p] for s in 1..early + 1
        }
        if early > 1 {
            R[(rank - early) % world][start..end] = sum(R[(rank - s) % world][start..end] for s in 1..early + 1)
        }
    }

    # Own block last: by then the others' have arrived.
    for p in 0..parts {
        let start = p * rows
        let end = start + rows
        set_stream pool(p % streams)
        @multiply R[rank][start..end] A[rank][start..end] biased
        set_stream high(1)
        synchronize pool(p % streams)
        wait take[s][p] for s in early + 1..world
        C[start..end] = sum(R[rank][start..end], R[(rank - s) % world][start..end] for s in early..world)
    }
@join lanes
    # The others may still be reading what they were offered.
    for p in 0..parts {
        wait give[s][p] for s in 1..world
    }
";

const COLLECTIVE: &str = "
    allocate P: $T[world, m / world, n]

@whole
    C = reduce_scatter(P, sum)
";

/// In how many parts [`Variant::RingCoarse`] and [`Variant::RingFine`] cut a block of `rows`: in two
/// where a part still keeps the device busy for some waves of tiles.
pub(super) fn parts(rows: usize, columns: usize) -> usize {
    const LEAST: usize = 2 * 132 * 128 * 256;
    if rows.is_multiple_of(2) && (rows / 2).saturating_mul(columns) >= LEAST {
        2
    } else {
        1
    }
}

/// From a rank to how many after it [`Variant::RingFine`] passes a block on: as many as the steps that
/// go by until a part of a block, multiplied and put, can be added to.
///
/// Half the ranks at most: with more, most sums would be of one product, and be added up at the end.
/// What is lowered depends on the problem alone, not on the machine that a variant is chosen for: a
/// stride that is larger than need be costs a sum, and nothing else.
pub(super) fn stride(spec: &MatmulReduceScatter, world: usize) -> usize {
    // Of H200, for products of this length.
    const LINK: f64 = 388e9;
    // To the put and from it, in seconds, while products keep the device busy.
    const HANDOVERS: f64 = 40e-6;
    let flops = match spec.dtype {
        DType::F32 => 54e12,
        _ => 790e12,
    };
    let most = (world / 2).max(1);
    let rows = spec.m / world;
    let elements = rows as f64 * spec.n as f64;
    let product = 2.0 * elements * (spec.k / world) as f64 / flops;
    let put = elements * spec.dtype.size() as f64 / LINK;
    let part = (product + put) / parts(rows, spec.n) as f64 + HANDOVERS;
    ((part / product).ceil() as usize).clamp(1, most)
}

/// Lowers a matmul + reduce-scatter to a program for `world` ranks, with the products on `streams`
/// streams in turn.
///
/// Every rank's A is `[m, k / world]`, declared as `[world, m / world, k / world]`, its B
/// `[k / world, n]`, its C `[m / world, n]`. The parameters are `m`, `k` and `n`, the inputs A, B
/// and `bias`, the output C. Where the world is more than one rank, sums are formed from partial
/// products rounded to the element type. Where they add up around a ring they are rounded at every
/// rank, and where some are added up early, those once more.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where `m` or `k` does not
/// divide by the world size, a size is zero, or the element type has no products.
pub fn lower_matmul_reduce_scatter(
    spec: &MatmulReduceScatter,
    world: usize,
    variant: Variant,
    streams: usize,
) -> Result<Lowered> {
    if spec.dtype.matmul_tolerance().is_none() {
        return Err(Error::invalid(format!(
            "products of {}: there are products of f16, bf16 and f32",
            spec.dtype
        )));
    }
    let sizes = [("m", spec.m), ("k", spec.k), ("n", spec.n)];
    check(world, &sizes, &["m", "k"], streams)?;
    let (body, what) = match variant {
        Variant::RingGet => (
            RING_GET,
            "add up around a ring, fetched from the rank before",
        ),
        Variant::RingPut => (RING_PUT, "add up around a ring, put to the rank after"),
        Variant::RingFine => (
            RING_FINE,
            "add up around rings in parts, each product onto what arrived",
        ),
        Variant::RingCoarse => (
            RING_COARSE,
            "are fetched by their owners, and added up early where they arrive early",
        ),
        Variant::PairwiseGet => (PAIRWISE_GET, "are fetched by their owners"),
        Variant::PairwisePut => (
            PAIRWISE_PUT,
            "are put to their owners from the products' streams",
        ),
        Variant::PushRotated => (PUSH_ROTATED, "are put to their owners in rotated order"),
        Variant::PushFine => (PUSH_FINE, "are stored at their owners, tile by tile"),
        Variant::Collective => (COLLECTIVE, "are reduced by the engine after the product"),
    };
    let whole = match spec.bias {
        true => {
            "    # The bias counts once.\n    if rank == 0 {\n        @multiply P A biased\n    } else \
             {\n        @multiply P A\n    }"
        }
        false => "    @multiply P A",
    };
    let parts = parts(spec.m / world, spec.n);
    let stride = stride(spec, world);
    let body = with_streams(body)
        .replace("@whole", whole)
        .replace("$parts", &parts.to_string())
        .replace("$stride", &stride.to_string())
        .replace("$lanes", if stride == 1 { "1" } else { "2" });
    let template = format!(
        "# Matmul + reduce-scatter: C = A · B with the contraction sharded over the ranks.\n\
         # The partial products {what}.\n\
         program matmul_reduce_scatter_{}(m, k, n) {{\n{HEAD}{}\n}}\n",
        variant.name().replace('-', "_"),
        body.trim_end(),
    );
    let fill = Fill {
        dtype: spec.dtype,
        operands: 1,
        bias: spec.bias,
        operand: "k / world over ranks, $",
        result: "m / world over ranks, $",
    };
    made(variant, fill.fill(&template), &sizes, streams)
}
