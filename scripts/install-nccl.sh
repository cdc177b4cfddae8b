#!/usr/bin/env bash
# Installs libwarplink-nccl.so, which stands in for NCCL, from a build of crates/warplink-nccl; see docs/nccl.md.
#
# usage: scripts/install-nccl.sh PREFIX [BUILD]
#
# BUILD is where cargo put the library; target/release if not given. DESTDIR is put in front of every path, and LIBDIR is
# PREFIX/lib if not set. It is not installed as libnccl.so.2: only programs that are told to take it get it.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if (($# < 1 || $# > 2)) || [[ $1 != /* ]]; then
    echo 'usage: scripts/install-nccl.sh PREFIX [BUILD]; PREFIX is an absolute path' >&2
    exit 2
fi

build=${2:-${CARGO_TARGET_DIR:-$root/target}/release}
to=${DESTDIR:-}${LIBDIR:-$1/lib}
library=$build/libwarplink_nccl.so
[[ -e $library ]] || { echo "$library is missing: run cargo build --release -p warplink-nccl" >&2; exit 1; }
install -d "$to"
install -m 755 "$library" "$to/libwarplink-nccl.so"
