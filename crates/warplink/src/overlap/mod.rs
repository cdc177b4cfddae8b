//! Overlapped products.
