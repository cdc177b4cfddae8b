//! Trace entry of one operation, or of one step of a lane.

use crate::error::Rank;
use serde::{Deserialize, Serialize};

/// One operation on one stream of one rank, or one step of a lane of a kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceSpan {
    /// The rank.
    pub rank: Rank,
    /// The stream, as program text names it; for the step of a lane, followed by the lane's number.
    pub stream: String,
    /// Name of the operation or step.
    pub operation: String,
    /// Its place in the program.
    pub site: String,
    /// Microseconds from the start of the run on its rank.
    pub start: f64,
    /// Microseconds from start to end, waiting included.
    pub duration: f64,
}
