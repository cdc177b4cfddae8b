//! Program text: whatever is parsed is printed and parsed again to the same program, and unrolled
//! and verified without a panic.
#![no_main]

use warplink::program::{Parameters, Program, verify};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let Ok(program) = Program::parse(text) else {
        return;
    };
    let printed = program.to_string();
    let again = Program::parse(&printed).expect("what is printed parses");
    assert_eq!(again.to_string(), printed);
    let parameters: Parameters = program
        .parameters
        .iter()
        .map(|name| (name.clone(), 4))
        .collect();
    let _ = verify(&program, 2, 2, &parameters);
});
