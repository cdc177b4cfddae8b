//! Pool of freed blocks of plain memory, for reuse by later allocations.

use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::Mutex;

/// A pooled block may exceed the requested size by up to 1 / `SLACK_DIVISOR`, which bounds the waste.
const SLACK_DIVISOR: usize = 8;

/// An unused block of driver memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}

/// The freed blocks of a GPU. It does not call the driver: callers free or use the blocks that they take.
#[derive(Debug)]
pub(crate) struct BlockPool {
    state: Mutex<Blocks>,
    max_bytes: usize,
}

#[derive(Debug, Default)]
struct Blocks {
    // Block addresses, keyed by size and order of insertion.
    blocks: BTreeMap<(usize, u64), u64>,
    count: u64,
    closed: bool,
}

impl BlockPool {
    /// An empty pool that keeps up to `max_bytes` when new memory is allocated from the driver.
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self {
            state: Mutex::default(),
            max_bytes,
        }
    }

    /// Best fit: the smallest block of at least `bytes` that is not much longer; among equals the most
    /// recently freed.
    pub(crate) fn take(&self, bytes: usize) -> Option<Block> {
        let mut state = lock(&self.state);
        let longest = bytes.saturating_add(bytes / SLACK_DIVISOR);
        let ((shortest, _), _) = state.blocks.range((bytes, 0)..).next()?;
        let of_that = (*shortest, 0)..=(*shortest, u64::MAX);
        let (&key, _) = state.blocks.range(of_that).next_back()?;
        if key.0 > longest {
            return None;
        }
        let address = state.blocks.remove(&key)?;
        Some(Block {
            address,
            bytes: key.0,
        })
    }

    /// Keeps a block, or returns it if the pool is closed.
    pub(crate) fn put(&self, block: Block) -> Option<Block> {
        let mut state = lock(&self.state);
        if state.closed {
            return Some(block);
        }
        state.count += 1;
        let key = (block.bytes, state.count);
        state.blocks.insert(key, block.address);
        None
    }

    /// Removes the blocks beyond the limit, oldest first.
    pub(crate) fn take_surplus(&self) -> Vec<Block> {
        lock(&self.state).shrink(self.max_bytes)
    }

    /// Removes all blocks.
    pub(crate) fn take_all(&self) -> Vec<Block> {
        lock(&self.state).shrink(0)
    }

    /// Removes all blocks, and accepts none from now on.
    pub(crate) fn close(&self) -> Vec<Block> {
        let mut state = lock(&self.state);
        state.closed = true;
        state.shrink(0)
    }
}

impl Blocks {
    fn shrink(&mut self, max_bytes: usize) -> Vec<Block> {
        let mut bytes: usize = self.blocks.keys().map(|(bytes, _)| bytes).sum();
        let mut taken = Vec::new();
        while bytes > max_bytes
            && let Some(&key) = self.blocks.keys().min_by_key(|(_, number)| *number)
            && let Some(address) = self.blocks.remove(&key)
        {
            bytes -= key.0;
            taken.push(Block {
                address,
                bytes: key.0,
            });
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 2 << 20;

    fn block(address: u64, blocks: usize) -> Block {
        Block {
            address,
            bytes: blocks * BLOCK,
        }
    }

    #[test]
    fn the_best_fit_that_was_freed_last_is_taken() {
        let pool = BlockPool::new(100 * BLOCK);
        for next in [block(1, 16), block(2, 16), block(3, 18), block(4, 40)] {
            assert_eq!(pool.put(next), None);
        }
        assert_eq!(pool.take(16 * BLOCK), Some(block(2, 16)));
        assert_eq!(pool.take(17 * BLOCK), Some(block(3, 18)));
        assert_eq!(pool.take(17 * BLOCK), None, "the next is much longer");
        assert_eq!(pool.take(15 * BLOCK), Some(block(1, 16)));
        assert_eq!(pool.take(usize::MAX), None);
        assert_eq!(pool.take_all(), [block(4, 40)]);
    }

    #[test]
    fn the_first_that_were_freed_are_too_much() {
        let pool = BlockPool::new(4 * BLOCK);
        for (address, blocks) in [(1, 1), (2, 3), (3, 2)] {
            pool.put(block(address, blocks));
        }
        assert_eq!(pool.take_surplus(), [block(1, 1), block(2, 3)]);
        assert_eq!(pool.take_surplus(), []);
        assert_eq!(pool.close(), [block(3, 2)]);
        assert_eq!(pool.put(block(4, 1)), Some(block(4, 1)));
        assert_eq!(pool.take(BLOCK), None);
    }
}
