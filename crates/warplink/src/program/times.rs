//! The time of a program, by how it is submitted.

/// Seconds from start to end, expected or measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times {
    /// Of an eager run.
    pub eager: f64,
    /// Of a launch as one graph; infinite for a program that runs eagerly only.
    pub captured: f64,
}

impl Times {
    /// Of the faster submission, which is what programs are compared by.
    pub fn seconds(&self) -> f64 {
        self.eager.min(self.captured)
    }
}
