//! The store, unique ids, and collectives of bytes.
