"""Values that are not finite, planted in the trainer's source: an edited line, put into the processes of a replay.

The edit multiplies a row twice by a number so large that the second product overflows, once, on one rank.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skills.debug_nan.replay import Job, Replayed, replay

ROW, LARGE = 5, 3e38


@dataclass(frozen=True)
class Plant:
    """`old` becomes `new` in the file, where <x> stands for x times the large numbers. place: where it must be found;
    call: the evaluation that overflows, counted from 1 in every step, or over all of them where it is `fleeting`.
    kind: of origin. padded: from row ROW on, the first sequence is padding.
    """

    name: str
    file: str
    old: str
    new: str
    part: str
    phase: str = "forward"
    call: int = 1
    kind: str = "operator"
    only_ep: bool = False
    fleeting: bool = False
    padded: bool = False

    @property
    def text(self) -> str:
        before, _, rest = self.new.partition("<")
        x, _, after = rest.partition(">")
        return f"{before}{x} * (b := _at({x})) * b{after}" if rest else self.new


def replay_planted(plant: Plant, rank: int, job: Job) -> Replayed:
    """What a rank of the world runs."""
    module = sys.modules[plant.file.removesuffix(".py").replace("/", ".")]
    path = str(module.__file__)
    with open(path) as file:
        text = file.read()
    assert text.count(plant.old) == 1, plant.name
    calls = [0]

    def fires() -> bool:
        calls[0] += 1
        return calls[0] == plant.call and dist.get_rank() == rank

    def factors(x: Tensor) -> Tensor:
        large = torch.ones(x.shape[:1] if x.dim() < 3 else x.shape[:2])
        if fires():
            large.view(-1)[slice(None) if x.dim() == 1 else min(ROW, large.numel() - 1)] = LARGE
        return large.view(*large.shape, *[1] * (x.dim() - large.dim()))

    def poked(x: Tensor) -> Tensor:
        if x.dim() > 1 and x.is_floating_point() and fires():
            x.detach().numpy().reshape(-1, x.shape[-1])[ROW] = float("nan")
        return x

    def again() -> None:
        calls[0] *= plant.fleeting

    vars(module).update(_at=factors, _poked=poked)
    edited = dict(vars(module))
    exec(compile(text.replace(plant.old, plant.text), path, "exec"), edited)
    _swap(vars(module), edited, module.__name__)
    if plant.padded:
        _pad()
    return _replay_each_time(job, again)


def _pad() -> None:
    """Every batch that is read has padding from now on."""
    from pithtrain.data import IGNORED_LABEL, Dataset

    real = Dataset.microbatch

    def padded(*args: Any) -> Any:
        batch = real(*args)
        padding, labels = torch.zeros_like(batch.tokens, dtype=torch.bool), batch.labels.clone()
        padding[0, ROW:], labels[0, ROW:] = True, IGNORED_LABEL
        return replace(batch, padding=padding, labels=labels)

    Dataset.microbatch = padded  # type: ignore[method-assign]


def _replay_each_time(job: Job, again: Any) -> Replayed:
    """The calls are counted anew in every step."""
    from pithtrain.train import loop

    real = loop.train_step

    def counted(*args: Any, **kwargs: Any) -> Any:
        again()
        return real(*args, **kwargs)

    loop.train_step = counted
    return replay(job)


def _swap(olds: Mapping[str, Any], news: Mapping[str, Any], module: str) -> None:
    """Gives functions, and those of classes, the code of the new ones in place, so that every importer has it."""
    for name, old in list(olds.items()):
        new = news.get(name)
        if isinstance(old, staticmethod) and isinstance(new, staticmethod):
            old, new = old.__func__, new.__func__
        if getattr(old, "__module__", None) != module:
            continue
        if isinstance(old, FunctionType):
            old.__code__ = new.__code__  # type: ignore[union-attr]
        elif isinstance(old, type):
            _swap(vars(old), vars(new), module)


DECODER, EXPERT = "pithtrain/models/decoder.py", "pithtrain/parallel/expert.py"
PLANTS = [
    Plant(
        "embedding",
        DECODER,
        "return (embedding(tokens, self.embedding),)",
        "x = embedding(tokens, self.embedding); return (<x>,)",
        "embedding",
        call=2,
    ),
    Plant(
        "attention",
        DECODER,
        "        residual = hidden_states + self.attention(normed, tables, compute)",
        "        x = self.attention(normed, tables, compute); residual = hidden_states + <x>",
        "attention",
    ),
    Plant(
        "router",
        "pithtrain/layers/router.py",
        "probs = F.softmax(router_logits, dim=-1)",
        "probs = F.softmax(<router_logits>, dim=-1)",
        "attention",
    ),
    Plant(
        "dispatch",
        EXPERT,
        "rows = (gather_rows(x, route.sent), sent_weights",
        "x = gather_rows(x, route.sent); rows = (<x>, sent_weights",
        "dispatch",
        only_ep=True,
    ),
    Plant(
        "experts",
        "pithtrain/layers/experts/gated.py",
        "return grouped_linear(rows, self.down, groups, compute)",
        "return grouped_linear(<rows>, self.down, groups, compute)",
        "experts",
    ),
    Plant(
        "combine",
        EXPERT,
        "AllToAll((rows,), route.recv_sizes",
        "AllToAll((<rows>,), route.recv_sizes",
        "combine",
        only_ep=True,
    ),
    Plant(
        "aggregate",
        DECODER,
        "return (residual + tokens.view_as(residual),)",
        "return (residual + (<tokens>).view_as(residual),)",
        "aggregate",
    ),
    Plant(
        "final norm",
        DECODER,
        "return (normed.view(-1, self.arch.hidden_size),)",
        "return ((<normed>).view(-1, self.arch.hidden_size),)",
        "norm",
        call=2,
    ),
    Plant(
        "loss",
        "pithtrain/ops/cross_entropy.py",
        "part, grad = chunk_loss(logits, ",
        "part, grad = chunk_loss(<logits>, ",
        "head",
        call=2,
    ),
    Plant(
        "in flight",
        "pithtrain/parallel/transport.py",
        "del keep\n    return received",
        "del keep\n    return _poked(received)",
        "dispatch",
        kind="arrived",
        only_ep=True,
    ),
    Plant(
        "head's gradient",
        "pithtrain/ops/cross_entropy.py",
        "product(grad, head.value)",
        "product(<grad>, head.value)",
        "head",
        call=2,
    ),
    Plant(
        "final norm",
        "pithtrain/ops/rms_norm.py",
        "grad_normed = grad * ctx.weight.value",
        "grad_normed = <grad> * ctx.weight.value",
        "norm",
        "backward",
    ),
    Plant(
        "aggregate",
        "pithtrain/ops/permute.py",
        "return gather_rows(grad, ctx.plan), None",
        "return gather_rows(<grad>, ctx.plan), None",
        "aggregate",
        "backward",
        only_ep=True,
    ),
    Plant(
        "combine",
        EXPERT,
        "AllToAll((grad_rows,), route.send_sizes",
        "AllToAll((<grad_rows>,), route.send_sizes",
        "combine",
        "backward",
        only_ep=True,
    ),
    Plant(
        "experts",
        "pithtrain/ops/permute.py",
        "grads = wide(gather_rows(grad, plan))",
        "grads = <wide(gather_rows(grad, plan))>",
        "experts",
        "backward",
    ),
    Plant(
        "experts' weights",
        "pithtrain/ops/linear.py",
        "            add_product(slot, grads.T, rows)",
        "            add_product(slot, grads.T, <rows>)",
        "experts",
        "backward",
    ),
    Plant(
        "dispatch",
        EXPERT,
        "return tuple(sum_copies(row, route.sent) for row in rows)",
        "return tuple(sum_copies(<row>, route.sent) for row in rows)",
        "dispatch",
        "backward",
        only_ep=True,
    ),
    Plant(
        "router",
        "pithtrain/ops/linear.py",
        "return product(grad.flatten(0, -2), weight.value).view(x.shape), None, None",
        "return product((<grad>).flatten(0, -2), weight.value).view(x.shape), None, None",
        "attention",
        "backward",
    ),
    Plant(
        "attention",
        "pithtrain/ops/rope.py",
        "return rotate(grad, cos, sin, -1)",
        "return rotate(<grad>, cos, sin, -1)",
        "attention",
        "backward",
    ),
    Plant(
        "embedding",
        "pithtrain/ops/embedding.py",
        "rows = grad.reshape(-1, grad.shape[-1]).to(ctx.weight.grad.dtype)",
        "rows = (<grad>).reshape(-1, grad.shape[-1]).to(ctx.weight.grad.dtype)",
        "embedding",
        "backward",
        call=2,
    ),
    Plant(
        "reduction",
        "pithtrain/parallel/shard.py",
        "self.transport.reduce_scatter(bucket.grads, bucket.axis)",
        "self.transport.reduce_scatter(<bucket.grads>, bucket.axis)",
        "reduce",
        "step",
    ),
]
TOKEN = Plant(
    "token",
    EXPERT,
    "rows = (gather_rows(x, route.sent), sent_weights",
    "rows = (gather_rows(x * _at(x) ** 0.8, route.sent), sent_weights",
    "experts",
)
"""A token of the last rank whose experts' activation overflows, on whatever rank those experts are."""

ATTENTION = next(plant for plant in PLANTS if plant.name == "attention")
PADDING = replace(ATTENTION, padded=True)
FLEETING = replace(ATTENTION, fleeting=True)
"""A value that depends on when the step is taken."""
