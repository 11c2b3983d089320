"""Layout changes nothing: one global batch on five meshes and in 1, 2 and 4 micro-batches.

Every world measures the same cases; all is compared here with one rank. Where a loss depends on the number of
micro-batches (spec/losses.toml), it is compared with one rank at the same number, else with one micro-batch.
"""

import numpy as np
import pytest

from golden.world import run_world
from pithtrain.layers.balance import BalanceKind, Objective
from tests.agreement import TOLERANCE
from tests.distributed.comparison import Results, check, check_run, same_bytes
from tests.distributed.layouts import Case, Layout, Run, run_layout

ONE = Layout()
LAYOUTS = (ONE, Layout(ep=2), Layout(dp=2), Layout(dp=2, ep=2), Layout(ep=4))
COUNTS = (1, 2, 4)
MIXED = Objective("sequence", 0.05, 0.01)
PLAIN = [Case(Objective(), n) for n in COUNTS]
WHOLE = [Case(MIXED, n, bias=True) for n in COUNTS]
PADDED = [Case(MIXED, n, padding=True) for n in (1, 4)]
IDLE = [Case(MIXED, n, idle=True) for n in (1, 2)]
KINDS: tuple[BalanceKind, ...] = ("sequence", "micro_batch", "global_batch")
BALANCE = {kind: [Case(Objective(kind, 1.0, 0.1), n, labels=False, padding=True) for n in (1, 4)] for kind in KINDS}
CASES = [*PLAIN, *WHOLE, *PADDED, *IDLE, *(case for kind in KINDS for case in BALANCE[kind])]
RUNS = [Run("adamw"), Run("sgd"), Run("adamw", 4)]


@pytest.fixture(scope="module")
def worlds() -> dict[Layout, Results]:
    preload = ["tests.distributed.layouts"]
    return {layout: run_world(layout.size, run_layout, layout, CASES, RUNS, preload=preload)[0] for layout in LAYOUTS}


def first(case: Case) -> Case:
    """The same case in one micro-batch."""
    return Case(case.objective, 1, case.labels, case.padding, case.bias, case.idle)


def test_initial_weights(worlds: dict[Layout, Results]) -> None:
    expected = worlds[ONE]["initial"]
    for layout in LAYOUTS:
        same_bytes(worlds[layout]["initial"], expected, str(layout))
    for name, values in expected.items():
        if ".experts." in name:
            assert len({expert.tobytes() for expert in values}) == len(values), f"{name}: two experts are alike"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_agree(worlds: dict[Layout, Results], layout: Layout) -> None:
    cases, expected = worlds[layout]["cases"], worlds[ONE]["cases"]
    worst = max(check(cases[case], expected[first(case)], f"{layout}, {case}") for case in [*PLAIN, *WHOLE, *PADDED])
    gap = min(result["gap"] for result in cases.values())
    print(f"{layout}: largest relative difference {worst:.1e}, smallest top-k gap {gap:.1e}")


def test_every_parameter_learns(worlds: dict[Layout, Results]) -> None:
    for case in (PLAIN[0], WHOLE[0]):
        for name, grad in worlds[ONE]["cases"][case]["grads"].items():
            assert np.isfinite(grad).all(), name
            for part in grad if ".experts." in name else [grad]:
                assert np.abs(part).max() > 0, f"{name} has no gradient"


def test_labels_are_spread_unevenly(worlds: dict[Layout, Results]) -> None:
    results = worlds[ONE]["cases"]
    assert 0 < results[PADDED[0]]["num_labels"] < results[PLAIN[0]]["num_labels"] < 16 * 14 * 0.6
    assert results[PADDED[0]]["counts"].sum() < results[PLAIN[0]]["counts"].sum() == 2 * 16 * 14 * 3


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_balance_losses(worlds: dict[Layout, Results], layout: Layout, kind: BalanceKind) -> None:
    """Without labels, so that nothing hides their gradient. What only the head reads gets exact zeros."""
    cases, expected = worlds[layout]["cases"], worlds[ONE]["cases"]
    for case in BALANCE[kind]:
        result = cases[case]
        check(result, expected[first(case) if kind == "sequence" else case], f"{layout}, {case}")
        assert result["z_loss"] == pytest.approx(expected[BALANCE[kind][0]]["z_loss"], rel=TOLERANCE)
        assert result["balance_loss"] > 0 and result["z_loss"] > 0 and result["loss"] == 0
        grads = result["grads"]
        assert not grads["head"].any() and not grads["norm"].any()
        assert grads["layers.2.router"].any() and grads["layers.0.attention.qkv"].any()


def test_balance_scopes_differ_only_where_they_should(worlds: dict[Layout, Results]) -> None:
    value = {case: result["balance_loss"] for case, result in worlds[ONE]["cases"].items()}
    micro, whole = BALANCE["micro_batch"], BALANCE["global_batch"]
    assert value[micro[0]] == pytest.approx(value[whole[0]], rel=1e-6)
    assert len({round(value[case], 4) for case in [*micro, *whole[1:]]}) == 3


def test_a_rank_without_tokens(worlds: dict[Layout, Results]) -> None:
    """Every token goes to the first three experts: at EP4 three ranks have none. Their gradients are exact zeros."""
    expected = worlds[ONE]["cases"][IDLE[0]]
    for layout in LAYOUTS:
        for case in IDLE:
            result = worlds[layout]["cases"][case]
            check(result, expected, f"{layout}, {case}")
            assert result["counts"].tolist() == [[16 * 14] * 3 + [0] * 9] * 2
            for name, grad in result["grads"].items():
                if ".experts." in name:
                    assert grad[:3].any() and not grad[3:].any(), f"{layout}: {name}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_weights_after_steps_agree(worlds: dict[Layout, Results], layout: Layout) -> None:
    for run in RUNS:
        expected = worlds[ONE]["runs"][Run(run.optimizer)]
        check_run(worlds[layout]["runs"][run], expected, worlds[ONE]["initial"], f"{layout}, {run}")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_runs_repeat_bit_for_bit(worlds: dict[Layout, Results], layout: Layout) -> None:
    results = worlds[layout]
    same_bytes(results["again"], results["cases"][CASES[0]], f"{layout}: gradients")
    same_bytes(results["run again"], results["runs"][RUNS[0]], f"{layout}: three steps")
