"""All-to-alls and batches that go by Warplink's own collectives, on CPU tensors."""

import os
import random
import time

import pytest

torch = pytest.importorskip("torch")

from conftest import as_ranks, meet, start  # noqa: E402


def begin(rank, world, place, **options):
    import warplink.torch

    return start(rank, world, place, pg_options=warplink.torch.Options(direct_messages=True), **options)


class Counted:
    """Collectives that count their calls."""

    def __init__(self, collectives):
        self._collectives = collectives
        self.calls = 0

    def send_receive(self, *arguments):
        self.calls += 1
        return self._collectives.send_receive(*arguments)


@pytest.mark.parametrize(
    ("sizes", "parts", "expected"),
    [
        ((6, 3), None, [18, 18]),
        ((6, 3), [1, 5], [6, 30]),
        ((0, 3), None, [0, 0]),
        ((4, 0), [1, 3], [0, 0]),
        ((4,), [0, 4], [0, 8]),
    ],
)
def test_bytes_of_parts(sizes, parts, expected):
    from warplink.torch.shapes import bytes_of_parts, split

    tensor = torch.empty(sizes, dtype=torch.bfloat16)
    assert bytes_of_parts(2, tensor, parts, "input") == expected
    assert [part.nbytes for part in split(2, tensor, parts, "input")] == expected


@pytest.mark.parametrize(("parts", "said"), [([-1, 7], "-1 rows"), ([1, 4], "5 rows"), ([6], "1")])
def test_parts_that_do_not_fit_are_told(parts, said):
    from warplink.torch.shapes import bytes_of_parts

    with pytest.raises(ValueError, match=said):
        bytes_of_parts(2, torch.empty(6, 3), parts, "input")


@pytest.mark.parametrize("seed", range(20))
def test_both_ends_of_a_message_are_in_the_same_call(seed):
    from warplink.torch.direct import rounds

    chance = random.Random(seed)
    size, most = chance.randint(1, 8), 64
    counts = {(a, b): chance.choice([0, 1, 5, 40]) for a in range(size) for b in range(size)}
    found = {}
    for rank in range(size):
        batch = [(peer, True, n) for peer in range(size) for n in range(counts[rank, peer])]
        batch += [(peer, False, n) for peer in range(size) for n in range(counts[peer, rank])]
        # In any order that keeps that of a pair.
        lines = [[m for m in batch if m[:2] == line] for line in sorted({m[:2] for m in batch})]
        mixed = []
        while lines := [line for line in lines if line]:
            mixed.append(chance.choice(lines).pop(0))
        calls = rounds(mixed, size, most)
        assert all(0 < len(sends) + len(receives) <= most for sends, receives in calls)
        for number, (sends, receives) in enumerate(calls):
            for peer, n in sends:
                assert found.setdefault((rank, peer, n), number) == number
            for peer, n in receives:
                assert found.setdefault((peer, rank, n), number) == number
    assert len(found) == sum(counts.values())


def raw(tensor):
    """The bytes of a tensor of any type."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("world", [2, 4])
@as_ranks(starts=begin)
def test_all_to_alls_with_a_size_for_each_pair(dist, rank, world):
    group = dist.group.WORLD
    assert group.messages_path == "direct"
    group._host.direct = counted = Counted(group._host.direct)
    seed = [int.from_bytes(os.urandom(4), "little")]
    dist.broadcast_object_list(seed, 0)
    chance = random.Random(seed[0])
    generator = torch.Generator().manual_seed(seed[0])
    kinds = [torch.bfloat16, torch.float64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int64]
    for turn, dtype in enumerate(kinds):
        rows = [[chance.choice([0, 1, 7, 500]) for _ in range(world)] for _ in range(world)]
        if turn == 0:
            # Each rank has something to send that is longer than the first packet.
            for peer, row in enumerate(rows):
                row[(peer + 1) % world] = 500
        values = [
            [torch.randint(0, 2, (n, 9), generator=generator).to(dtype) for n in row] for row in rows
        ]
        sent, received = rows[rank], [row[rank] for row in rows]
        expected = torch.cat([row[rank] for row in values])
        own = torch.cat(values[rank])
        output = torch.zeros(sum(received), 9).to(dtype)
        if turn % 2:
            # Neither is contiguous.
            own = torch.cat([own, own], 1)[:, :9]
            output = torch.zeros(sum(received), 18).to(dtype)[:, ::2]
        work = dist.all_to_all_single(output, own, received, sent, async_op=turn > 2)
        if work is not None:
            work.wait()
        assert torch.equal(raw(output), raw(expected)), (seed, turn)
        outputs = [torch.zeros(n, 9).to(dtype) for n in received]
        dist.all_to_all(outputs, values[rank])
        for one, row in zip(outputs, values):
            assert torch.equal(raw(one), raw(row[rank])), (seed, turn)
    # It went direct.
    assert counted.calls > 0
    dist.barrier()


@pytest.mark.parametrize("world", [2, 4])
@as_ranks()
def test_batches_of_sends_and_receives(rank, world, place):
    dist = begin(rank, world, place)
    group = dist.group.WORLD
    seed = [int.from_bytes(os.urandom(4), "little")]
    dist.broadcast_object_list(seed, 0)
    chance = random.Random(seed[0])
    generator = torch.Generator().manual_seed(seed[0])
    for turn in range(4):
        # More than one call takes, between ranks at random, some of them of a rank to itself.
        plan = []
        for _ in range(chance.choice([1, 40, 200])):
            shape = (chance.choice([0, 1, 33]), chance.choice([4, 300]))
            plan.append((chance.randrange(world), chance.randrange(world), shape))
        operations, received = [], []
        for of, to, shape in plan:
            values = torch.randn(shape, generator=generator)
            if of == rank:
                # It lies by columns.
                operations.append(dist.P2POp(dist.isend, values.t().contiguous().t(), to))
            if to == rank:
                target = torch.zeros(shape[0], 2 * shape[1])[:, ::2] if turn % 2 else torch.zeros(shape)
                operations.append(dist.P2POp(dist.irecv, target, of))
                received.append((target, values))
        if not operations:
            continue
        works = dist.batch_isend_irecv(operations)
        future = works[0].get_future()
        for work in works:
            work.wait()
        assert future.wait() is not None
        for target, values in received:
            assert torch.equal(target, values), (seed, turn)
    # Of two of the ranks, in another order at the other end, and with a collective under way.
    total = torch.ones(3)
    reduced = dist.all_reduce(total, async_op=True)
    if rank < 2:
        first, second = torch.empty(10), torch.empty(20)
        sends = [dist.P2POp(dist.isend, torch.full((n,), float(n + rank)), 1 - rank) for n in (10, 20)]
        receives = [dist.P2POp(dist.irecv, one, 1 - rank) for one in (first, second)]
        for work in dist.batch_isend_irecv(sends + receives if rank else receives + sends):
            work.wait()
        assert (first == 11 - rank).all() and (second == 21 - rank).all()
    reduced.wait()
    assert (total == world).all()
    # None of these went by the lines of single messages, which go on beside them.
    assert not group._messages._senders and not group._messages._readers
    if rank == 0:
        dist.send(torch.ones(4), 1, tag=5)
    elif rank == 1:
        got = torch.zeros(4)
        dist.recv(got, 0, tag=5)
        assert (got == 1).all()
    dist.barrier()
    half = dist.new_group([0, world - 1], pg_options=group.options)
    if rank in (0, world - 1):
        assert half.messages_path == "direct"
        peer = world - 1 - rank
        got = torch.empty(50)
        own = torch.full((50,), float(rank))
        operations = [dist.P2POp(dist.irecv, got, peer, half), dist.P2POp(dist.isend, own, peer, half)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert (got == peer).all()
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="destroyed"):
        group._batches.exchange([]).wait()


@as_ranks(2)
def test_batches_by_a_name_that_was_imported_before_the_group_was_made(rank, world, place):
    import sys

    from warplink.autoload import name_backend

    # Where the wheel is installed, PyTorch's import has done it.
    name_backend()
    from torch.distributed import batch_isend_irecv

    assert "warplink.torch" not in sys.modules
    dist = begin(rank, world, place)
    got = torch.zeros(3)
    ends = [(dist.isend, torch.full((3,), float(rank))), (dist.irecv, got)]
    for work in batch_isend_irecv([dist.P2POp(call, tensor, 1 - rank) for call, tensor in ends]):
        work.wait()
    messages = dist.group.WORLD._messages
    assert (got == 1 - rank).all() and not messages._senders and not messages._readers
    dist.destroy_process_group()


@as_ranks(2)
def test_ranks_that_differ_are_told(rank, world, place):
    from warplink.errors import MismatchError

    # By the environment, on one rank only.
    os.environ["WARPLINK_TORCH_DIRECT_MESSAGES"] = str(rank)
    with pytest.raises(MismatchError, match="direct_messages=.* expected 'direct_messages=.*same options") as caught:
        start(rank, world, place)
    assert (caught.value.rank, caught.value.peer) == (rank, 1 - rank)
    os.environ["WARPLINK_TORCH_DIRECT_MESSAGES"] = "1"
    dist = start(rank, world, place + "again")
    assert dist.group.WORLD.messages_path == "direct"
    # All-to-alls say as before what the ranks call.
    with pytest.raises(MismatchError, match="all_to_all.*expected all_to_all") as caught:
        parts = [4000 + rank, 4000]
        dist.all_to_all_single(torch.zeros(sum(parts)), torch.zeros(8000), parts, [4000, 4000])
    assert caught.value.peer == 1 - rank
    dist.destroy_process_group()
    dist = start(rank, world, place + "batch")
    operation = dist.irecv if rank else dist.isend
    with pytest.raises(MismatchError) as caught:
        for work in dist.batch_isend_irecv([dist.P2POp(operation, torch.zeros(4 + rank), 1 - rank)]):
            work.wait()
    assert caught.value.peer == 1 - rank and "16" in str(caught.value) and "20" in str(caught.value)
    # Neither leaves before the other has its error.
    meet(place, "told", rank, range(world))
    dist.destroy_process_group()


@as_ranks(2, dies=(1,), starts=begin)
def test_a_lost_rank_ends_a_batch(dist, rank, world, place):
    meet(place, "joined", rank, range(world))
    if rank == 1:
        os._exit(1)
    with pytest.raises(ConnectionError) as caught:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.empty(5), 1)]):
            work.wait()
    assert caught.value.kind == "peer_lost" and caught.value.peer == 1


def failure(watch, kind):
    """The error of that kind that ``watch`` finds."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            watch.check()
        except kind as error:
            return error
        time.sleep(0.01)
    raise AssertionError("nothing was found")


@as_ranks(2)
def test_what_no_host_waits_for_is_watched(job, comm, rank):
    from warplink.errors import MismatchError

    peer = 1 - rank
    collectives, streams = comm.collectives(), [comm.create_stream() for _ in range(2)]
    watch, regions = comm.watch(collectives, 60.0), [comm.alloc(64) for _ in range(2)]
    for turn in range(60):
        # On several streams, which no host waits for.
        stream = streams[turn % 2]
        collectives.send_receive(stream, [(peer, regions[0])], [(peer, regions[1])])
    end = time.monotonic() + 60
    while watch.waits and time.monotonic() < end:
        time.sleep(0.01)
    watch.check()
    assert not watch.waits and all(stream.is_idle() for stream in streams)
    # Ends of other lengths.
    end = [(peer, regions[0].slice(0, 32 + 16 * rank))]
    collectives.send_receive(streams[0], *((end, []) if rank else ([], end)))
    error = failure(watch, MismatchError)
    assert error.peer == peer and "32" in str(error) and "48" in str(error)
    # It stays.
    with pytest.raises(MismatchError):
        watch.check()
    comm.all_gather_bytes(b"both were told")
    watch.close()
    job.abort("the test is over")


@pytest.mark.parametrize("by_turns", [False, True])
@as_ranks(2)
def test_a_call_that_does_not_end_is_ended(rank, world, meeting, by_turns):
    import warplink
    from warplink.errors import PeerLostError, TimeoutError

    job = warplink.Job.join(rank, world, meeting, timeout=60.0)
    comm = job.world()
    collectives, stream, region = comm.collectives(), comm.create_stream(), comm.alloc(64)
    turns = comm.turns()
    (receive,) = comm.exchange([warplink.Send(region, 0) if rank else warplink.Receive(region, 1)])
    if rank == 0:
        # Rank 1 never sends.
        watch = comm.watch(turns if by_turns else collectives, 60.0)
        assert watch.timeout == 60.0
        watch.timeout = 0.5
        if by_turns:
            turns.begin(stream)
            warplink.post_all([receive], stream)
            warplink.wait_all([receive], stream)
            turns.end(stream)
        else:
            collectives.send_receive(stream, [], [(1, region)])
        assert failure(watch, TimeoutError).kind == "timeout"
        # Waiting work is released.
        with pytest.raises(warplink.WarplinkError):
            stream.synchronize(30)
        watch.close()
    else:
        with pytest.raises(PeerLostError, match="took longer than 0.5 s") as caught:
            while True:
                comm.barrier()
        assert caught.value.peer == 0


def go_on(rank, world, dist):
    """All ranks of the group go on as they do without direct messages."""
    assert dist.group.WORLD.messages_path == "backend"
    right, left = (rank + 1) % world, (rank - 1) % world
    got = torch.empty(3000)
    operations = [dist.P2POp(dist.isend, torch.full((3000,), float(rank)), right), dist.P2POp(dist.irecv, got, left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert (got == left).all()
    gathered = torch.empty(2 * world)
    dist.all_to_all_single(gathered, torch.full((2 * world,), float(rank)))
    assert gathered[::2].tolist() == [float(peer) for peer in range(world)]
    dist.barrier()
    dist.destroy_process_group()


@as_ranks(9)
def test_ranks_that_cannot_go_direct_agree_on_it(rank, world, place):
    # More ranks than the collectives serve directly.
    go_on(rank, world, begin(rank, world, place))


@as_ranks(8)
def test_in_a_hybrid_cube_mesh_messages_go_as_without_the_option(rank, world, place):
    import warplink

    os.environ["WARPLINK_TOPOLOGY"] = "hybrid-cube-mesh"
    dist = begin(rank, world, place)
    collectives = dist.group.WORLD._communicator.collectives(path="direct")
    assert collectives.path == "direct" and not collectives.serves_messages
    with pytest.raises(warplink.errors.UnsupportedError, match="sends no messages in a hybrid cube mesh"):
        stream = dist.group.WORLD._communicator.create_stream()
        collectives.send_receive(stream, [((rank + 1) % world, torch.ones(1))], [])
    go_on(rank, world, dist)
