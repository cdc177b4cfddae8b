# For scripts that run Python on GPUs, sourced by them: the package in this checkout, which is not installed, with the
# extension module in device-bin/ and what is beside it (PARTS=python scripts/device-build.sh).

# Makes the package, in $package, and has Python find it. Who calls use_package removes that folder in a trap.
use_package() {
    [ -f device-bin/_warplink.abi3.so ] || { echo 'device-bin/_warplink.abi3.so is missing; run PARTS=python scripts/device-build.sh first' >&2; exit 2; }
    package=$(mktemp -d)
    cp -r crates/warplink-py/python/warplink "$package"
    cp device-bin/_warplink.abi3.so "$package/warplink/"
    export PYTHONPATH=$package:$PWD/device-bin/python PYTHONUNBUFFERED=1
}
