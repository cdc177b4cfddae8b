//! Seconds by bytes: measured points, with interpolation and extrapolation.

use super::fields::{MAX_SECONDS, MIN_SECONDS};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Times of transfers or collectives by their size: `[bytes, seconds]`, in order of bytes.
///
/// Interpolation is linear in the logarithms of time and size. Below the first point, its time applies; beyond the
/// last, time is proportional to bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Curve(pub Vec<(u64, f64)>);

impl Curve {
    /// Seconds for `bytes`; 0 for an empty curve.
    pub fn seconds(&self, bytes: f64) -> f64 {
        let points = &self.0;
        let (Some(first), Some(last)) = (points.first(), points.last()) else {
            return 0.0;
        };
        if bytes <= first.0 as f64 {
            return first.1;
        }
        if bytes >= last.0 as f64 {
            // Large transfers are bound by bandwidth, so the last point's rate holds beyond it.
            return last.1 * bytes / last.0 as f64;
        }
        let above = points.partition_point(|point| (point.0 as f64) < bytes);
        let (low, high) = (points[above - 1], points[above]);
        let share = (bytes / low.0 as f64).ln() / (high.0 as f64 / low.0 as f64).ln();
        low.1 * (high.1 / low.1).powf(share)
    }

    /// Bytes per second at the fastest point; infinite for an empty curve.
    pub fn peak(&self) -> f64 {
        let rates = self
            .0
            .iter()
            .map(|(bytes, seconds)| *bytes as f64 / seconds);
        rates
            .fold(None, |most: Option<f64>, rate| {
                Some(most.map_or(rate, |most| most.max(rate)))
            })
            .unwrap_or(f64::INFINITY)
    }

    /// Fails unless sizes rise and every time is positive.
    pub(super) fn check(&self, name: &str) -> Result<()> {
        let rising = self.0.windows(2).all(|pair| pair[0].0 < pair[1].0);
        let positive = self
            .0
            .iter()
            .all(|(bytes, seconds)| *bytes > 0 && (MIN_SECONDS..=MAX_SECONDS).contains(seconds));
        if rising && positive {
            return Ok(());
        }
        Err(Error::parse(format!(
            "'{name}' is not a list of [bytes, seconds]; expected rising sizes and {MIN_SECONDS:e} to {MAX_SECONDS:e} seconds"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn curve() -> Curve {
        Curve(vec![(1024, 2e-6), (65536, 4e-6), (1 << 20, 8e-6)])
    }

    #[test]
    fn points_are_met_and_ends_are_extended() {
        let curve = curve();
        for (bytes, seconds) in &curve.0 {
            assert!((curve.seconds(*bytes as f64) / seconds - 1.0).abs() < 1e-12);
        }
        assert_eq!(curve.seconds(1.0), 2e-6);
        assert!((curve.seconds((4 << 20) as f64) - 32e-6).abs() < 1e-12);
        // Halfway between two points on a logarithmic scale.
        assert!((curve.seconds(8192.0) - (2e-6_f64 * 4e-6).sqrt()).abs() < 1e-12);
        assert!((curve.peak() - (1 << 20) as f64 / 8e-6).abs() < 1.0);
    }

    #[test]
    fn disorder_is_refused() {
        for points in [
            vec![(2, 1.0), (1, 1.0)],
            vec![(1, 0.0)],
            vec![(1, f64::NAN)],
            vec![(0, 1.0)],
        ] {
            assert!(Curve(points.clone()).check("put").is_err(), "{points:?}");
        }
        assert!(curve().check("put").is_ok());
    }

    proptest! {
        #[test]
        fn more_bytes_never_take_less_time(a in 1.0..1e10_f64, b in 1.0..1e10_f64) {
            let curve = curve();
            let (less, more) = (a.min(b), a.max(b));
            prop_assert!(curve.seconds(less) <= curve.seconds(more) * (1.0 + 1e-12));
        }

        #[test]
        fn times_lie_between_those_of_the_neighbours(bytes in 65536.0..1048576.0_f64) {
            let seconds = curve().seconds(bytes);
            prop_assert!((4e-6 * (1.0 - 1e-12)..=8e-6 * (1.0 + 1e-12)).contains(&seconds));
        }
    }
}
