//! Layout of a topology drawing.

use std::f64::consts::PI;
use warplink::Rank;
use warplink::topology::{Connection, Topology};

/// Width and height of a rank's box.
pub(super) const BOX: (i32, i32) = (136, 64);

/// Gap between boxes, and margin of a machine.
const GAP: i32 = 28;

/// Height of the switch bar, and its distance to the boxes.
const BAR: i32 = 34;
const RISE: i32 = 64;

/// Maximum ranks in one row.
const ROW: usize = 4;

/// Layout of one machine. Positions are pixels relative to its panel.
pub(super) struct Panel {
    pub(super) ranks: Vec<Rank>,
    /// Centre of each rank's box, in the order of `ranks`.
    pub(super) middles: Vec<(i32, i32)>,
    /// Upper left and lower right corner of the switch box.
    pub(super) switches: Option<[(i32, i32); 2]>,
    pub(super) size: (i32, i32),
}

/// A panel for each machine, in rank order.
pub(super) fn panels(topology: &Topology) -> Vec<Panel> {
    let mesh = topology.mesh();
    let mut machines: Vec<Vec<Rank>> = Vec::new();
    for rank in 0..mesh.world() {
        let machine = mesh.machine(rank).unwrap_or(0);
        match machines.get_mut(machine) {
            Some(ranks) => ranks.push(rank),
            None => machines.push(vec![rank]),
        }
    }
    machines
        .into_iter()
        .map(|ranks| {
            let any = |is: fn(&Connection) -> bool| {
                let mut pairs = ranks
                    .iter()
                    .flat_map(|&a| ranks.iter().map(move |&b| (a, b)));
                pairs.any(|(a, b)| is(&mesh.connection(a, b)))
            };
            let switches = any(|by| matches!(by, Connection::Switches(_)));
            let direct = any(|by| matches!(by, Connection::Links(_) | Connection::Bus));
            if switches && !direct {
                rows(ranks)
            } else {
                // The halves of the ring are the groups of a hybrid cube mesh.
                let places = match topology.cube_positions() {
                    Some(positions) => cube_places(&ranks, &positions),
                    None => (0..ranks.len()).collect(),
                };
                ring(ranks, &places, switches)
            }
        })
        .collect()
}

/// Rows of ranks above and below their switches.
fn rows(ranks: Vec<Rank>) -> Panel {
    let above = match ranks.len() {
        few if few <= ROW => few,
        many => many.div_ceil(2),
    };
    let below = ranks.len() - above;
    let width = above as i32 * (BOX.0 + GAP) - GAP;
    let bar = GAP + BOX.1 + RISE;
    let middle = |index: usize| {
        let (column, count, y) = if index < above {
            (index, above, GAP + BOX.1 / 2)
        } else {
            (index - above, below, bar + BAR + RISE + BOX.1 / 2)
        };
        let start = (width - (count as i32 * (BOX.0 + GAP) - GAP)) / 2;
        let x = GAP + start + column as i32 * (BOX.0 + GAP) + BOX.0 / 2;
        (x, y)
    };
    let bottom = match below {
        0 => bar + BAR,
        _ => bar + BAR + RISE + BOX.1,
    };
    Panel {
        middles: (0..ranks.len()).map(middle).collect(),
        switches: Some([(GAP, bar), (GAP + width, bar + BAR)]),
        size: (width + 2 * GAP, bottom + GAP),
        ranks,
    }
}

/// Ranks on a ring, each at its place, clockwise from the top.
fn ring(ranks: Vec<Rank>, places: &[usize], switches: bool) -> Panel {
    let count = ranks.len() as f64;
    // Neighbours must be further apart than a box is wide, also at the top of the ring.
    let least = f64::from(BOX.0 + GAP) / (2.0 * (PI / count.max(2.0)).sin());
    // An ellipse, so that lines between second neighbours miss the box between them.
    let wide = if ranks.len() > ROW { 1.55 } else { 1.12 };
    let (across, down) = (least.max(150.0) * wide, least.max(110.0));
    let centre = (
        across as i32 + GAP + BOX.0 / 2,
        down as i32 + GAP + BOX.1 / 2,
    );
    let middle = |&place: &usize| {
        // Two neighbours share the top, so that pairs are side by side.
        let angle = match ranks.len() {
            1 => 0.0,
            2 => -PI / 2.0 + PI * place as f64,
            _ => 2.0 * PI * (place as f64 - 0.5) / count,
        };
        (
            centre.0 + (across * angle.sin()).round() as i32,
            centre.1 - (down * angle.cos()).round() as i32,
        )
    };
    let middles: Vec<(i32, i32)> = places.iter().map(middle).collect();
    let top = middles.iter().map(|at| at.1).min().unwrap_or(0) - BOX.1 / 2 - GAP;
    let bottom = middles.iter().map(|at| at.1).max().unwrap_or(0) + BOX.1 / 2 + GAP;
    let left = middles.iter().map(|at| at.0).min().unwrap_or(0) - BOX.0 / 2 - GAP;
    let right = middles.iter().map(|at| at.0).max().unwrap_or(0) + BOX.0 / 2 + GAP;
    let moved = |at: (i32, i32)| (at.0 - left, at.1 - top);
    let (x, y) = moved(centre);
    let half = (BOX.0 / 2, BAR / 2);
    Panel {
        middles: middles.into_iter().map(moved).collect(),
        switches: switches.then_some([(x - half.0, y - half.1), (x + half.0, y + half.1)]),
        size: (right - left, bottom - top),
        ranks,
    }
}

/// Place of each rank on the ring: one group down the left side, and opposite each of its ranks its
/// counterpart.
fn cube_places(ranks: &[Rank], positions: &[Rank]) -> Vec<usize> {
    let count = positions.len();
    ranks
        .iter()
        .map(|rank| {
            let position = positions.iter().position(|at| at == rank).unwrap_or(0);
            if position < count / 2 {
                (count - position) % count
            } else {
                position - count / 2 + 1
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: [&str; 4] = [
        include_str!("../../../../warplink/tests/meshes/switched-8.json"),
        include_str!("../../../../warplink/tests/meshes/pairs-8.json"),
        include_str!("../../../../warplink/tests/meshes/hybrid-cube-mesh-permuted.json"),
        include_str!("../../../../warplink/tests/meshes/two-machines.json"),
    ];

    #[test]
    fn boxes_stand_apart_and_inside_their_panel() {
        for text in FILES {
            let topology = Topology::from_json(text).unwrap();
            let panels = panels(&topology);
            let ranks: usize = panels.iter().map(|panel| panel.ranks.len()).sum();
            assert_eq!(ranks, topology.places().len());
            for panel in panels {
                for (index, at) in panel.middles.iter().enumerate() {
                    let (x, y) = (at.0 - BOX.0 / 2, at.1 - BOX.1 / 2);
                    assert!(x >= 0 && y >= 0, "{at:?}");
                    assert!(
                        x + BOX.0 <= panel.size.0 && y + BOX.1 <= panel.size.1,
                        "{at:?}"
                    );
                    for other in &panel.middles[..index] {
                        let apart = (at.0 - other.0).abs() >= BOX.0 + 8
                            || (at.1 - other.1).abs() >= BOX.1 + 8;
                        assert!(apart, "{at:?} and {other:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn facing_ranks_of_a_cube_stand_side_by_side() {
        let topology = Topology::from_json(FILES[2]).unwrap();
        let positions = topology.cube_positions().unwrap();
        let panel = &panels(&topology)[0];
        for (rank, peer) in positions[..4].iter().zip(&positions[4..]) {
            let (left, right) = (panel.middles[*rank], panel.middles[*peer]);
            assert!((left.1 - right.1).abs() <= 1 && left.0 < right.0);
        }
    }
}
