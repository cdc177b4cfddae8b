//! Sampling of loop iterations: all of them, or a weighted subset.

/// The fractional part of the golden ratio times 2^64: low-discrepancy hash multiplier.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Iterations of `for index in from..to`, possibly sampled. The loop body repeats after `period` iterations. The
/// first and the last iteration, and the remainder after the last whole period, always count once. The periods
/// between are represented by a subset, as if the others were omitted from the loop.
#[derive(Clone, Copy, Debug)]
pub(super) struct Iterations {
    from: i64,
    total: u64,
    period: u64,
    /// Whole periods between the first and the last iteration, and the number of them sampled.
    periods: u64,
    through: u64,
    /// Number of sampled iterations, and number already yielded.
    taken: u64,
    next: u64,
}

impl Iterations {
    /// Samples about `most` iterations, but at least one period.
    pub(super) fn new(from: i64, to: i64, most: u64, period: u64) -> Self {
        let total = if to > from { to.abs_diff(from) } else { 0 };
        let period = period.max(1);
        // The first and the last iteration are always taken: prologues and remainders differ from the rest.
        let between = total.saturating_sub(2);
        let (periods, rest) = (between / period, between % period);
        // Excluding both ends.
        let through = most.saturating_sub(2 + rest) / period;
        let through = through.max(1).min(periods);
        let all = total <= most || through == periods;
        Self {
            from,
            total,
            period,
            periods,
            through,
            taken: if all {
                total
            } else {
                2 + through * period + rest
            },
            next: 0,
        }
    }

    /// Iteration number of sample `position`, and its weight.
    fn at(&self, position: u64) -> (u64, f64) {
        if self.taken == self.total || position == 0 {
            return (position, 1.0);
        }
        let (number, within) = ((position - 1) / self.period, (position - 1) % self.period);
        if number >= self.through {
            // After the last whole period.
            // Counted from the end, so that the incomplete period and the last iteration keep their own indices.
            return (self.total - (self.taken - position), 1.0);
        }
        // One sample per stratum of the periods, jittered: evenly spaced samples could alias with behaviour whose
        // period is unknown.
        let start = |number| share(number, self.periods, self.through);
        let (first, end) = (start(number), start(number + 1));
        // Squared, since multiples of the golden ratio alone are again evenly spaced. No random source: predictions
        // of ranks must agree.
        let square = (number + 1).wrapping_mul(number + 1);
        let random = square.wrapping_mul(GOLDEN);
        let offset = (u128::from(random) * u128::from(end - first)) >> 64;
        let chosen = first + offset as u64;
        let weight = self.periods as f64 / self.through as f64;
        (1 + chosen * self.period + within, weight)
    }
}

impl Iterator for Iterations {
    /// Index value and weight.
    type Item = (i64, f64);

    fn next(&mut self) -> Option<Self::Item> {
        if self.next == self.taken {
            return None;
        }
        let (iteration, weight) = self.at(self.next);
        self.next += 1;
        Some((self.from.wrapping_add_unsigned(iteration), weight))
    }
}

/// Start of part `number` of `parts` equal parts of `whole`, rounded down.
fn share(number: u64, whole: u64, parts: u64) -> u64 {
    // The product of two 64-bit numbers does not fit in 64 bits.
    (u128::from(number) * u128::from(whole) / u128::from(parts)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_iteration_is_stood_for_once() {
        for total in [0, 1, 2, 3, 7, 8, 9, 17, 30, 100, 65_536] {
            for most in [3, 8, 16, 64, u64::MAX] {
                for period in [1, 2, 3, 4, 5, 6, 7, 12, 60] {
                    let all = Iterations::new(-5, total - 5, most, period);
                    let taken: Vec<(i64, f64)> = all.collect();
                    let told = format!("{total} {most} {period}: {taken:?}");
                    assert!(taken.len() as u64 <= most.max(2 * period + 1), "{told}");
                    assert!(taken.windows(2).all(|pair| pair[0].0 < pair[1].0), "{told}");
                    if let (Some(first), Some(last)) = (taken.first(), taken.last()) {
                        assert_eq!((first, last), (&(-5, 1.0), &(total - 6, 1.0)), "{told}");
                    }
                    // Every remainder occurs equally often.
                    for remainder in 0..period as i64 {
                        let is = |index: &i64| index.rem_euclid(period as i64) == remainder;
                        let there = (-5..total - 5).filter(is).count() as f64;
                        let of_those = taken.iter().filter(|(index, _)| is(index));
                        let stood_for: f64 = of_those.map(|(_, weight)| weight).sum();
                        assert!((stood_for - there).abs() < 1e-6, "{told}");
                    }
                }
            }
        }
        assert_eq!(Iterations::new(4, 2, 8, 1).count(), 0);
        assert_eq!(
            Iterations::new(i64::MIN, i64::MAX, 16, 3).last(),
            Some((i64::MAX - 1, 1.0))
        );
    }

    /// Evenly spaced samples would alias: all or none would have the same remainder.
    #[test]
    fn iterations_are_not_in_step_with_what_has_no_known_period() {
        for total in [30, 44, 58, 86, 100, 226] {
            for divisor in [2, 3, 4] {
                let all = Iterations::new(0, total, 16, 1);
                let of_those = all.filter(|(index, _)| index % divisor == 0);
                let stood_for: f64 = of_those.map(|(_, weight)| weight).sum();
                let there = total as f64 / divisor as f64;
                assert!(
                    (0.3..2.3).contains(&(stood_for / there)),
                    "{total} {divisor}: {stood_for}"
                );
            }
        }
    }
}
