//! Parsing, printing and unrolling of programs.

use warplink::program::{Parameters, Program, unroll};

fn example(name: &str) -> String {
    let path = format!(
        "{}/../../examples/programs/{name}.wlp",
        env!("CARGO_MANIFEST_DIR")
    );
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn the_ring_parses_prints_and_unrolls() {
    let program = Program::parse(&example("all_gather_matmul_ring_get")).unwrap();
    let printed = program.to_string();
    println!("{printed}");
    assert_eq!(Program::parse(&printed).unwrap(), program);
    let parameters: Parameters = [("m", 64), ("k", 8), ("n", 16)]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
    for rank in 0..8 {
        let unrolled = unroll(&program, rank, 8, 2, &parameters).unwrap();
        assert_eq!(unrolled.transfers.len(), 14);
        assert_eq!(unrolled.exchanges.len(), 1);
    }
}
