"""Layers of experts, compared with a reference."""

from importlib.util import find_spec

import numpy
import pytest
from conftest import as_ranks
from held import Held, shared_seed

import warplink
from warplink.errors import InvalidArgumentError, MismatchError, ParseError

TOP_K, MAX_TOKENS, EACH = 3, 40, 3


class Input:
    """Dispatch of a rank, as all ranks know it: values and weights whose sums are exact."""

    def __init__(self, random, world, elements, dtype, way):
        tokens = 0 if way == "none" else int(random.integers(1, MAX_TOKENS + 1))
        self.tokens = random.integers(-8, 9, (tokens, elements)).astype(dtype)
        self.experts = random.integers(-1, EACH * world, (tokens, TOP_K)).astype(numpy.int32)
        if way == "one":
            self.experts[:] = EACH * (world - 1) + numpy.arange(TOP_K) % EACH
        self.weights = random.choice([0.5, 1.0, 2.0], (tokens, TOP_K)).astype(numpy.float32)

    def sent_to(self, rank):
        """The tokens and experts of the rows that go to ``rank``, in order."""
        found = [
            (token, int(expert) - EACH * rank)
            for token, slots in enumerate(self.experts)
            for expert in slots
            if expert >= 0 and expert // EACH == rank
        ]
        return found

    def combined(self):
        """Result where expert e multiplies by e + 1."""
        total = numpy.zeros(self.tokens.shape, numpy.float32)
        for slot in range(TOP_K):
            expert = self.experts[:, slot]
            factor = numpy.where(expert >= 0, expert + 1, 0)
            total += (self.weights[:, slot] * factor)[:, None] * self.tokens.astype(numpy.float32)
        return total.astype(self.tokens.dtype)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["float32", "float16"])
@as_ranks()
def test_tokens_go_to_their_experts_and_come_back_as_weighted_sums(comm, rank, world, kind):
    collectives, stream = comm.collectives(), comm.create_stream()
    dtype = numpy.dtype(kind)
    name = {"float32": "f32", "float16": "f16"}[kind]
    elements = 37
    layer = collectives.experts(
        experts=EACH * world,
        top_k=TOP_K,
        max_tokens=MAX_TOKENS,
        elements=elements,
        dtype=name,
    )
    # A random token may go to one expert in each of its slots.
    rows = layer.max_rows
    assert rows == TOP_K * MAX_TOKENS and f"max_rows={rows}" in repr(layer)
    held = warplink.Dispatched(
        Held(comm, numpy.zeros((world, rows, elements), dtype)),
        Held(comm, numpy.zeros((world, rows), numpy.int32)),
        Held(comm, numpy.zeros(world, numpy.int32)),
    )
    dispatched = warplink.Dispatched(*(one.array for one in held))
    seed = shared_seed(comm)
    random = numpy.random.default_rng(seed)
    for way in ("random", "one", "none", "random"):
        inputs = [Input(random, world, elements, dtype, way) for _ in range(world)]
        own = inputs[rank]
        tokens, experts = Held(comm, own.tokens), Held(comm, own.experts)
        # A tuple will do as well.
        target = dispatched if way == "random" else tuple(dispatched)
        layer.dispatch(stream, target, tokens.array, experts.array)
        stream.synchronize()
        came, of_rows, counts = (one.read() for one in held)
        results = came.copy()
        for peer in range(world):
            expected = inputs[peer].sent_to(rank)
            assert counts[peer] == len(expected), (seed, way, peer)
            for row, (token, expert) in enumerate(expected):
                assert (came[peer, row] == inputs[peer].tokens[token]).all(), (seed, way, peer, row)
                assert of_rows[peer, row] == expert, (seed, way, peer, row)
                results[peer, row] *= EACH * rank + expert + 1
        held.rows.write(results)
        target = Held(comm, numpy.full_like(own.tokens, 77))
        weights = Held(comm, own.weights)
        layer.combine(stream, target.array, dispatched, weights.array)
        stream.synchronize()
        assert numpy.array_equal(target.read(), own.combined()), (seed, way)
    comm.barrier()


@pytest.mark.skipif(not find_spec("torch"), reason="there is no PyTorch")
@as_ranks(2, device="host")
def test_a_graph_of_tensors_serves_every_routing(comm, rank, world):
    import torch

    # Tensors of PyTorch on the host device.
    collectives, stream = comm.collectives(), comm.create_stream()
    layer = collectives.experts(experts=world, top_k=1, max_tokens=16, elements=8, dtype="bf16")
    dispatched = layer.allocate()
    shapes = [(view.shape, view.dtype) for view in dispatched]
    assert shapes == [([world, 16, 8], "bf16"), ([world, 16], "i32"), ([world], "i32")]
    rows, _, counts = (torch.from_dlpack(view) for view in dispatched)
    tokens, target = torch.zeros(16, 8, dtype=torch.bfloat16), torch.empty(16, 8, dtype=torch.bfloat16)
    experts, weights = torch.zeros(16, 1, dtype=torch.int32), torch.full((16, 1), 2.0)
    stream.begin_capture()
    layer.dispatch(stream, dispatched, tokens, experts)
    layer.combine(stream, target, dispatched, weights)
    graph = stream.end_capture()
    generator = torch.Generator().manual_seed(rank)
    for turn in range(4):
        tokens.copy_(torch.randint(-50, 50, (16, 8), generator=generator))
        experts.copy_(torch.randint(0, world, (16, 1), generator=generator))
        graph.launch(stream)
        stream.synchronize()
        assert torch.equal(target, 2 * tokens), turn
        told = comm.all_gather_bytes(experts.numpy().tobytes())
        of_peers = [numpy.frombuffer(one, numpy.int32) for one in told]
        assert counts.tolist() == [int((one == rank).sum()) for one in of_peers]
        kept = tokens[experts[:, 0] == rank]
        assert torch.equal(rows[rank, : len(kept)], kept)
    comm.barrier()


def expected_rows(layout, inputs, rank, limit):
    """Source, row at its source, token and expert of each row of a rank, by place; and what each source drops by expert."""
    world = len(inputs)
    found, dropped = [], []
    for source, one in enumerate(inputs):
        rows = one.sent_to(rank)
        if layout == "once_per_rank":
            tokens = sorted({token for token, _ in rows})
            rows = [(token, [expert for other, expert in rows if other == token]) for token in tokens]
        else:
            rows = [(token, [expert]) for token, expert in rows]
        found += [(source, number, *row) for number, row in enumerate(rows[:limit])]
        counts = numpy.zeros(EACH * world, numpy.int32)
        for _, experts in rows[limit:]:
            numpy.add.at(counts, [EACH * rank + expert for expert in experts], 1)
        dropped.append(counts)
    if layout == "by_expert":
        found.sort(key=lambda row: row[3])
        return list(enumerate(found)), dropped
    return [(source * limit + number, (source, number, *rest)) for source, number, *rest in found], dropped


@pytest.mark.parametrize("layout", ["by_source", "by_expert", "once_per_rank"])
@as_ranks(2, device="host")
def test_a_handle_connects_dispatch_and_combine(comm, rank, world, layout):
    # Results are read where they are, on the host device.
    collectives, stream = comm.collectives(), comm.create_stream()
    elements, limit = 40, 9
    layer = collectives.experts(
        experts=EACH * world,
        top_k=TOP_K,
        max_tokens=MAX_TOKENS,
        elements=elements,
        dtype="f32",
        max_rows=limit,
        layout=layout,
    )
    buffer = warplink.ExpertBuffer(layer, stream)
    seed = shared_seed(comm)
    random = numpy.random.default_rng(seed)
    once = layout == "once_per_rank"
    target = layer.allocate()
    # New memory, the same each time, and without counts of what is dropped.
    targets = {"random": None, "one": target, "none": target._replace(dropped=None)}
    for way, into in targets.items():
        inputs = [Input(random, world, elements, numpy.dtype("float32"), way) for _ in range(world)]
        own = inputs[rank]
        tokens, experts = Held(comm, own.tokens), Held(comm, own.experts)
        weights = Held(comm, own.weights)
        of_tokens = weights.array if once else None
        rows, counts, handle = buffer.dispatch(tokens.array, experts.array, of_tokens, target=into)
        stream.synchronize()
        assert into is None or (rows is into.rows and handle.dropped is into.dropped)
        placed, _ = expected_rows(layout, inputs, rank, limit)
        read = [numpy.from_dlpack(view) for view in (rows, counts, handle.experts)]
        came, got, locals_ = read[0].reshape(-1, elements), read[1], read[2].reshape(world * limit, -1)
        results = came.copy()
        expected = numpy.zeros(len(got), numpy.int32)
        for place, (source, _, token, of_row) in placed:
            where = (seed, way, place)
            expected[of_row[0] if layout == "by_expert" else source] += 1
            assert (came[place] == inputs[source].tokens[token]).all(), where
            assert sorted(local for local in locals_[place] if local >= 0) == sorted(of_row), where
            factor = 0
            for slot, expert in enumerate(inputs[source].experts[token]):
                if expert // EACH == rank and (once or expert - EACH * rank == of_row[0]):
                    weight = inputs[source].weights[token, slot] if once else 1
                    factor = factor + weight * (expert + 1) if once else expert + 1
            results[place] *= factor
        assert (got == expected).all(), (seed, way)
        lost = numpy.zeros(EACH * world, numpy.int32)
        for peer in range(world):
            lost += expected_rows(layout, inputs, peer, limit)[1][rank]
        if handle.dropped is not None:
            assert (numpy.from_dlpack(handle.dropped) == lost).all(), (seed, way)
        made = Held(comm, results.reshape(read[0].shape))
        sums = None if into is None else layer.allocate_output(len(own.tokens))
        output = buffer.combine(made.array, handle, None if once else weights.array, target=sums)
        assert sums is None or output is sums
        stream.synchronize()
        # Rows that were dropped are left out, slot by slot or rank by rank.
        kept = own.experts.copy()
        for peer in range(world):
            rows_of_peer = own.sent_to(peer)
            if once:
                tokens_kept = sorted({token for token, _ in rows_of_peer})[:limit]
                gone = [(t, s) for t in range(len(kept)) if t not in tokens_kept for s in range(TOP_K)]
            else:
                slots = [(t, s) for t in range(len(kept)) for s in range(TOP_K) if own.experts[t, s] // EACH == peer]
                gone = [slot for slot in slots if own.experts[slot] >= 0][limit:]
            for t, s in gone:
                if own.experts[t, s] >= 0 and own.experts[t, s] // EACH == peer:
                    kept[t, s] = -1
        own.experts = kept
        assert numpy.array_equal(numpy.from_dlpack(output), own.combined()), (seed, way)
    comm.barrier()


@as_ranks(2, device="host")
def test_rows_are_quantised_on_their_way(comm, rank, world):
    collectives, stream = comm.collectives(), comm.create_stream()
    options = {"experts": world, "top_k": 1, "max_tokens": 4, "elements": 256, "dtype": "f32"}
    layer = collectives.experts(**options, quantization="per_block")
    buffer = warplink.ExpertBuffer(layer, stream)
    tokens = numpy.arange(4 * 256, dtype=numpy.float32).reshape(4, 256)
    experts = numpy.full((4, 1), (rank + 1) % world, numpy.int32)
    (rows, scales), counts, handle = buffer.dispatch(tokens, experts)
    stream.synchronize()
    source = (rank - 1) % world
    assert numpy.from_dlpack(counts).tolist() == [4 if p == source else 0 for p in range(world)]
    expected = numpy.abs(tokens.reshape(4, 2, 128)).max(2) / numpy.float32(448)
    assert (rows.dtype, scales.shape, handle.weights) == ("u8", [world, 4, 2], None)
    # The last element of a block is its largest, and becomes 448.
    assert (numpy.from_dlpack(rows)[source].reshape(4, 2, 128)[..., -1] == 0x7E).all()
    assert numpy.array_equal(numpy.from_dlpack(scales)[source], expected)
    comm.barrier()


@as_ranks(2, device="host")
def test_layers_and_arrays_that_do_not_fit_are_refused(job, comm, rank):
    collectives, stream = comm.collectives(), comm.create_stream()
    good = {"experts": 4, "top_k": 2, "max_tokens": 8, "elements": 6, "dtype": "f32"}

    def layer_refused(says, kind=InvalidArgumentError, **changes):
        with pytest.raises(kind, match=says):
            collectives.experts(**{**good, **changes})

    layer_refused("make a layer of experts: 5 experts on 2 ranks", experts=5)
    layer_refused("expected at least one of each", top_k=0)
    layer_refused("rows of i32; expected f16, bf16 or f32", dtype="i32")
    layer_refused("f65", kind=ParseError, dtype="f65")
    layer = collectives.experts(**good)
    assert layer.max_rows == 16
    to = layer.allocate()
    tokens, experts = numpy.zeros((8, 6), numpy.float32), numpy.zeros((8, 2), numpy.int32)
    weights = numpy.ones((8, 2), numpy.float32)

    def refused(says, call, *arguments, kind=InvalidArgumentError):
        with pytest.raises(kind, match=says):
            call(stream, *arguments)

    shape = r"tokens is f32 of shape \[8, 5\]; expected f32 of shape \[8, 6\]"
    refused(shape, layer.dispatch, to, tokens[:, :5].copy(), experts)
    refused("tokens is f64", layer.dispatch, to, tokens.astype(float), experts)
    refused("experts is i64 of .*; expected i32", layer.dispatch, to, tokens, experts.astype(int))
    refused(r"experts is i32 of shape \[7, 2\]", layer.dispatch, to, tokens, experts[:7])
    many = numpy.zeros((9, 6), numpy.float32)
    refused("at most 8 of them", layer.dispatch, to, many, numpy.zeros((9, 2), numpy.int32))
    short = to._replace(counts=numpy.zeros(3, numpy.int32))
    refused(r"target.counts is i32 of shape \[3\]", layer.dispatch, short, tokens, experts)
    missing = (None, *to[1:])
    refused("read target.rows: NoneType is not", layer.dispatch, missing, tokens, experts, kind=TypeError)
    refused("weights is f64", layer.combine, tokens, to, weights.astype(float))
    refused("expected a dispatch before it", layer.combine, tokens, to, weights)
    layer_refused("unknown layout 'rows'; expected by_source", layout="rows", kind=ParseError)
    refused("read tokens: .*strides", layer.dispatch, to, numpy.zeros((8, 12), numpy.float32)[:, ::2], experts)
    # More rows for a rank than there is room for, reported on both ranks.
    layer = collectives.experts(**good, max_rows=3, overflow="fail")
    experts[:] = 2
    with pytest.raises(MismatchError, match="rank 0 has 16 rows for rank 1; expected at most 3"):
        own = slice(8 if rank == 0 else 1)
        layer.dispatch(stream, layer.allocate(), tokens[own], experts[own])
        stream.synchronize()
    comm.all_gather_bytes(b"both were told")
    job.abort("the test is over")
