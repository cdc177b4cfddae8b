//! Host programs.
