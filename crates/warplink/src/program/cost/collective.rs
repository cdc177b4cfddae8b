//! Times of the engine's collectives by world size and bytes.

use super::curve::Curve;
use crate::error::Result;
use crate::program::ir::Collective;
use serde::{Deserialize, Serialize};

/// Times of a collective on a number of ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CollectiveTimes {
    /// Name in program text, such as `all_gather`; `exchange` for sends and receives.
    pub name: String,
    /// Number of ranks that took part.
    pub world: usize,
    /// Seconds by bytes of the larger side: an all-gather's target and a reduce-scatter's source on a rank; bytes of
    /// each message for `exchange`.
    pub times: Curve,
}

/// Name of the times of sends and receives.
pub const EXCHANGE: &str = "exchange";

/// Times of all measured collectives.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Collectives(pub Vec<CollectiveTimes>);

impl Collectives {
    /// Seconds of a collective with `bytes` on its larger side, on `world` ranks.
    ///
    /// For a world size that was not measured, uses the nearest measured one, at the size with equal traffic on a
    /// rank's link. For a collective that was not measured, uses the slowest measured one.
    pub fn seconds(&self, name: &str, world: usize, bytes: f64) -> f64 {
        let near = |times: &&CollectiveTimes| {
            let ratio = times.world.max(1) as f64 / world.max(1) as f64;
            ratio.ln().abs()
        };
        let named = self.0.iter().filter(|times| times.name == name);
        let scaled = |times: &CollectiveTimes| {
            let measured = link_bytes(&times.name, times.world, 1.0);
            let wanted = link_bytes(name, world, bytes);
            times.times.seconds(if measured > 0.0 {
                wanted / measured
            } else {
                bytes
            })
        };
        match named.min_by(|a, b| near(a).total_cmp(&near(b))) {
            Some(times) => scaled(times),
            // The slowest, so that an unknown collective is not chosen for its time.
            None => self.0.iter().map(scaled).fold(0.0, f64::max),
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        self.0
            .iter()
            .try_for_each(|times| times.times.check(&times.name))
    }
}

/// Bytes that a rank sends over its link for a collective of `bytes` with a ring algorithm.
pub(super) fn link_bytes(name: &str, world: usize, bytes: f64) -> f64 {
    let world = world.max(1) as f64;
    match name {
        EXCHANGE => bytes,
        "all_reduce" => 2.0 * bytes * (world - 1.0) / world,
        "broadcast" | "reduce" => bytes * f64::min(world - 1.0, 1.0),
        _ => bytes * (world - 1.0) / world,
    }
}

/// Bytes of the larger side of a collective with a `target` and a `source` of these sizes in bytes.
pub(super) fn larger_side<R>(collective: &Collective<R>, target: usize, source: usize) -> f64 {
    match collective {
        Collective::Broadcast(_) => target as f64,
        Collective::Reduce(..) => source as f64,
        _ => target.max(source) as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collectives() -> Collectives {
        let times = |name: &str, world, scale: f64| CollectiveTimes {
            name: name.to_owned(),
            world,
            times: Curve(vec![
                (1 << 10, 10e-6),
                (1 << 20, scale * 20e-6),
                (1 << 30, scale * 5e-3),
            ]),
        };
        Collectives(vec![
            times("all_gather", 2, 1.0),
            times("all_gather", 8, 2.0),
            times("all_reduce", 8, 4.0),
        ])
    }

    #[test]
    fn a_world_that_was_measured_is_met() {
        let seconds = collectives().seconds("all_gather", 8, (1 << 20) as f64);
        assert!((seconds - 40e-6).abs() < 1e-12);
    }

    #[test]
    fn another_world_follows_the_bytes_over_the_link() {
        let collectives = collectives();
        // On 4 ranks, 3/4 of the bytes cross the link; on 8, 7/8: so 7/6 MiB correspond to 1 MiB.
        let bytes = (1 << 20) as f64 * 7.0 / 6.0;
        let seconds = collectives.seconds(
            "all_gather",
            5,
            bytes * 6.0 / 7.0 * (7.0 / 8.0) / (4.0 / 5.0),
        );
        assert!((seconds - 40e-6).abs() < 1e-9, "{seconds}");
    }

    #[test]
    fn what_was_not_measured_takes_as_long_as_the_slowest() {
        let collectives = collectives();
        let seconds = collectives.seconds("all_to_all", 8, (1 << 30) as f64);
        assert!(seconds >= collectives.seconds("all_gather", 8, (1 << 30) as f64));
    }
}
