//! Messages about programs name the statement of a line, roots, operators and protocols.

use warplink::program::{Diagnostic, Parameters, Program, unroll, verify};

fn refused(text: &str, world: usize) -> Vec<Diagnostic> {
    let program = Program::parse(text).unwrap_or_else(|error| panic!("{error}"));
    verify(&program, world, 2, &Parameters::new()).expect_err(text)
}

#[track_caller]
fn says(diagnostic: &Diagnostic, parts: &[&str]) {
    let text = diagnostic.to_string();
    for part in parts {
        assert!(text.contains(part), "'{part}' is not in: {text}");
    }
}

#[test]
fn a_message_names_the_statement_of_several_that_share_a_line() {
    let text = "program p() {
    input A: u8[4]; output B: u8[4]; allocate X: u8[4]
    fork pool(0) { set_stream pool(0); X = copy(A); set_stream caller; B = copy(X) }
}";
    let found = refused(text, 1);
    says(
        &found[0],
        &[
            "race: rank 0, line 3, column 40: `X = copy(A)`",
            "rank 0, line 3, column 72: `B = copy(X)`",
        ],
    );
    let starts: Vec<_> = found[0]
        .places
        .iter()
        .map(|p| (p.site.line, p.site.column))
        .collect();
    assert_eq!(starts, [(3, 40), (3, 72)]);
    // The first statement of a line is known by its line.
    let text = "program p() {\n    input A: u8[4]; output B: u8[4]\n}";
    says(
        &refused(text, 1)[0],
        &["line 2, column 21: `output B: u8[4]`"],
    );
    let text = "program p() {\n    output B: u8[4]; input A: u8[4]\n}";
    says(&refused(text, 1)[0], &["rank 0, line 2: `output B: u8[4]`"]);
}

#[test]
fn what_is_long_is_shown_in_part() {
    let long = "A, ".repeat(1000);
    let text = format!(
        "program p() {{ input A: u8[4]; output B: f16[4]; output C: f16[4]; allocate D: f16[4]; set_stream \
         pool(0); B = sum({long}A) }}"
    );
    let refused = refused(&text.replace("u8", "f16"), 1);
    let said = refused[0].to_string();
    assert!(
        said.contains("`B = sum(A, A") && said.contains('…'),
        "{said}"
    );
    assert!(said.len() < 600, "{said}");
    // A wrong word far along the line.
    let error = Program::parse(&text.replace(" A) }", " A) wrong }")).unwrap_err();
    let shown = error.to_string();
    let lines: Vec<&str> = shown.lines().collect();
    assert!(
        lines[2].contains("… A, A") || lines[2].contains("…A, A") || lines[2].contains("…, A"),
        "{shown}"
    );
    assert!(
        lines.iter().all(|line| line.chars().count() < 200),
        "{shown}"
    );
    let caret = lines[3].chars().position(|c| c == '^').unwrap();
    let pointed: String = lines[2].chars().skip(caret).take(5).collect();
    assert_eq!(pointed, "wrong", "{shown}");
    // So is an expression that does not hold.
    let sum = "(1 + 1)";
    let product = format!("({})", [sum; 60].join(" * "));
    let text = format!("program p() {{ require {product} / 0 == 1 }}");
    assert!(self::refused(&text, 1)[0].to_string().len() < 400);
}

#[test]
fn lists_of_ranks_in_two_orders_are_told_as_such() {
    let text = "program p() {
    input A: u8[4]
    output B: u8[8]
    let pair = [rank, 1 - rank]
    B = all_gather(A) among pair
}";
    says(
        &refused(text, 2)[0],
        &[
            "collective-order: rank 0, line 5: `B = all_gather(A) among pair` is among all ranks in \
             order, and rank 1 calls one among ranks 1, 0; expected the same ranks in the same order",
        ],
    );
}

#[test]
fn two_statements_of_one_line_are_two_diagnostics() {
    let text = "program p() {
    input A: u8[4]
    output B: u8[4]; output C: u8[4]
}";
    let found = refused(text, 2);
    assert_eq!(found.len(), 2);
    says(
        &found[0],
        &[
            "line 3: `output B: u8[4]`",
            "(1 more in the same statements)",
        ],
    );
    says(&found[1], &["line 3, column 22: `output C: u8[4]`"]);
}

#[test]
fn shared_transfers_and_arms_have_columns_too() {
    let text = "program p() {
    input A: u8[4]
    output B: u8[4]
    share { s = send A to 1 - rank tag rank via get; r = receive B from 1 - rank tag rank via get }
    post s, r; wait s, r
}";
    let found = refused(text, 2);
    says(
        &found[0],
        &["line 4, column 13: `s = send A to 1 - rank tag rank via get`"],
    );
    let text = "program p() {
    if 1 == 2 { } else if 1 / 0 == 1 { }
}";
    says(
        &refused(text, 1)[0],
        &["line 2, column 24: 1 / 0 == 1: division by zero"],
    );
}

#[test]
fn columns_count_characters_on_long_lines() {
    let body: String = (0..2000).map(|i| format!("let x{i} = {i}; ")).collect();
    let text = format!("program p() {{\n{body} let z = y\n}}");
    let column = text.lines().nth(1).unwrap().find("let z").unwrap() + 1;
    let error = refused(&text, 1).remove(0);
    says(
        &error,
        &[&format!(
            "line 2, column {column}: y: 'y' is not an integer"
        )],
    );
}

#[test]
fn roots_operators_and_sizes_of_collectives_are_said() {
    let program = |line: &str| {
        format!(
            "program p() {{
    input A: f32[4]
    output B: f32[4]
    let n = 2 + rank * 2
    {line}
    if rank == 1 {{ B = copy(A) }}
}}"
        )
    };
    for (line, parts) in [
        (
            "B = broadcast(A from rank)",
            [
                "`B = broadcast(A from rank)`",
                "broadcast(… from 1) against broadcast(… from 0)",
            ],
        ),
        (
            "if rank == 0 { B = all_reduce(A, sum) } else { B = all_reduce(A, max) }",
            [
                "`B = all_reduce(A, max)`",
                "all_reduce(…, max) against all_reduce(…, sum)",
            ],
        ),
        (
            "B = reduce(A, min to 1 - rank)",
            [
                "`B = reduce(A, min to 1 - rank)`",
                "reduce(…, min to 0) against reduce(…, min to 1)",
            ],
        ),
        (
            "B[0..n] = all_reduce(A[0..n], sum)",
            [
                "`B[0..n] = all_reduce(A[0..n], sum)`",
                "16 bytes of f32 into 16 against 8 bytes of f32 into 8",
            ],
        ),
    ] {
        let found = refused(&program(line), 2);
        says(&found[0], &parts);
    }
}

#[test]
fn the_protocols_of_two_ends_are_said() {
    let text = "program p() {
    input A: u8[4]
    output B: u8[4]
    share {
        s = send A to 1 - rank via get
        r = receive B from 1 - rank via put
    }
    post s, r
    wait s, r
}";
    let found = refused(text, 2);
    says(
        &found[0],
        &[
            "`s = send A to 1 - rank via get`",
            "`r = receive B from 1 - rank via put`",
            "via get against via put",
        ],
    );
}

/// Some editors write one at the start of a file.
#[test]
fn a_byte_order_mark_is_skipped() {
    let text = "\u{feff}program p() {\n    output B: u8[4]\n    B = copy(C)\n}";
    let program = Program::parse(text).unwrap();
    assert_eq!(
        program,
        Program::parse(text.trim_start_matches('\u{feff}')).unwrap()
    );
    let error = unroll(&program, 0, 1, 1, &Parameters::new()).unwrap_err();
    assert!(
        error.to_string().contains("line 3: unknown tensor 'C'"),
        "{error}"
    );
    let error = Program::parse_text("\u{feff}programm").unwrap_err();
    assert_eq!((error.line, error.column), (1, 1));
    // Only at the start.
    let error = Program::parse_text("program p() {\n\u{feff}}").unwrap_err();
    assert_eq!((error.line, error.column), (2, 1));
}
