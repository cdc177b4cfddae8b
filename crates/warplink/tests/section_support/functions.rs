//! Functions of rows that samples call: their texts, and what they mean, written down a second time.
//!
//! They give whole numbers of whole numbers, so that no order of sums matters.

/// A function of rows: results from arguments.
pub(super) type Function = fn(&[Vec<f64>]) -> Vec<Vec<f64>>;

/// The functions' text.
pub(super) const TEXTS: [&str; 3] = [
    "function shifted(x, r, s) { let h = x - r; let most = row_max(abs(h)); return max(h, -s) + most, row_sum(select(h < 0, 0, h)) }",
    "function joined(x) { return x + row_sum(x) }",
    "function blocked(x, b by 8) { let most = block_max(abs(x), 8); return most - x + b, most + b }",
];

/// The function of a name.
pub(super) fn of(name: &str) -> Function {
    match name {
        "shifted" => shifted,
        "joined" => joined,
        "blocked" => blocked,
        other => panic!("no function {other}"),
    }
}

/// A row, another, and a single value.
fn shifted(arguments: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let [x, r, s] = arguments else {
        panic!("shifted takes two rows and a value");
    };
    let h: Vec<f64> = x.iter().zip(r).map(|(x, r)| x - r).collect();
    let most = h
        .iter()
        .fold(f64::NEG_INFINITY, |most, value| most.max(value.abs()));
    let rows = h.iter().map(|value| value.max(-s[0]) + most).collect();
    vec![rows, vec![h.iter().filter(|value| **value > 0.0).sum()]]
}

fn joined(arguments: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let [x] = arguments else {
        panic!("joined takes a row");
    };
    let sum: f64 = x.iter().sum();
    vec![x.iter().map(|value| value + sum).collect()]
}

/// A row, and a value for each block of it.
fn blocked(arguments: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let [x, b] = arguments else {
        panic!("blocked takes a row and values of blocks");
    };
    let (mut row, mut blocks) = (Vec::new(), Vec::new());
    for (block, b) in x.chunks(8).zip(b) {
        let most = block.iter().map(|value| value.abs());
        let most = most.fold(f64::NEG_INFINITY, f64::max);
        row.extend(block.iter().map(|value| most - value + b));
        blocks.push(most + b);
    }
    vec![row, blocks]
}
