"""Imported before PyTorch by scripts that start NCCL: NVLink multicast stays off in measurements, as
`scripts/device-environment.sh` has it for others."""

import os

os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")
