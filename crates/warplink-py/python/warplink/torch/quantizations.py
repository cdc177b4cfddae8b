"""Quantised rows by PyTorch's operations, and the layouts in which matmuls take their scales."""

from __future__ import annotations

import math
from typing import Sequence

import torch

#: How rows are quantised, and elements that have a scale of their own: 0 where a row or a call has one.
QUANTIZATIONS = {
    "static": 0,
    "per_token": 0,
    "per_block": 128,
    "per_block_power_of_two": 128,
    "mxfp8": 32,
    "nvfp4": 16,
}

#: Quantisations that are given one float32: what is divided by, and the global scale of nvfp4.
GIVEN_SCALE = ("static", "nvfp4")

#: Quantisations whose scales may be in the tiles that matmuls read.
SWIZZLED = ("mxfp8", "nvfp4")

_SCALE_DTYPES = {"mxfp8": torch.uint8, "nvfp4": torch.float8_e4m3fn}

_LARGEST = 448.0

#: The least scale, where it is not 1e-10.
_LEAST_SCALES = {"mxfp8": 2.0**-126}

#: The middles between floats of 4 bits (e2m1), which go to the one with an even code.
_MIDDLES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def of_codes(sizes: Sequence[int], quantization: str) -> tuple[list[int], torch.dtype]:
    """Sizes and type of what rows of ``sizes`` become."""
    if quantization == "nvfp4":
        return [*sizes[:-1], math.ceil(sizes[-1] / 2)], torch.uint8
    return list(sizes), torch.float8_e4m3fn


def of_scales(sizes: Sequence[int], quantization: str) -> tuple[list[int], torch.dtype]:
    """Sizes and type of the scales of rows of ``sizes``."""
    dtype = _SCALE_DTYPES.get(quantization, torch.float32)
    block = QUANTIZATIONS[quantization]
    return [*sizes[:-1], math.ceil(sizes[-1] / block)] if block else list(sizes[:-1]), dtype


def quantize(
    row: torch.Tensor, quantization: str, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The quantised ``row``, and its scales where they are computed: in single precision, with the bits of Warplink's kernels."""
    row = row.float()
    if scale is not None:
        # One element of as many dimensions as there may be.
        scale = scale.reshape(())
    if quantization == "nvfp4" and scale is not None:
        return _nvfp4(row, scale)
    if quantization == "static" and scale is not None:
        return _as_fp8(row / scale), None
    # Infinities count, NaN does not.
    sizes = row.abs().nan_to_num(nan=0.0, posinf=math.inf)
    width, block = row.shape[-1], QUANTIZATIONS[quantization]
    if not block:
        # Rows of no elements, too, have a scale.
        block, sizes = width + 1, torch.nn.functional.pad(sizes, (0, 1))
    largest = _largest(sizes, block)
    scales = _quotient(largest, _LARGEST).clamp_min(_LEAST_SCALES.get(quantization, 1e-10))
    if quantization in ("per_block_power_of_two", "mxfp8"):
        # The next power of two from it on: bits of the mantissa carry into the exponent.
        scales = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    quantized = _as_fp8(row / _of_elements(scales, block, width))
    if quantization == "mxfp8":
        scales = (scales.view(torch.int32) >> 23).to(torch.uint8)
    return quantized, scales if QUANTIZATIONS[quantization] else scales.squeeze(-1)


def _as_fp8(row: torch.Tensor) -> torch.Tensor:
    """``row`` as floats of 8 bits, the largest where it is too large."""
    # Kernels store one NaN, whatever its sign was.
    limited = row.clamp(-_LARGEST, _LARGEST)
    return torch.where(limited.isnan(), math.nan, limited).to(torch.float8_e4m3fn)


def _quotient(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """``values`` divided by a number: PyTorch multiplies by the reciprocal of one that is not in a tensor on some devices."""
    return values / values.new_full((), divisor)


def _largest(sizes: torch.Tensor, block: int) -> torch.Tensor:
    """The largest of each block; the last one may be shorter."""
    blocks = math.ceil(sizes.shape[-1] / block)
    padded = torch.nn.functional.pad(sizes, (0, blocks * block - sizes.shape[-1]))
    largest: torch.Tensor = padded.unflatten(-1, (blocks, block)).amax(-1)
    return largest


def _of_elements(values: torch.Tensor, block: int, width: int) -> torch.Tensor:
    """For each of ``width`` elements, the value of its block."""
    return values.repeat_interleave(block, -1)[..., :width]


def _nvfp4(row: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    width = row.shape[-1]
    # A block with a NaN has a scale that is none; infinities count as the largest number.
    most = _largest(row.abs().clamp_max(torch.finfo(torch.float32).max), 16)
    scales = _as_fp8(scale * _quotient(most, 6.0))
    wide = scales.to(row.dtype)
    factor = torch.where(wide > 0, scale / wide, torch.zeros_like(wide))
    scaled = row * _of_elements(factor, 16, width)
    size = scaled.abs()
    codes = torch.zeros_like(size, dtype=torch.uint8)
    for middle, even in _MIDDLES:
        codes += size >= middle if even else size > middle
    codes = torch.where(scaled.isnan(), 7, codes + 8 * scaled.signbit().to(torch.uint8)).to(torch.uint8)
    pairs = torch.nn.functional.pad(codes, (0, width % 2)).unflatten(-1, (math.ceil(width / 2), 2))
    return pairs[..., 0] | pairs[..., 1] << 4, scales


def packed_form(rows: int, blocks: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Sizes and strides of the integers that have four exponents of a row each: columns, with room for whole tiles of 4 rows."""
    return (rows, math.ceil(blocks / 4)), (1, math.ceil(rows / 4) * 4)


def pack_exponents(scales: torch.Tensor, scale_out: torch.Tensor) -> None:
    """Stores powers of two as bytes of exponents, four in an integer of :func:`packed_form`, and 0 where there is none."""
    exponents = scales.view(torch.int32) >> 23
    rows, blocks = exponents.shape
    padded = exponents.new_zeros(rows, math.ceil(blocks / 4) * 4)
    padded[:, :blocks] = exponents
    shifts = torch.arange(0, 32, 8, device=scales.device, dtype=torch.int32)
    packed = (padded.view(rows, padded.shape[1] // 4, 4) << shifts).sum(-1, dtype=torch.int32)
    if rows and blocks:
        # The padding between columns is read by kernels that load whole tiles.
        elements = rows + (scale_out.shape[1] - 1) * scale_out.stride(1)
        scale_out.as_strided([elements], [1]).zero_()
    scale_out.copy_(packed)


def swizzled_bytes(rows: int, blocks: int) -> int:
    """How long the scales of rows are in tiles of 128 rows of 4."""
    return math.ceil(rows / 128) * 128 * math.ceil(blocks / 4) * 4


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """The scales of rows, a byte each, in tiles of 128 rows of 4."""
    rows, blocks = math.prod(scales.shape[:-1]), scales.shape[-1]
    tiles = scales.new_empty([-(-rows // 128) * 128, -(-blocks // 4) * 4])
    swizzle(scales.view(torch.uint8).view(rows, blocks), tiles)
    return tiles


def swizzle(scales: torch.Tensor, scale_out: torch.Tensor) -> None:
    """Stores ``[rows, blocks]`` bytes in tiles of 128 rows of 4, one row of tiles behind another, and 0 where there is none.

    A tile is 32 times 16 bytes: four of row r, then of rows r + 32, r + 64 and r + 96.
    """
    rows, blocks = scales.shape
    down, across = math.ceil(rows / 128), math.ceil(blocks / 4)
    padded = scales.new_zeros(down * 128, across * 4)
    padded[:rows, :blocks] = scales
    tiles = padded.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4)
    scale_out.view(-1).view(torch.uint8)[: padded.numel()].view(tiles.shape).copy_(tiles)
