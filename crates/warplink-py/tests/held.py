"""Arrays in memory of the device under test, with guards around them."""

import os

import numpy

GUARD_BYTES = 64
GUARD = 0x5A

#: Warplink's names of NumPy's types.
NAMES = {
    numpy.dtype(kind): name
    for kind, name in [
        (numpy.uint8, "u8"),
        (numpy.float16, "f16"),
        (numpy.int32, "i32"),
        (numpy.float32, "f32"),
        (numpy.int64, "i64"),
        (numpy.float64, "f64"),
        (numpy.complex128, "c128"),
    ]
}


class Held:
    """An array: on the host device one of NumPy's own, on a GPU a view of a region."""

    def __init__(self, comm, values):
        self._dtype, self._shape = values.dtype, values.shape
        whole = numpy.full(2 * GUARD_BYTES + values.nbytes, GUARD, numpy.uint8)
        self._inner = slice(GUARD_BYTES, GUARD_BYTES + values.nbytes)
        if comm.device == "host":
            self._region, self._whole = None, whole
            self.array = whole[self._inner].view(values.dtype).reshape(values.shape)
        else:
            self._region = comm.alloc(whole.nbytes)
            self._region.upload(whole.tobytes())
            memory = self._region.memory.slice(self._inner.start, self._inner.stop)
            self.array = memory.view(list(values.shape), NAMES[values.dtype])
        self.write(values)

    def write(self, values):
        """Fills it, when no stream uses it."""
        if self._region is None:
            self.array[...] = values
        elif values.nbytes:
            self._region.slice(self._inner.start, self._inner.stop).upload(values.tobytes())

    def read(self):
        """A copy of what is in it, when no stream uses it. Fails where a guard was touched."""
        if self._region is None:
            whole = self._whole
        else:
            whole = numpy.frombuffer(self._region.download(), numpy.uint8)
        around = numpy.concatenate([whole[: self._inner.start], whole[self._inner.stop :]])
        assert (around == GUARD).all(), "bytes around an array were touched"
        return whole[self._inner].copy().view(self._dtype).reshape(self._shape)


def shared_seed(comm):
    """A new seed, the same on every rank."""
    return int.from_bytes(comm.all_gather_bytes(os.urandom(4))[0], "little")


def random_values(random, shape, dtype):
    """Any bits that are a value equal to itself: small integers, of either sign where the type has one."""
    low = 0 if numpy.dtype(dtype).kind == "u" else -100
    return random.integers(low, 100, shape).astype(dtype)
