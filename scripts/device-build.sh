#!/usr/bin/env bash
# Builds what a machine with GPUs but without cargo needs, stripped, into device-bin/: the command,
# the device tests and programs in C and C++ as executables. Carry device-bin/binaries.tar.gz there, which has all of them.
#
# TESTS names the tests that are built, with the command, instead of everything.
#
# PARTS=random_programs builds device-bin/random_programs instead, which needs no GPU,
# PARTS=random_collectives builds device-bin/random_collectives, PARTS=python what scripts/device-python.sh needs, and
# PARTS=nccl device-bin/nccl/libwarplink_nccl.so, for scripts/device-nccl.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

out=device-bin
if [[ ${PARTS:-} == random_programs || ${PARTS:-} == random_collectives ]]; then
    mkdir -p "$out"
    cargo build --release -p warplink --example "$PARTS"
    cp "target/release/examples/$PARTS" "$out/"
    strip "$out/$PARTS"
    exit
fi
if [[ ${PARTS:-} == nccl ]]; then
    mkdir -p "$out/nccl"
    cargo build --release -p warplink-nccl
    cp target/release/libwarplink_nccl.so "$out/nccl/"
    strip "$out/nccl/libwarplink_nccl.so"
    exit
fi
if [[ ${PARTS:-} == python ]]; then
    mkdir -p "$out"
    cargo build --release -p warplink-py
    cp target/release/lib_warplink.so "$out/_warplink.abi3.so"
    strip "$out/_warplink.abi3.so"
    rm -rf "$out/python"
    python3 -m pip install --quiet --disable-pip-version-check --no-compile --target "$out/python" pytest expecttest
    exit
fi
[[ -n ${TESTS:-} ]] || rm -f "$out"/warplink "$out"/test-* "$out"/c_* "$out"/libwarplink.so.*
mkdir -p "$out"
tests=(device_contract transfers lifetimes losses timeouts channels stopped handover communicators collectives programs
    sections)
if [[ -n ${TESTS:-} ]]; then tests=($TESTS); fi

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
# A machine takes 64 MiB, and these have twice as much; device-environment.sh unpacks them there.
pack() { tar -C "$out" -czf "$out/binaries.tar.gz" "${@##*/}"; }
if [[ -n ${TESTS:-} ]]; then
    strip "$out/warplink" "${tests[@]/#/$out/test-}"
    pack "$out/warplink" "${tests[@]/#/$out/test-}"
    exit
fi

# Programs in C and C++: the example with the library in it, the tests' with the shared library beside them.
cargo build --release -p warplink-c
installed=$(mktemp -d)
trap 'rm -rf "$installed"' EXIT
scripts/install-c.sh "$installed"
cp -L "$installed"/lib/libwarplink.so.?.? "$out/"
options=(-O2 -pthread -I "$installed/include" -static-libgcc)
c++ -std=c++17 "${options[@]}" examples/c/ping_pong.cpp -o "$out/c_ping_pong" -Wl,--gc-sections -static-libstdc++ \
    "$installed/lib/libwarplink.a" -lutil -lrt -lm -ldl
beside=(-L "$installed/lib" -lwarplink "-Wl,-rpath,\$ORIGIN")
for name in life_cycle lost_peer collectives messages; do
    cc -std=c99 -D_POSIX_C_SOURCE=200809L "${options[@]}" "crates/warplink-c/tests/programs/$name.c" \
        -o "$out/c_$name" "${beside[@]}"
done
c++ -std=c++17 "${options[@]}" crates/warplink-c/tests/programs/threads.cpp -o "$out/c_threads" -static-libstdc++ \
    "${beside[@]}"
strip "$out"/warplink "$out"/test-* "$out"/c_* "$out"/libwarplink.so.*
pack "$out"/warplink "$out"/test-* "$out"/c_* "$out"/libwarplink.so.*
du -h "$out/binaries.tar.gz"
