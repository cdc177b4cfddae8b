//! Recognizes a hybrid cube mesh: eight devices with few links each.
//!
//! Its positions 0 to 3 are one group and 4 to 7 the other; position p is opposite p + 4. Two
//! positions are linked if they are in one group or opposite each other. The number of links between two
//! positions differs between machines and is ignored.

use super::mesh::{Connection, Mesh};
use crate::error::Rank;

/// Number of ranks of a hybrid cube mesh.
pub const CUBE_RANKS: usize = 8;

/// Number of ranks of a group.
const GROUP: usize = CUBE_RANKS / 2;

/// Rank at each position, if the direct links of `mesh` form a hybrid cube mesh. Of the 48 equivalent
/// placements, the lexicographically smallest one.
pub(super) fn positions(mesh: &Mesh) -> Option<[Rank; CUBE_RANKS]> {
    if mesh.world() != CUBE_RANKS {
        return None;
    }
    let linked = |rank, peer| matches!(mesh.connection(rank, peer), Connection::Links(_));
    let neighbours: Vec<Rank> = (1..CUBE_RANKS).filter(|&peer| linked(0, peer)).collect();
    if neighbours.len() != GROUP {
        return None;
    }
    // One of rank 0's neighbours is opposite; the other three are in its group.
    neighbours.iter().find_map(|&facing| {
        let mut positions = [0; CUBE_RANKS];
        let group = neighbours.iter().filter(|&&peer| peer != facing);
        for (position, &peer) in positions[1..GROUP].iter_mut().zip(group) {
            *position = peer;
        }
        // Each rank of the first group has exactly one neighbour outside it in a cube.
        let (first, second) = positions.split_at_mut(GROUP);
        for (rank, faced) in first.iter().zip(second) {
            let mut others = (0..CUBE_RANKS).filter(|peer| !first.contains(peer));
            *faced = others.find(|&peer| linked(*rank, peer))?;
        }
        is_cube(&positions, linked).then_some(positions)
    })
}

/// Whether two ranks of a hybrid cube mesh with these `positions` are linked.
pub(crate) fn is_cube_link(positions: &[Rank; CUBE_RANKS], a: Rank, b: Rank) -> bool {
    let position = |rank| positions.iter().position(|other| *other == rank);
    position(a)
        .zip(position(b))
        .is_some_and(|(a, b)| is_link(a, b))
}

/// Whether two positions are linked.
fn is_link(a: usize, b: usize) -> bool {
    a != b && (a / GROUP == b / GROUP || a % GROUP == b % GROUP)
}

/// Whether each rank has one position, and the links are exactly those of the positions.
fn is_cube(positions: &[Rank; CUBE_RANKS], linked: impl Fn(Rank, Rank) -> bool) -> bool {
    let all = (0..CUBE_RANKS).flat_map(|a| (0..a).map(move |b| (a, b)));
    all.into_iter().all(|(a, b)| {
        positions[a] != positions[b] && linked(positions[a], positions[b]) == is_link(a, b)
    })
}
