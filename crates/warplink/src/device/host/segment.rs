//! Reserved addresses into which shared memory is mapped piece by piece.

use super::mapping::{Mapping, Reservation, add_piece};
use crate::device::Segment;
use crate::error::{Error, Result};
use crate::sync::lock;
use std::sync::{Arc, Mutex};

/// Growable memory of the host device.
#[derive(Debug)]
pub(super) struct HostSegment {
    reservation: Arc<Reservation>,
    pieces: Mutex<Pieces>,
}

#[derive(Debug, Default)]
struct Pieces {
    bytes: usize,
    // Held as long as the segment.
    mappings: Vec<Arc<Mapping>>,
}

impl HostSegment {
    pub(super) fn reserve(bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(
                Error::invalid("the segment has 0 bytes; expected at least 1")
                    .with_operation("reserve a segment"),
            );
        }
        Ok(Self {
            reservation: Arc::new(Reservation::new(bytes)?),
            pieces: Mutex::default(),
        })
    }
}

impl Segment for HostSegment {
    fn address(&self) -> u64 {
        self.reservation.base()
    }

    fn bytes(&self) -> usize {
        lock(&self.pieces).bytes
    }

    fn grow(&self, bytes: usize) -> Result<()> {
        let mut pieces = lock(&self.pieces);
        // The lock is held over the mapping: two pieces at one offset would replace each other.
        let mapping = add_piece(&self.reservation, pieces.bytes, bytes.max(1))?;
        pieces.bytes += mapping.bytes;
        pieces.mappings.push(mapping);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::host::memory::{borrow, map, pieces, read_bytes, write_bytes};

    #[test]
    fn a_range_that_spans_pieces_is_shared_whole() {
        let page = rustix::param::page_size();
        let segment = HostSegment::reserve(8 * page).unwrap();
        (0..3).for_each(|_| segment.grow(2 * page).unwrap());
        let start = segment.address() + page as u64;
        let owner = Arc::new(segment);
        let middle = borrow(start, 4 * page, owner.clone()).unwrap();
        assert_eq!(
            (middle.offset(), middle.allocation().bytes()),
            (page, 6 * page)
        );
        let short = borrow(start, page / 2, owner.clone()).unwrap();
        assert_eq!(short.allocation().bytes(), 2 * page);
        assert_ne!(short.backing().identity(), middle.backing().identity());
        let again = borrow(start + 8, 4 * page - 8, owner.clone()).unwrap();
        assert_eq!(again.backing().identity(), middle.backing().identity());
        let past = borrow(start, 6 * page, owner.clone());
        assert!(past.is_err(), "past the last piece");
        owner.grow(2 * page).unwrap();
        assert!(owner.grow(1).is_err(), "past the reserved addresses");
        let longer = borrow(start, 6 * page, owner.clone()).unwrap();
        assert_ne!(longer.backing().identity(), middle.backing().identity());
        let peers = map(pieces(&longer).unwrap().0, 8 * page, None).unwrap();
        let bytes: Vec<u8> = (0..6 * page).map(|index| (index / 7) as u8).collect();
        write_bytes(&longer, &bytes).unwrap();
        let mut seen = vec![0; bytes.len()];
        read_bytes(&peers.slice(page..7 * page).unwrap(), &mut seen).unwrap();
        assert!(seen == bytes);
    }
}
