"""FP8 against bf16: a layer's experts, forward and backward; and a model's steps, with bf16's routing for both."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch

from pithtrain.layers.experts.gated import SwiGLUExperts
from pithtrain.layers.router import Replayed
from pithtrain.ops.linear import Compute, Groups, Precision
from pithtrain.ops.parameter import Weight
from pithtrain.step import Choices, Gradients
from tests.device.exact import group_sizes, randn
from tests.device.measure import interleaved, on_host, spread
from tests.device.model import batches, setup, start
from tests.device.report import Place, Row, each, judged

ROUNDS = 15
STEPS = 20
BAND = 0.12  # of the loss: spec/precision.toml holds bf16 within 1% and FP8 within 11% of fp32
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp8")


def precision(place: Place) -> Iterator[Row]:
    yield from each(place, [("experts", partial(_experts, place)), ("training step", partial(_training, place))])


def _experts(place: Place) -> Iterator[Row]:
    """With weights quantised anew, as in a step's first micro-batch, and with what an earlier one quantised."""
    shape = place.shape
    sizes = group_sizes(place, shape)
    x, grad = (randn(place, shape.rows, shape.hidden, seed=seed).bfloat16() for seed in range(2))
    weights = []
    for seed, sides in enumerate(((2 * shape.expert_hidden, shape.hidden), (shape.hidden, shape.expert_hidden))):
        value = (0.02 * randn(place, shape.experts, *sides, seed=seed)).bfloat16()
        weights.append(Weight(value, torch.zeros(value.shape, device=place.device)))
    experts, leaf = SwiGLUExperts(*weights), x.requires_grad_()
    kept = Compute("fp8")

    def both(precision: Precision, compute: Compute | None = None) -> None:
        compute = compute or Compute(precision)
        output = experts(leaf, Groups.of(sizes, place.device, compute), compute)
        torch.autograd.grad(output, leaf, grad)

    calls: dict[str, Callable[[], object]] = {name: partial(both, name) for name in PRECISIONS}
    calls["fp8, later micro-batches"] = partial(both, "fp8", kept)
    yield from _rows("experts", interleaved(calls, place.device, 2 if place.small else ROUNDS))


def _rows(name: str, seconds: dict[str, list[float]]) -> Iterator[Row]:
    base = statistics.median(seconds["bf16"])
    for kind, times in seconds.items():
        middle, deciles = spread(times)
        figures = {"ms": middle * 1e3, "10%-90% ms": deciles, "times as fast as bf16": base / middle}
        yield Row(f"{name}, {kind}", "measured", figures)


def _training(place: Place) -> Iterator[Row]:
    made, turns = setup(place.small), 4 if place.small else STEPS
    runs = {name: start(made, place.device, name) for name in PRECISIONS}
    seconds: dict[str, list[float]] = {name: [] for name in PRECISIONS}
    losses: dict[str, list[float]] = {name: [] for name in PRECISIONS}
    for position in range(turns):
        given, choices = batches(made, position, place.device), None
        for name, run in runs.items():
            results: list[Gradients] = []
            seconds[name].append(on_host(lambda: results.append(run.step(given, choices)), place.device))  # noqa: B023
            losses[name].append(results[0].loss)
            choices = replayed(results[0])
    yield from _rows("training step", {name: times[2:] for name, times in seconds.items()})
    apart = [abs(a - b) / b for a, b in zip(losses["fp8"], losses["bf16"], strict=True)]
    figures = {"steps": turns, "first loss": losses["bf16"][0], "last loss, bf16": losses["bf16"][-1]}
    yield Row("loss", "measured", figures | {"last loss, fp8": losses["fp8"][-1], "last apart": apart[-1]})
    yield judged("loss, fp8 against bf16", f"{turns} steps, relative", max(apart), BAND)


def replayed(gradients: Gradients) -> Choices:
    """The routing of that step."""
    return [[Replayed(ids[row]) for row in sorted(ids)] for ids in gradients.chosen]
