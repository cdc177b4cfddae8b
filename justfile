# Everyday commands; `just` lists them. Install it with `cargo install just`.

set shell := ["bash", "-euo", "pipefail", "-c"]

[private]
default:
    @just --list

# Formatting and lints, as CI checks them
check:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings

# Format everything and apply what clippy can fix
fix:
    cargo fmt --all
    cargo clippy --workspace --all-targets --fix --allow-dirty --allow-staged

# All tests, with a time limit for each; more arguments choose some
test *args:
    cargo nextest run --workspace {{ args }}
    cargo test --workspace --doc

# Licences, banned crates, sources
deny:
    cargo deny check --hide-inclusion-graph licenses bans sources

# Types of the Python package, with mypy and PyTorch installed
types:
    python3 -m mypy

# The documentation, with warnings denied
doc *args:
    RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps {{ args }}

# The demo: all-gather + matmul, overlapped and not
demo *args:
    cargo run --release -- demo {{ args }}

# A benchmark, such as `just bench p2p`
bench *args:
    cargo run --release -- bench {{ args }}

# Run a fuzz target for some seconds, on the stable toolchain
fuzz target seconds='60':
    RUSTC_BOOTSTRAP=1 cargo fuzz run --target x86_64-unknown-linux-gnu {{ target }} -- -max_total_time={{ seconds }} -timeout=10

# Random programs and mutants: the verifier's word against what happens; with --sections, of kernels
random-programs count='20000' *args:
    cargo run --release -p warplink --example random_programs -- --count {{ count }} {{ args }}

# Mixed small collectives on 2, 4 and 8 ranks, each result checked; with --replays, a graph of 100 too
random-collectives count='20000' *args:
    cargo run --release -p warplink --example random_collectives -- --count {{ count }} {{ args }}

# Errors on the surviving ranks for each fault in each phase: first the last rank fails, then rank 0, which serves the store
faults *args:
    cargo build --release -p warplink-cli
    for ranks in 2 4 8; do for victim in "$((ranks - 1))" 0; do \
        target/release/warplink faults -n "$ranks" --victim "$victim" {{ args }}; done; done

# The protocols under loom, which tries all interleavings
loom *args:
    RUSTFLAGS='--cfg loom' CARGO_TARGET_DIR=target/loom cargo test -p warplink --release --lib loom {{ args }}

# The host device under the thread sanitizer, with the toolchain's rust-src; more arguments choose tests
tsan *args='--lib --test device_contract --test transfers':
    RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR=target/tsan CARGO_PROFILE_DEV_OPT_LEVEL=1 CARGO_PROFILE_DEV_DEBUG=line-tables-only \
        RUSTFLAGS='-Zsanitizer=thread --cfg rustix_use_libc --cfg warplink_tsan' TSAN_OPTIONS=history_size=4 \
        cargo test -Zbuild-std -p warplink --target x86_64-unknown-linux-gnu {{ args }}

# Stripped binaries for a machine without a toolchain: the command and the device tests
device:
    scripts/device-build.sh

# A wheel for machines with glibc 2.28 or newer, in target/wheels; needs `pip install 'maturin[zig]'`
wheel:
    maturin build --release --zig --compatibility manylinux_2_28 --auditwheel check

# The library that stands in for NCCL, to a prefix: `just install-nccl "$HOME/.local"`
install-nccl prefix='/usr/local':
    cargo build --release -p warplink-nccl
    scripts/install-nccl.sh '{{ prefix }}'

# libwarplink, its headers and its pkg-config file, to a prefix: `just install-c "$HOME/.local"`
install-c prefix='/usr/local':
    cargo build --release -p warplink-c
    scripts/install-c.sh '{{ prefix }}'

# Everything that CI runs
ci:
    bash .ci/run
