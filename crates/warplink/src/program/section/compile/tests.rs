//! Tests of generated kernel text. `tests/kernels.rs` checks that it compiles.

mod meeting;

use super::SectionInstance;
use crate::program::{Parameters, Program, unroll};

/// The section of a program for rank `rank` of `world`.
fn section(text: &str, rank: usize, world: usize, n: i64) -> SectionInstance {
    let program = Program::parse(text).unwrap_or_else(|error| panic!("{error}"));
    let parameters = Parameters::new().with("n", n);
    let rank_program = unroll(&program, rank, world, 1, &parameters).unwrap();
    rank_program.sections().next().unwrap().clone()
}

/// The kernel of a body over X, Y and Z of n elements, and packets P.
fn kernel(body: &str, rank: usize, world: usize) -> Result<String, String> {
    kernel_of(body, rank, world, true)
}

fn kernel_of(body: &str, rank: usize, world: usize, aligned: bool) -> Result<String, String> {
    let text = format!(
        "program test(n) {{\n input X: bf16[n]\n output Y: bf16[n]\n output Z: bf16[n]\n \
         scratch P: packets16 bf16[2, world, n]\n kernel lane in 0..4 threads 128 {{\n{body}\n}}\n}}\n"
    );
    let kernel = section(&text, rank, world, 1000).kernel(aligned);
    kernel.map_err(|error| error.to_string())
}

fn barriers(body: &str) -> usize {
    kernel(body, 0, 2).unwrap().matches("self.sync();").count()
}

#[test]
fn threads_are_synchronized_where_one_may_need_what_another_wrote() {
    let copies = "Y[lane of 4] = copy(X[lane of 4])\n";
    assert_eq!(barriers(copies), 0);
    // Read after write, write after read, write after write.
    assert_eq!(
        barriers(&format!("{copies}Z[lane of 4] = copy(Y[lane of 4])")),
        1
    );
    assert_eq!(
        barriers("Y[lane of 4] = copy(Z[lane of 4])\nZ[lane of 4] = copy(X[lane of 4])"),
        1
    );
    assert_eq!(barriers(&format!("{copies}{copies}")), 1);
    // A signal and a wait are barriers too.
    let after = |between: &str| format!("{copies}{between}\nZ[lane of 4] = copy(Y[lane of 4])");
    assert_eq!(barriers(&after("signal 1 - rank")), 0);
    assert_eq!(barriers(&after("wait 1 - rank")), 0);
    assert_eq!(barriers(&after("barrier")), 0);
    // Disjoint parts, other ranks, and packets need no barrier.
    assert_eq!(
        barriers("Y[0..10] = copy(X[0..10])\nY[10..20] = copy(X[10..20])"),
        1
    );
    assert_eq!(
        barriers("Y[0 of 2] = copy(X[0 of 2])\nY[1 of 2] = copy(X[1 of 2])"),
        0
    );
    assert_eq!(barriers("put X to Y on 1\nY = copy(X)"), 0);
    assert_eq!(barriers("put X to P[0][rank] on 1\nY = copy(P[0][1])"), 0);
}

/// How often the kernel of a body over integers E, P and Q has a text.
fn of_integers(body: &str, found: &str) -> usize {
    let text = format!(
        "program test(n) {{\n input E: i32[n]\n output P: i32[n]\n output Q: i32[n]\n \
         kernel lane in 0..4 threads 128 {{\n{body}\n}}\n}}\n"
    );
    let kernel = section(&text, 0, 2, 1000).kernel(true).unwrap();
    kernel.matches(found).count()
}

#[test]
fn the_thread_that_stores_all_integers_needs_no_barrier_between_them() {
    let of = |body: &str| of_integers(body, "self.sync();");
    assert_eq!(of("P[0] = integer(1)\nP[0] = integer(2)"), 0);
    let reversed = "for i in 0..n { P[n - 1 - i] = integer(i) }\nP[n - 1] = integer(2)";
    assert_eq!(of(reversed), 0);
    // Threads of a warp have iterations each, may have copied these elements, or have yet to read them.
    assert_eq!(
        of("for i in 0..n { P[i] = integer(i) }\nP[n - 1] = integer(2)"),
        1
    );
    assert_eq!(of("P = copy(E)\nP[0] = integer(2)"), 1);
    assert_eq!(of("P[0] = integer(2)\nQ = copy(P)"), 1);
    assert_eq!(of("let x = P[0] at most 9\nP[0] = integer(x + 1)"), 1);
}

#[test]
fn one_warp_does_what_only_stores_integers() {
    let of = |body: &str, found: &str| of_integers(&format!("for k in 0..n {{\n{body}\n}}"), found);
    let one = "let m = count(E[k..k + 1] in 0..9)\nif m > 0 { P[k] = integer(m) }";
    let word = "let x = E[k] at most 9\nP[k] = integer(x)";
    let position = "let s = position(k of E[0..n] in 0..9)\nP[k] = integer(s)";
    for body in [one, word, position] {
        assert_eq!(of(body, "in_last_warp"), 1, "{body}");
    }
    // Each of its threads has iterations, unless an element is not its own.
    let divided =
        |body: &str| of(body, "+= 32") == 1 && of(body, "held(") + of(body, ", true);") > 0;
    assert!(divided(one) && divided(word) && !divided(position));
    assert!(!divided("let x = E[k] at most 9\nP[0] = integer(x)"));
    // Another thread would have an element when the loop begins elsewhere.
    let shifted = format!("for i in 0..2 {{\nfor k in i..n {{\n{word}\n}}\n}}");
    assert_eq!(of_integers(&shifted, "+= 32"), 0);
    // Nothing is stored, all threads are needed, or other threads' elements are.
    for body in [
        "let x = E[k] at most 9",
        "let m = count(E[0..n] in 0..9)\nP[k] = integer(m)",
        "P[k] = copy(E[k])",
        "let x = P[k] at most 9\nQ[k] = integer(x)",
        "P[k] = integer(k)\nQ = copy(E)",
        "P[k] = integer(k)\nbarrier",
    ] {
        assert_eq!(of(body, "in_last_warp"), 0, "{body}");
    }
}

#[test]
fn what_an_iteration_leaves_to_the_next_is_waited_for() {
    let chain =
        "for c in 0..n { Z[lane of 4] = copy(Y[lane of 4])\nY[lane of 4] = copy(X[lane of 4]) }";
    // A barrier before the second step, which overwrites the first one's source, and before the first, which reads
    // the second one's result.
    assert_eq!(barriers(chain), 2);
    assert_eq!(barriers("for p in 0..2 { Y[p of 2] = copy(X[p of 2]) }"), 0);
    assert_eq!(barriers("for p in 0..2 { Y[0 of 2] = copy(X[p of 2]) }"), 1);
    assert_eq!(
        barriers(
            "if lane > 1 { Y[lane of 4] = copy(X[lane of 4]) }\nZ[lane of 4] = copy(Y[lane of 4])"
        ),
        1
    );
}

/// Threads divide a whole row in the same way each time, if it is known how it is aligned: so no other thread's elements are
/// overwritten.
#[test]
fn a_step_needs_no_barrier_from_itself_where_threads_divide_it_alike() {
    let cases = [
        ("for c in 0..n { Y = copy(X) }", true, 0),
        ("for c in 0..n { Y = reduce(X, Z, sum) }", true, 0),
        ("for c in 0..n { put X to Y on c % world }", true, 0),
        ("for c in 0..n { Y = copy(X) }", false, 1),
        // Of another length each time, another step, or a step that reads what another thread stored.
        ("for c in 0..n { Y[0..c] = copy(X[0..c]) }", true, 1),
        ("for c in 0..n { Y = copy(X)\nY = copy(Z) }", true, 2),
        // Packets are divided by their data.
        (
            "for r in 0..2 { Y = copy(X if r == rank else P[0][r]) }",
            true,
            2,
        ),
        ("for c in 0..n { Y = copy(X)\nX = copy(Y) }", true, 2),
    ];
    for (body, aligned, expected) in cases {
        let kernel = kernel_of(body, 0, 2, aligned).unwrap();
        assert_eq!(
            kernel.matches("self.sync();").count(),
            expected,
            "{body}, {aligned}"
        );
    }
}

#[test]
fn a_loop_that_may_have_no_iterations_synchronizes_nothing_that_comes_after_it() {
    let after = |steps: &str| {
        let read = "Z[lane of 4] = copy(Y[lane of 4])";
        barriers(&format!(
            "Y[lane of 4] = copy(X[lane of 4])\n{steps}\n{read}"
        ))
    };
    for loops in ["0..n", "lane..2"] {
        assert_eq!(after(&format!("for i in {loops} {{ barrier }}")), 1);
        assert_eq!(after(&format!("for i in {loops} {{ wait 1 - rank }}")), 1);
        assert_eq!(after(&format!("for i in {loops} {{ signal 1 - rank }}")), 1);
        let nested = format!("for i in {loops} {{ for j in 0..n {{ barrier }} }}");
        assert_eq!(after(&nested), 1);
        // Its own barrier does not help if it has no iterations.
        let own = format!("for i in {loops} {{ Y[lane of 4] = copy(X[lane of 4]) }}");
        assert_eq!(after(&own), 2);
        assert_eq!(after(&format!("{own}\nbarrier")), 1);
    }
    // This loop has iterations.
    assert_eq!(after("for i in 0..2 { barrier }"), 0);
    assert_eq!(after("for i in 0..1000 { barrier }"), 0);
}

#[test]
fn tensors_that_are_parts_of_one_are_known_to_be() {
    let of = |lets: &str, body: &str| {
        let text = format!(
            "program test(n) {{\n input X: f32[2, n]\n output Y: f32[2, n]\n output W: f32[2, n]\n{lets}\n \
             kernel lane in 0..1 threads 64 {{\n{body}\n}}\n}}\n"
        );
        let kernel = section(&text, 0, 2, 64).kernel(true).unwrap();
        kernel.matches("self.sync();").count()
    };
    let parts = "let H = Y[1]\nlet L = Y[0]\nlet V = W[0]";
    assert_eq!(of(parts, "Y = copy(X)\nH = reduce(H, X[0], sum)"), 1);
    assert_eq!(of(parts, "H = copy(X[0])\nW[0] = copy(Y[1])"), 1);
    // Selections do not determine addresses.
    assert_eq!(
        of(
            parts,
            "H[0 of 2] = copy(X[0][0 of 2])\nY[1 of 2] = copy(X[1 of 2])"
        ),
        1
    );
    assert_eq!(of(parts, "L = copy(X[0])\nH = copy(X[1])"), 1);
    // Different memory, other ranks, and disjoint parts of one tensor.
    assert_eq!(of(parts, "H = copy(X[0])\nV = copy(X[1])"), 0);
    assert_eq!(of(parts, "put X to Y on 1\nH = copy(X[0])"), 0);
    assert_eq!(
        of(
            parts,
            "H[0 of 2] = copy(X[0][0 of 2])\nH[1 of 2] = copy(X[0][1 of 2])"
        ),
        0
    );
}

#[test]
fn lists_are_written_out_and_begin_with_another_rank_on_each() {
    let body = "barrier\nY[rank of world][lane of 4] on r for r in 0..world = \
                reduce(X[rank of world][lane of 4] on r for r in 0..world, sum)\nbarrier";
    for rank in 0..4 {
        let text = kernel(body, rank, 4).unwrap();
        let next = (rank + 1) % 4;
        let first = if next == 0 {
            "Places<4>".to_owned()
        } else {
            format!("Places<4, 0x0, 16, {next}>")
        };
        assert_eq!(text.matches(&first).count(), 2, "{text}");
        assert!(
            text.contains("at.v_X[0]") && text.contains("at.v_Y[3]"),
            "{text}"
        );
        let mask = 0xf & !(1 << rank);
        assert_eq!(
            text.matches(&format!("inbound.wait(self, {mask:#x}u);"))
                .count(),
            2,
            "{text}"
        );
    }
}

#[test]
fn a_step_that_stores_nothing_is_left_out() {
    let text = kernel("Y on r for r in 0..0 = reduce(X, sum)", 0, 2).unwrap();
    assert!(!text.contains("reduce<"), "{text}");
    let error = kernel("Y on r for r in 0..0 = reduce(P[0][rank], sum)", 0, 2).unwrap_err();
    assert!(
        error.contains("packets are read, and stored nowhere"),
        "{error}"
    );
}

#[test]
fn a_list_that_depends_on_a_loop_has_it_written_out() {
    let body = "for p in 0..world { Y[p of world] = reduce(X[p of world] if r == p else P[0][r][p of world] for r in 0..world, sum) }";
    let text = kernel(body, 0, 2).unwrap();
    assert_eq!(text.matches("constexpr Index v_p = ").count(), 2, "{text}");
    assert!(!text.contains("for (Index v_p"), "{text}");
    let error = kernel("for c in 0..n { Y = reduce(X for r in 0..c, sum) }", 0, 2).unwrap_err();
    assert!(
        error.contains("no constants of the kernel") && error.contains("line"),
        "{error}"
    );
}

#[test]
fn sizes_do_not_change_the_text_unless_they_need_more_bits() {
    let text = "program test(n) {\n input X: f32[n]\n output Y: f32[n]\n kernel lane in 0..2 threads 64 {\n \
                Y[lane of 2] = copy(X[lane of 2])\n }\n}\n";
    let of = |n| section(text, 0, 2, n).kernel(true).unwrap();
    assert_eq!(of(1000), of(1 << 20));
    assert!(of(1000).contains("WARPLINK_INDEX int") && !of(1 << 31).contains("WARPLINK_INDEX"));
    assert!(section(text, 0, 2, 1 << 40).kernel(true).is_err());
}

#[test]
fn what_a_kernel_computes_needs_as_many_bits_as_it_says() {
    let is_narrow = |step: &str, n: i64| {
        let text = format!(
            "program test(n) {{\n input X: f32[64]\n output Y: f32[64]\n kernel lane in 0..2 threads 64 {{\n \
             {step}\n }}\n}}\n"
        );
        let kernel = section(&text, 0, 2, n).kernel(true).unwrap();
        kernel.contains("WARPLINK_INDEX int")
    };
    // Parts are multiples of 16 elements.
    let parts = "Y[n - 1 - lane of n] = copy(X[n - 1 - lane of n])";
    assert!(is_narrow(parts, 1 << 26) && !is_narrow(parts, (1 << 26) + 1));
    let by = "if lane >> n == 0 { Y[lane of 2] = copy(X[lane of 2]) }";
    assert!(is_narrow(by, 30) && !is_narrow(by, 31));
    assert!(is_narrow("if lane >> 30 == 0 { barrier }", 1));
    assert!(!is_narrow("if lane >> 40 == 0 { barrier }", 1));
    assert!(!is_narrow("if (lane - lane) << 40 == 0 { barrier }", 1));
}

#[test]
fn a_number_is_as_wide_as_what_it_is_shifted_in() {
    let text = "program test(n) {\n input X: f32[64]\n output Y: f32[64]\n kernel lane in 0..1 threads 32 {\n \
                Y = copy(X[0..min(1 << n, 64)])\n }\n}\n";
    let kernel = section(text, 0, 1, 33).kernel(true).unwrap();
    assert!(kernel.contains("((Index)1 << "), "{kernel}");
}

#[test]
fn a_loop_over_all_numbers_that_never_runs_is_no_failure() {
    let body = "if n == 7 { for i in -9223372036854775807..9223372036854775807 { barrier } }";
    kernel(body, 0, 1).unwrap();
}

/// A word that names a row is read by all threads of a lane together, if there is a row.
#[test]
fn words_that_name_rows_are_read_where_they_are() {
    let kernel = |inputs: &str, body: &str| {
        let text = format!(
            "program test(n) {{\n input X: f32[4, n]\n input I: i32[4]\n output Y: f32[8, n]\n output K: i32[8]\n \
             {inputs}\n function same(x) {{ return x }}\n kernel lane in 0..2 threads 64 {{\n{body}\n}}\n}}\n"
        );
        section(&text, 0, 2, 64).kernel(true).unwrap()
    };
    let text = kernel(
        "",
        "for j in 0..4 { let t = 2 * j + lane\n Y[t] = same(X[I[t]] if t < 3 else 0) }",
    );
    let row = text.lines().find(|line| line.contains("Index row0 = "));
    assert!(row.unwrap().contains("v_t < 3 ? value<"), "{text}");
    let packets = "let J = H[epoch % 2]\n for i in 0..4 { K[J[2 * lane]] = integer(i) }\n barrier";
    let of_packets = kernel("scratch H: packets16 i32[2, 4]", packets);
    assert!(of_packets.contains("packet_value<"), "{of_packets}");
    assert!(!of_packets.contains("in_last_warp"), "{of_packets}");
    let of_input = kernel("", "for i in 0..4 { K[I[lane]] = integer(i) }\n barrier");
    assert!(of_input.contains("in_last_warp"), "{of_input}");
}

#[test]
fn what_never_runs_takes_no_time_to_compile() {
    let nested = |bounds: &str, depth: usize, step: &str| {
        let open: String = (0..depth)
            .map(|i| format!("for i{i} in {bounds} {{\n"))
            .collect();
        format!("Y = copy(X)\n{open}{step}\n{}", "}\n".repeat(depth))
    };
    // Too many steps to follow: a barrier before every step that moves data.
    assert_eq!(barriers(&nested("0..n", 28, "Y = copy(X)")), 2);
    let copies = nested("0..60", 4, "Y = copy(X if i0 + i1 + i2 + i3 == 3 else Z)");
    let loops = nested("0..1", 28, "Y = copy(X if i0 == 0 else Z)");
    for body in [copies, loops] {
        let error = kernel(&format!("if n == 1 {{\n{body}\n}}"), 0, 2).unwrap_err();
        assert!(
            error.contains("a kernel of more than 65536 lines") && error.contains("line"),
            "{error}"
        );
    }
}

#[test]
fn names_are_told_apart_from_those_of_the_kernel_and_from_one_another() {
    let body =
        "let int = lane\nlet to0 = X[int of 4]\nlet self = to0[0 of 1]\nY[lane of 4] = copy(self)";
    let text = kernel(body, 0, 2).unwrap();
    assert!(text.contains("const Index v_int = v_lane;"), "{text}");
    assert!(
        text.contains("const auto v_to0 = v_X.part(v_int, 4);"),
        "{text}"
    );
    assert!(
        text.contains("const auto v_self = v_to0.part(0, 1);"),
        "{text}"
    );
    let text = "program test(size, n) {\n input X: f32[n]\n output Y: f32[n]\n kernel lane in 0..2 threads 64 {\n \
                for i in 0..n { let size_ = size + 1\n Y[0..size_] = copy(X[0..size_]) }\n }\n}\n";
    let program = Program::parse(text).unwrap();
    let parameters = Parameters::new().with("size", 7).with("n", 100);
    let rank_program = unroll(&program, 0, 2, 1, &parameters).unwrap();
    let section = rank_program.sections().next().unwrap();
    let text = section.kernel(true).unwrap();
    assert!(text.contains("const Index v_size_ = v_size + 1;"), "{text}");
}

#[test]
fn conditions_are_in_parentheses_once() {
    let announced = "announce 1 with X in A[epoch % 2]\nagree 1 with X in A[epoch % 2]\n";
    for (condition, code) in [
        ("reachable(X)", "if (located[0].reachable()) {"),
        (
            "reachable(X) and lane > 1",
            "if (located[0].reachable() && ",
        ),
        ("lane > 1", "if (v_lane > 1) {"),
    ] {
        let text = format!(
            "program test(n) {{\n input X: bf16[n]\n output Y: bf16[n]\n scratch A: packets16 i32[2, world, 4]\n \
             kernel lane in 0..4 threads 128 {{\n{announced}if {condition} {{ Y[lane of 4] = copy(X[lane of 4]) }}\n}}\n}}\n"
        );
        let kernel = section(&text, 0, 2, 1000).kernel(true).unwrap();
        assert!(kernel.contains(code), "{condition}:\n{kernel}");
    }
}

/// The reductions along the row and divisions of whole units of a function of rows.
fn of_rows(function: &str) -> (Vec<String>, usize) {
    let text = format!(
        "program test(n) {{\n input X: bf16[4, n]\n input W: bf16[n]\n input B: f32[4, (n + 127) / 128]\n output Q: f8e4m3[4, n]\n \
         {function}\n kernel lane in 0..4 threads 128 {{\n Q[lane] = f(X[lane], W, B[lane])\n}}\n}}\n"
    );
    let kernel = section(&text, 0, 1, 1024).kernel(true).unwrap();
    let exchanges = kernel
        .lines()
        .filter_map(|line| line.trim().strip_prefix("row.across"));
    let exchanges = exchanges.map(|line| line.split('(').next().unwrap().to_owned());
    let units = kernel.matches("row_divide(stored").count();
    (exchanges.collect(), units)
}

#[test]
fn reductions_of_a_row_that_need_no_other_are_made_together() {
    let cases: [(&str, &[&str], usize); 5] = [
        // A scale of the whole row, and of a block: one reciprocal for a unit.
        (
            "let scale = row_max(abs(x))\nreturn x / scale",
            &["<RowMax>"],
            1,
        ),
        ("return x / b", &[], 1),
        // Each element has a divisor, or its quotient is needed otherwise.
        ("return x / w", &[], 0),
        (
            "let scale = row_sum(x)\nlet q = x / scale\nreturn q + x",
            &["<RowSum>"],
            0,
        ),
        (
            "let factor = rsqrt(row_sum(x * x))\nlet scale = row_max(abs(x * w)) * factor\nreturn x * factor * w / scale",
            &["<RowSum, RowMax>"],
            1,
        ),
    ];
    for (lines, exchanges, units) in cases {
        let function = format!("function f(x, w, b by 128) {{\n{lines}\n}}");
        let (found, divided) = of_rows(&function);
        assert_eq!(found, exchanges, "{lines}");
        assert_eq!(divided, units, "{lines}");
    }
}

/// The kernel of a loop over rows of X, of which words of E name some.
fn of_looked_up_rows(body: &str, threads: usize) -> String {
    let text = format!(
        "program test(n) {{\n input X: bf16[n, n]\n input E: i32[n]\n output Y: bf16[n, n]\n output Z: bf16[n, n]\n output P: i32[n, n]\n output V: bf16[n, 4, n]\n \
         input F: i32[n, n]\n output K: i32[n]\n output S: f32[n]\n let H = V[1]\n \
         function by_row(x) {{\n let most = row_max(abs(x))\n return x / most, most\n}}\n \
         function of_number(x) {{\n return row_max(x)\n}}\n \
         function by_sum(x) {{\n return x / row_sum(x)\n}}\n \
         function by_block(x) {{\n return x / block_max(abs(x), 128)\n}}\n \
         kernel lane in 0..4 threads {threads} {{\n let m = count(E[0..n] in 0..9)\nfor j in 0..m {{\n{body}\n}}\n}}\n}}\n"
    );
    section(&text, 0, 2, 1024).kernel(true).unwrap()
}

#[test]
fn iterations_that_look_up_rows_are_divided_if_they_are_independent() {
    let found = "let s = position(j of E[0..n] in 0..9)\n";
    for (body, divided) in [
        // By the loop's index, or by what differs with it.
        ("put X[s] to Y[j] on 1", true),
        ("put X[s] to Y[n - j - 1] on 1", true),
        (
            "let t = 3 + s\nput X[s] to Y[t] on 1\nP[t][j] = integer(j)",
            true,
        ),
        ("let p = 5 + j\nput X[s] to V[p / 4][p % 4] on 1", true),
        ("let p = 5 + j\nput X[s] to V[p / 2][p % 4] on 1", false),
        ("Y[0] = copy(X[s])", false),
        ("Y[j % 2] = copy(X[s])", false),
        ("Y[j + s] = copy(X[s])", false),
        // One name for two values, and one row for two names.
        (
            "if j > 3 { let t = j\nP[t][0] = integer(s) } else { let t = j + 1\nP[t][0] = integer(s) }\nY[j] = copy(X[s])",
            false,
        ),
        (
            "P[j][0] = integer(s)\nP[j + 1][0] = integer(s)\nY[j] = copy(X[s])",
            false,
        ),
        ("Y[j] = copy(X[s])\nV[j][0] = copy(X[s])", true),
        ("H[j] = copy(X[s])\nV[j][0] = copy(X[s])", false),
        // Threads that divide a row, and others.
        ("Y[j] = copy(X[s])\nY[j] = copy(X[j])", false),
        (
            "for k in 0..2 { P[j][k] = integer(k) }\nP[j][0] = integer(s)\nY[j] = copy(X[s])",
            false,
        ),
        (
            "for k in 0..2 { P[j][k] = integer(k) }\nY[j] = copy(X[s])",
            true,
        ),
        ("for k in 0..2 { Y[j] = copy(X[k]) }", false),
        ("K[j] = integer(j % 4)\nV[j][K[j]] = copy(X[s])", false),
        // Two ways to name a row.
        ("P[j / 4][j % 4] = integer(s)\nY[j] = copy(X[s])", true),
        (
            "P[j / 4][j % 4] = integer(s)\nP[j][0] = integer(j)\nY[j] = copy(X[s])",
            false,
        ),
        // What others store, what needs all threads, and nothing that is looked up.
        ("Y[j] = copy(Z[s])", false),
        ("Y[j] = copy(X[s])\nZ[j] = copy(Y[s])", false),
        ("Y[j] = copy(X[s])\nsignal 1", false),
        (
            "let c = count(E[0..j] in 0..9)\nY[j] = copy(X[s])\nP[j][0] = integer(c)",
            false,
        ),
        (
            "let c = count(E[j..j + 1] in 0..9)\nY[j] = copy(X[s])\nP[j][0] = integer(c)",
            true,
        ),
        (
            "let c = count(F[j..j + 1] in 0..9)\nY[j] = copy(X[s])\nP[j][0] = integer(c)",
            false,
        ),
        ("P[j][0] = integer(s)", false),
        ("Y[j] = by_block(X[s])", true),
        ("Y[j] on 1; S[j] on 1 = by_row(X[s])", true),
        ("Y[j]; S[0] = by_row(X[s])", false),
        ("Y[j], Y[n - j - 1] = by_block(X[s])", false),
        ("Y[j] = by_block(Z[s])", false),
        // The order of a sum depends on the threads.
        ("Y[j] = by_sum(X[s])", false),
    ] {
        let kernel = of_looked_up_rows(&format!("{found}{body}"), 128);
        assert_eq!(kernel.contains("Parts parts"), divided, "{body}");
    }
    assert!(!of_looked_up_rows("Y[j] = copy(X[j])", 128).contains("Parts"));
    // A single warp has no parts.
    assert!(!of_looked_up_rows(&format!("{found}Y[j] = copy(X[s])"), 32).contains("Parts"));
}

/// The threads of a part that reduces along rows keep a row in registers, and the lane synchronizes before and after the loop, since
/// parts use the shared memory of its reductions.
#[test]
fn parts_of_a_lane_reduce_along_rows() {
    let found = "let s = position(j of E[0..n] in 0..9)\n";
    for (body, threads, parts, reduces) in [
        ("Y[j]; S[j] = by_row(X[s])", 128, 4, true),
        ("Y[j]; S[j] = by_row(X[s])", 1024, 15, true),
        ("Y[j] = of_number(2.0)", 1024, 15, true),
        ("Y[j] = by_block(X[s])", 1024, 32, false),
    ] {
        let kernel = of_looked_up_rows(&format!("{found}{body}"), threads);
        let (_, after) = kernel.split_once("Parts parts(").unwrap();
        let (made, after) = after.split_once(");").unwrap();
        assert!(made.ends_with(&format!(", {parts}")), "{made}");
        assert_eq!(
            after.matches("whole.sync();").count(),
            if reduces { 2 } else { 0 }
        );
        // Units that need no others are loaded once, however long the row is.
        assert_eq!(after.contains("while (row.next<4>());"), !reduces);
    }
}

/// Another loop may store the same rows with other threads: the lane synchronizes before it, never within.
#[test]
fn the_lane_synchronizes_before_a_divided_loop() {
    let row = "let s = position(j of E[0..n] in 0..9)\nput X[s] to Y[j] on 1";
    let again = format!("{row}\n}}\nfor j in 0..m {{\n{row}");
    let kernel = of_looked_up_rows(&again, 128);
    let (first, second) = kernel.split_once("whole.ended").unwrap();
    assert!(!first.contains("self.sync();"), "{kernel}");
    let (before, after) = second.split_once("Parts parts").unwrap();
    assert_eq!(before.matches("self.sync();").count(), 1, "{kernel}");
    assert!(!after.contains("self.sync();"), "{kernel}");
    // A loop without iterations does it, too, since what comes after relies on it.
    let text = format!(
        "program test(n) {{\n input X: bf16[n, n]\n input E: i32[n]\n output Y: bf16[n, n]\n output Z: bf16[n, n]\n output W: bf16[n, n]\n \
         kernel lane in 0..4 threads 128 {{\n W[0] = copy(X[0])\nY[0] = copy(X[0])\nfor j in 2..world {{\n{}\n}}\n\
         Z[0][0..8] = copy(W[0][0..8])\n}}\n}}\n",
        row.replace(" on 1", "")
    );
    let kernel = section(&text, 0, 2, 1024).kernel(true).unwrap();
    assert_eq!(kernel.matches("self.sync();").count(), 1, "{kernel}");
}
