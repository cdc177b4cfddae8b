//! Program text: whatever is parsed is printed and parsed again to the same program, and unrolled
//! and verified without a panic.
#![no_main]

use warplink::program::parameters::ParameterKind;
use warplink::program::{Parameters, Program, Value, verify};

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
        .filter_map(|parameter| {
            let value = match parameter.kind {
                ParameterKind::Integer => Value::Integer(4),
                ParameterKind::List => Value::List(vec![4, 2]),
                ParameterKind::OneOf(_) => return None,
            };
            Some((parameter.name.clone(), value))
        })
        .collect();
    let _ = verify(&program, 2, 2, &parameters);
});
