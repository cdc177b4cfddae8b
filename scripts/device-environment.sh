# For scripts that start ranks on GPUs, sourced by them. NVLink multicast cannot be used on every machine that tests run on,
# so Warplink's peers do without it there. The library itself uses NCCL as its user has set it up.
# Tests that were built elsewhere read files below the folder of the crate here.
export WARPLINK_TEST_ROOT=$PWD/crates/warplink
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
# What device-build.sh has packed, unless it is there already.
if [[ -e device-bin/binaries.tar.gz && ! device-bin/warplink -nt device-bin/binaries.tar.gz ]]; then
    tar -C device-bin -xmzf device-bin/binaries.tar.gz
fi
