"""Pipelines change nothing: one global batch on five pipeline meshes, each with a schedule, against one rank.

The model has nine layers, three of them dense, over 2, 4 or 8 stages, so they never fit evenly, and its head is its
embedding. Numbers of micro-batches from one up to twice the stages; each way of recomputation.
"""

from typing import get_args

import numpy as np
import pytest

from golden.world import run_world
from pithtrain.layers.balance import BalanceKind, Objective
from pithtrain.parallel.pipeline.schedule import ScheduleKind
from pithtrain.passes import Recompute
from pithtrain.step import Execution
from tests.distributed.comparison import Results, check, check_run, same_bytes
from tests.distributed.layouts import DEEP_TIED, Case, Layout, Run, run_layout

ONE = Layout(arch=DEEP_TIED)
LAYOUTS = (
    Layout(pp=2, execution=Execution("1f1b"), arch=DEEP_TIED),
    Layout(pp=2, execution=Execution("interleaved", 2, "experts"), arch=DEEP_TIED),
    Layout(pp=2, ep=2, execution=Execution("dualpipev"), arch=DEEP_TIED),
    Layout(pp=2, dp=2, execution=Execution("zbv", recompute="layer"), arch=DEEP_TIED),
    Layout(pp=4, execution=Execution("dualpipev", recompute="experts"), arch=DEEP_TIED),
)
MIXED = Objective("sequence", 0.05, 0.01)
WHOLE = [Case(MIXED, 1, bias=True), Case(MIXED, 8, bias=True), Case(MIXED, 4, padding=True)]
KINDS: tuple[BalanceKind, ...] = ("sequence", "micro_batch", "global_batch")
BALANCE = {kind: Case(Objective(kind, 1.0, 0.1), 4, labels=False, padding=True) for kind in KINDS}
CASES = [*WHOLE, *BALANCE.values()]
RUN = Run("adamw", 4)


@pytest.fixture(scope="module")
def worlds() -> dict[Layout, Results]:
    preload = ["tests.distributed.layouts"]
    layouts = (ONE, *LAYOUTS)
    return {layout: run_world(layout.size, run_layout, layout, CASES, [RUN], preload=preload)[0] for layout in layouts}


def test_what_is_covered() -> None:
    assert {layout.execution.schedule for layout in LAYOUTS} == set(get_args(ScheduleKind))
    assert {layout.execution.recompute for layout in LAYOUTS} == set(get_args(Recompute))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_pipelines_agree_with_one_rank(worlds: dict[Layout, Results], layout: Layout) -> None:
    same_bytes(worlds[layout]["initial"], worlds[ONE]["initial"], str(layout))
    for case in WHOLE:
        expected = worlds[ONE]["cases"][case]
        assert all(np.abs(grad).max() > 0 for grad in expected["grads"].values())
        check(worlds[layout]["cases"][case], expected, f"{layout}, {case}")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_balance_losses(worlds: dict[Layout, Results], layout: Layout, kind: BalanceKind) -> None:
    """Without labels, so that nothing hides their gradient. What only the head reads gets exact zeros."""
    case = BALANCE[kind]
    result = worlds[layout]["cases"][case]
    check(result, worlds[ONE]["cases"][case], f"{layout}, {case}")
    assert result["balance_loss"] > 0 and result["z_loss"] > 0 and result["loss"] == 0
    assert not result["grads"]["norm"].any() and result["grads"]["layers.8.router"].any()
    assert result["grads"]["embedding"].any()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_steps_move_weights_and_biases_as_on_one_rank(worlds: dict[Layout, Results], layout: Layout) -> None:
    """On each rank that borrows the embedding it is its owner's to the bit after them."""
    check_run(worlds[layout]["runs"][RUN], worlds[ONE]["runs"][RUN], worlds[ONE]["initial"], str(layout))
    ends_apart = layout.execution.schedule in ("1f1b", "interleaved")
    assert worlds[layout]["borrowed"] == ends_apart, "the V kinds have both ends on one rank"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_runs_repeat_bit_for_bit(worlds: dict[Layout, Results], layout: Layout) -> None:
    results = worlds[layout]
    same_bytes(results["again"], results["cases"][CASES[0]], f"{layout}: gradients")
    same_bytes(results["run again"], results["runs"][RUN], f"{layout}: steps")
