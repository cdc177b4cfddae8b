//! Triggers: 128-bit requests from kernels to a proxy.

use crate::error::{Error, Result};

/// Maximum number of regions of a connection on either side; must match the kernels.
pub(crate) const MAX_REGIONS: usize = 16;

/// Maximum number of connections of a proxy: the range of the index in a trigger.
pub(crate) const MAX_CONNECTIONS: usize = 1 << 10;

/// Upper bound of offsets in a trigger; regions beyond it cannot be addressed.
pub(crate) const MAX_OFFSET: u64 = 1 << 36;

/// Maximum bytes of one trigger; must match the kernels.
pub(crate) const MAX_TRIGGER_BYTES: u64 = 1 << 31;

/// The bit in each half that holds the lap parity of the ring.
pub(crate) const LAP: u64 = 1 << 63;

/// Flags of a trigger; must match the kernels.
const PUT: u32 = 1;
const GET: u32 = 2;
const SIGNAL: u32 = 4;
const FLUSH: u32 = 8;

/// Request from a kernel. The highest bit of both halves is reserved for the FIFO's lap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Trigger {
    pub(crate) movement: Option<Movement>,
    /// Signal the peer after the data movement.
    pub(crate) signal: bool,
    /// Notify the kernel once all requests of the connection up to this one are complete.
    pub(crate) flush: bool,
    /// Index of the connection at the proxy.
    pub(crate) connection: u32,
    /// Bytes to move.
    pub(crate) bytes: u64,
    /// Local location.
    pub(crate) own: At,
    /// Location at the peer.
    pub(crate) peers: At,
}

/// Direction of the movement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Movement {
    /// To the peer.
    Put,
    /// From the peer.
    Get,
}

/// Location in a region of a connection. Region 0 is the one that the connection was created with; a plain
/// offset refers to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct At {
    /// The number of the region.
    pub region: u32,
    /// Bytes from its start.
    pub offset: u64,
}

impl From<u64> for At {
    fn from(offset: u64) -> Self {
        Self { region: 0, offset }
    }
}

impl From<(u32, u64)> for At {
    fn from((region, offset): (u32, u64)) -> Self {
        Self { region, offset }
    }
}

impl Trigger {
    /// A trigger that only signals.
    pub(crate) fn signal(connection: u32) -> Self {
        Self {
            movement: None,
            signal: true,
            flush: false,
            connection,
            bytes: 0,
            own: At::default(),
            peers: At::default(),
        }
    }

    /// Encodes into two halves; locations and lengths must be within their limits. Must match the kernels.
    pub(crate) fn encode(&self) -> [u64; 2] {
        let movement = match self.movement {
            None => 0,
            Some(Movement::Put) => PUT,
            Some(Movement::Get) => GET,
        };
        let flag = |set: bool, bit: u32| if set { bit } else { 0 };
        let kind = movement | flag(self.signal, SIGNAL) | flag(self.flush, FLUSH);
        [
            // From the top, below the lap bit: 4 bits of kind, 10 of connection, 4 of region, 36 of offset, the low
            // 9 of the length. The second half has 4 of region, 36 of offset, and the other 23 of the length.
            u64::from(kind) << 59
                | u64::from(self.connection) << 49
                | u64::from(self.own.region) << 45
                | self.own.offset << 9
                | self.bytes & 511,
            u64::from(self.peers.region) << 59 | self.peers.offset << 23 | self.bytes >> 9,
        ]
    }

    /// Decodes two halves.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] for bits that no channel call produces.
    pub(crate) fn decode([first, second]: [u64; 2]) -> Result<Self> {
        let bits = |word: u64, from: u32, count: u32| word >> from & ((1 << count) - 1);
        let kind = bits(first, 59, 4) as u32;
        let movement = match kind & (PUT | GET) {
            0 => None,
            PUT => Some(Movement::Put),
            GET => Some(Movement::Get),
            _ => {
                return Err(Error::protocol(format!(
                    "a trigger of kind {kind:#x} asks for a put and a get at once"
                ))
                .with_operation("read a trigger")
                .with_help("build kernels with the device.cuh of this version"));
            }
        };
        Ok(Self {
            movement,
            signal: kind & SIGNAL != 0,
            flush: kind & FLUSH != 0,
            connection: bits(first, 49, 10) as u32,
            bytes: bits(second, 0, 23) << 9 | bits(first, 0, 9),
            own: At {
                region: bits(first, 45, 4) as u32,
                offset: bits(first, 9, 36),
            },
            peers: At {
                region: bits(second, 59, 4) as u32,
                offset: bits(second, 23, 36),
            },
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use proptest::prelude::*;

    fn places() -> impl Strategy<Value = At> {
        (0..MAX_REGIONS as u32, 0..MAX_OFFSET).prop_map(At::from)
    }

    proptest! {
        #[test]
        fn triggers_survive_and_leave_the_bit_of_the_lap_free(
            movement in prop_oneof![Just(None), Just(Some(Movement::Put)), Just(Some(Movement::Get))],
            (signal, flush) in any::<(bool, bool)>(),
            connection in 0..MAX_CONNECTIONS as u32,
            bytes in 0_u64..1 << 32,
            own in places(),
            peers in places(),
        ) {
            let trigger = Trigger { movement, signal, flush, connection, bytes, own, peers };
            let halves = trigger.encode();
            prop_assert!(halves.iter().all(|half| half & LAP == 0));
            prop_assert_eq!(Trigger::decode(halves).unwrap(), trigger);
            prop_assert_eq!(Trigger::decode(halves.map(|half| half | LAP)).unwrap(), trigger);
        }
    }

    proptest! {
        #[test]
        fn whatever_is_in_a_slot_is_a_trigger_or_an_error(halves: [u64; 2]) {
            match Trigger::decode(halves) {
                Ok(trigger) => prop_assert_eq!(trigger.encode(), halves.map(|half| half & !LAP)),
                Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Protocol),
            }
        }
    }

    #[test]
    fn a_put_and_a_get_at_once_is_refused() {
        let error = Trigger::decode([3 << 59, 0]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol);
    }
}
