#!/usr/bin/env bash
# Installs libwarplink, its headers and its pkg-config file from a build of crates/warplink-c.
#
# usage: scripts/install-c.sh PREFIX [BUILD]
#
# BUILD is where cargo put the libraries; target/release if not given. DESTDIR is put in front of every path, as
# packagers expect; LIBDIR is PREFIX/lib if not set.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if (($# < 1 || $# > 2)) || [[ $1 != /* ]]; then
    echo 'usage: scripts/install-c.sh PREFIX [BUILD]; PREFIX is an absolute path' >&2
    exit 2
fi

prefix=$1
build=${2:-${CARGO_TARGET_DIR:-$root/target}/release}
libdir=${LIBDIR:-$prefix/lib}
version=$(sed -n '/^\[workspace.package\]/,/^\[/ s/^version = "\(.*\)"$/\1/p' "$root/Cargo.toml")
# The interface may change with every minor version before 1.0.
soname=libwarplink.so.${version%.*}
for library in "$build"/libwarplink_c.{so,a}; do
    [[ -e $library ]] || { echo "$library is missing: run cargo build --release -p warplink-c" >&2; exit 1; }
done

to_lib=${DESTDIR:-}$libdir
to_include=${DESTDIR:-}$prefix/include
install -d "$to_lib/pkgconfig" "$to_include/warplink"
install -m 755 "$build/libwarplink_c.so" "$to_lib/libwarplink.so.$version"
ln -sf "libwarplink.so.$version" "$to_lib/$soname"
ln -sf "$soname" "$to_lib/libwarplink.so"
install -m 644 "$build/libwarplink_c.a" "$to_lib/libwarplink.a"
install -m 644 "$root/crates/warplink-c/include/warplink.h" "$to_include/"
install -m 644 "$root"/crates/warplink/kernels/warplink/*.cuh "$to_include/warplink/"
cat >"$to_lib/pkgconfig/warplink.pc" <<EOF
prefix=$prefix
libdir=$libdir
includedir=\${prefix}/include

Name: warplink
Description: One-sided, zero-copy communication between GPUs
Version: $version
Libs: -L\${libdir} -lwarplink
Libs.private: -lgcc_s -lutil -lrt -lpthread -lm -ldl -lc
Cflags: -I\${includedir}
EOF
