"""Time of every kernel at a layer's shape, as a share of what the card was measured to copy or to multiply.

A memory-bound kernel's bytes are those of its inputs and results, once each. Contestants of one case take turns.
Targets: memory-bound kernels 80% of the copy, grouped bf16 products 75% and grouped FP8 products 60% of the dense rate
of their type. A target is met or not met; neither is a failure.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pithtrain.layers import router
from pithtrain.ops import cross_entropy, fp8, fp8_gemm, linear, permute, swiglu
from pithtrain.ops.fp8 import Quantised, RowBlocks
from pithtrain.ops.linear import Compute, Groups
from pithtrain.ops.parameter import Weight
from tests.device.exact import chosen, group_sizes, randn
from tests.device.measure import interleaved, spread
from tests.device.report import Case, Place, Row, each

Call = Callable[[], object]

ROUNDS = 15
CHUNK = cross_entropy.CHUNK
DENSE_OUTS = 5120  # of queries, keys and values of Qwen3-30B-A3B


@dataclass(frozen=True)
class Work:
    """What one call does: bytes or FLOPs, and the measured rate it is held against."""

    amount: float
    rate: str
    target: float | None = None

    @staticmethod
    def moved(inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> "Work":
        return Work(sum(x.numel() * x.element_size() for x in (*inputs, *outputs)), "copy", 0.80)


def timed(
    place: Place,
    name: str,
    work: Work,
    ours: Call,
    others: Mapping[str, Call] | None = None,
) -> Iterator[Row]:
    """A row for ours and one for each other contestant; one that cannot run is a row that says so."""
    running = {name: ours}
    for other, call in (others or {}).items():
        try:
            call()
            running[other] = call
        except Exception as error:  # noqa: BLE001 - whatever a contestant raised, ours is still measured
            yield Row(other, "not run", note=f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}")
    rate = place.rate(work.rate)
    for label, seconds in interleaved(running, place.device, 2 if place.small else ROUNDS).items():
        middle, deciles = spread(seconds)
        figures: dict[str, Any] = {"ms": middle * 1e3, "10%-90% ms": deciles, "per second": work.amount / middle}
        if rate is not None:
            figures["share"] = work.amount / middle / rate
            if work.target is not None and label == name:
                figures |= {"target": work.target, "met": "met" if figures["share"] >= work.target else "not met"}
        yield Row(label, "measured", figures)


def speed(place: Place) -> Iterator[Row]:
    products = _quantise, _quantise_weight, _grouped_fp8, _grouped_bf16, _dense_fp8
    cases: list[Case] = [
        (case.__name__.strip("_"), partial(case, place))
        for case in (*products, _copies, _router, _swiglu, _loss)  # what torch compiles comes last
    ]
    yield from each(place, cases)


def _quantise(place: Place) -> Iterator[Row]:
    shape = place.shape
    x = randn(place, shape.rows, shape.hidden).bfloat16()
    blocks = RowBlocks.of(group_sizes(place, shape), place.device)
    rows, columns = fp8.quantise(x, blocks)
    yield from timed(place, "quantise 1x128", Work.moved([x], rows), lambda: fp8.quantise(x, blocks, columns=False))
    both = Work.moved([x], [*rows, *columns])
    yield from timed(place, "quantise 1x128, 128x1", both, lambda: fp8.quantise(x, blocks))


def _quantise_weight(place: Place) -> Iterator[Row]:
    shape = place.shape
    weight = randn(place, shape.experts, 2 * shape.expert_hidden, shape.hidden).bfloat16()
    plain, transposed = fp8.quantise_weight(weight)
    work = Work.moved([weight], [*plain, transposed.values])
    yield from timed(place, "quantise 128x128", work, lambda: fp8.quantise_weight(weight))


def _grouped_fp8(place: Place) -> Iterator[Row]:
    """Both of a layer's products, forward, input gradient and weight gradient."""
    shape = place.shape
    sizes = group_sizes(place, shape)
    blocks = RowBlocks.of(sizes, place.device)
    for part, outs, ins in (
        ("gate and up", 2 * shape.expert_hidden, shape.hidden),
        ("down", shape.hidden, shape.expert_hidden),
    ):
        (x, x_columns), (grad, grad_columns) = (
            fp8.quantise(randn(place, shape.rows, side).bfloat16(), blocks) for side in (ins, outs)
        )
        plain, transposed = fp8.quantise_weight(randn(place, shape.experts, outs, ins).bfloat16())
        buffer = torch.zeros(shape.experts, outs, ins, device=place.device)
        work = Work(2 * shape.rows * outs * ins, "FP8 product", 0.60)
        calls: dict[str, Call] = {
            "forward": partial(fp8_gemm.multiply, x, plain, blocks, torch.bfloat16),
            "input gradient": partial(fp8_gemm.multiply, grad, transposed, blocks, torch.bfloat16),
            "weight gradient": partial(fp8_gemm.add_weight_gradient, buffer, grad_columns, x_columns, blocks),
        }
        for name, call in calls.items():
            yield from timed(place, f"grouped FP8, {part}, {name}", work, call)


def _grouped_bf16(place: Place) -> Iterator[Row]:
    """As the trainer calls them: on a card, torch's own grouped product."""
    shape = place.shape
    sizes, compute = group_sizes(place, shape), Compute("bf16")
    groups = Groups.of(sizes, place.device, compute)
    for part, outs, ins in (
        ("gate and up", 2 * shape.expert_hidden, shape.hidden),
        ("down", shape.hidden, shape.expert_hidden),
    ):
        x, grad = (randn(place, shape.rows, side).bfloat16() for side in (ins, outs))
        value = randn(place, shape.experts, outs, ins).bfloat16()
        weight = Weight(value, torch.zeros(value.shape, device=place.device))
        multiply = linear.multiply_by_grouped_mm if linear.grouped_mm_is_faster(x) else linear.multiply_by_loop
        work = Work(2 * shape.rows * outs * ins, "bf16 product", 0.75)
        calls: dict[str, Call] = {
            "forward": partial(multiply, x, value, groups),
            "input gradient": partial(multiply, grad, value.transpose(1, 2), groups),
            "weight gradient": partial(linear.add_grouped_weight_gradient, weight, x, grad, groups),
        }
        for name, call in calls.items():
            yield from timed(place, f"grouped bf16, {part}, {name}", work, call)


def _dense_fp8(place: Place) -> Iterator[Row]:
    """The product of queries, keys and values, ours against torch's in the same blocks (Hopper only)."""
    tokens, ins, outs = place.shape.tokens, place.shape.hidden, 128 if place.small else DENSE_OUTS
    blocks = RowBlocks.of((tokens,), place.device)
    x = fp8.quantise(randn(place, tokens, ins).bfloat16(), blocks)[0]
    weight = fp8.quantise_weight(randn(place, 1, outs, ins).bfloat16())[0]
    ours = partial(fp8_gemm.multiply, x, weight, blocks, torch.bfloat16)
    expected = ours()

    def theirs() -> Tensor:
        return _torch_blockwise(x, weight)

    def checked() -> Tensor:
        """The first call; later ones are theirs alone."""
        got = theirs()
        apart = float((got.double() - expected.double()).norm() / expected.double().norm())
        if not apart <= 1e-2:
            raise ValueError(f"differs from ours by {apart:.2e} of the norm, expected at most 1e-2")
        return got

    others: dict[str, Call] = {}
    try:
        checked()
        others["dense FP8, torch scaled_mm"] = theirs
    except Exception as error:  # noqa: BLE001 - torch has this product on some cards only
        yield Row("dense FP8, torch scaled_mm", "not run", note=f"{type(error).__name__}: {str(error).strip()[:200]}")
    yield from timed(place, "dense FP8", Work(2 * tokens * ins * outs, "FP8 product", 0.60), ours, others)


def _torch_blockwise(x: Quantised, weight: Quantised) -> Tensor:
    """Scales of x [M, K / 128] and of the weight [K / 128 padded to 4, N / 128], each with the first dim contiguous."""
    kinds = F.ScalingType
    weight_scales = F.pad(weight.scales[0], (0, -weight.scales.shape[2] % 4)).contiguous().T
    return F.scaled_mm(
        x.values, weight.values[0].T, x.scales.T, kinds.BlockWise1x128, weight_scales, kinds.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )  # fmt: skip


def _swiglu(place: Place) -> Iterator[Row]:
    shape = place.shape
    gate_up = randn(place, shape.rows, 2 * shape.expert_hidden).bfloat16().requires_grad_()
    grad = randn(place, shape.rows, shape.expert_hidden, seed=1).bfloat16()

    def plain(x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, -1)
        return (F.silu(gate) * up).to(x.dtype)

    def backward(forward: Callable[[], Tensor]) -> Call:
        """The forward pass, once, is in its first call, which warms up."""
        outputs: list[Tensor] = []

        def call() -> object:
            if not outputs:
                outputs.append(forward())
            return torch.autograd.grad(outputs[0], gate_up, grad, retain_graph=True)

        return call

    forward: dict[str, Call] = {}
    theirs: dict[str, Call] = {}
    if place.device.type == "cuda":
        compiled = torch.compile(plain)
        forward["SwiGLU, torch.compile"] = lambda: compiled(gate_up)
        theirs["SwiGLU backward, torch.compile"] = backward(lambda: compiled(gate_up))
    work, whole = Work.moved([gate_up], [grad]), Work.moved([gate_up, grad], [gate_up])
    yield from timed(place, "SwiGLU", work, lambda: swiglu.swiglu(gate_up), forward)
    yield from timed(place, "SwiGLU backward", whole, backward(lambda: swiglu.swiglu(gate_up)), theirs)


def _copies(place: Place) -> Iterator[Row]:
    shape = place.shape
    permutation = permute.plan(chosen(place, shape), shape.experts, shape.rows)
    copies, weights = randn(place, shape.rows, shape.hidden).bfloat16(), randn(place, shape.rows, seed=1)
    grad = randn(place, shape.tokens, shape.hidden, seed=2).bfloat16()
    read = [copies, permutation.copies, permutation.starts]
    for name, factors in (("sum of copies", None), ("weighted sum of copies", weights)):
        work = Work.moved(read if factors is None else [*read, factors], [grad])
        yield from timed(place, name, work, partial(permute.sum_copies, copies, permutation, factors))
    work = Work.moved([grad, copies, weights, permutation.rows], [copies, weights])
    yield from timed(place, "weighted sum backward", work, lambda: permute.spread(grad, permutation, copies, weights))
    work = Work.moved([grad, permutation.rows], [copies])
    yield from timed(place, "copies (torch)", work, lambda: permute.gather_rows(grad, permutation))


def _router(place: Place) -> Iterator[Row]:
    shape = place.shape
    scores = randn(place, shape.tokens, shape.experts)
    ours = partial(router.topk_lowest_index, scores, shape.top_k)
    others = {"router top-k, torch": lambda: scores.topk(shape.top_k)}  # which promises no order of equals
    yield from timed(place, "router top-k", Work.moved([scores], [ours()]), ours, others)


def _loss(place: Place) -> Iterator[Row]:
    """A chunk of tokens, as the head takes them; the gradient goes where the logits were."""
    vocabulary = place.shape.vocabulary
    logits = randn(place, CHUNK, vocabulary)
    labels = torch.randint(vocabulary, (CHUNK,), device=place.device)
    leaf = logits.clone().requires_grad_()

    def plain() -> Tensor:
        return F.cross_entropy(leaf, labels, reduction="sum")

    both: dict[str, Call] = {}
    if place.device.type == "cuda":
        compiled = torch.compile(plain)
        both["loss and gradient, torch.compile"] = lambda: torch.autograd.grad(compiled(), leaf)
    loss_only, gradient = Work.moved([logits, labels], []), Work.moved([logits, labels], [logits])
    yield from timed(place, "loss", loss_only, lambda: cross_entropy.chunk_loss(logits, labels, None))
    ours = partial(cross_entropy.chunk_loss, logits, labels, 1.0)  # of its own gradients, the second time: as long
    yield from timed(place, "loss and gradient", gradient, ours, both)
