//! Functions of rows that samples call: their texts, and what they mean, written down a second time.
//!
//! They give whole numbers of whole numbers, so that no order of sums matters.

/// What a function gives, for each of its results, of the values of all sources.
pub(super) type Function = fn(&[Vec<f64>]) -> Vec<Vec<f64>>;

/// The functions' text.
pub(super) const TEXTS: [&str; 2] = [
    "function shifted(x, r, s) { let h = x - r; let most = row_max(abs(h)); return max(h, -s) + most, row_sum(select(h < 0, 0, h)) }",
    "function joined(x) { return x + row_sum(x) }",
];

/// The function of a name.
pub(super) fn of(name: &str) -> Function {
    match name {
        "shifted" => shifted,
        "joined" => joined,
        other => panic!("no function {other}"),
    }
}

/// The last two sources are a row and a single value; those before are added up.
fn shifted(sources: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let [terms @ .., r, s] = sources else {
        panic!("shifted takes a sum, a row and a value");
    };
    let at = |element: usize| terms.iter().map(|term| term[element]).sum::<f64>() - r[element];
    let h: Vec<f64> = (0..r.len()).map(at).collect();
    let most = h
        .iter()
        .fold(f64::NEG_INFINITY, |most, value| most.max(value.abs()));
    let rows = h.iter().map(|value| value.max(-s[0]) + most).collect();
    vec![rows, vec![h.iter().filter(|value| **value > 0.0).sum()]]
}

fn joined(sources: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let at = |element: usize| sources.iter().map(|term| term[element]).sum();
    let x: Vec<f64> = (0..sources[0].len()).map(at).collect();
    let sum: f64 = x.iter().sum();
    vec![x.iter().map(|value| value + sum).collect()]
}
