"""One-sided, zero-copy communication between GPUs, and between processes on the host device.

A rank registers memory once, its peers map it, and from then on a transfer is a put or a get plus a
signal. A ring, started by ``torchrun`` or another launcher::

    import warplink

    with warplink.Job.from_env() as job:
        comm = job.world()
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        own, received = comm.alloc(1 << 20), comm.alloc(1 << 20)
        transfers = comm.exchange([warplink.Send(own, right), warplink.Receive(received, left)])
        stream = comm.create_stream()
        for _ in range(32):
            stream.fill(own, comm.rank)
            warplink.post_all(transfers, stream)
            warplink.wait_all(transfers, stream)
        stream.synchronize()

Whatever may block runs without the interpreter's lock. Errors are exceptions under
:class:`warplink.errors.WarplinkError`, with the kind, the peer and the rank.

``import warplink.torch`` registers the process group backend ``warplink`` and the fused operations, and ``warplink.jax`` has
collectives for programs of JAX.
"""

from warplink._warplink import *  # noqa: F403 - `__all__` lists the names
from warplink._warplink import version
from warplink.choice import Choice
from warplink.errors import WarplinkError
from warplink.experts import Dispatched, ExpertBuffer

__version__ = version()

__all__ = [
    "Block",
    "BlockChannel",
    "BoundCall",
    "CallState",
    "CapturedOverlap",
    "CapturedPlan",
    "Choice",
    "CollectiveEngine",
    "Collectives",
    "Communicator",
    "Connect",
    "Connection",
    "Connections",
    "DirectCalls",
    "Dispatched",
    "Event",
    "Executor",
    "ExpertBuffer",
    "Experts",
    "GatherOperator",
    "Graph",
    "Job",
    "Kernel",
    "Memory",
    "Module",
    "Order",
    "OverlapLauncher",
    "OverlapPlan",
    "Plan",
    "Prepared",
    "Program",
    "Receive",
    "RecentCall",
    "RecentCalls",
    "RecentPair",
    "Region",
    "RemoteRegion",
    "Report",
    "Routing",
    "ScatterOperator",
    "Send",
    "Stream",
    "StreamBarrier",
    "Transfer",
    "Turns",
    "UniqueId",
    "View",
    "WarplinkError",
    "Watch",
    "XlaGroup",
    "__version__",
    "post_all",
    "wait_all",
]
