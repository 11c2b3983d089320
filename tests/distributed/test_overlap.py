"""A pair's exchanges run behind the other pass's compute: the order, as a table, and how much of a delay that hides.

The model and the step are the real ones. For the measurement an observer adds a sleep to every segment with products,
so that compute has a length that no other process changes: one unit forward, one for input and one for weight
gradients. The transport's exchanges between experts arrive `DELAY` after their launch at the earliest.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from golden.world import run_world
from pithtrain import step
from pithtrain.data import Batch
from pithtrain.layers.balance import Objective
from pithtrain.ops.linear import Compute
from pithtrain.parallel.mesh import make_mesh
from pithtrain.parallel.pipeline.schedule import Pair, Schedule, actions
from pithtrain.parallel.tape import Phase
from pithtrain.parallel.transport import AllReduce, AllToAll, Counts, Pending, Request, Transport
from tests.distributed.layouts import ARCH

PRELOAD = ["tests.distributed.test_overlap"]
S = 8


@dataclass(frozen=True, eq=False)
class Trained(step.Trainee):
    """A trainee that may run its schedule with every pair taken apart."""

    apart: bool = False

    def schedule(self, num_microbatches: int) -> Schedule:
        table = super().schedule(num_microbatches)
        if not self.apart:
            return table
        return replace(table, steps=tuple(tuple(a for step in row for a in actions(step)) for row in table.steps))


def trained(pp: int, ep: int, layers: int, transport: Transport, **changes: Any) -> Trained:
    """layers: of each stage, all sparse."""
    execution = step.Execution("dualpipev")
    arch = replace(ARCH, num_layers=2 * pp * layers, sparse_layers=(True,) * (2 * pp * layers))
    built = step.build(arch, make_mesh(pp=pp, ep=ep), transport, S, torch.device("cpu"), execution)
    built.shard.initialise(1)
    built.shard.gather()
    return Trained(**vars(built) | changes)


def run_step(trainee: step.Trainee, num_microbatches: int) -> None:
    generator = torch.Generator().manual_seed(trainee.mesh.rank)
    tokens = torch.randint(trainee.arch.vocab_size, (num_microbatches, 2, S + 1), generator=generator)
    batches = [Batch(row[:, :-1].contiguous(), row[:, 1:].contiguous(), None) for row in tokens]
    choices = step.balanced(trainee, num_microbatches)
    step.gradients(trainee, batches, Objective(), choices, Compute())


# --- the order

TURNS = """
backward layers.1.aggregate, launch layers.1.combine_backward
forward layers.2.attention, launch layers.2.counts
backward weight gradients
wait layers.2.counts, launch layers.2.dispatch
wait layers.1.combine_backward, backward layers.1.experts, launch layers.1.dispatch_backward
wait layers.2.dispatch, forward layers.2.experts, launch layers.2.combine
backward weight gradients
wait layers.2.combine, forward layers.2.aggregate, forward layers.3.attention, launch layers.3.counts
wait layers.1.dispatch_backward, backward layers.1.attention, backward layers.0.aggregate
launch layers.0.combine_backward
wait layers.3.counts, launch layers.3.dispatch
backward weight gradients
wait layers.3.dispatch, forward layers.3.experts, launch layers.3.combine
wait layers.0.combine_backward, backward layers.0.experts, launch layers.0.dispatch_backward
wait layers.3.combine, forward layers.3.aggregate, forward norm, forward head
backward weight gradients
wait layers.0.dispatch_backward, backward layers.0.attention, backward embedding, backward weight gradients
"""


def order() -> list[str]:
    seen = list[str]()

    def observe(name: str, phase: Phase, run: Callable[[], Any], /) -> Any:
        if phase not in ("action", "host"):
            seen.append(f"{phase} {name}")
            return run()
        before = len(seen)
        result = run()
        if name != "F1.1+B0.0":
            del seen[before:]
        return result

    run_step(trained(1, 2, 2, Transport(), observe=observe), 2)
    return [line for line in seen if not line.startswith("step ")]


def test_the_order_of_a_pair() -> None:
    """The backward pass of layers 1 and 0 beside the forward of 2 and 3."""
    expected = ", ".join(TURNS.strip().splitlines()).split(", ")
    for seen in run_world(2, order, preload=PRELOAD):
        assert seen == expected


# --- the measurement

UNIT, DELAY = 0.04, 0.02  # seconds; the delay is half the least that it can hide behind
LAYERS, ROUNDS, BOUND = 3, 7, 0.8  # what a pair exposes is the counts of its first layer: 1 of 5 x LAYERS exchanges


@dataclass(frozen=True, eq=False)
class Slow(Transport):
    """Exchanges between experts arrive `seconds` after their launch, or later."""

    seconds: float = 0.0

    def launch(self, request: Request) -> Pending:
        pending, due = super().launch(request), time.perf_counter() + self.seconds

        def wait() -> tuple[Tensor, ...]:
            result = pending()
            time.sleep(max(0.0, due - time.perf_counter()))
            return result

        return wait if isinstance(request, AllToAll | Counts) else pending


@dataclass(eq=False)
class Clock:
    """Times the actions named, without waits for other stages, and counts their exchanges. Makes compute last."""

    actions: set[str]
    inside: bool = False
    paired: bool = False
    seconds: float = 0.0
    exchanges: int = 0
    later: int = 0  # units that a pair's weight gradients will take

    def __call__(self, name: str, phase: Phase, run: Callable[[], Any], /) -> Any:
        if phase == "action":
            self.inside, self.paired = name in self.actions, "+" in name
        started, result = time.perf_counter(), run()
        if not self.inside:
            return result
        if phase in ("forward", "backward"):
            time.sleep(UNIT * self.units(name, phase))
        message = name.startswith(("hidden", "grad"))
        if phase == "action" or (phase == "wait" and message):
            self.seconds += (time.perf_counter() - started) * (1 if phase == "action" else -1)
        self.exchanges += phase == "launch" and not message
        return result

    def units(self, name: str, phase: Phase) -> int:
        if name == "weight gradients":
            done, self.later = self.later, 0
            return done
        if not name.endswith(("attention", "experts")):
            return 0
        self.later += phase == "backward" and self.paired
        return 1 if phase == "forward" or self.paired else 2


Figures = dict[tuple[bool, bool], list[float]]  # (apart, delayed) -> seconds of each round


def measure(pp: int, ep: int, num_microbatches: int) -> tuple[Figures, int]:
    """The seconds that what pairs do takes, paired or apart, with and without delay; and the exchanges in it."""
    transports = {False: Slow(), True: Slow(seconds=DELAY)}
    base = trained(pp, ep, LAYERS, transports[False])
    row = base.schedule(num_microbatches).steps[base.mesh.pp.index]
    names = {str(part) for pair in row if isinstance(pair, Pair) for part in (pair, *actions(pair))}
    figures: Figures = {(apart, delayed): [] for apart in (False, True) for delayed in (False, True)}
    counted = set[int]()
    run_step(base, num_microbatches)
    for _ in range(ROUNDS):
        for apart, delayed in figures:
            clock, transport = Clock(names), transports[delayed]
            transport.run(AllReduce(torch.zeros(1), base.mesh.world))
            run_step(replace(base, apart=apart, transport=transport, observe=clock), num_microbatches)
            figures[apart, delayed].append(clock.seconds)
            counted.add(clock.exchanges)
    (exchanges,) = counted
    return figures, exchanges


@pytest.mark.prove
@pytest.mark.parametrize(("pp", "ep", "num_microbatches"), [(1, 4, 2), (2, 2, 3)])
def test_a_pair_hides_a_delay(pp: int, ep: int, num_microbatches: int) -> None:
    """Hidden: 1 - extra of the pairs / extra of the same actions one by one, where extra is the time with delay less
    the time without; and 1 - extra of the pairs / (exchanges x delay). Seconds are the sums of four ranks.
    """
    results = run_world(4, measure, pp, ep, num_microbatches, preload=PRELOAD)
    injected = sum(exchanges for _, exchanges in results) * DELAY
    rounds = {key: [sum(parts) for parts in zip(*(f[key] for f, _ in results), strict=True)] for key in results[0][0]}
    seconds = {key: median(values) for key, values in rounds.items()}
    print(f"\npp{pp} ep{ep}, delay {DELAY} s: seconds of {ROUNDS} rounds, median (least to most)")
    for (apart, delayed), values in rounds.items():
        name = f"{'apart' if apart else 'paired'}{', delay' if delayed else ''}"
        print(f"{name:15}{median(values):7.3f} ({min(values):.3f} to {max(values):.3f})")
    extra = {apart: seconds[apart, True] - seconds[apart, False] for apart in (False, True)}
    of_apart, of_all = 1 - extra[False] / extra[True], 1 - extra[False] / injected
    print(f"injected {injected:.3f}, paired {extra[False]:+.3f}, apart {extra[True]:+.3f}")
    print(f"hidden {of_apart:.0%} of what the delay costs apart, {of_all:.0%} of the delay injected")
    assert min(of_apart, of_all) >= BOUND
