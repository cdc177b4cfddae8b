"""PyTorch's own tests of process groups, with the backend that the variable BACKEND names.

They are those of ``torch.testing._internal.distributed.distributed_test``, which PyTorch ships. Each
runs its ranks as processes: forked ones, and new ones where there are GPUs, which a fork of a process that
has used CUDA cannot use. ``test_pytorch_suite.py`` says which must pass.

    BACKEND=warplink python -m pytest crates/warplink-py/tests/pytorch_suite.py

Many tests are for backends of certain names only. With WARPLINK_FOR_GLOO=1, the backend ``gloo`` is
Warplink's process group, so that the tests for Gloo run on it. With WARPLINK_FOR_NCCL=1 it takes the place of
``nccl`` on GPUs. With WARPLINK_TEST_RANKS_PER_GPU=N, up to N ranks share a GPU; ``scripts/device-torch-suite.sh``
compares both backends so.
"""

import os
import sys
import tempfile

os.environ.setdefault("BACKEND", "warplink")
os.environ.setdefault("WORLD_SIZE", "3")
if "TEMP_DIR" not in os.environ:
    os.environ["TEMP_DIR"] = tempfile.mkdtemp(prefix="warplink-suite-")
    for folder in ("barrier", "test_dir", "init_dir"):
        os.makedirs(os.path.join(os.environ["TEMP_DIR"], folder))
os.environ.setdefault("INIT_METHOD", f"file://{os.environ['TEMP_DIR']}/init_dir/shared_init_file")
# Workers of pytest-xdist take turns at sets of GPUs.
gpu_sets = os.environ.get("WARPLINK_TEST_GPU_SETS", "").split()
if gpu_sets:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu_sets[worker % len(gpu_sets)]
# Ranks compute on one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gpus  # noqa: E402
import torch  # noqa: E402
from torch.testing._internal.common_distributed import DistTestCases  # noqa: E402

is_ours = os.environ["BACKEND"] == "warplink" or any(
    os.environ.get(f"WARPLINK_FOR_{name}") == "1" for name in ("GLOO", "NCCL")
)
if is_ours:
    import warplink.torch

# Features that the tests ask of a backend by its name.
has_gpus = torch.cuda.device_count() > 0
for feature in ("ddp", "subgroup", *(("cuda", "gpu") if has_gpus else ())):
    DistTestCases.backend_feature[feature].add("warplink")

if os.environ.get("WARPLINK_FOR_GLOO") == "1":
    from torch.distributed import distributed_c10d as c10d

    class ProcessGroupGloo(warplink.torch.ProcessGroupWarplink):
        """Warplink's process group where PyTorch makes Gloo's."""

        # Newer releases name further options.
        def __init__(self, store, rank, size, timeout, **_):
            super().__init__(store, rank, size, timeout, devices={"cpu": "warplink"})
            # Tests look for its events.
            self._source.backend = "gloo"

    c10d.ProcessGroupGloo = ProcessGroupGloo

if os.environ.get("WARPLINK_FOR_NCCL") == "1":
    from torch.distributed import distributed_c10d as c10d

    Nccl = c10d.ProcessGroupNCCL

    class ProcessGroupNCCL(warplink.torch.ProcessGroupWarplink):
        """Warplink's process group where PyTorch makes NCCL's."""

        Options = Nccl.Options

        def __init__(self, store, rank, size, options):
            own = warplink.torch.Options(nccl_options=options)
            # It makes one of NCCL's itself.
            c10d.ProcessGroupNCCL = Nccl
            try:
                # It serves what NCCL serves, since tests take the name for that.
                devices = {"cuda": "warplink"}
                super().__init__(
                    store, rank, size, options._timeout, options=own, name=options.group_name, devices=devices
                )
                # Tests look for its events.
                self._source.backend = "nccl"
            finally:
                c10d.ProcessGroupNCCL = ProcessGroupNCCL

    c10d.ProcessGroupNCCL = ProcessGroupNCCL

from torch.testing._internal.distributed import distributed_test as suite  # noqa: E402

# Their profilers are to see every call.
suite.PROFILING_SUPPORTED_BACKENDS.append("warplink")
suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append("warplink")


def own_gpu(device):
    """The GPU of a rank, for the number that a test has for it."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int):
        return gpus.gpu(device)
    named = torch.device(device) if isinstance(device, str) else device
    if isinstance(named, torch.device) and named.type == "cuda" and named.index is not None:
        return torch.device("cuda", gpus.gpu(named.index))
    return device


class SharedGpus(torch.overrides.TorchFunctionMode):
    """Has tensors on the GPU that a rank shares, where a test names that by the number of the rank."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        keywords = dict(keywords or {})
        if "device" in keywords:
            keywords["device"] = own_gpu(keywords["device"])
        if function in (torch.Tensor.cuda, torch.Tensor.to):
            tensor, *others = arguments
            arguments = (tensor, *(own_gpu(one) if isinstance(one, (int, str, torch.device)) else one for one in others))
        return function(*arguments, **keywords)


def share_gpus(rank):
    """Lets tests of a rank, which want a GPU for each rank, run on one that it shares."""
    if gpus.RANKS_PER_GPU == 1:
        return
    gpus.prepare_sharing(rank)
    # It looks at every GPU that is counted.
    torch.cuda.init()
    count = torch.cuda.device_count() * gpus.RANKS_PER_GPU
    torch.cuda.device_count = lambda: count
    suite.init_multigpu_helper = lambda world_size, backend: {each: [gpus.gpu(each)] for each in range(world_size)}

    def taking(function):
        return lambda device=None, *others, **more: function(own_gpu(device), *others, **more)

    for name in ("set_device", "synchronize", "current_stream", "get_device_properties", "get_device_capability"):
        setattr(torch.cuda, name, taking(getattr(torch.cuda, name)))
    # By which modules that run in parallel move their inputs.
    move = torch.distributed.utils._recursive_to
    torch.distributed.utils._recursive_to = lambda inputs, device, *others: move(inputs, own_gpu(device), *others)
    enter = torch.cuda.device.__init__
    torch.cuda.device.__init__ = lambda self, device: enter(self, own_gpu(device))
    SharedGpus().__enter__()


torch.backends.cuda.matmul.allow_tf32 = False


class TestProcessGroup(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    """The tests, each with ranks of its own."""

    @classmethod
    def _run(cls, rank, *arguments, **options):
        share_gpus(rank)
        super()._run(rank, *arguments, **options)

    def setUp(self):
        super().setUp()
        method = "spawn" if has_gpus else "fork"
        self._start_processes(torch.multiprocessing.get_context(method).Process)

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        sys.stdout.flush()
