"""Programs and overlapped matmuls."""

import json
import pathlib
import sys
import threading
import time

import numpy
import pytest
import warplink
from warplink.errors import MismatchError, ParseError, VerificationError

from conftest import as_ranks

PROGRAMS = pathlib.Path(__file__).parents[3] / "examples" / "programs"


def test_programs_are_verified():
    program = warplink.Program((PROGRAMS / "all_gather_matmul_pairwise_put.wlp").read_text())
    assert {"m", "k", "n", "T"} <= set(program.parameters)
    parameters = {"m": 64, "k": 16, "n": [8], "T": "f32"}
    report = program.verify(4, parameters)
    assert report.world == 4 and report.nbytes > 0 and "no deadlock" in str(report)
    assert str(warplink.Program(str(program))) == str(program)
    with pytest.raises(ParseError, match="line|expected"):
        warplink.Program("program {")
    with pytest.raises(ValueError, match="expected an integer"):
        program.verify(4, parameters | {"m": 1.5})


def test_the_verifier_says_what_is_wrong():
    text = (PROGRAMS / "all_gather_matmul_pairwise_put.wlp").read_text()
    lines = [line for line in text.splitlines() if "wait" not in line.split("//")[0].split("#")[0]]
    assert len(lines) < len(text.splitlines())
    program = warplink.Program("\n".join(lines))
    with pytest.raises(VerificationError) as caught:
        program.verify(2, {"m": 64, "k": 16, "n": [8], "T": "f32"})
    assert caught.value.kind == "verification"
    first = caught.value.diagnostics[0]
    assert first.lines and first.ranks and first.message


def typed(comm, shape, values):
    region = comm.alloc(4 * int(numpy.prod(shape)))
    view = region.view(list(shape), "f32")
    numpy.asarray(view)[...] = values
    return view


@as_ranks(2, device="host")
def test_a_program_runs(comm, rank, world):
    executor, stream = comm.executor(), comm.create_stream()
    program = warplink.Program((PROGRAMS / "all_gather_matmul_pairwise_put.wlp").read_text())
    m, k, n = 8 * world, 16, 8
    whole = numpy.random.default_rng(0).standard_normal((m, k), numpy.float32)
    right = numpy.random.default_rng(1).standard_normal((k, n), numpy.float32)
    prepared = executor.prepare(program, {"m": m, "k": k, "n": [n], "T": "f32"})
    part = typed(comm, (m // world, k), whole[rank * 8 : rank * 8 + 8])
    c = typed(comm, (m, n), 0)
    plan = prepared.bind({"A": part, "B[0]": right, "C[0]": c})
    assert plan.operations > 0 and plan.tensor("C[0]").address == c.address
    for _ in range(3):
        numpy.asarray(c)[...] = 0
        comm.barrier()
        plan.run(stream)
        stream.synchronize()
        numpy.testing.assert_allclose(numpy.asarray(c), whole @ right, rtol=1e-5, atol=1e-5)
    trace = plan.trace(stream)
    assert (trace is not None) == (rank == 0)
    if trace is not None:
        assert {event["pid"] for event in json.loads(trace)} == set(range(world))
    if plan.eager_only is None:
        captured = plan.capture()
        with pytest.raises(warplink.errors.ClosedError):
            plan.run(stream)
        captured.launch(stream)
        stream.synchronize()
    with pytest.raises(ValueError):
        prepared.bind({"A": part, "B[0]": right[:2], "C[0]": c})
    # Read-only arrays are inputs, and not outputs.
    kept = numpy.zeros((m, n), numpy.float32)
    for array in (right, kept):
        array.flags.writeable = False
    with pytest.raises(ValueError, match=r"write 'C\[0\]': the array is read-only"):
        prepared.bind({"A": part, "B[0]": right, "C[0]": kept})
    result = numpy.zeros((m, n), numpy.float32)
    plan = prepared.bind({"A": part, "B[0]": right, "C[0]": result})
    assert "C[0]" in plan.replaceable
    with pytest.raises(ValueError, match="the array is read-only"):
        stream.fill(plan.tensor("B[0]"), 1)
    stream.fill(plan.tensor("C[0]"), 1)
    with pytest.raises(ValueError, match=r"write 'C\[0\]': the array is read-only"):
        plan.run(stream, {"C[0]": kept})
    plan.run(stream, {"B[0]": right})
    stream.synchronize()
    numpy.testing.assert_allclose(result, whole @ right, rtol=1e-5, atol=1e-5)
    comm.barrier()


@pytest.mark.parametrize("dim", [0, 1])
@as_ranks(2, device="host")
def test_overlapped_matmuls(comm, rank, world, dim):
    executor, stream = comm.executor(), comm.create_stream()
    random = numpy.random.default_rng(2)
    shape = [4, 4 * world, 16] if dim == 1 else [8 * world, 16]
    whole = random.standard_normal(shape, numpy.float32)
    rights = [random.standard_normal((16, n), numpy.float32) for n in (8, 12)]
    own = numpy.split(whole, world, dim)[rank]
    results = [typed(comm, (*shape[:-1], b.shape[1]), 0) for b in rights]
    gathered = typed(comm, shape, 0)
    plan = executor.all_gather_matmul(
        typed(comm, own.shape, own), rights, results, gathered=gathered, dim=dim
    )
    assert plan.lowering and plan.lowering in plan.explanation and "program" in plan.text
    plan.run(stream)
    stream.synchronize()
    numpy.testing.assert_array_equal(numpy.asarray(gathered), whole)
    kept = numpy.zeros((*shape[:-1], 12), numpy.float32)
    kept.flags.writeable = False
    with pytest.raises(ValueError, match=r"write 'C\[1\]': the array is read-only"):
        plan.run(stream, {"C[1]": kept})
    for result, right in zip(results, rights):
        numpy.testing.assert_allclose(numpy.asarray(result), whole @ right, rtol=1e-4, atol=1e-4)
    # The sum over the ranks of a product, divided along the same dimension.
    k = 16 // world
    left = numpy.ascontiguousarray(whole[..., rank * k : rank * k + k])
    part = typed(comm, (*own.shape[:-1], 8), 0)
    right = numpy.ascontiguousarray(rights[0][rank * k : rank * k + k])
    plan = executor.matmul_reduce_scatter(
        typed(comm, left.shape, left), right, part, dim=dim, lowering="push", multiprocessors=4
    )
    assert plan.lowering == "push"
    captured = plan.capture()
    captured.launch(stream)
    stream.synchronize()
    expected = numpy.split(whole @ rights[0], world, dim)[rank]
    numpy.testing.assert_allclose(numpy.asarray(part), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(MismatchError, match=f"multiprocessors = {2 + rank}"):
        executor.all_gather_matmul(
            typed(comm, own.shape, own), rights, results, dim=dim, multiprocessors=2 + rank
        )
    with pytest.raises(ValueError, match="expected \\[16, n\\]"):
        executor.all_gather_matmul(typed(comm, own.shape, own), [rights[0][:8]], results[:1], dim=dim)
    comm.barrier()


@as_ranks(1, limit=60, device="host")
def test_a_plan_that_threads_use_is_captured_or_refused(comm):
    a, b, c = (numpy.ones((256, 256), numpy.float32) for _ in range(3))
    plan = comm.executor().matmul_reduce_scatter(a, b, c)
    done = threading.Event()

    def asks():
        while not done.is_set():
            try:
                plan.replaceable
            except warplink.errors.ClosedError:
                return

    def runs(stream):
        while not done.is_set():
            try:
                plan.run(stream)
            except warplink.errors.ClosedError:
                return
            stream.synchronize()

    threads = [threading.Thread(target=runs, args=(comm.create_stream(),), daemon=True) for _ in range(2)]
    threads += [threading.Thread(target=asks, daemon=True) for _ in range(2)]
    # Threads often take turns while an error is made.
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            plan.capture()
            break
        except warplink.errors.InvalidArgumentError as error:
            assert "in use by another thread" in str(error)
    done.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
