//! The iterations of a loop: all of them, or a few that stand for all.

/// The iterations of `for index in from..to`, of which at most `most` are gone through. The first and the last stand
/// for themselves; each of those between, as far from one another as can be, stands for as many as are left out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Iterations {
    from: i64,
    total: u64,
    taken: u64,
    next: u64,
}

impl Iterations {
    pub(super) fn new(from: i64, to: i64, most: u64) -> Self {
        let total = if to > from { to.abs_diff(from) } else { 0 };
        Self {
            from,
            total,
            // Two ends, and something between them.
            taken: total.min(most.max(3)),
            next: 0,
        }
    }
}

impl Iterator for Iterations {
    /// The value of the index, and how many iterations it stands for.
    type Item = (i64, f64);

    fn next(&mut self) -> Option<Self::Item> {
        let position = self.next;
        if position == self.taken {
            return None;
        }
        self.next += 1;
        if self.taken == self.total || position == 0 {
            return Some((self.from + position as i64, 1.0));
        }
        if self.next == self.taken {
            return Some((self.from + (self.total - 1) as i64, 1.0));
        }
        let (inner, of) = (self.taken - 2, self.total - 2);
        let offset = 1 + (u128::from(position - 1) * u128::from(of) / u128::from(inner)) as i64;
        Some((self.from + offset, of as f64 / inner as f64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_iteration_is_stood_for_once() {
        for total in [0, 1, 2, 3, 7, 8, 9, 100, 65_536] {
            for most in [3, 8, 64, u64::MAX] {
                let taken: Vec<(i64, f64)> = Iterations::new(-5, total - 5, most).collect();
                let stood_for: f64 = taken.iter().map(|(_, weight)| weight).sum();
                assert!((stood_for - total as f64).abs() < 1e-6);
                assert_eq!(taken.len() as u64, most.min(total as u64));
                assert!(taken.windows(2).all(|pair| pair[0].0 < pair[1].0));
                if let (Some(first), Some(last)) = (taken.first(), taken.last()) {
                    assert_eq!((first, last), (&(-5, 1.0), &(total - 6, 1.0)));
                }
            }
        }
        assert_eq!(Iterations::new(4, 2, 8).count(), 0);
    }
}
