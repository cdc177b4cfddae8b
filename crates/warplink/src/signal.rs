//! Words that one rank sets and another waits for.
