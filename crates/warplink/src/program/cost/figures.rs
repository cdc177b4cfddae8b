//! Inputs of a derived hardware model: nominal rates reported by the device, and achieved rates from a short
//! measurement.

use super::fields::check;
use crate::device::DeviceProperties;
use crate::error::Result;
use serde::{Deserialize, Serialize};

/// Fraction of the nominal rate that a GPU achieves: memory, products, puts of the copy engine over a link, stores
/// and loads of kernels over it. Links lose bandwidth to headers (a packet of 16 bytes for 128 of data), and loads
/// also to requests.
const MEMORY: f64 = 0.85;
const PRODUCTS: f64 = 0.7;
const PUT: f64 = 0.87;
const STORED: f64 = 0.79;
const LOADED: f64 = 0.74;

/// Defaults for a GPU that does not report its rates: slow ones, so that nothing is chosen for its rate alone.
const SOME_CLOCK: f64 = 1.4e9;
const SOME_MEMORY: f64 = 1e12;
const SOME_LINK: f64 = 25e9;

/// Rates of a machine, in bytes and operations per second, and the time of a launch in seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Bytes read and written by a copy within a device's memory.
    pub memory: f64,
    /// Bytes that every rank puts to its neighbour by the copy engine, all ranks at once.
    pub put: f64,
    /// Bytes that every rank stores at its neighbour by a kernel of many blocks, all ranks at once.
    pub stored: f64,
    /// Bytes that every rank loads from its neighbour by a kernel of many blocks, all ranks at once.
    pub loaded: f64,
    /// Operations of a large matrix product of 16-bit floats.
    pub products: f64,
    /// Seconds of a minimal kernel, one of many in a graph.
    pub launch: f64,
}

impl Figures {
    /// Expected figures of a device, before any measurement.
    pub fn expected(device: &DeviceProperties) -> Self {
        if device.shared {
            // Typical of one current processor; a measurement is more accurate.
            return Self {
                memory: 10e9,
                put: 5e9,
                stored: 5e9,
                loaded: 5e9,
                products: 30e9,
                launch: 3e-6,
            };
        }
        let or = |said: f64, some: f64| if said > 0.0 { said } else { some };
        let memory = MEMORY * or(device.memory_rate, SOME_MEMORY);
        let link = or(device.link_rate, SOME_LINK);
        let clock = or(device.clock, SOME_CLOCK);
        let all = 1024.0 * clock * device.multiprocessors.max(1) as f64;
        Self {
            memory,
            put: PUT * link,
            stored: STORED * link,
            loaded: LOADED * link,
            products: PRODUCTS * or(device.products[0], all),
            launch: 1.4e-6,
        }
    }

    /// Fails if a figure is out of range.
    pub fn check(&self) -> Result<()> {
        let rates = [
            ("memory", self.memory),
            ("put", self.put),
            ("stored", self.stored),
            ("loaded", self.loaded),
            ("products", self.products),
        ];
        // From the rate of a floppy disk to beyond that of any hardware.
        check(&rates, 1e4..=1e18, "a rate between 1e4 and 1e18 a second")?;
        let launch = [("launch", self.launch)];
        check(&launch, 1e-9..=1.0, "between 1e-9 and 1 second")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A property that a device does not report never leads to an invalid figure.
    #[test]
    fn every_device_has_figures() {
        for shared in [false, true] {
            for said in [0.0, 1e12] {
                let device = DeviceProperties {
                    model: String::new(),
                    version: String::new(),
                    multiprocessors: 0,
                    cluster_blocks: 1,
                    clock: said / 1e3,
                    products: [said; 2],
                    memory_rate: said,
                    link_rate: said,
                    linked: false,
                    shared,
                    kernel_copies: false,
                };
                Figures::expected(&device).check().unwrap();
            }
        }
    }
}
