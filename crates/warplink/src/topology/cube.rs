//! Recognizing a hybrid cube mesh, the mesh of eight devices with few links each.
//!
//! Its positions 0 to 3 are one group and 4 to 7 the other; position p faces position p + 4. Two
//! positions are linked if they are of one group or face each other. How many links connect two
//! positions differs between machines and is not a part of it.

use super::mesh::{Connection, Mesh};
use crate::error::Rank;

/// The ranks of a hybrid cube mesh.
pub const CUBE_RANKS: usize = 8;

/// The ranks of a group.
const GROUP: usize = CUBE_RANKS / 2;

/// The rank at each position, if the direct links of `mesh` are those of a hybrid cube mesh. Of the
/// 48 ways to place the ranks, it is the one with the smallest ranks first.
pub(super) fn positions(mesh: &Mesh) -> Option<[Rank; CUBE_RANKS]> {
    if mesh.world() != CUBE_RANKS {
        return None;
    }
    let linked = |rank, peer| matches!(mesh.connection(rank, peer), Connection::Links(_));
    let neighbours: Vec<Rank> = (1..CUBE_RANKS).filter(|&peer| linked(0, peer)).collect();
    if neighbours.len() != GROUP {
        return None;
    }
    // One of rank 0's neighbours faces it, and the other three are its group.
    neighbours.iter().find_map(|&facing| {
        let mut positions = [0; CUBE_RANKS];
        let group = neighbours.iter().filter(|&&peer| peer != facing);
        for (position, &peer) in positions[1..GROUP].iter_mut().zip(group) {
            *position = peer;
        }
        let (first, second) = positions.split_at_mut(GROUP);
        for (rank, faced) in first.iter().zip(second) {
            let mut others = (0..CUBE_RANKS).filter(|peer| !first.contains(peer));
            *faced = others.find(|&peer| linked(*rank, peer))?;
        }
        is_cube(&positions, linked).then_some(positions)
    })
}

/// Whether a link connects two ranks of a hybrid cube mesh that has `positions`.
pub(crate) fn is_cube_link(positions: &[Rank; CUBE_RANKS], a: Rank, b: Rank) -> bool {
    let position = |rank| positions.iter().position(|other| *other == rank);
    position(a)
        .zip(position(b))
        .is_some_and(|(a, b)| is_link(a, b))
}

/// Whether a link connects two positions.
fn is_link(a: usize, b: usize) -> bool {
    a != b && (a / GROUP == b / GROUP || a % GROUP == b % GROUP)
}

/// Whether each rank has one position, and the links are those of the positions and no others.
fn is_cube(positions: &[Rank; CUBE_RANKS], linked: impl Fn(Rank, Rank) -> bool) -> bool {
    let all = (0..CUBE_RANKS).flat_map(|a| (0..a).map(move |b| (a, b)));
    all.into_iter().all(|(a, b)| {
        positions[a] != positions[b] && linked(positions[a], positions[b]) == is_link(a, b)
    })
}
