//! The verifier on examples, on faulty programs and on lowered ones.

use warplink::program::{Parameters, Program, verify};

fn parameters(list: &[(&str, i64)]) -> Parameters {
    list.iter()
        .map(|&(name, value)| (name.to_owned(), value))
        .collect()
}

#[test]
fn the_examples_pass() {
    let folder = format!("{}/../../examples/programs", env!("CARGO_MANIFEST_DIR"));
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let program = Program::parse(&text).unwrap_or_else(|e| panic!("{}:\n{e}", path.display()));
        assert_eq!(Program::parse(&program.to_string()).unwrap(), program);
        for world in [1, 2, 3, 4, 5, 8, 16] {
            let sizes = program
                .parameters
                .iter()
                .map(|name| (name.as_str(), 240 * 16))
                .collect::<Vec<_>>();
            for streams in [1, 2, 3] {
                match verify(&program, world, streams, &parameters(&sizes)) {
                    Ok(report) => assert_eq!(report.world, world),
                    Err(findings) => {
                        for finding in &findings {
                            println!("{finding}");
                        }
                        panic!("{} for {world} ranks, {streams} streams", path.display());
                    }
                }
            }
        }
        count += 1;
    }
    assert!(count >= 1);
}
