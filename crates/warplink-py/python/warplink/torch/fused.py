"""``torch.ops.warplink``: an all-reduce with residual, norm and quantisation behind it, in one kernel.

``allreduce_fusion`` has the arguments and the meaning of FlashInfer's function, and writes into tensors that it is given;
``fused_all_reduce`` makes its results, so that compilers may move it. Groups of Warplink whose members reach one another's
memory run them as one kernel; all else runs as an all-reduce and PyTorch's operations. Every rank of the group calls them
in the same order with the same sizes, types and outputs. Sums are always in single precision and in rank order, and all
ranks get the same bits where the kernel does it. They have no gradients.
"""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple, Sequence

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed import ProcessGroup

from warplink.torch import quantizations
from warplink.torch.ops import direct_workspace, library
from warplink.torch.quantizations import GIVEN_SCALE, QUANTIZATIONS

#: Element types of rows.
ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: Names of results.
OUTPUTS = ("sum", "residual_out", "output", "quantized", "scale")

#: How rows travel between ranks.
WIRES = ("exact", "fp8")


class AllReduceFusionPattern:
    """Operations of ``allreduce_fusion``, by FlashInfer's numbers."""

    kAllReduce = 0
    kARResidualRMSNorm = 1
    kARResidualRMSNormFP8Quant = 2
    kARResidualRMSNormFP4Quant = 3
    kARResidualRMSNormOutFP8Quant = 4
    kARResidualRMSNormOutFP4Quant = 5
    kARResidualRMSNormPerTokenGroupFP8PackedQuant = 8
    kARResidualRMSNormOutPerTokenGroupFP8PackedQuant = 9
    kARResidualRMSNormDynamicFP8Quant = 10
    kARResidualRMSNormOutDynamicFP8Quant = 11


class QuantizationSFLayout:
    """How scales of fp4 are stored, by FlashInfer's numbers."""

    SWIZZLED_128x4 = 0
    LINEAR = 2


#: Of each pattern, the quantisation.
_PATTERNS = {
    AllReduceFusionPattern.kAllReduce: None,
    AllReduceFusionPattern.kARResidualRMSNorm: None,
    AllReduceFusionPattern.kARResidualRMSNormFP8Quant: "static",
    AllReduceFusionPattern.kARResidualRMSNormOutFP8Quant: "static",
    AllReduceFusionPattern.kARResidualRMSNormFP4Quant: "nvfp4",
    AllReduceFusionPattern.kARResidualRMSNormOutFP4Quant: "nvfp4",
    AllReduceFusionPattern.kARResidualRMSNormPerTokenGroupFP8PackedQuant: "per_block_power_of_two",
    AllReduceFusionPattern.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant: "per_block_power_of_two",
    AllReduceFusionPattern.kARResidualRMSNormDynamicFP8Quant: "per_token",
    AllReduceFusionPattern.kARResidualRMSNormOutDynamicFP8Quant: "per_token",
}

#: Patterns that store the norm.
_WITH_NORM = (
    AllReduceFusionPattern.kARResidualRMSNorm,
    AllReduceFusionPattern.kARResidualRMSNormOutFP8Quant,
    AllReduceFusionPattern.kARResidualRMSNormOutFP4Quant,
    AllReduceFusionPattern.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant,
    AllReduceFusionPattern.kARResidualRMSNormOutDynamicFP8Quant,
)

library.define(
    "fused_all_reduce(Tensor input, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? scale, "
    "str[] outputs, str group_name, *, str? norm = None, float eps = 1e-6, bool weight_bias = False, "
    "str? quantization = None, str wire = 'exact', bool swizzled_scale = False) -> Tensor[]",
    tags=[torch._C.Tag.needs_fixed_stride_order],
)
library.define(
    "allreduce_fusion(Tensor input, str group_name, int pattern, bool launch_with_pdl = False, "
    "bool trigger_completion_at_end = True, Tensor(a!)? output = None, Tensor(b!)? residual_out = None, "
    "Tensor(c!)? norm_out = None, Tensor(d!)? quant_out = None, Tensor(e!)? scale_out = None, "
    "Tensor? residual_in = None, Tensor? rms_gamma = None, float rms_eps = 1e-6, Tensor? scale_factor = None, "
    "int? layout_code = None, bool? use_oneshot = None, bool fp32_acc = False, "
    "int? block_quant_group_size = None, float weight_bias = 0.0) -> ()"
)


class _Epilogue(NamedTuple):
    """Operations behind the sum; see ``fused_all_reduce``."""

    residual: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    scale: torch.Tensor | None
    norm: str | None
    eps: float
    weight_bias: bool
    quantization: str | None
    wire: str = "exact"


def _check(input: torch.Tensor, outputs: Sequence[str], of: _Epilogue) -> None:
    norm, quantization, scale = of.norm, of.quantization, of.scale
    if input.dim() < 1:
        raise ValueError("the input has no dimensions; expected rows")
    if norm not in (None, "rms", "layer"):
        raise ValueError(f"norm is '{norm}'; expected rms or layer")
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization is '{quantization}'; expected {', '.join(QUANTIZATIONS)}")
    if of.wire not in WIRES:
        raise ValueError(f"wire is '{of.wire}'; expected {' or '.join(WIRES)}")
    unknown = [name for name in outputs if name not in OUTPUTS]
    if unknown or len(set(outputs)) != len(outputs) or not outputs:
        raise ValueError(f"outputs are {list(outputs)}; expected some of {', '.join(OUTPUTS)}, each once")
    computes = quantization not in (None, "static")
    if ("quantized" in outputs) != (quantization is not None) or ("scale" in outputs) != computes:
        raise ValueError(
            f"quantization is {quantization} and outputs are {list(outputs)}; expected 'quantized' exactly with it, and "
            "'scale' where it is computed"
        )
    if (of.weight is None) != (norm is None) or of.bias is not None and norm is None:
        raise ValueError("expected a weight exactly with a norm, and a bias only with one")
    for name, tensor, sizes in (
        ("the residual", of.residual, input.shape),
        ("the weight", of.weight, input.shape[-1:]),
        ("the bias", of.bias, input.shape[-1:]),
    ):
        if tensor is None:
            continue
        if tensor.shape != sizes or tensor.dtype != input.dtype or tensor.device != input.device:
            raise ValueError(
                f"{name} is {list(tensor.shape)} of {tensor.dtype} on {tensor.device}; expected {list(sizes)} of "
                f"{input.dtype} on {input.device}"
            )
    if (scale is not None) != (quantization in GIVEN_SCALE):
        raise ValueError(f"expected a scale exactly with the quantizations {' and '.join(GIVEN_SCALE)}")
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != input.device):
        raise ValueError(
            f"the scale is {list(scale.shape)} of {scale.dtype} on {scale.device}; expected one float32 on {input.device}"
        )


def _form(input: torch.Tensor, name: str, quantization: str | None) -> tuple[list[int], torch.dtype]:
    """Sizes and type of a result."""
    sizes = list(input.shape)
    if name == "quantized":
        return quantizations.of_codes(sizes, quantization or "static")
    if name == "scale":
        return quantizations.of_scales(sizes, quantization or "per_token")
    return sizes, input.dtype


def _made(input: torch.Tensor, name: str, quantization: str | None) -> torch.Tensor:
    """Memory for a result."""
    sizes, dtype = _form(input, name, quantization)
    return input.new_empty(sizes, dtype=dtype)


def _results(
    input: torch.Tensor, of: _Epilogue, group_name: str, memory: Callable[[], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Results by their names: in ``memory`` by the kernel, or all of them by PyTorch's operations."""
    fuses = input.dtype in ROW_DTYPES and input.numel() > 0
    space = direct_workspace(group_name, input.device, fuses=fuses) if fuses else None
    if space is None:
        return _unfused(input, of, group_name)
    targets = memory()
    arrays: dict[str, Any] = dict(targets)
    for name, tensor in (("residual", of.residual), ("weight", of.weight), ("bias", of.bias)):
        if tensor is not None:
            arrays[name] = tensor.contiguous()
    if of.scale is not None:
        # A scale that is read.
        arrays["scale" if of.quantization == "static" else "global_scale"] = of.scale
    for name, tensor in arrays.items():
        plain = tensor.detach()
        # DLPack has had no name for floats of 8 and 4 bits for long.
        arrays[name] = plain.view(torch.uint8) if plain.itemsize == 1 else plain
    how = {name: getattr(of, name) for name in ("norm", "eps", "weight_bias", "quantization", "wire")}
    with space.turn(kernels_wait=True) as stream:
        space.collectives().fused(stream, input.contiguous().detach(), **arrays, **how)
    space.settle(stream)
    return targets


def fused_all_reduce(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    outputs: list[str],
    group_name: str,
    *,
    norm: str | None = None,
    eps: float = 1e-6,
    weight_bias: bool = False,
    quantization: str | None = None,
    wire: str = "exact",
    swizzled_scale: bool = False,
) -> list[torch.Tensor]:
    """Results named by ``outputs``, in that order, of the sum over the group's ranks of ``input``, ``[.., width]``.

    "sum" is that alone; "residual_out" is h, the sum and ``residual``, rounded to the input's type; "output" is h normalised
    by ``norm``, "rms" or "layer", with ``weight``, to which 1 is added with ``weight_bias``, and ``bias``, or h without a
    norm; "quantized" is that divided by a scale, as float8_e4m3fn. By ``quantization`` the scale is ``scale``, one float32
    ("static"), or an output "scale": of each row ("per_token"), or of each 128 elements of it ("per_block",
    "per_block_power_of_two"), or of each 32 as a byte of its exponent ("mxfp8"). With "nvfp4" it is two floats of 4 bits in a
    byte, the first in the low bits, and "scale" is of each 16 elements, as float8_e4m3fn: their largest magnitude / 6, times
    ``scale``. With ``swizzled_scale``, the scales of "mxfp8" and "nvfp4" are copied into the tiles of 128 rows of 4 that matmuls
    read: ``[rows, blocks]``, rounded up to these, with 0 where there is none. With ``wire`` "fp8" rows travel as floats of 8
    bits with a scale for each 128 elements, where the kernel does it, for an error that docs/fused.md states; all ranks get the
    same bits either way.
    Raises ValueError where sizes, types or names do not fit.
    """
    of = _Epilogue(residual, weight, bias, scale, norm, eps, weight_bias, quantization, wire)
    _check(input, outputs, of)
    if swizzled_scale and quantization not in quantizations.SWIZZLED:
        raise ValueError(
            f"swizzled scales of the quantization {quantization}; expected {' or '.join(quantizations.SWIZZLED)}"
        )

    def made() -> dict[str, torch.Tensor]:
        return {name: _made(input, name, quantization) for name in outputs}

    # The compiler asks for shapes and types only.
    results = made() if input.is_meta else _results(input, of, group_name, made)
    if swizzled_scale:
        results["scale"] = quantizations.swizzled(results["scale"])
    return [results[name] for name in outputs]


def _unfused(input: torch.Tensor, of: _Epilogue, group_name: str) -> dict[str, torch.Tensor]:
    """The same as an all-reduce and PyTorch's operations; every result by its name."""
    name: Any = group_name
    # Added in single precision, as the kernel does.
    wide = input.float() if input.dtype in ROW_DTYPES else input
    total: torch.Tensor = funcol.wait_tensor(funcol.all_reduce(wide.contiguous(), "sum", name))
    added = total if of.residual is None else total + of.residual.to(total.dtype)
    results = {"sum": total.to(input.dtype), "residual_out": added.to(input.dtype)}
    row = results["residual_out"].to(total.dtype)
    if of.norm == "layer":
        row = row - row.mean(-1, keepdim=True)
    if of.norm is not None and of.weight is not None:
        row = row * torch.rsqrt(row.square().mean(-1, keepdim=True) + of.eps)
        row = row * (of.weight.to(row.dtype) + (1 if of.weight_bias else 0))
    if of.bias is not None:
        row = row + of.bias.to(row.dtype)
    results["output"] = row.to(input.dtype)
    if of.quantization is None:
        return results
    results["quantized"], scales = quantizations.quantize(row, of.quantization, of.scale)
    if scales is not None:
        results["scale"] = scales
    return results


def _check_scales(scale_out: torch.Tensor, input: torch.Tensor, quantization: str, *, linear: bool) -> None:
    """Raises ValueError unless the scales of ``input`` fit into ``scale_out``, in the layout that they are copied to."""
    rows, width = math.prod(input.shape[:-1]), input.shape[-1]
    blocks = math.ceil(width / QUANTIZATIONS[quantization])
    if quantization == "nvfp4":
        least = rows * blocks if linear else quantizations.swizzled_bytes(rows, blocks)
        if scale_out.nbytes < least or not scale_out.is_contiguous() or scale_out.device != input.device:
            raise ValueError(
                f"the memory for scales is of {scale_out.nbytes} bytes on {scale_out.device}; expected {least} on "
                f"{input.device}, contiguous"
            )
        return
    sizes, strides = quantizations.packed_form(rows, blocks)
    form = (scale_out.shape, scale_out.stride(), scale_out.dtype, scale_out.device)
    if form != (sizes, strides, torch.int32, input.device):
        raise ValueError(
            f"the memory for scales is {list(scale_out.shape)} of {scale_out.dtype} on {scale_out.device} with strides "
            f"{list(scale_out.stride())}; expected {list(sizes)} of {torch.int32} on {input.device} with strides "
            f"{list(strides)}"
        )


@torch.no_grad()
def _allreduce_fusion(
    input: torch.Tensor,
    group_name: str,
    pattern: int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_in: torch.Tensor | None = None,
    rms_gamma: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    scale_factor: torch.Tensor | None = None,
    layout_code: int | None = None,
    use_oneshot: bool | None = None,
    fp32_acc: bool = False,
    block_quant_group_size: int | None = None,
    weight_bias: float = 0.0,
) -> None:
    """The operation of :func:`allreduce_fusion`, which makes nothing and returns nothing."""
    if pattern not in _PATTERNS:
        known = ", ".join(map(str, _PATTERNS))
        raise ValueError(f"the pattern is {pattern}; expected one of {known}")
    if weight_bias not in (0.0, 1.0):
        raise ValueError(f"weight_bias is {weight_bias}; expected 0 or 1")
    quantization = _PATTERNS[pattern]
    block = 16 if quantization == "nvfp4" else 128
    if block_quant_group_size not in (None, block):
        raise ValueError(f"blocks of {block_quant_group_size}; expected {block}")
    layouts = (None, QuantizationSFLayout.SWIZZLED_128x4, QuantizationSFLayout.LINEAR)
    if quantization == "nvfp4" and layout_code not in layouts:
        raise ValueError(f"layout_code is {layout_code}; expected one of {', '.join(map(str, layouts))}")
    plain = pattern == AllReduceFusionPattern.kAllReduce
    if plain and (output is None or residual_out is not None or norm_out is not None):
        raise ValueError("expected output, and no other result, of a plain all-reduce")
    norm = None if plain else "rms"
    if not plain and (residual_in is None or rms_gamma is None):
        raise ValueError("expected residual_in and rms_gamma")
    normal = norm_out if pattern in _WITH_NORM else None
    targets = {"sum": output, "residual_out": residual_out, "output": normal, "quantized": quant_out}
    scales_out = quantization not in (None, "static")
    if scales_out and scale_out is None:
        raise ValueError("expected scale_out")
    # Scales of rows are stored where they are wanted, others are moved there.
    moves = scales_out and quantization != "per_token"
    if scales_out and not moves:
        targets["scale"] = scale_out
    whole = {name: tensor for name, tensor in targets.items() if tensor is not None}
    wanted = [*whole, "scale"] if moves else list(whole)
    of = _Epilogue(residual_in, rms_gamma, None, scale_factor, norm, rms_eps, weight_bias == 1, quantization)
    _check(input, wanted, of)
    for name, tensor in whole.items():
        sizes, dtype = _form(input, name, quantization)
        fits = tensor.dtype == dtype or (name == "quantized" and quantization == "nvfp4" and tensor.itemsize == 1)
        fits = fits and tensor.device == input.device
        if tensor.numel() != math.prod(sizes) or not fits or not tensor.is_contiguous():
            raise ValueError(
                f"the memory for {name} is {list(tensor.shape)} of {tensor.dtype} on {tensor.device}; expected {sizes} of "
                f"{dtype} on {input.device}, contiguous"
            )
    linear = layout_code == QuantizationSFLayout.LINEAR
    if moves and scale_out is not None and quantization is not None:
        _check_scales(scale_out, input, quantization, linear=linear)
    if norm is not None and "output" not in wanted and quantization is None:
        of = of._replace(norm=None, weight=None)

    def memory() -> dict[str, torch.Tensor]:
        return {**whole, "scale": _made(input, "scale", quantization)} if moves else whole

    results = _results(input, of, group_name, memory)
    for name, tensor in whole.items():
        if (found := results[name]) is not tensor:
            target = tensor.view(torch.uint8) if found.dtype == torch.uint8 else tensor
            target.copy_(found.view(tensor.shape))
    if not moves or scale_out is None:
        return
    scales = results["scale"]
    scales = scales.view(math.prod(input.shape[:-1]), scales.shape[-1])
    if quantization != "nvfp4":
        quantizations.pack_exponents(scales, scale_out)
    elif linear:
        scale_out.view(-1).view(torch.uint8)[: scales.numel()].copy_(scales.view(torch.uint8).view(-1))
    else:
        quantizations.swizzle(scales.view(torch.uint8), scale_out)


def allreduce_fusion(
    input: torch.Tensor,
    group: ProcessGroup | str,
    pattern: int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_in: torch.Tensor | None = None,
    rms_gamma: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    scale_factor: torch.Tensor | float | None = None,
    layout_code: int | None = None,
    use_oneshot: bool | None = None,
    fp32_acc: bool = False,
    *,
    block_quant_group_size: int | None = None,
    weight_bias: float = 0.0,
) -> torch.Tensor:
    """FlashInfer's ``allreduce_fusion``, by the numbers of :class:`AllReduceFusionPattern`, on a group, or the group of a name,
    in place of a workspace. Returns the norm, what is quantised or the sum: the first that the pattern stores.

    ``input`` and ``residual_in`` are ``[tokens, width]``; results are written into those of ``output`` (the sum),
    ``residual_out``, ``norm_out``, ``quant_out`` and ``scale_out`` that are given; ``norm_out`` only by patterns with "Out"
    and without a quantisation, as by FlashInfer. A result that is returned and not given is made, but ``quant_out``. Of static
    fp8, ``scale_factor`` is what is divided by; of fp4, what scales are multiplied by. ``scale_out`` of dynamic fp8 is
    ``[tokens, 1]`` of float32; of blocks of fp8 it is ``[tokens, blocks / 4, rounded up]`` of int32 with the strides 1 and
    ``tokens`` rounded up to 4, whose padding becomes 0; of fp4, bytes. ``layout_code`` is how scales of fp4 are stored, by the
    numbers of :class:`QuantizationSFLayout`: in tiles of 128 rows of 4 (also for None), whose padding becomes 0, or row by row.
    How the kernel is launched and done is not for the caller to say: ``launch_with_pdl``, ``trigger_completion_at_end``,
    ``use_oneshot`` and ``fp32_acc`` change nothing. Raises ValueError for arguments that do not fit, before the collective.
    """
    stores_norm = pattern in _WITH_NORM
    if pattern == AllReduceFusionPattern.kAllReduce and output is None:
        output = torch.empty_like(input)
    if stores_norm and norm_out is None:
        norm_out = torch.empty_like(input)
    if isinstance(scale_factor, (int, float)):
        scale_factor = input.new_full((1,), scale_factor, dtype=torch.float32)
    torch.ops.warplink.allreduce_fusion(
        input,
        group if isinstance(group, str) else group.group_name,
        pattern,
        launch_with_pdl,
        trigger_completion_at_end,
        output,
        residual_out,
        norm_out,
        quant_out,
        scale_out,
        residual_in,
        rms_gamma,
        rms_eps,
        scale_factor,
        layout_code,
        use_oneshot,
        fp32_acc,
        block_quant_group_size,
        weight_bias,
    )
    return [result for result in (norm_out if stores_norm else None, quant_out, output) if result is not None][0]


def _meta_nothing(*_: Any, **__: Any) -> None:
    """Shapes of the outputs."""


_VLLM = "flashinfer_trtllm_fused_allreduce_norm"

#: Libraries of functions by vLLM's name, which live as long as the process, and the group that they are of.
_for_vllm: dict[str, Any] = {}


def register_for_vllm(group_name: str) -> None:
    """Makes ``torch.ops.vllm.flashinfer_trtllm_fused_allreduce_norm`` this: vLLM's function of that name and with its
    arguments, done by the group ``group_name``. A second call only changes the group.

    Raises RuntimeError where vLLM has registered its own.
    """
    registered = "library" in _for_vllm
    if not registered and hasattr(torch.ops.vllm, _VLLM):
        raise RuntimeError(f"torch.ops.vllm.{_VLLM} is registered; expected a vLLM that has not found FlashInfer")
    _for_vllm["group"] = group_name
    if registered:
        return
    made = torch.library.Library("vllm", "FRAGMENT")
    made.define(
        f"{_VLLM}(Tensor(a!) allreduce_in, Tensor(b!) residual, Tensor rms_gamma, float rms_eps, int world_size, "
        "bool launch_with_pdl, bool fp32_acc, int max_token_num, int pattern_code, Tensor(c!)? norm_out = None, "
        "Tensor(d!)? quant_out = None, Tensor(e!)? scale_out = None, Tensor? scale_factor = None, "
        "float weight_bias = 0.0) -> ()"
    )
    for key in ("CPU", "CUDA"):
        made.impl(_VLLM, _by_vllm, key)
    made.impl(_VLLM, _meta_nothing, "Meta")
    _for_vllm["library"] = made


def _by_vllm(
    allreduce_in: torch.Tensor,
    residual: torch.Tensor,
    rms_gamma: torch.Tensor,
    rms_eps: float,
    world_size: int,
    launch_with_pdl: bool,
    fp32_acc: bool,
    max_token_num: int,
    pattern_code: int,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    scale_factor: torch.Tensor | None = None,
    weight_bias: float = 0.0,
) -> None:
    """Without ``norm_out``, the norm is written over ``allreduce_in``, by patterns that store it, and h over ``residual``; with
    it, h over ``allreduce_in``."""
    residual_out = residual if norm_out is None else allreduce_in
    _allreduce_fusion(
        allreduce_in,
        _for_vllm["group"],
        pattern_code,
        launch_with_pdl,
        residual_out=residual_out,
        norm_out=allreduce_in if norm_out is None else norm_out,
        quant_out=quant_out,
        scale_out=scale_out,
        residual_in=residual,
        rms_gamma=rms_gamma,
        rms_eps=rms_eps,
        scale_factor=scale_factor,
        fp32_acc=fp32_acc,
        weight_bias=weight_bias,
    )


for _key in ("CPU", "CUDA"):
    library.impl("fused_all_reduce", torch.no_grad()(fused_all_reduce), _key)
    library.impl("allreduce_fusion", _allreduce_fusion, _key)
library.impl("fused_all_reduce", fused_all_reduce, "Meta")
library.impl("allreduce_fusion", _meta_nothing, "Meta")
