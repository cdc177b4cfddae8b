//! Human-readable byte counts: `4KiB`, `1GiB`, `2.5MB`.

use serde::Serialize;
use std::fmt;
use std::str::FromStr;

/// A number of bytes. Parsed with or without a unit (`K` and `KiB` are 1024, `KB` is 1000), and displayed in
/// the largest binary unit that is exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub(crate) struct ByteSize(pub(crate) u64);

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const BINARY: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let (mut value, mut unit) = (self.0, 0);
        while value != 0 && value.is_multiple_of(1024) && unit + 1 < BINARY.len() {
            value /= 1024;
            unit += 1;
        }
        // `pad` applies width and alignment to the whole.
        f.pad(&format!("{value} {}", BINARY[unit]))
    }
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let split = text
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let bad = || {
            format!("unknown size '{text}'; expected a number of bytes such as 4KiB, 1GiB or 1500")
        };
        let factor = factor(unit.trim()).ok_or_else(bad)?;
        // `1.` and `.5` are rejected, since an empty part does not parse.
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        let whole: u128 = whole.parse().map_err(|_| bad())?;
        // Integer arithmetic keeps exact values exact.
        let scale = 10_u128
            .checked_pow(u32::try_from(fraction.len()).map_err(|_| bad())?)
            .ok_or_else(bad)?;
        let fraction: u128 = fraction.parse().map_err(|_| bad())?;
        let scaled = fraction.checked_mul(factor).ok_or_else(bad)?;
        if !scaled.is_multiple_of(scale) {
            return Err(format!(
                "the size '{text}' is a fraction; expected a whole number of bytes"
            ));
        }
        let total = whole
            .checked_mul(factor)
            .and_then(|bytes| bytes.checked_add(scaled / scale));
        let total = total.and_then(|bytes| u64::try_from(bytes).ok());
        total
            .map(Self)
            .ok_or_else(|| format!("the size '{text}' is too large; expected less than 16 EiB"))
    }
}

fn factor(unit: &str) -> Option<u128> {
    let unit = unit.to_ascii_lowercase();
    let (letter, base) = match unit.strip_suffix("ib") {
        Some(letter) => (letter, 1024_u128),
        None => match unit.strip_suffix('b') {
            Some("") => return Some(1),
            Some(letter) => (letter, 1000),
            // A bare letter is binary, as in other tools for memory sizes.
            None => (unit.as_str(), 1024),
        },
    };
    let power = match letter {
        "" if base == 1024 && unit.is_empty() => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        _ => return None,
    };
    Some(base.pow(power))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        for (text, bytes) in [
            ("0", 0),
            ("1500", 1500),
            ("12B", 12),
            ("4KiB", 4096),
            ("4 kib", 4096),
            ("4K", 4096),
            ("4kB", 4000),
            ("1.5MiB", 3 << 19),
            ("2.5MB", 2_500_000),
            ("1GiB", 1 << 30),
            ("16383TiB", 16383 << 40),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn refuses_the_rest() {
        for text in [
            "",
            "KiB",
            "ib",
            "-1",
            "1.5",
            "1..5K",
            ".K",
            "4XiB",
            "4 K B",
            "1e9",
            "20000000TiB",
            "0.1KiB",
        ] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
        assert!(
            format!("1.{}K", "0".repeat(60))
                .parse::<ByteSize>()
                .is_err()
        );
    }

    #[test]
    fn writes_without_loss() {
        for bytes in [
            0,
            1,
            1023,
            1024,
            1536,
            4096,
            1 << 20,
            (1 << 20) + 1,
            1 << 30,
            3 << 40,
            u64::MAX,
        ] {
            assert_eq!(ByteSize(bytes).to_string().parse(), Ok(ByteSize(bytes)));
        }
        assert_eq!(ByteSize(4096).to_string(), "4 KiB");
        assert_eq!(ByteSize(1 << 50).to_string(), "1024 TiB");
        assert_eq!(format!("{:>8}|", ByteSize(1 << 30)), "   1 GiB|");
    }
}
