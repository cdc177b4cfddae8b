"""Creates a communicator of one rank, and prints why that is refused."""

from ctypes import byref, c_void_p

from nccl import UniqueId, call, last_error

identifier, comm = UniqueId(), c_void_p()
code = call("GetUniqueId", byref(identifier))
if code == 0:
    code = call("CommInitRank", byref(comm), 1, identifier, 0)
print(f"refused with {code}: {last_error()}" if code else "created")
