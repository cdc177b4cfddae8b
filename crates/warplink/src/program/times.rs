//! Time of a program, by submission mode.

/// Seconds from start to end, expected or measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times {
    /// Eager run.
    pub eager: f64,
    /// Launch as one graph; infinite if the program runs eagerly only.
    pub captured: f64,
}

impl Times {
    /// Time of the faster submission mode, by which programs are compared.
    pub fn seconds(&self) -> f64 {
        self.eager.min(self.captured)
    }
}
