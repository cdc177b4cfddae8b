//! Every function of `warplink.h` called wrongly, in C that is made from the header: with each pointer null, and with each
//! handle that is none, that never was, or that was given back.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeSet;
use std::fmt::Write;

/// Pointers for which null is a value.
const MAY_BE_NULL: [(&str, &str); 12] = [
    ("warplink_unique_id_create", "ip"),
    ("warplink_init", "options"),
    ("warplink_init_from_id", "options"),
    ("warplink_init_from_env", "options"),
    ("warplink_stream_borrow", "cuda_stream"),
    ("warplink_connect", "network_devices"),
    ("warplink_block_index", "index"),
    ("warplink_block_index", "blocks"),
    ("warplink_collectives_join", "options"),
    ("warplink_experts_combine", "weights"),
    ("warplink_set_log_handler", "handler"),
    ("warplink_set_log_handler", "user"),
];

/// Types of handles, and what messages call them.
const HANDLES: [(&str, &str); 10] = [
    ("comm", "communicator"),
    ("region", "region"),
    ("stream", "stream"),
    ("buffer", "buffer"),
    ("module", "module"),
    ("kernel", "kernel"),
    ("collectives", "group of collectives"),
    ("experts", "layer of experts"),
    ("bound_call", "bound call"),
    ("routing", "routing"),
];

/// Functions that give no status. They take no pointers but the log handler's text, and `programs/every_call.c` passes the
/// arguments on that they make.
const WITHOUT_STATUS: [&str; 17] = [
    "warplink_version",
    "warplink_status_text",
    "warplink_last_error",
    "warplink_last_error_peer",
    "warplink_options_default",
    "warplink_collective_options_default",
    "warplink_fused_call_default",
    "warplink_default_log_handler",
    "warplink_argument_u32",
    "warplink_argument_i32",
    "warplink_argument_u64",
    "warplink_argument_i64",
    "warplink_argument_f32",
    "warplink_argument_f64",
    "warplink_argument_region",
    "warplink_argument_channel",
    "warplink_argument_channels",
];

struct Function<'a> {
    name: &'a str,
    /// Type and name.
    parameters: Vec<(&'a str, &'a str)>,
}

/// Those that give a status.
fn functions(header: &str) -> Vec<Function<'_>> {
    let declarations = header.split("\nwarplink_status ").skip(1);
    let all = declarations.map(|text| {
        let (name, rest) = text.split_once('(').unwrap();
        let (list, _) = rest.split_once(");").unwrap();
        let parameters = list
            .split(',')
            .map(str::trim)
            .filter(|text| *text != "void");
        let parameters = parameters.map(|text| {
            let split = text.rfind([' ', '*']).unwrap() + 1;
            (text[..split].trim(), &text[split..])
        });
        Function {
            name,
            parameters: parameters.collect(),
        }
    });
    all.collect()
}

/// The handle that a parameter is, or has in it.
fn handle(kind: &str) -> Option<(&'static str, &'static str)> {
    let name = match kind {
        "warplink_span" => "region",
        _ => kind.strip_prefix("warplink_")?,
    };
    HANDLES.into_iter().find(|(handle, _)| *handle == name)
}

/// An argument that is right, of the handles in `set`.
fn argument(function: &str, (kind, name): (&str, &str), set: &str) -> String {
    if let Some((handle, _)) = handle(kind) {
        return match kind {
            "warplink_span" => format!("span({set}.region, 0, 8)"),
            _ => format!("{set}.{handle}"),
        };
    }
    let text = match (kind, name) {
        ("const char *", "address") => "rank_0",
        ("const char *", "network_devices") => "NULL",
        ("const char *", "ip") => "\"127.0.0.1\"",
        ("const char *", _) => "\"swap\"",
        ("warplink_log_handler", _) => "warplink_default_log_handler",
        (_, "peer") if !kind.ends_with('*') => "1 - rank",
        (_, "rank") if !kind.ends_with('*') => "rank",
        (_, "size") if !kind.ends_with('*') => "2",
        // One that is not there yet, to declare a connection.
        (_, "tag") if function == "warplink_connect" => "77",
        (_, "bytes") if !kind.ends_with('*') => "8",
        (_, "count" | "max_count" | "capacity" | "seconds" | "flag") if !kind.ends_with('*') => "1",
        (_, "channel" | "index") if !kind.ends_with('*') => "0",
        // The kinds of the kernel's arguments.
        ("uint32_t", "argument") => match function {
            "warplink_block_u64" => "1",
            "warplink_block_i64" => "2",
            "warplink_block_f64" => "3",
            _ => "0",
        },
        (_, "transport" | "element_type" | "port" | "tag" | "offset") => "0",
        (_, "epoch") if !kind.ends_with('*') => "0",
        ("warplink_at", _) => "at(0, 0)",
        ("warplink_shape", _) => "shape",
        ("warplink_parts", _) => "parts",
        // In the order of the words in the memory of the device.
        ("void *" | "const void *", "results" | "output" | "input" | "address") => "device",
        ("const float *", "weights") => "device",
        ("uint64_t *", "received") | ("const uint64_t *", "sent") => "device",
        ("void *" | "const void *", _) => "words",
        ("const warplink_options *", _) => "&options",
        ("const warplink_unique_id *", _) => "&id",
        ("const warplink_module_source *", _) => "&source",
        ("const warplink_argument *", _) => "&one",
        ("const warplink_collective_options *", _) => "&ways",
        ("const warplink_collective_call *", _) => "&call",
        ("const warplink_fused_call *", _) => "&rows",
        ("const warplink_message *", _) => "&message",
        ("const warplink_expert_options *", _) => "&layer",
        ("const warplink_dispatched *", _) => "&dispatched",
        ("const warplink_tokens *", _) => "&tokens",
        _ if kind.ends_with('*') => "(void *)words",
        _ => panic!("{function}: no value for {kind} {name}"),
    };
    text.to_owned()
}

/// A call of `function` with the handles in `set`, but for argument `other`.
fn call(function: &Function<'_>, set: &str, other: Option<(usize, &str)>) -> String {
    let arguments = function.parameters.iter().enumerate();
    let arguments = arguments.map(|(at, parameter)| match other {
        Some((place, text)) if place == at => text.to_owned(),
        _ => argument(function.name, *parameter, set),
    });
    let arguments: Vec<String> = arguments.collect();
    format!("{}({})", function.name, arguments.join(", "))
}

/// Fails where the header declares a function that is neither of `functions` nor without a status.
fn assert_complete(header: &str, functions: &[Function<'_>]) {
    let is_declared = |line: &&str| line.starts_with(char::is_alphanumeric) && line.contains("(");
    let declared = header.lines().filter(is_declared).filter_map(|line| {
        let name = line.split('(').next()?.rsplit([' ', '*']).next()?;
        (!line.starts_with("typedef") && name.starts_with("warplink_")).then_some(name)
    });
    let declared: BTreeSet<&str> = declared.collect();
    let called = functions.iter().map(|function| function.name);
    let known: BTreeSet<&str> = called.chain(WITHOUT_STATUS).collect();
    assert_eq!(declared, known);
}

/// The functions in C that `programs/every_call.c` runs, and how many calls they make.
pub(crate) fn calls(header: &str) -> (String, usize) {
    let functions = functions(header);
    assert_complete(header, &functions);
    let [
        mut null,
        mut in_block,
        mut in_callback,
        mut outside,
        mut zero,
        mut unknown,
        mut freed,
        mut closed,
    ] = [(); 8].map(|()| String::new());
    let (mut made, mut seen) = (0, BTreeSet::new());
    let mut add = |to: &mut String, call: String, status: &str, says: &str| {
        made += 1;
        writeln!(to, "    FAILS({call},\n        {status}, \"{says}\");").unwrap();
    };
    let invalid = "WARPLINK_STATUS_INVALID_ARGUMENT";
    for function in &functions {
        let is_of_blocks = function.name.starts_with("warplink_block_");
        if is_of_blocks {
            let usage = "WARPLINK_STATUS_INVALID_USAGE";
            let call = call(function, "live", None);
            add(&mut outside, call, usage, "no kernel of the host device");
        } else {
            let usage = "WARPLINK_STATUS_INVALID_USAGE";
            let call = call(function, "live", None);
            add(&mut in_callback, call, usage, "a call in the ");
        }
        for (at, (kind, name)) in function.parameters.iter().enumerate() {
            if kind.ends_with('*') || *kind == "warplink_log_handler" {
                if MAY_BE_NULL.contains(&(function.name, name)) {
                    seen.insert((function.name, *name));
                    continue;
                }
                let to = if is_of_blocks {
                    &mut in_block
                } else {
                    &mut null
                };
                let with_null = call(function, "live", Some((at, "NULL")));
                add(to, with_null, invalid, &format!("{name} is null"));
            }
            let Some((handle, what)) = handle(kind) else {
                continue;
            };
            let in_place = |set: &str| argument(function.name, (kind, name), set);
            let with = |set: &str| call(function, "live", Some((at, &in_place(set))));
            add(
                &mut zero,
                with("none"),
                invalid,
                &format!("the {what} is zero"),
            );
            add(&mut unknown, with("made_up"), invalid, "is not a");
            if handle != "comm" {
                let closed = "WARPLINK_STATUS_CLOSED";
                add(
                    &mut freed,
                    with("freed"),
                    closed,
                    &format!("the {what} was freed"),
                );
            }
        }
        if function
            .parameters
            .iter()
            .any(|(kind, _)| handle(kind).is_some())
        {
            add(
                &mut closed,
                call(function, "live", None),
                "WARPLINK_STATUS_CLOSED",
                "destroyed",
            );
        }
    }
    // Those that are not there need no exception.
    assert_eq!(seen.len(), MAY_BE_NULL.len(), "{seen:?}");
    let bodies = [
        ("null_pointers", null),
        ("null_pointers_in_a_block", in_block),
        ("in_a_function_of_the_callers", in_callback),
        ("outside_of_a_block", outside),
        ("no_handles", zero),
        ("handles_that_never_were", unknown),
        ("handles_given_back", freed),
        ("after_destroy", closed),
    ];
    let bodies = bodies.into_iter();
    let text = bodies.map(|(name, body)| format!("static void {name}(void) {{\n{body}}}\n"));
    (text.collect(), made)
}
