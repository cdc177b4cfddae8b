//! The iterations of a loop: all of them, or a few that stand for all.

/// The fraction of the golden ratio, of 2^64: what is left of its products with squares is spread like random numbers.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The iterations of `for index in from..to`, of which a few are gone through. What a loop does is repeated after
/// `period` iterations. The first and the last stand for themselves; of the periods between, some stand for all. What is
/// left behind the last whole period stands for itself, too. So it is as if some periods were left out of the loop.
#[derive(Clone, Copy, Debug)]
pub(super) struct Iterations {
    from: i64,
    total: u64,
    period: u64,
    /// Whole periods between the first and the last iteration, and how many of them are gone through.
    periods: u64,
    through: u64,
    /// Iterations that are gone through, and how many of them have been.
    taken: u64,
    next: u64,
}

impl Iterations {
    /// About `most` iterations, or as many as a period takes.
    pub(super) fn new(from: i64, to: i64, most: u64, period: u64) -> Self {
        let total = if to > from { to.abs_diff(from) } else { 0 };
        let period = period.max(1);
        let between = total.saturating_sub(2);
        let (periods, rest) = (between / period, between % period);
        // Without the two ends.
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

    /// Which iteration the one at `position` among those gone through is, and how many it stands for.
    fn at(&self, position: u64) -> (u64, f64) {
        if self.taken == self.total || position == 0 {
            return (position, 1.0);
        }
        let (number, within) = ((position - 1) / self.period, (position - 1) % self.period);
        if number >= self.through {
            // Behind the last whole period.
            return (self.total - (self.taken - position), 1.0);
        }
        // Each of those gone through is from a share of its own of all periods, but they are not evenly apart: evenly
        // spaced iterations may be alike in what no remainder says.
        let start = |number| share(number, self.periods, self.through);
        let (first, end) = (start(number), start(number + 1));
        let square = (number + 1).wrapping_mul(number + 1);
        let random = square.wrapping_mul(GOLDEN);
        let offset = (u128::from(random) * u128::from(end - first)) >> 64;
        let chosen = first + offset as u64;
        let weight = self.periods as f64 / self.through as f64;
        (1 + chosen * self.period + within, weight)
    }
}

impl Iterator for Iterations {
    /// The value of the index, and how many iterations it stands for.
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

/// `number` of `parts` equal parts of `whole`, rounded down.
fn share(number: u64, whole: u64, parts: u64) -> u64 {
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
                    // As many as there are of each remainder.
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

    /// Evenly spaced ones would be: all of them, or none, would be of one remainder.
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
