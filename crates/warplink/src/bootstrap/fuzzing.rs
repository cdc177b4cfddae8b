//! Entry points of the fuzz targets: every parser of bytes from a socket or text from a launcher.

use super::message::{self, Answer, Request, StoreEntry, StoreEvent};
use super::table::StoreTable;
use super::{UniqueId, channel, nodelist};

/// Records as a store or a member may receive them, whose bodies are decoded as every kind of message; the requests among
/// them are carried out. The first two bytes of a record are the rank that sends it and the number of the request.
pub fn store_frames(bytes: &[u8]) {
    const WORLD: u32 = 4;
    let mut table = StoreTable::new(WORLD as usize, 1 << 20);
    for rank in 0..WORLD {
        // Nobody has joined before.
        let _ = table.join(rank, None);
    }
    let mut reader = bytes;
    while let Ok(Some(record)) = channel::read_record(&mut reader) {
        let Some((&[sender, id], body)) = record.split_first_chunk() else {
            continue;
        };
        if let Ok(request) = message::decode::<Request>(body) {
            table.handle(u32::from(sender) % WORLD, id.into(), request);
        }
        for sent in table.take_outgoing() {
            // A member must be able to read whatever the store sends.
            let read = match sent.id {
                0 => {
                    message::decode::<StoreEvent>(&sent.body).is_ok()
                        || message::decode::<Answer>(&sent.body).is_ok()
                }
                _ => message::decode::<Answer>(&sent.body).is_ok(),
            };
            assert!(read, "the store sent a message that no member can read");
        }
        let _ = message::decode::<Answer>(body);
        let _ = message::decode::<StoreEntry>(body);
        let _ = message::decode::<StoreEvent>(body);
    }
    for rank in 0..WORLD {
        table.lose(rank, "the end of the input");
    }
}

/// Bytes as a unique id. One that is accepted must encode to the same bytes.
pub fn unique_id(bytes: &[u8]) {
    if let Ok(id) = UniqueId::from_bytes(bytes) {
        assert_eq!(id.to_bytes(), bytes, "an id does not round-trip");
    }
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = text.parse::<UniqueId>();
        let _ = nodelist::first_host(text);
    }
}
