//! PCI addresses.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// PCI address of a device. Unlike an ordinal, it is the same in every process. Displayed as `0000:1b:00.0`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct PciAddress {
    /// Domain, also called segment.
    pub domain: u32,
    /// Bus in the domain.
    pub bus: u8,
    /// Device on the bus.
    pub device: u8,
    /// Function of the device.
    pub function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            domain,
            bus,
            device,
            function,
        } = self;
        // Same format as sysfs.
        f.pad(&format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
    }
}

impl fmt::Debug for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for PciAddress {
    type Err = Error;

    /// Parses an address in upper or lower case, with a domain of any length, since libraries differ.
    fn from_str(text: &str) -> Result<Self> {
        let parsed = || {
            let (place, function) = text.split_once('.')?;
            let mut parts = place.split(':');
            let address = Self {
                domain: hex(parts.next()?)?,
                bus: hex(parts.next()?)?.try_into().ok()?,
                device: hex(parts.next()?)?.try_into().ok()?,
                function: hex(function)?.try_into().ok()?,
            };
            parts.next().is_none().then_some(address)
        };
        parsed().ok_or_else(|| {
            Error::parse(format!(
                "malformed PCI address '{text}'; expected the form 0000:1b:00.0"
            ))
        })
    }
}

impl TryFrom<String> for PciAddress {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> Self {
        address.to_string()
    }
}

fn hex(text: &str) -> Option<u32> {
    // `from_str_radix` alone would accept a sign.
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    digits.then(|| u32::from_str_radix(text, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use proptest::prelude::*;

    #[test]
    fn every_librarys_form_is_the_same_address() {
        let expected = PciAddress {
            domain: 0,
            bus: 0x1b,
            device: 0,
            function: 0,
        };
        for text in ["0000:1b:00.0", "00000000:1B:00.0", "0:1b:0.0"] {
            assert_eq!(text.parse::<PciAddress>().unwrap(), expected);
        }
        assert_eq!(expected.to_string(), "0000:1b:00.0");
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "",
            "1b:00.0",
            "0000:1b:00",
            "0000:1b:00.0.0",
            "0000:1b:00:00.0",
            "0000:+b:00.0",
            "0000:1ff:00.0",
            "0000:1g:00.0",
        ] {
            let error = text.parse::<PciAddress>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Parse, "{text}");
        }
    }

    proptest! {
        #[test]
        fn formatted_address_parses_back(domain: u32, bus: u8, device: u8, function: u8) {
            let address = PciAddress { domain, bus, device, function };
            prop_assert_eq!(address.to_string().parse::<PciAddress>().unwrap(), address);
        }
    }
}
