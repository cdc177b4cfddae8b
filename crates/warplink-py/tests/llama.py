"""A small model in the style of Llama, and ways to train it over several ranks.

``scripts/torch_llama.py`` trains and times it from the command line; tests compare its losses between
backends. Every way draws the same data and weights on every rank.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

#: The ways to train: data parallel, sharded, tensor parallel with sequences divided, a pipeline, and data parallel with experts.
WAYS = ("ddp", "fsdp2", "tp", "pipeline", "experts")

#: How many steps each of them takes.
STEPS = 20

#: How many experts each rank has of a layer.
EXPERTS_PER_RANK = 2


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Configuration of the model and of its training."""

    vocabulary: int = 64
    hidden: int = 32
    inner: int = 64
    heads: int = 4
    key_value_heads: int = 2
    layers: int = 2
    batch: int = 4
    tokens: int = 16


#: The layers of Llama 3 8B, of which the seed of the fused operations trains 8.
LLAMA_3_8B = Sizes(
    vocabulary=128_256, hidden=4096, inner=14_336, heads=32, key_value_heads=8, layers=8, batch=1, tokens=8192
)


def rotated(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """``x`` of ``[batch, heads, tokens, width]`` with its positions in it."""
    half = x.shape[-1] // 2
    rates = 500_000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(tokens, device=x.device, dtype=torch.float32)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.width = sizes.hidden // sizes.heads
        self.wq = nn.Linear(sizes.hidden, sizes.heads * self.width, bias=False)
        self.wk = nn.Linear(sizes.hidden, sizes.key_value_heads * self.width, bias=False)
        self.wv = nn.Linear(sizes.hidden, sizes.key_value_heads * self.width, bias=False)
        self.wo = nn.Linear(sizes.heads * self.width, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens = x.shape[:2]
        # How many heads there are here depends on how the weights are divided.
        q, k, v = (
            w(x).view(batch, -1, w_width(w, self.width), self.width).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        tokens = q.shape[2]
        q, k = rotated(q, tokens), rotated(k, tokens)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch, tokens, -1))


def w_width(linear: nn.Linear, width: int) -> int:
    """Heads of ``linear`` that are on this rank."""
    weight: Any = linear.weight
    rows = (weight.to_local() if isinstance(weight, DTensor) else weight).shape[0]
    return rows // width


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.up = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Feed-forward networks, of which each rank has some. Each token goes to one, wherever that is."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        rank, self.world = dist.get_rank(), dist.get_world_size()
        # All are drawn, so that each has the same weights on any rank.
        every = [FeedForward(sizes) for _ in range(EXPERTS_PER_RANK * self.world)]
        self.router = nn.Linear(sizes.hidden, len(every), bias=False)
        self.own = nn.ModuleList(every[EXPERTS_PER_RANK * rank : EXPERTS_PER_RANK * (rank + 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        leaving = chosen.bincount(minlength=EXPERTS_PER_RANK * self.world)
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving)
        sent, received = (counts.view(self.world, -1).sum(1).tolist() for counts in (leaving, coming))
        arrived = all_to_all_single_autograd(rows[order], received, sent, dist.group.WORLD).split(coming.tolist())
        computed = torch.cat([self.own[number % EXPERTS_PER_RANK](part) for number, part in enumerate(arrived)])
        returned = all_to_all_single_autograd(computed, sent, received, dist.group.WORLD)
        return (torch.zeros_like(rows).index_copy(0, order, returned) * weights[:, None]).view_as(x)


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.attention, self.feed_forward = Attention(sizes), FeedForward(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.norm(x))


class Llama(nn.Module):
    """Tokens in, the logits of the next ones out. Without ``embeds``, hidden states go in; without
    ``predicts``, they come out."""

    def __init__(self, sizes: Sizes, layers: int, embeds: bool = True, predicts: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden) if embeds else None
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(layers))
        self.norm = nn.RMSNorm(sizes.hidden) if predicts else None
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False) if predicts else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def divide(model: Llama, mesh: Any) -> Llama:
    """Tensor parallel: columns and rows in turn, and sequences divided between them."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    whole = (Shard(1),), (Replicate(),)
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=whole[0], desired_input_layouts=whole[1]),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=whole[0], desired_input_layouts=whole[1]),
                "feed_forward.gate": ColwiseParallel(),
                "feed_forward.up": ColwiseParallel(),
                "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    return model


def batches(sizes: Sizes, steps: int, seed: int, device: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and what follows each, of a text that can be learned."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(steps):
        starts = torch.randint(sizes.vocabulary, (sizes.batch, 1), generator=generator)
        text = (starts + 3 * torch.arange(sizes.tokens + 1)) % sizes.vocabulary
        made.append((text[:, :-1].contiguous().to(device), text[:, 1:].contiguous().to(device)))
    return made


def train(
    way: str,
    device: torch.device,
    sizes: Sizes = Sizes(),
    compiled: bool = False,
) -> list[float]:
    """The losses of the steps on the default group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, (world,))
    if way == "pipeline":
        return _train_pipeline(rank, world, device, sizes)
    model: Any = Llama(sizes, sizes.layers).to(device)
    # Data parallel ranks have data of their own, tensor parallel ones the same.
    own = batches(sizes, STEPS, 100 if way == "tp" else 100 + rank, device)
    if way == "experts":
        for layer in model.layers:
            layer.feed_forward = Experts(sizes).to(device)
        # Each rank's experts are its own, and have the gradients of all tokens that came.
        theirs = [name for name, _ in model.named_parameters() if ".own." in name]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, theirs)
    if way in ("ddp", "experts"):
        model = nn.parallel.DistributedDataParallel(model)
    elif way == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif way == "tp":
        divide(model, mesh)
        if compiled:
            for layer in model.layers:
                layer.compile(fullgraph=True)
    else:
        raise ValueError(f"unknown way '{way}'; expected one of {', '.join(WAYS)}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, foreach=False)
    losses = []
    for tokens, targets in own:
        loss = loss_of(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _train_pipeline(rank: int, world: int, device: torch.device, sizes: Sizes) -> list[float]:
    """The layers one after another on the ranks; the last one has the losses, which all get."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    first, last = rank == 0, rank == world - 1
    # All are drawn, so that each layer's weights are those of the whole model.
    whole = Llama(sizes, sizes.layers)
    share = range(sizes.layers * rank // world, sizes.layers * (rank + 1) // world)
    model = Llama(sizes, 0, embeds=False, predicts=False)
    model.layers.extend(whole.layers[index] for index in share)
    if first:
        model.embedding = whole.embedding
    if last:
        model.norm, model.head = whole.norm, whole.head
    model.to(device)
    stage = PipelineStage(model, rank, world, device)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, foreach=False)
    losses = []
    for tokens, targets in batches(sizes, STEPS, 100, device):
        parts: list[torch.Tensor] = []
        optimizer.zero_grad()
        arguments = (tokens,) if first else ()
        if last:
            schedule.step(*arguments, target=targets, losses=parts)
        else:
            schedule.step(*arguments)
        optimizer.step()
        loss = torch.stack(parts).mean().detach() if last else torch.zeros((), device=device)
        dist.broadcast(loss, world - 1)
        losses.append(loss.item())
    return losses
