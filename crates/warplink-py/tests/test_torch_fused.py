"""Collectives with an epilogue: arrays, torch.ops.warplink and the compile pass."""

import functools
import itertools
import pathlib

import pytest

torch = pytest.importorskip("torch")

import torch._inductor.config  # noqa: E402
from conftest import as_ranks, on_ranks  # noqa: E402
from test_torch_fusion import COMPILING, fusing, start_compiling  # noqa: E402

WORLDS = (2, 3)

#: What is awkward in a row.
AWKWARD = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -3e-39, 3e38)

FP8 = torch.float8_e4m3fn


def rows(seed, tokens, width, dtype, awkward=False):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(tokens, width, generator=generator)
    if awkward:
        places = torch.randint(0, tokens * width, (8,), generator=generator)
        made.view(-1)[places] = torch.tensor(AWKWARD)
    return made.to(dtype)


def reference(inputs, residual, weight, bias, norm, eps, more):
    """The sum, h and n in f64, of h as it is stored."""
    total = inputs[0].float()
    for other in inputs[1:]:
        total = total + other.float()
    h = (total if residual is None else total + residual.float()).to(inputs[0].dtype)
    wide = h.double()
    if norm == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.double() + more)
    return total.to(h.dtype), h, wide if bias is None else wide + bias.double()


def same_on_all(comm, *tensors):
    told = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    everybody = comm.all_gather_bytes(told)
    assert all(one == everybody[0] for one in everybody)


def close(found, near, bound, h=None):
    """Where the reference, and what it is computed of, are numbers of moderate size in all of a row."""
    usual = (near.abs() < 1e18).all(-1, keepdim=True)
    if h is not None:
        usual &= (h.abs() < 1e18).all(-1, keepdim=True)
    off = (found.double() - near).abs()
    assert ((off <= bound) | ~usual).all(), off.max()


@pytest.mark.parametrize("world", WORLDS)
@as_ranks()
def test_fused_collectives_of_arrays(comm, rank, world):
    collectives, stream = comm.collectives(), comm.create_stream()
    for number, (tokens, width) in enumerate([(4, 37), (1, 1), (6, 300)]):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            inputs = [rows(peer + 10 * number, tokens, width, dtype, number == 2) for peer in range(world)]
            residual = rows(7, tokens, width, dtype)
            weight, bias = rows(8, 1, width, dtype)[0], rows(9, 1, width, dtype)[0]
            for norm in ("rms", "layer"):
                h, n, total = (torch.empty_like(residual) for _ in range(3))
                collectives.fused(
                    stream,
                    inputs[rank],
                    norm=norm,
                    eps=1e-5,
                    weight=weight,
                    bias=bias,
                    weight_bias=True,
                    residual=residual,
                    sum=total,
                    residual_out=h,
                    output=n,
                )
                stream.synchronize()
                exact = reference(inputs, residual, weight, bias, norm, 1e-5, 1)
                assert torch.equal(total.nan_to_num(7), exact[0].nan_to_num(7))
                assert torch.equal(h.nan_to_num(7), exact[1].nan_to_num(7))
                close(n, exact[2], exact[2].abs() * 2**-7 + 1e-3, exact[1])
                same_on_all(comm, total, h, n)
            collectives.fused(stream, inputs[rank], sum=total, wire="fp8")
            stream.synchronize()
            each = torch.stack([peer.double() for peer in inputs])
            usual = each.isfinite().all(0)
            finite = each.where(each.isfinite(), torch.zeros_like(each)).abs()
            bound = 0.14 * finite.sum(0) + 6e-6 * finite.amax(-1, keepdim=True).sum(0) + 1e-6
            assert total[~usual].isnan().all()
            near = (total.double() - each.sum(0)).abs() <= bound
            assert (near | ~usual | (finite.sum(0) > 1e4)).all()
            same_on_all(comm, total)
    with pytest.raises(ValueError, match="expected static"):
        collectives.fused(stream, residual, quantization="other", output=n)
    with pytest.raises(ValueError, match="expected exact or fp8"):
        collectives.fused(stream, residual, sum=residual, wire="fp4")
    with pytest.raises(ValueError, match="nothing to store"):
        collectives.fused(stream, residual)


@pytest.mark.parametrize("world", WORLDS)
@as_ranks()
def test_quantized_collectives_of_arrays(comm, rank, world):
    collectives, stream = comm.collectives(), comm.create_stream()
    tokens, width, blocks = 2 * world, 300, 3
    inputs = [rows(peer, tokens, width, torch.bfloat16) for peer in range(world)]
    residual, weight = rows(7, tokens, width, torch.bfloat16), rows(8, 1, width, torch.bfloat16)[0]
    own = slice(2 * rank, 2 * rank + 2)
    for kind, quantization in itertools.product(
        ("all_reduce", "all_reduce_sharded", "reduce_scatter", "all_gather"),
        ("static", "per_token", "per_block", "per_block_power_of_two"),
    ):
        if kind == "all_gather":
            exact = reference([torch.cat([inputs[p][2 * p : 2 * p + 2] for p in range(world)])], residual, weight, None, "rms", 1e-6, 0)
        else:
            exact = reference(inputs, residual, weight, None, "rms", 1e-6, 0)
        here = own if kind == "reduce_scatter" else slice(0, tokens)
        mine = slice(0, tokens) if kind == "all_reduce" else own
        count = here.stop - here.start
        q = torch.empty(count, width, dtype=torch.uint8)
        scale = torch.full((count, blocks) if "block" in quantization else (count,), 0.03)
        scale = scale[:1] if quantization == "static" else scale
        h = torch.empty_like(residual[mine])
        collectives.fused(
            stream,
            inputs[rank][own] if kind == "all_gather" else inputs[rank],
            kind=kind,
            norm="rms",
            weight=weight,
            residual=residual[mine],
            residual_out=h,
            quantization=quantization,
            quantized=q,
            scale=scale,
        )
        stream.synchronize()
        assert torch.equal(h, exact[1][mine])
        near = exact[2][here]
        if "block" in quantization:
            divisor = scale.repeat_interleave(128, -1)[:, :width]
            padded = torch.nn.functional.pad(near.abs(), (0, 84)).view(count, blocks, 128)
            least = padded.amax(-1) / 448
        else:
            divisor, least = scale.view(-1, 1), near.abs().amax(-1) / 448
        if quantization == "static":
            assert scale == 0.03
        elif quantization == "per_block_power_of_two":
            assert torch.equal(scale.log2().frac(), torch.zeros_like(scale))
            assert ((scale >= least * 0.999) & (scale <= least * 2.001)).all()
        else:
            torch.testing.assert_close(scale, least.float(), rtol=1e-4, atol=0)
        meant = (near / divisor).clamp(-448, 448)
        close(q.view(FP8).float(), meant, meant.abs() / 15 + 2e-3)
        if kind != "reduce_scatter":
            same_on_all(comm, q, scale)


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def check_fp4(codes, scales, near, factor):
    """Bytes of two floats of 4 bits, and bytes of scales, row by row, against rows in f64."""
    width = near.shape[-1]
    codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)[:, :width].long()
    found = E2M1[codes & 7] * (1 - 2 * (codes >> 3))
    scales = scales.view(FP8).double()
    blocks = torch.nn.functional.pad(near.abs(), (0, -width % 16)).unflatten(-1, (-1, 16)).amax(-1)
    meant = (factor * blocks / 6).clamp(max=448)
    assert ((scales - meant).abs() <= meant / 15 + 2**-10).all()
    each = (scales / factor).repeat_interleave(16, -1)[:, :width]
    assert ((found * each - near).abs() <= near.abs() / 3.9 + each * 0.26).all()
    assert ((found.abs() == 6) | (found.abs() == 4)).any()


def tile_places(tokens, blocks):
    """Where the scales of rows are in tiles of 128 rows of 4."""
    return [
        (row // 128 * -(-blocks // 4) + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
        for row in range(tokens)
        for block in range(blocks)
    ]


def as_fp4(rank, name, inputs, residual, weight, h, near):
    import warplink.torch

    patterns, layouts = warplink.torch.AllReduceFusionPattern, warplink.torch.QuantizationSFLayout
    (tokens, width), blocks = near.shape, -(-near.shape[1] // 16)
    factor = torch.tensor([448 * 6 / near.abs().max().item()])
    for dtype in (inputs[rank].dtype, torch.float64):
        # Another type goes by PyTorch's operations.
        given = [tensor.to(dtype) for tensor in (inputs[rank], residual, weight)]
        q, scale = torch.ops.warplink.fused_all_reduce(
            *given, None, factor, ["quantized", "scale"], name, norm="rms", quantization="nvfp4"
        )
        assert q.shape == (tokens, width // 2) and q.dtype == torch.uint8
        assert scale.shape == (tokens, blocks) and scale.dtype == FP8
        check_fp4(q, scale, near, factor.item())
    of = [tensor.to("meta") for tensor in (inputs[rank], residual, weight)]
    meta = torch.ops.warplink.fused_all_reduce(
        *of, None, factor.to("meta"), ["scale", "quantized"], name, norm="rms", quantization="nvfp4"
    )
    assert [(one.shape, one.dtype) for one in meta] == [(scale.shape, FP8), (q.shape, torch.uint8)]
    for quantization, given_scale in (("nvfp4", factor), ("mxfp8", None)):
        of = inputs[rank], residual, weight, None, given_scale
        how = {"norm": "rms", "quantization": quantization}
        (q, by_row), (same_q, tiles) = (
            torch.ops.warplink.fused_all_reduce(*of, ["quantized", "scale"], name, **how, swizzled_scale=swizzled)
            for swizzled in (False, True)
        )
        each = by_row.shape[1]
        assert torch.equal(q.view(torch.uint8), same_q.view(torch.uint8)) and tiles.dtype == by_row.dtype
        assert list(tiles.shape) == [128, -(-each // 4) * 4]
        flat, at = tiles.view(torch.uint8).view(-1), tile_places(tokens, each)
        assert torch.equal(flat[at].view(tokens, each), by_row.view(torch.uint8))
        assert flat.count_nonzero() == by_row.view(torch.uint8).count_nonzero()
        of = [tensor if tensor is None else tensor.to("meta") for tensor in of]
        _, like = torch.ops.warplink.fused_all_reduce(*of, ["quantized", "scale"], name, **how, swizzled_scale=True)
        assert (like.shape, like.dtype) == (tiles.shape, tiles.dtype)
    with pytest.raises(ValueError, match="swizzled scales of the quantization per_token"):
        torch.ops.warplink.fused_all_reduce(
            *(inputs[rank], None, None, None, None, ["quantized", "scale"], name),
            quantization="per_token",
            swizzled_scale=True,
        )
    flashinfer = functools.partial(torch.ops.warplink.allreduce_fusion, inputs[rank], name)
    given, linear = {"residual_in": residual, "rms_gamma": weight}, None
    for pattern, layout in (
        (patterns.kARResidualRMSNormFP4Quant, layouts.LINEAR),
        (patterns.kARResidualRMSNormOutFP4Quant, layouts.SWIZZLED_128x4),
        (patterns.kARResidualRMSNormFP4Quant, None),
    ):
        codes, found_h = torch.empty(tokens, width // 2, dtype=torch.uint8), torch.empty_like(h)
        tiles = torch.full((128, -(-blocks // 4)), -1, dtype=torch.int32)
        bytes_out = torch.empty(tokens, blocks, dtype=torch.uint8) if layout == layouts.LINEAR else tiles
        n = torch.empty_like(h) if pattern == patterns.kARResidualRMSNormOutFP4Quant else None
        out = {"residual_out": found_h, "norm_out": n, "quant_out": codes, "scale_out": bytes_out}
        flashinfer(pattern, **out, **given, scale_factor=factor, layout_code=layout)
        assert torch.equal(found_h, h)
        if linear is None:
            linear = bytes_out
            check_fp4(codes, linear, near, factor.item())
            continue
        flat = tiles.view(-1).view(torch.uint8)
        at = tile_places(tokens, blocks)
        assert torch.equal(flat[at].view(tokens, blocks), linear)
        rest = torch.ones_like(flat, dtype=torch.bool)
        rest[at] = False
        assert not flat[rest].any()
    with pytest.raises(ValueError, match="layout_code is 1"):
        flashinfer(pattern, **given, layout_code=1)
    with pytest.raises(ValueError, match="memory for scales is of 1 bytes"):
        short = torch.empty(1, dtype=torch.uint8)
        flashinfer(pattern, **given, quant_out=codes, scale_out=short, scale_factor=factor)


def travels_as_fp8(rank, name, inputs, total):
    (found,) = torch.ops.warplink.fused_all_reduce(
        inputs[rank], None, None, None, None, ["sum"], name, wire="fp8"
    )
    sizes = torch.stack([one.double().abs() for one in inputs])
    # As docs/fused.md has it, and the rounding of what is stored.
    bound = 0.13 * sizes.sum(0) + 6e-6 * sizes.amax(-1, keepdim=True).sum(0)
    bound += total.double().abs() * 2**-8 + 1e-6
    exact = torch.stack([one.double() for one in inputs]).sum(0)
    assert ((found.double() - exact).abs() <= bound).all()
    if len(inputs) > 1:
        assert not torch.equal(found, total)
    everybody = [torch.empty_like(found) for _ in inputs]
    torch.distributed.all_gather(everybody, found)
    assert all(torch.equal(one, found) for one in everybody)


def stores_as_flashinfer(group, x, residual, weight, n, h, total):
    """Patterns by the function: what it returns, makes and leaves, with the kernel and by PyTorch's operations, also of no
    rows."""
    from warplink.torch import AllReduceFusionPattern as patterns, QuantizationSFLayout, allreduce_fusion
    from warplink.torch.fused import _allreduce_fusion

    given = {"residual_in": residual, "rms_gamma": weight}
    assert torch.equal(allreduce_fusion(x, group, patterns.kAllReduce), total)
    assert torch.equal(allreduce_fusion(x, group.group_name, patterns.kARResidualRMSNorm, **given), n)
    for dtype, (rows, width) in itertools.product((x.dtype, torch.float64), (x.shape, (0, x.shape[1]))):
        blocks = -(-width // 128)
        columns, room = -(-blocks // 4), -(-rows // 4) * 4
        packed = torch.empty_strided((rows, columns), (1, room), dtype=torch.int32)
        linear = {"layout_code": QuantizationSFLayout.LINEAR}
        forms = {
            patterns.kARResidualRMSNormFP8Quant: (None, {"scale_factor": 0.02}),
            patterns.kARResidualRMSNormOutFP8Quant: (None, {"scale_factor": torch.tensor([0.02])}),
            patterns.kARResidualRMSNormFP4Quant: (
                torch.empty(rows, -(-width // 16), dtype=FP8),
                {"scale_factor": 30, **linear},
            ),
            patterns.kARResidualRMSNormPerTokenGroupFP8PackedQuant: (packed, {}),
            patterns.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant: (packed, {}),
            patterns.kARResidualRMSNormDynamicFP8Quant: (torch.empty(rows, 1), {}),
            patterns.kARResidualRMSNormOutDynamicFP8Quant: (torch.empty(rows, 1), {}),
        }
        of, added, gamma = x[:rows].to(dtype), residual[:rows].to(dtype), weight.to(dtype)
        for pattern, (scale, more) in forms.items():
            fp4 = pattern == patterns.kARResidualRMSNormFP4Quant
            q = torch.empty(rows, -(-width // 2), dtype=torch.uint8) if fp4 else torch.empty(rows, width, dtype=FP8)
            norm, found_h = torch.full((rows, width), 7.0, dtype=dtype), torch.empty(rows, width, dtype=dtype)
            out = {"residual_out": found_h, "norm_out": norm, "quant_out": q, "scale_out": scale}
            made = allreduce_fusion(of, group, pattern, residual_in=added, rms_gamma=gamma, **out, **more)
            if dtype == x.dtype:
                assert torch.equal(found_h, h[:rows])
            if pattern in (4, 9, 11):
                assert made is norm
                torch.testing.assert_close(norm.float(), n[:rows].float(), rtol=2**-6, atol=2**-6)
            else:
                # It is not stored, as FlashInfer does not store it.
                assert made is q and (norm == 7).all()
            if pattern in (10, 11) and rows:
                torch.testing.assert_close(scale[:, 0], n.float().abs().amax(-1) / 448, rtol=2**-6, atol=0)
                torch.testing.assert_close(q.float() * scale, n.float(), rtol=0.13, atol=0.02)
    # Nothing has been summed where memory does not fit: all ranks would wait otherwise.
    tokens, width = x.shape
    q = torch.empty(tokens, width, dtype=FP8)
    wrong = [
        torch.empty_strided((tokens, 1), (1, 8)),
        torch.empty(tokens, 3, dtype=torch.int32),
        torch.empty_strided((tokens + 1, 1), (1, 8), dtype=torch.int32),
    ]
    for scale in wrong:
        with pytest.raises(ValueError, match="memory for scales is .* with strides"):
            allreduce_fusion(x, group, 8, quant_out=q, scale_out=scale, **given)
    for scale in (torch.empty(tokens), torch.empty(tokens, 1, dtype=torch.float16), torch.empty(tokens + 1, 1)):
        if scale.numel() == tokens and scale.dtype == torch.float32:
            assert allreduce_fusion(x, group, 10, quant_out=q, scale_out=scale, **given) is q
            continue
        with pytest.raises(ValueError, match="the memory for scale is"):
            allreduce_fusion(x, group, 10, quant_out=q, scale_out=scale, **given)
    packed = torch.empty_strided((tokens, 1), (1, 8), dtype=torch.int32)
    for pattern, refused, more in (
        (2, "the scale is", {"scale_factor": torch.ones(1)}),
        (1, "the memory for residual_out is", {"residual_out": x}),
        (3, "the memory for scales is", {"scale_out": torch.empty(10_000), "scale_factor": torch.ones(1)}),
        (8, "the memory for scales is", {"scale_out": packed}),
    ):
        named, elsewhere = next((name, one.to("meta")) for name, one in more.items())
        q = torch.empty(tokens, width // 2 if pattern == 3 else width, dtype=torch.uint8 if pattern == 3 else FP8)
        out = {"quant_out": q} if pattern > 1 else {}
        with pytest.raises(ValueError, match=f"{refused} .* on meta"):
            # The dispatcher takes calls with such a tensor for the compiler's.
            _allreduce_fusion(x, group.group_name, pattern, **given, **out, **{**more, named: elsewhere})


@pytest.mark.parametrize("world", WORLDS)
@as_ranks()
def test_operations_have_flashinfers_meaning(dist, rank, world):
    import warplink.torch

    name = dist.group.WORLD.group_name
    patterns = warplink.torch.AllReduceFusionPattern
    tokens, width = 5, 264
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [rows(peer, tokens, width, dtype) for peer in range(world)]
        residual, weight = rows(7, tokens, width, dtype), rows(8, 1, width, dtype)[0]
        total, h, near = reference(inputs, residual, weight, None, "rms", 1e-6, 0)
        made = torch.ops.warplink.fused_all_reduce(
            inputs[rank], residual, weight, None, None, ["output", "residual_out", "sum"], name, norm="rms"
        )
        assert torch.equal(made[1], h) and torch.equal(made[2], total)
        close(made[0], near, near.abs() * 2**-7 + 1e-3)
        # FlashInfer's patterns.
        output = torch.empty_like(residual)
        flashinfer = functools.partial(torch.ops.warplink.allreduce_fusion, inputs[rank], name)
        flashinfer(patterns.kAllReduce, output=output)
        assert torch.equal(output, total)
        found_h, found_n = torch.empty_like(h), torch.empty_like(h)
        given = {"residual_in": residual, "residual_out": found_h, "rms_gamma": weight}
        flashinfer(patterns.kARResidualRMSNorm, **given, norm_out=found_n)
        assert torch.equal(found_h, h) and torch.equal(found_n, made[0])
        q, scale = torch.empty(tokens, width, dtype=FP8), torch.tensor([0.02])
        pattern = patterns.kARResidualRMSNormOutFP8Quant
        flashinfer(pattern, **given, norm_out=found_n, quant_out=q, scale_factor=scale)
        assert torch.equal(found_n, made[0])
        close(q.float(), (near / 0.02).clamp(-448, 448), near.abs() / 0.02 / 15 + 2e-3)
        # Scales as bytes, a column of four blocks at a time, behind one another with room.
        packed = torch.full((2 * 8,), -1, dtype=torch.int32).as_strided([tokens, 1], [1, 8])
        pattern = patterns.kARResidualRMSNormPerTokenGroupFP8PackedQuant
        flashinfer(pattern, **given, quant_out=q, scale_out=packed, block_quant_group_size=128)
        exponents = torch.stack([packed >> shift & 0xFF for shift in (0, 8, 16, 24)], -1).view(tokens, 4)
        assert (exponents[:, 3] == 0).all()
        scales = torch.exp2(exponents[:, :3].float() - 127)
        meant = near / scales.repeat_interleave(128, -1)[:, :width]
        assert (meant.abs() <= 448.5).all() and (meant.abs().amax(-1) > 200).all()
        close(q.float(), meant.clamp(-448, 448), meant.abs() / 15 + 2e-3)
        as_fp4(rank, name, inputs, residual, weight, h, near)
        travels_as_fp8(rank, name, inputs, total)
        stores_as_flashinfer(dist.group.WORLD, inputs[rank], residual, weight, made[0], h, total)
    with pytest.raises(ValueError, match="the pattern is 6"):
        flashinfer(6)
    with pytest.raises(ValueError, match="expected exact or fp8"):
        torch.ops.warplink.fused_all_reduce(inputs[rank], None, None, None, None, ["sum"], name, wire="fp4")
    with pytest.raises(ValueError, match="each once"):
        torch.ops.warplink.fused_all_reduce(inputs[rank], None, None, None, None, ["other"], name)
    # Where the kernel does not do it.
    whole = rows(rank, tokens, width, torch.float64)
    (total,) = torch.ops.warplink.fused_all_reduce(whole, None, None, None, None, ["sum"], name)
    torch.testing.assert_close(total, sum(rows(peer, tokens, width, torch.float64) for peer in range(world)))
    empty = whole[:0].float()
    (n,) = torch.ops.warplink.fused_all_reduce(empty, empty, weight.float(), None, None, ["output"], name, norm="rms")
    assert n.shape == empty.shape


def adversarial_rows(width):
    """Rows that are hard to quantise, one for each reason, and usual numbers around what is awkward."""
    usual = torch.linspace(-3, 3, width)

    def with_some(*values):
        row = usual.clone()
        row[torch.arange(len(values)) * 37 % width] = torch.tensor(values)
        return row

    # Scales next to powers of two, the least scale, and what becomes smaller than any float.
    near = [448 * 2.0**power * (1 + shift * 2**-23) for power in (-20, -1, 0, 7) for shift in (-1, 0, 1, 2)]
    rows = [
        *(usual / 3 * value for value in near),
        *(usual * 2.0**power for power in (-149, -130, -127, -126, -60, -24, 0, 24, 60, 120)),
        with_some(float("nan")),
        with_some(-float("nan"), float("inf"), -1e30),
        with_some(float("-inf"), 2.0),
        with_some(3.4e38, -3.4e38),
        with_some(-0.0, 1e-40, -3e-39, 1.4e-45),
        torch.full((width,), float("nan")),
        torch.full((width,), float("inf")),
        torch.full((width,), -0.0),
    ]
    return torch.stack(rows)


@as_ranks(2)
def test_kernels_and_operations_of_pytorch_quantise_alike(rank, dist):
    from warplink.torch import fused, quantizations

    name = dist.group.WORLD.group_name

    def as_bytes(tensor):
        return tensor.contiguous().view(torch.uint8)

    for dtype, width in itertools.product((torch.float32, torch.bfloat16), (300, 33)):
        whole = adversarial_rows(width).to(dtype)
        mine = whole if rank == 0 else torch.zeros_like(whole)
        weight = rows(3, 1, width, dtype)[0]
        for quantization in quantizations.QUANTIZATIONS:
            scale = torch.tensor([37.5]) if quantization in quantizations.GIVEN_SCALE else None
            outputs = ["output", "quantized", *(["scale"] if quantization != "static" else [])]
            h, *found = torch.ops.warplink.fused_all_reduce(
                mine, None, None, None, scale, outputs, name, quantization=quantization
            )
            for one, other in zip(found, quantizations.quantize(h, quantization, scale)):
                assert one.shape == other.shape and one.dtype == other.dtype
                same = (as_bytes(one) == as_bytes(other)).view(len(whole), -1).all(-1)
                assert same.all(), (dtype, width, quantization, same)
            # Means of these are infinite or none, so that no rounding differs.
            odd = ~(whole.double().square().sum(-1) < 1e38)
            _, *found = torch.ops.warplink.fused_all_reduce(
                mine, None, weight, None, scale, outputs, name, norm="rms", quantization=quantization
            )
            of = fused._Epilogue(None, weight, None, scale, "rms", 1e-6, False, quantization)
            unfused = fused._unfused(mine, of, name)
            for output, one in zip(outputs[1:], found):
                assert torch.equal(as_bytes(one[odd]), as_bytes(unfused[output][odd])), (dtype, quantization, output)
        assert odd.sum() > 5
    # Rows of no elements have scales as well.
    nothing = torch.empty(3, 0)
    for quantization in quantizations.QUANTIZATIONS:
        q, scales = quantizations.quantize(nothing, quantization, torch.ones(1))
        assert q.shape == nothing.shape
        assert scales is None or list(scales.shape) == quantizations.of_scales([3, 0], quantization)[0]


@as_ranks(2, limit=COMPILING, starts=start_compiling)
def test_vllms_function_is_served(rank, world, dist):
    import warplink.torch

    warplink.torch.register_for_vllm(dist.group.WORLD.group_name)
    warplink.torch.register_for_vllm(dist.group.WORLD.group_name)
    fused = torch.ops.vllm.flashinfer_trtllm_fused_allreduce_norm
    tokens, width = 3, 64
    inputs = [rows(peer, tokens, width, torch.bfloat16) for peer in range(world)]
    residual, weight = rows(7, tokens, width, torch.bfloat16), rows(8, 1, width, torch.bfloat16)[0]
    _, h, near = reference(inputs, residual, weight, None, "rms", 1e-6, 1)
    pattern = warplink.torch.AllReduceFusionPattern.kARResidualRMSNorm
    common = weight, 1e-6, world, True, True, 1024, pattern

    def in_place(x, r):
        fused(x, r, *common, weight_bias=1.0)
        return x, r

    def apart(x, r):
        n = torch.empty_like(x)
        fused(x, r, *common, norm_out=n, weight_bias=1.0)
        return n, x

    for function in (in_place, apart):
        for call in (function, torch.compile(function, fullgraph=True)):
            n, found = call(inputs[rank].clone(), residual.clone())
            assert torch.equal(found, h)
            close(n, near, near.abs() * 2**-7 + 1e-3)
    # Nobody reads the norm of this one.
    quantize = warplink.torch.AllReduceFusionPattern.kARResidualRMSNormFP8Quant
    x, found, q = inputs[rank].clone(), residual.clone(), torch.empty(tokens, width, dtype=FP8)
    scale = torch.tensor([0.02])
    fused(x, found, *common[:-1], quantize, quant_out=q, scale_factor=scale, weight_bias=1.0)
    assert torch.equal(found, h) and torch.equal(x, inputs[rank])
    close(q.float(), (near / 0.02).clamp(-448, 448), near.abs() / 0.02 / 15 + 2e-3)


def with_the_pass(function, fused, move=None):
    """``function`` compiled with the pass, and with Inductor's decompositions, but without its code, which takes long. Nodes of
    fused operations go into ``fused``. The pass takes the scalar argument for one on the device ``move``."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    from warplink.torch.fusion.graph_pass import FusionPass

    def compiler(module, _):
        scales = [node for node in module.graph.nodes if node.op == "placeholder" and node.meta["val"].numel() == 1]
        kept = {node: node.meta["val"] for node in scales}
        for node in scales if move else ():
            node.meta["val"] = node.meta["val"].to(move)
        FusionPass()(module.graph)
        for node, value in kept.items():
            node.meta["val"] = value
        targets = [node.target for node in module.graph.nodes]
        made = [node for node in module.graph.nodes if node.target is torch.ops.warplink.fused_all_reduce.default]
        assert not made or torch.ops._c10d_functional.all_reduce.default not in targets, module.graph
        fused.extend(made)
        module.recompile()
        return module.forward

    backend = aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table())
    return torch.compile(function, fullgraph=True, backend=backend)


@as_ranks(2, limit=COMPILING, starts=start_compiling)
def test_the_pass_fuses_norms(rank, dist):
    import torch.distributed._functional_collectives as funcol

    import warplink.torch

    name = dist.group.WORLD.group_name
    width = 48

    def reduced(x):
        return funcol.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", name))

    def rms(h, w, more=0.0):
        # As models of transformers write it.
        wide = h.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return w * wide.to(h.dtype) if not more else (wide * (more + w.float())).to(h.dtype)

    def usual(x, r, w, s):
        h = reduced(x) + r
        return rms(h, w), h

    def gemma(x, r, w, s):
        h = r + reduced(x)
        return rms(h, w, 1.0), h * 2

    def functional(x, r, w, s):
        h = reduced(x) + r
        return torch.nn.functional.rms_norm(h, (width,), w, 1e-5), h

    def first_layer(x, r, w, s):
        h = reduced(x)
        return rms(h, w), h

    def norm_only(x, r, w, s):
        return rms(reduced(x) + r, w)

    def to_fp8(x, r, w, s):
        h = reduced(x) + r
        n = (rms(h, w).float() / s).clamp(-448.0, 448.0)
        return n.to(FP8), h

    def sum_too(x, r, w, s):
        total = reduced(x)
        h = total + r
        return rms(h, w), h, total.relu()

    def computed(x, r, w, s):
        return rms(reduced(x @ x.mT @ x) + r, w)

    def average(x, r, w, s):
        total = funcol.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "avg", name))
        return rms(total + r, w)

    def no_norm(x, r, w, s):
        return (reduced(x) + r).relu()

    def dependent(x, r, w, s):
        total = reduced(x)
        return rms(total + total.relu() * r, w)

    def normal(h, eps=1e-5):
        wide = h.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)

    def root_too(x, r, w, s):
        # As training saves it.
        wide = (reduced(x) + r).float()
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (wide * root * w.float()).to(x.dtype), root

    def row_too(x, r, w, s):
        row = normal(reduced(x) + r)
        return (row * w.float()).to(x.dtype), row

    def two_weights(x, r, w, s):
        row = torch.nn.functional.rms_norm(reduced(x) + r, (width,), None, 1e-5)
        return row * w, row * (w * w)

    def wide_output_too(x, r, w, s):
        n = rms(reduced(x) + r, w).float()
        return (n / s).clamp(-448.0, 448.0).to(FP8), n * 2

    def single_sum(x, r, w, s):
        h = reduced(x).float() + r.float()
        return (normal(h) * w.float()).to(x.dtype), h.to(x.dtype)

    def single_sum_and_root(x, r, w, s):
        h = reduced(x).float() + r
        root = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (h * root).to(x.dtype) * w, h.to(x.dtype), root

    def single_sum_too(x, r, w, s):
        h = reduced(x).float() + r.float()
        return (normal(h) * w.float()).to(x.dtype), h

    def by_root(x, r, w, s):
        wide = (reduced(x) + r).float()
        return (wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * w.float()).to(x.dtype)

    def of_rows(x, r, w, s):
        h = reduced(x.reshape(6, width).repeat(8, 1))
        return (normal(h) * w.float().view(width, 1)).to(x.dtype)

    def one_row_of_weights(x, r, w, s):
        return (normal(reduced(x) + r) * w.float().view(1, width)).to(x.dtype)

    def more_dimensions(x, r, w, s):
        return (normal(reduced(x) + r) * w.float().view(1, 1, 1, width)).to(x.dtype)

    def rounded_weight(x, r, w, s):
        return (normal(reduced(x) + r) * w.to(FP8).float()).to(x.dtype)

    def negative_eps(x, r, w, s):
        return (normal(reduced(x) + r, -1e-5) * w.float()).to(x.dtype)

    def by_reciprocal(x, r, w, s):
        n = (rms(reduced(x) + r, w).float() * s.reciprocal()).clamp(-448.0, 448.0)
        return n.to(FP8)

    def by_one_over(x, r, w, s):
        n = (rms(reduced(x) + r, w).float() * (1.0 / s)).clamp(-448.0, 448.0)
        return n.to(FP8)

    def deep_scale(x, r, w, s):
        n = (rms(reduced(x) + r, w).float() / s.view(1, 1, 1, 1)).clamp(-448.0, 448.0)
        return n.to(FP8)

    def dynamic_scale(x, r, w, s):
        n = rms(reduced(x) + r, w).float()
        return (n / (n.abs().amax() / 448)).clamp(-448.0, 448.0).to(FP8)

    fuses = [
        usual, gemma, functional, first_layer, norm_only, to_fp8, sum_too, computed, root_too, row_too,
        two_weights, wide_output_too, single_sum, single_sum_and_root, by_root, one_row_of_weights,
        by_reciprocal, by_one_over, deep_scale, dynamic_scale,
    ]
    # Why others are left.
    refused = {
        average: "not sum",
        no_norm: "no RMSNorm",
        dependent: "depends on the sum",
        single_sum_too: "in single precision",
        of_rows: "no RMSNorm",
        more_dimensions: "no RMSNorm",
        rounded_weight: "no RMSNorm",
        negative_eps: "no RMSNorm",
    }
    quantizes = (to_fp8, wide_output_too, by_reciprocal, by_one_over)
    with fusing():
        for dtype, sizes in ((torch.bfloat16, (6, width)), (torch.float32, (2, 3, width))):
            x = rows(rank, 6, width, dtype).view(sizes)
            r, w = rows(7, 6, width, dtype).view(sizes), rows(8, 1, width, dtype)[0]
            s = torch.tensor([0.05])
            for function in (*fuses, *refused):
                torch._dynamo.reset()
                warplink.torch.fusion_report(clear=True)
                whole = dtype == torch.bfloat16 and function in (usual, to_fp8)
                fused = []
                made = torch.compile(function, fullgraph=True) if whole else with_the_pass(function, fused)
                got = made(x, r, w, s)
                # Of single precision, nothing is rounded.
                rounds = dtype != torch.float32 or function not in (single_sum_too, rounded_weight)
                reason = refused.get(function) if rounds else None
                wanted = function(x, r, w, s)
                got, wanted = ((a,) if torch.is_tensor(a) else a for a in (got, wanted))
                for one, other in zip(got, wanted):
                    # The norm is rounded once instead of twice.
                    bound = {"rtol": 0.13, "atol": 0.02} if one.dtype == FP8 else {"rtol": 2**-6, "atol": 2**-6}
                    torch.testing.assert_close(one.float(), other.float(), **bound)
                (found,) = warplink.torch.fusion_report()
                assert found.replaced == (reason is None), (function, dtype, str(found))
                assert found.kind == "all-reduce + norm"
                assert str(found).endswith("fused") or ": fused, from" in str(found) or reason in str(found), found
                if fused:
                    assert (fused[0].kwargs["quantization"] == "static") == (function in quantizes), function
            # A scale on another device, which the kernel would not read.
            torch._dynamo.reset()
            with_the_pass(to_fp8, fused, "meta")(x, r, w, s)
            assert fused[-1].kwargs["quantization"] is None
            # What training saves.
            warplink.torch.fusion_report(clear=True)
            given = [(r.clone().requires_grad_(), w.clone().requires_grad_()) for _ in range(2)]
            for call, (residual, weight) in zip((usual, with_the_pass(usual, fused)), given):
                n, h = call(x, residual, weight, s)
                (n.float().sin().sum() + h.float().sum()).backward()
            for one, other in zip(*given):
                torch.testing.assert_close(one.grad.float(), other.grad.float(), rtol=2**-5, atol=2**-5)
            assert [found.replaced for found in warplink.torch.fusion_report()] == [True]


@as_ranks(1)
def test_a_group_of_one_rank_computes(dist):
    name = dist.group.WORLD.group_name
    x, w = rows(1, 3, 16, torch.float32), rows(2, 1, 16, torch.float32)[0]
    n, h = torch.ops.warplink.fused_all_reduce(x, x, w, None, None, ["output", "residual_out"], name, norm="rms")
    torch.testing.assert_close(h, 2 * x)
    torch.testing.assert_close(n, torch.nn.functional.rms_norm(2 * x, (16,), w, 1e-6))


def documented(rank, world, _, place, text):
    import re

    dist = start_compiling(rank, world, place)
    names = {}
    torch.manual_seed(rank)
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(block, "docs/fused.md", "exec"), names)
    total = names["x"].clone()
    dist.all_reduce(total)
    torch.testing.assert_close(names["h"], total + 1)
    torch.testing.assert_close(names["n"], torch.nn.functional.rms_norm(total + 1, (64,), eps=1e-5))
    torch.testing.assert_close(names["probabilities"], torch.softmax(total * 0.5, -1))
    names["plans"].clear()
    dist.destroy_process_group()


def test_the_documents_examples_run():
    document = pathlib.Path(__file__).parents[3] / "docs" / "fused.md"
    on_ranks(documented, 2, document.read_text(), limit=COMPILING)
