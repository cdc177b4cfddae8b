//! `C = matmul(A, B)`, with A sharded over the ranks and C over the stream loop.

use super::template::{Fill, numbered, with_streams};
use super::{Lowered, Variant, check, made};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// A product of which every rank has a part of A's rows, all of B, and wants all of C.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllGatherMatmul {
    /// Rows of A on all ranks together.
    pub m: usize,
    /// Columns of A.
    pub k: usize,
    /// Columns of B; of each, where several right operands share one A.
    pub n: Vec<usize>,
    /// Element type.
    pub dtype: DType,
    /// Whether a bias is added to each product.
    pub bias: bool,
    /// Whether the gathered A is an output, `G`.
    pub keep: bool,
}

/// Every variant: what is declared.
const HEAD: &str = "    require m % world == 0

    input A: $T[m / world over ranks, k]
    @operands
    @results
";

const RING_GET: &str = "
    let next = (rank + 1) % world
    let previous = (rank - 1) % world

    # In step j a rank holds the shard of rank - j, passes it on, and fetches the one before it.
    share {
        for j in 0..world - 1 {
            let held = (rank - j) % world
            if j == 0 {
                pass = send A to next tag j via get
            } else {
                pass = send G[held] to next tag j via get
            }
            fetch = receive G[(held - 1) % world] from previous tag j via get
        }
    }
@fork
    for j in 0..world {
        let held = (rank - j) % world
        set_stream high(0)
        if j > 0 {
            post fetch[j - 1]
        }
        if j < world - 1 {
            post pass[j]
        }
        set_stream pool(j % streams)
        if j == 0 {
            @multiply C[held] A biased
            @keep
        } else {
            wait fetch[j - 1]
            @multiply C[held] G[held] biased
        }
    }
@join
    # The successor may still be reading what it was offered.
    wait pass[j] for j in 0..world - 1
";

const RING_PUT: &str = "
    let next = (rank + 1) % world
    let previous = (rank - 1) % world

    # In step j a rank receives the shard of rank - j, and puts the one of the step before.
    share {
        for j in 1..world {
            let current = (rank - j) % world
            if j == 1 {
                pass = send A to next tag j via put
            } else {
                pass = send G[(current + 1) % world] to next tag j via put
            }
            fetch = receive G[current] from previous tag j via put
        }
    }
@fork
    for j in 0..world {
        let current = (rank - j) % world
        if j > 0 {
            set_stream high(0)
            if j > 1 {
                wait fetch[j - 1]
            }
            # One group: the put waits for the successor's receive, which must not wait behind it.
            post fetch[j], pass[j]
        }
        set_stream pool(j % streams)
        if j == 0 {
            @multiply C[current] A biased
            @keep
        } else {
            wait fetch[j]
            @multiply C[current] G[current] biased
        }
    }
@join";

const RING_FINE: &str = "
    let next = (rank + 1) % world
    let previous = (rank - 1) % world

    # A shard travels in so many parts, in turn on so many streams: while one part is handed over,
    # another is under way.
    let parts = $parts
    let lanes = $lanes
    let rows = m / world / parts

    # In step j a rank receives the shard of rank - j, and puts the one of the step before.
    share {
        for j in 1..world {
            let current = (rank - j) % world
            let before = (current + 1) % world
            for p in 0..parts {
                let start = p * rows
                let end = start + rows
                if j == 1 {
                    pass = send A[start..end] to next tag j * parts + p via put
                } else {
                    pass = send G[before][start..end] to next tag j * parts + p via put
                }
                fetch = receive G[current][start..end] from previous tag j * parts + p via put
            }
        }
    }
@fork lanes
    # Every part has a place of its own, so the predecessor need not ask before each put.
    for p in 0..parts {
        set_stream high(p % lanes)
        post fetch[j][p] for j in 1..world
    }

    set_stream pool(0)
    @multiply C[rank] A biased
    @keep

    # Products in the order of arrival.
    for j in 1..world {
        let current = (rank - j) % world
        for p in 0..parts {
            let start = p * rows
            let end = start + rows
            set_stream high(p % lanes)
            if j > 1 {
                wait fetch[j - 1][p]
            }
            post pass[j][p]
            set_stream pool(((j - 1) * parts + p + 1) % streams)
            wait fetch[j][p]
            @multiply C[current][start..end] G[current][start..end] biased
        }
    }
@join lanes
";

const RING_COARSE: &str = "
    let next = (rank + 1) % world
    let previous = (rank - 1) % world

    # In step j a rank fetches the shard of rank - j, and passes the one of the step before on.
    share {
        for j in 1..world {
            let current = (rank - j) % world
            if j == 1 {
                pass = send A to next tag j via get
            } else {
                pass = send G[(current + 1) % world] to next tag j via get
            }
            fetch = receive G[current] from previous tag j via get
        }
    }
@fork
    set_stream high(0)
    for j in 1..world {
        post pass[j]
        post fetch[j]
    }

    set_stream pool(0)
    @multiply C[rank] A biased
    @keep

    # The shards of two groups of steps, each multiplied at once: large products lose less at their
    # ends.
    for g in 0..2 {
        let first = 1 + g * (world - 1) / 2
        let last = (g + 1) * (world - 1) / 2
        if first <= last {
            set_stream pool((g + 1) % streams)
            wait fetch[j] for j in first..last + 1
            # From the shard of the last step to that of the first, which may be on both ends of G.
            let start = (rank - last) % world
            let end = (rank - first) % world + 1
            if start < end {
                @multiply C[start..end] G[start..end] biased
            } else {
                @multiply C[start..world] G[start..world] biased
                @multiply C[0..end] G[0..end] biased
            }
        }
    }
@join
    # The successor may still be reading what it was offered.
    wait pass[j] for j in 1..world
";

const PAIRWISE_GET: &str = "
    # In step j a rank fetches the shard of rank + j, and rank - j fetches this rank's.
    share {
        for j in 1..world {
            let source = (rank + j) % world
            offer = send A to (rank - j) % world tag j via get
            fetch = receive G[source] from source tag j via get
        }
    }
@fork
    set_stream high(0)
    post offer[j] for j in 1..world

    for j in 0..world {
        let source = (rank + j) % world
        if j > 0 {
            set_stream high(0)
            post fetch[j]
        }
        set_stream pool(j % streams)
        if j == 0 {
            @multiply C[rank] A biased
            @keep
        } else {
            wait fetch[j]
            @multiply C[source] G[source] biased
        }
    }
@join
    # The others may still be reading the shard.
    wait offer[j] for j in 1..world
";

const PAIRWISE_PUT: &str = "
    # In step j a rank puts its shard to rank - j, and rank + j puts its own here.
    share {
        for j in 1..world {
            let source = (rank + j) % world
            push = send A to (rank - j) % world tag j via put
            fetch = receive G[source] from source tag j via put
        }
    }

    get_stream main
    for i in 0..streams {
        set_stream pool(i)
        synchronize main
    }

    for j in 0..world {
        let source = (rank + j) % world
        set_stream pool(j % streams)
        if j == 0 {
            @multiply C[rank] A biased
            @keep
        } else {
            post fetch[j], push[j]
            wait fetch[j]
            @multiply C[source] G[source] biased
        }
    }

    set_stream main
    for i in 0..streams {
        synchronize pool(i)
    }
";

const PUSH_ROTATED: &str = "
    # Every rank puts its shard to all others, starting with rank - 1, so that in each step every
    # rank is the target of one other.
    share {
        for j in 1..world {
            let source = (rank + j) % world
            push = send A to (rank - j) % world tag j via put
            fetch = receive G[source] from source tag j via put
        }
    }
@fork
    set_stream high(0)
    post fetch[j] for j in 1..world
    for j in 1..world {
        post push[j]
    }

    # Products in the order of arrival, own shard first.
    for j in 0..world {
        let source = (rank + j) % world
        set_stream pool(j % streams)
        if j == 0 {
            @multiply C[rank] A biased
            @keep
        } else {
            wait fetch[j]
            @multiply C[source] G[source] biased
        }
    }
@join";

const PUSH_FINE: &str = "
    # Every rank puts its shard to all others, starting with rank - 1, so that in each step every
    # rank is the target of one other. The last one goes in parts, of which each is multiplied while
    # the next is under way: half of the shard, half of what is left of it, and so on, and at the end
    # what equals the part before. Little is then left to multiply after the last arrival.
    let parts = $last
    let rows = m / world
    let least = rows / (1 << (parts - 1))
    share {
        for j in 1..world - 1 {
            let source = (rank + j) % world
            push = send A to (rank - j) % world tag j via put
            fetch = receive G[source] from source tag j via put
        }
        if world > 1 {
            let source = (rank - 1) % world
            for p in 0..parts {
                let left = 1 << (parts - 1 - p)
                let start = rows - left * least
                let end = rows - left / 2 * least
                push_last = send A[start..end] to (rank + 1) % world tag world + p via put
                fetch_last = receive G[source][start..end] from source tag world + p via put
            }
        }
    }

    # Every part has a place of its own: all are announced at once, before the streams fork.
    if world > 1 {
        post fetch[j] for j in 1..world - 1, fetch_last[p] for p in 0..parts
    }
@fork
    set_stream high(0)
    for j in 1..world - 1 {
        post push[j]
    }
    if world > 1 {
        for p in 0..parts {
            post push_last[p]
        }
    }

    # Products in the order of arrival, own shard first.
    set_stream pool(0)
    @multiply C[rank] A biased
    @keep
    for j in 1..world - 1 {
        let source = (rank + j) % world
        set_stream pool(j % streams)
        wait fetch[j]
        @multiply C[source] G[source] biased
    }
    if world > 1 {
        let source = (rank - 1) % world
        for p in 0..parts {
            let left = 1 << (parts - 1 - p)
            let start = rows - left * least
            let end = rows - left / 2 * least
            set_stream pool((world - 1 + p) % streams)
            wait fetch_last[p]
            @multiply C[source][start..end] G[source][start..end] biased
        }
    }
@join";

const COLLECTIVE: &str = "
    G = all_gather(A)
    @multiply C G biased
";

/// In how many parts [`Variant::RingFine`] cuts a shard of `rows`, with `columns` in the result.
///
/// The more parts, the less is left to multiply after the last arrival; but a part with fewer tiles
/// than a third of the device's multiprocessors takes as long as a larger one.
pub(super) fn parts(rows: usize, columns: usize) -> usize {
    const TILE: usize = 128 * 256;
    const LEAST_TILES: usize = 48;
    let fits = |parts: &usize| {
        rows.is_multiple_of(*parts) && (rows / parts).saturating_mul(columns) >= LEAST_TILES * TILE
    };
    [4, 2].into_iter().find(fits).unwrap_or(1)
}

/// In how many parts [`Variant::PushFine`] cuts the last shard of `rows`, with `columns` in the result:
/// a half, a quarter, and so on, the last as large as the one before.
///
/// Parts pay where arrivals are the bound, which depends on the columns alone, as long as the product
/// of the last is no shorter than the handover of one more.
pub(super) fn last_parts(rows: usize, columns: usize) -> usize {
    const TILE: usize = 128 * 128;
    const LEAST_TILES: usize = 32;
    const MAX_COLUMNS: usize = 1536;
    const MOST: usize = 5;
    let fits = |parts: &usize| {
        let halvings = parts - 1;
        let least = rows >> halvings;
        rows.is_multiple_of(1 << halvings) && least.saturating_mul(columns) / TILE >= LEAST_TILES
    };
    match columns <= MAX_COLUMNS {
        true => (2..=MOST).rev().find(fits).unwrap_or(1),
        false => 1,
    }
}

/// Lowers an all-gather + matmul to a program for `world` ranks, with the products on `streams`
/// streams in turn.
///
/// The result C is `[world, m / world, n]`, that is `[m, n]`, in rank order of A's parts. The
/// parameters are `m`, `k` and `n`, or `n0`, `n1`, … where there are several right operands; the
/// inputs A, B (`B0`, …) and `bias`, the outputs C (`C0`, …) and, where A is kept, G.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where `m` does not divide by
/// the world size, a size is zero, or the element type has no products.
pub fn lower_all_gather_matmul(
    spec: &AllGatherMatmul,
    world: usize,
    variant: Variant,
    streams: usize,
) -> Result<Lowered> {
    if spec.dtype.matmul_tolerance().is_none() || spec.n.is_empty() {
        return Err(Error::invalid(format!(
            "{} products of {}: there are products of f16, bf16 and f32",
            spec.n.len(),
            spec.dtype
        )));
    }
    let names: Vec<String> = (0..spec.n.len())
        .map(|index| numbered("n", index, spec.n.len()))
        .collect();
    let mut sizes = vec![("m", spec.m), ("k", spec.k)];
    sizes.extend(names.iter().map(String::as_str).zip(spec.n.iter().copied()));
    check(world, &sizes, &["m"], streams)?;
    let (body, what) = match variant {
        Variant::RingGet => (
            RING_GET,
            "travel around a ring, each rank fetching from the one before",
        ),
        Variant::RingPut => (
            RING_PUT,
            "travel around a ring, each rank putting to the one after",
        ),
        Variant::RingFine => (
            RING_FINE,
            "travel around a ring in parts, each multiplied as it arrives",
        ),
        Variant::RingCoarse => (
            RING_COARSE,
            "travel around a ring and are multiplied several at a time",
        ),
        Variant::PairwiseGet => (PAIRWISE_GET, "are fetched from their owners"),
        Variant::PairwisePut => (PAIRWISE_PUT, "are put by their owners, a step at a time"),
        Variant::PushRotated => (PUSH_ROTATED, "are put by their owners in rotated order"),
        Variant::PushFine => (
            PUSH_FINE,
            "are put by their owners in rotated order, the last in parts",
        ),
        Variant::Collective => (COLLECTIVE, "are gathered by the engine before the product"),
    };
    let gathered = match spec.keep {
        true => "    output G: $T[world over loop, m / world, k]\n",
        false => "    allocate G: $T[world over loop, m / world, k]\n",
    };
    let parts = parts(spec.m / world, spec.n.iter().sum());
    let body = with_streams(body)
        .replace("$parts", &parts.to_string())
        .replace(
            "$last",
            &last_parts(spec.m / world, spec.n.iter().sum()).to_string(),
        )
        .replace("$lanes", &parts.min(2).to_string());
    let mut template = format!(
        "# All-gather + matmul: C = A · B with the rows of A sharded over the ranks.\n\
         # The shards {what}.\n\
         program all_gather_matmul_{}({}) {{\n",
        variant.name().replace('-', "_"),
        sizes
            .iter()
            .map(|(name, _)| *name)
            .collect::<Vec<_>>()
            .join(", "),
    );
    template += HEAD;
    template += gathered;
    for line in body.lines() {
        match line.trim_start() {
            "@keep" if !spec.keep => continue,
            "@keep" => template += &line.replace("@keep", "G[rank] = copy(A)"),
            _ => template += line,
        }
        template.push('\n');
    }
    template += "}\n";
    let fill = Fill {
        dtype: spec.dtype,
        operands: spec.n.len(),
        bias: spec.bias,
        operand: "k, $",
        result: "world over loop, m / world, $",
    };
    made(variant, fill.fill(&template), &sizes, streams)
}
