//! Transfers in stream order.
