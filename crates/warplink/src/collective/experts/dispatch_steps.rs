//! Fragments of the dispatch program; each variant of its text contains some of them. Names in braces are replaced by
//! `dispatch_text`.

/// The range of experts that rank q has.
pub(super) const OF_RANK: &str = "in q * per..(q + 1) * per";

/// Numbers of rows by source rank: each rank states its own to the others.
pub(super) const COUNTS_BY_SOURCE: &str = "\
if first == 0 {
    for r in 0..world {
        let q = (rank + r) % world
        let came = count({of}E[0..whole] {of rank})
        R[slot][rank] on q = integer(min(came, rows))
    }
    barrier
    for p in 0..world { K[p] = copy(R[slot][p]) }
}";

/// For each expert that this lane counts, rows that are dropped, which are the last ones for its rank; and what lanes state to all
/// ranks about the others.
pub(super) const COUNTED: &str = "\
for k in 0..(experts - i + each - 1) / each {
    let x = i + k * each
    let q = x / per
    let wanted = count({of}E[0..whole] {of rank})
    if wanted > rows {
        let cut = position(rows of {of}E[0..whole] {of rank})
        {dropped}
        {stated}
    } else {
        {none dropped}
        {all stated}
    }
}";

/// Rows up to slot {end} for the experts of rank q up to x, and none before the first of these.
pub(super) const STATED: &str = "\
let up = count(E[0..{end}] in q * per..x + 1)
for r in 0..world {
    let o = (rank + r) % world
    {up} on o = integer(up)
    if x == q * per { {none} on o = integer(0) }
}";

/// Where rows of this rank begin among those of expert x: behind those of earlier experts, and those of earlier ranks. And how many
/// rows an expert of this rank has.
pub(super) const BASES: &str = "\
for k in 0..(experts - i + each - 1) / each {
    let x = i + k * each
    let q = x / per
    {earlier}
    {base} = integer({sum})
    if q == rank {
        {ends}
        K[x - rank * per] = integer({difference})
    }
}";

/// Slots without an expert have no row.
pub(super) const NOBODY_OF_SLOTS: &str = "\
let nobody = count(E[start..stop] not in 0..experts)
for j in 0..nobody {
    let s = position(j of E[start..stop] not in 0..experts)
    P[start + s] = integer(none)
}";

/// Tokens without an expert of a rank have no row there.
pub(super) const NOBODY_OF_RANKS: &str = "\
for q in 0..world {
    let nobody = count(rows of E[start..stop] not {of rank})
    for j in 0..nobody {
        let s = position(j of rows of E[start..stop] not {of rank})
        P[start + s][q] = integer(none)
    }
}";

/// Rows for rank q, straight into its outputs.
pub(super) const STORED_BY_SOURCE: &str = "\
let before = count({of}E[0..start] {of rank})
let own = count({of}E[start..stop] {of rank})
for j in 0..own {
    let s = position(j of {of}E[start..stop] {of rank})
    let t = {token}
    if before + j < rows {
        {expert}
        {stored}
        P[{position}] = integer(q * rows + before + j)
    } else {
        P[{position}] = integer(none)
    }
}";

/// The same by expert. The condition on the place holds unless an integer is wrong: it keeps all stores within the memory.
pub(super) const STORED_BY_EXPERT: &str = "\
let before = count(E[0..start] {of rank})
let own = count(E[start..stop] {of rank})
let kept = min(own, max(rows - before, 0))
if own > 0 {
    let last = position(max(kept, 1) - 1 of E[start..stop] {of rank})
    for x in q * per..(q + 1) * per {
        let ours = count(E[start..stop] in x..x + 1)
        if ours > 0 {
            let base = {base} at most world * rows
            let earlier = count(E[0..start] in x..x + 1)
            for j in 0..ours {
                let s = position(j of E[start..stop] in x..x + 1)
                let t = {token}
                let place = base + earlier + j
                if kept > 0 and s <= last and place < world * rows {
                    {stored}
                    P[{position}] = integer(q * span + place)
                } else {
                    P[{position}] = integer(none)
                }
            }
        }
    }
}";

/// The place of the row of a slot, for rows that go through scratch.
pub(super) const PLACE_BY_EXPERT: &str = "\
{expert}
let base = {base} at most world * rows
let earlier = count(E[0..start + s] in x..x + 1)
let place = base + earlier";

/// The experts of a row among those of rank q.
pub(super) const LOCALS: &str = "\
for k in 0..slots {
    let here = count(E[t][k..k + 1] {of rank})
    if here > 0 {
        let x = E[t][k] at most experts - 1
        {local} on q = integer(x - q * per)
    } else {
        {local} on q = integer(-1)
    }
}";

/// Rows of all source ranks.
pub(super) const EXPECTED_BY_SOURCE: &str = "\
for r in 0..world {
    let all = N[0] on r at most tokens
    if all > 0 {
        let m = count({of}E[0..all * {unit}] on r in rank * per..(rank + 1) * per)
        for j in 0..min(m, rows) {
            let s = position(j of {of}E[0..all * {unit}] on r in rank * per..(rank + 1) * per)
            let t = s / {unit}
            if first <= t and t < first + most {
                {expect}
            }
        }
    }
}";

/// Of one source rank. The remainder changes nothing but where the verifier takes integers to be as large as they may be.
pub(super) const EXPECTED_BY_EXPERT: &str = "\
let head{p} = {head}
for j in 0..of{p} * min(all{p}, 1) {
    let s = position(j of E[0..all{p} * slots] on {p} in x..x + 1)
    let place = head{p} + j
    if first <= s / slots and s / slots < first + most {
        {expect}
    }
}";
