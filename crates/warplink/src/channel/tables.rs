//! Memory for the region tables that kernels read, allocated from pages.

use crate::device::channel::TABLE_BYTES;
use crate::device::{AllocationKind, Device, DeviceSlice};
use crate::error::Result;
use crate::sync::lock;
use std::sync::{Arc, Mutex};

const PAGE_BYTES: usize = 64 << 10;

/// Allocator of tables.
#[derive(Debug)]
pub(super) struct TablePool {
    device: Arc<dyn Device>,
    free: Mutex<Vec<DeviceSlice>>,
}

/// Memory of one table, returned to its pool on drop.
#[derive(Debug)]
pub(super) struct AddressTable {
    slice: DeviceSlice,
    pool: Arc<TablePool>,
}

impl TablePool {
    pub(super) fn new(device: &Arc<dyn Device>) -> Arc<Self> {
        Arc::new(Self {
            device: device.clone(),
            free: Mutex::default(),
        })
    }

    /// Allocates one table; its content is undefined.
    pub(super) fn allocate(self: &Arc<Self>) -> Result<AddressTable> {
        let mut free = lock(&self.free);
        if free.is_empty() {
            let page = self.device.allocate(PAGE_BYTES, AllocationKind::Plain)?;
            // By the page: an allocation of its own for each table would take a driver call and a multiple of its
            // memory.
            for start in (0..PAGE_BYTES).step_by(TABLE_BYTES) {
                free.push(page.slice(start..start + TABLE_BYTES)?);
            }
        }
        let slice = match free.pop() {
            Some(slice) => slice,
            None => self.device.allocate(TABLE_BYTES, AllocationKind::Plain)?,
        };
        Ok(AddressTable {
            slice,
            pool: self.clone(),
        })
    }
}

impl AddressTable {
    pub(super) fn memory(&self) -> &DeviceSlice {
        &self.slice
    }
}

impl Drop for AddressTable {
    fn drop(&mut self) {
        lock(&self.pool.free).push(self.slice.clone());
    }
}
