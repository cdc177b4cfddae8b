#!/usr/bin/env bash
# Builds what a machine with GPUs but without cargo needs, stripped, into device-bin/: the command,
# the device tests and programs in C and C++ as executables. Carry that folder there.
set -euo pipefail
cd "$(dirname "$0")/.."

out=device-bin
rm -f "$out"/warplink "$out"/test-* "$out"/c_*
mkdir -p "$out"
tests=(device_contract transfers failures lifetimes abort timeouts channels repeated_losses
    survivors shared_streams stopped handover communicators device_faults)
for optional in programs program_language; do
    if [ -f "crates/warplink/tests/$optional.rs" ]; then tests+=("$optional"); fi
done

cargo build --release -p warplink-cli
cp target/release/warplink "$out/"
args=()
for name in "${tests[@]}"; do args+=(--test "$name"); done
cargo test --release -p warplink "${args[@]}" --no-run --message-format=json |
    python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message["target"]["kind"] == ["test"]:
        print(message["target"]["name"], message["executable"])
' | while read -r name executable; do cp "$executable" "$out/test-$name"; done

# Programs in C and C++, each with the library in it.
cargo build --release -p warplink-c
installed=$(mktemp -d)
trap 'rm -rf "$installed"' EXIT
scripts/install-c.sh "$installed"
for source in examples/c/ping_pong.cpp crates/warplink-c/tests/programs/{life_cycle.c,lost_peer.c,threads.cpp}; do
    name=${source##*/}
    compiler=(c++ -std=c++17 -static-libstdc++)
    if [[ $name == *.c ]]; then compiler=(cc -std=c99 -D_POSIX_C_SOURCE=200809L); fi
    "${compiler[@]}" -O2 -pthread -I "$installed/include" "$source" -o "$out/c_${name%.*}" -Wl,--gc-sections \
        "$installed/lib/libwarplink.a" -static-libgcc -lutil -lrt -lm -ldl
done
strip "$out"/warplink "$out"/test-* "$out"/c_*
du -sh "$out"
# What may be carried to such a machine.
(($(du -sm "$out" | cut -f1) <= 60)) || echo "$out has more than 60 MiB; drop tests that are not needed" >&2
