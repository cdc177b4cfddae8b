//! Range checks and errors for fields of a hardware model.

use crate::error::{Error, Result};
use std::ops::RangeInclusive;

/// Upper bound for the time of one operation in seconds; larger values are rejected as implausible.
pub(super) const MAX_SECONDS: f64 = 1e6;
/// Lower bound for the time of a measured operation in seconds; above 0, which would give an infinite rate.
pub(super) const MIN_SECONDS: f64 = 1e-12;
/// Plausible rates in bytes per second.
const RATES: RangeInclusive<f64> = 1.0..=1e18;
/// Upper bound for the ratio of two times.
pub(super) const MAX_RATIO: f64 = 1e4;
/// Upper bound for any count of a device.
pub(super) const MAX_COUNT: f64 = 1e9;

/// Fails for a field whose value is out of `range`; `expected` describes the range. NaN is in no range.
pub(super) fn check(
    fields: &[(&str, f64)],
    range: RangeInclusive<f64>,
    expected: &str,
) -> Result<()> {
    match fields.iter().find(|(_, value)| !range.contains(value)) {
        Some((name, value)) => Err(Error::parse(format!(
            "'{name}' is {value}; expected {expected}"
        ))),
        None => Ok(()),
    }
}

/// Fails for a time that is out of range; 0 is within.
pub(super) fn check_seconds(fields: &[(&str, f64)]) -> Result<()> {
    let expected = format!("0 to {MAX_SECONDS:e} seconds");
    check(fields, 0.0..=MAX_SECONDS, &expected)
}

/// Fails for a rate that is out of range.
pub(super) fn check_rates(fields: &[(&str, f64)]) -> Result<()> {
    let expected = format!("{:e} to {:e} bytes a second", RATES.start(), RATES.end());
    check(fields, RATES, &expected)
}

#[cfg(test)]
mod tests {
    use super::super::HardwareModel;
    use super::super::find::all_shipped;
    use serde_json::{Value, json};

    /// Each figure of a model, by its path.
    fn figures(value: &Value, path: String, found: &mut Vec<String>) {
        match value {
            Value::Number(number) if number.is_f64() => found.push(path),
            // The last element represents a list.
            Value::Array(values) => {
                if let Some(last) = values.last() {
                    figures(last, format!("{path}/{}", values.len() - 1), found);
                }
            }
            Value::Object(fields) => fields
                .iter()
                .for_each(|(name, value)| figures(value, format!("{path}/{name}"), found)),
            _ => {}
        }
    }

    #[test]
    fn no_figure_may_be_absurd() {
        for model in all_shipped() {
            let whole: Value = serde_json::from_str(&model.to_json().unwrap()).unwrap();
            let mut found = Vec::new();
            figures(&whole, String::new(), &mut found);
            assert!(found.len() > 20, "{}", found.len());
            for path in found {
                for absurd in [1e30, -1.0] {
                    let mut changed = whole.clone();
                    *changed.pointer_mut(&path).unwrap() = json!(absurd);
                    let read = HardwareModel::from_json(&changed.to_string());
                    assert!(read.is_err(), "{path} is {absurd}");
                }
            }
        }
    }
}
