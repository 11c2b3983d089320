"""The comparer: whatever differs is found and named, the first step and field first."""

import math
from dataclasses import replace
from typing import Any

import pytest

from golden.compare import Band, compare, compare_costs
from golden.trace import Costs, Golden, Step, Trace, TraceError, from_text, to_text
from tests.golden.extension import FirstStepsExtension, TraceExtension

STEP = Step(
    loss=2.5,
    balance_loss=0.02,
    z_loss=0.0,
    grad_norm=1.5,
    grad_norms={"router": 0.5, "experts": 0.25},
    learning_rate=1e-3,
    num_tokens_per_expert=[[3, 5], [4, 4]],
    expert_bias=[[0.001, -0.001], [0.0, 0.0]],
)
COSTS = Costs(7, 1000, 20000, {"all_to_all ep": (4, 640)}, {"bf16": 90})
TRACE = Trace("base", "f" * 64, (STEP,) * 10, COSTS, 1e-3)
GOLDEN = Golden(TRACE, {"EP2, n=1": COSTS}, {"torch": "2"}, ({"reason": "first"},))


def changed(at: int, **fields: Any) -> Trace:
    steps = list(TRACE.steps)
    steps[at] = replace(STEP, **fields)
    return replace(TRACE, steps=tuple(steps))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"loss": 2.5 * (1 + 2e-5)}, "loss"),
        ({"balance_loss": 0.02 * (1 - 2e-5)}, "balance_loss"),
        ({"z_loss": 1e-12}, "z_loss"),
        ({"grad_norm": -1.5}, "grad_norm"),
        ({"grad_norms": {"router": 0.5, "experts": 0.26}}, "grad_norms.experts"),
        ({"grad_norms": {"router": 0.5}}, "grad_norms.experts"),
        ({"grad_norms": {"router": 0.5, "experts": 0.25, "head": 0.0}}, "grad_norms.head"),
        ({"learning_rate": 1e-3 * (1 + 1e-9)}, "learning_rate"),
        ({"num_tokens_per_expert": [[4, 4], [4, 4]]}, "num_tokens_per_expert"),
        ({"num_tokens_per_expert": [[3, 5]]}, "num_tokens_per_expert"),
        ({"expert_bias": [[0.001, -0.001], [0.0, 1e-12]]}, "expert_bias"),
        ({"expert_bias": None}, "expert_bias"),
    ],
)
def test_differences_are_named(fields: dict[str, Any], named: str) -> None:
    (difference,) = compare(TRACE, changed(6, **fields)).differences
    assert (difference.step, difference.field) == (6, named)
    assert f"step 6, {named}" in str(difference)
    two = replace(changed(3, loss=9.0), steps=(*changed(3, loss=9.0).steps[:6], *changed(6, **fields).steps[6:]))
    assert [(d.step, d.field) for d in compare(TRACE, two).differences] == [(3, "loss"), (6, named)]


def test_what_is_within_the_tolerance_agrees() -> None:
    close = compare(TRACE, changed(6, loss=2.5 * (1 + 5e-6), learning_rate=1e-3 * (1 + 1e-14)))
    assert close.differences == () and close.num_steps == 10
    assert close.largest == pytest.approx(5e-6)
    assert compare(TRACE, TRACE).largest == 0.0


def test_a_band_is_of_losses_and_of_norms() -> None:
    band, strayed = Band(loss=0.01, norms=0.1), changed(6, loss=2.5 * 1.011, grad_norm=1.5 * 1.11)
    assert [d.field for d in compare(TRACE, strayed, band=band).differences] == ["loss", "grad_norm"]
    near = changed(6, loss=2.5 * 1.009, grad_norm=1.5 * 1.09, grad_norms={"router": 0.53, "experts": 0.24})
    assert not compare(TRACE, near, band=band).differences and compare(TRACE, near).differences
    assert compare(TRACE, changed(6, learning_rate=1e-3 * (1 + 1e-9)), band=band).differences
    assert compare(TRACE, changed(6, loss=math.nan), band=band).differences


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_never_matches(value: float) -> None:
    one_side, both = compare(TRACE, changed(2, grad_norm=value)), changed(2, grad_norm=value)
    assert [(d.step, d.field) for d in one_side.differences] == [(2, "grad_norm")] and math.isnan(one_side.largest)
    assert [(d.step, d.field) for d in compare(both, both).differences] == [(2, "grad_norm")]
    text = TraceExtension().serialize(both)
    assert not TraceExtension().matches(serialized_data=text, snapshot_data=text)


def test_missing_and_surplus_steps_are_differences() -> None:
    short, long = replace(TRACE, steps=(STEP,) * 9), replace(TRACE, steps=(STEP,) * 11)
    for trace in (short, long, replace(TRACE, steps=())):
        (difference,) = compare(TRACE, trace).differences
        assert difference.field == "number of steps" and difference.got == len(trace.steps)
    assert not compare(TRACE, short, 9).differences and not compare(TRACE, long, 10).differences
    assert compare(TRACE, short, 10).differences and compare(short, short, 10).differences
    assert not compare(TRACE, changed(9, loss=0.0), 9).differences
    assert compare(TRACE, replace(TRACE, case="other")).differences[0].field == "case"


def test_costs_are_compared_exactly_but_for_memory() -> None:
    assert not compare_costs(GOLDEN, "EP2, n=1", COSTS)
    fatter = replace(COSTS, collectives={"all_to_all ep": (4, 641)}, products=8)
    assert [d.field for d in compare_costs(GOLDEN, "EP2, n=1", fatter)] == ["products", "collectives"]
    assert [d.field for d in compare_costs(GOLDEN, "EP2, n=1", replace(COSTS, flops=1001))] == ["flops"]
    assert [d.field for d in compare_costs(GOLDEN, "EP2, n=1", replace(COSTS, roundings={}))] == ["roundings"]
    assert not compare_costs(GOLDEN, "EP2, n=1", replace(COSTS, peak_bytes=20199))
    assert [d.field for d in compare_costs(GOLDEN, "EP2, n=1", replace(COSTS, peak_bytes=20201))] == ["peak_bytes"]
    assert [d.field for d in compare_costs(GOLDEN, "DP2, n=1", COSTS)] == ["costs"]


def test_the_file_keeps_every_bit() -> None:
    golden = replace(GOLDEN, trace=changed(1, loss=0.1 + 0.2, grad_norm=math.inf, expert_bias=None))
    assert from_text(to_text(golden), "here") == golden


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"format": 3', '"format": 2', "format 2, expected 3"),
        ('"products": 7', '"product": 7', "TypeError"),
        ('"loss": 2.5, ', "", "KeyError|a step has fields"),
        ('"loss": 2.5', '"loss": "much"', "KeyError: 'much'"),
        ('"steps"', '"stops"', "KeyError: 'steps'"),
        ("]\n}", "", "JSONDecodeError"),
    ],
)
def test_a_damaged_file_is_named(old: str, new: str, says: str) -> None:
    text = to_text(GOLDEN)
    assert old in text
    with pytest.raises(TraceError, match=rf"base.json: .*({says}).*--update"):
        from_text(text.replace(old, new, 1), "base.json")


def test_the_extension_compares_with_the_same_comparer() -> None:
    golden, late = to_text(GOLDEN), TraceExtension().serialize(changed(9, loss=3.0))
    assert not TraceExtension().matches(serialized_data=late, snapshot_data=golden)
    assert FirstStepsExtension().matches(serialized_data=late, snapshot_data=golden)
    assert list(TraceExtension().diff_lines(late, golden)) == ["step 9, loss: expected 2.5, got 3.0 (relative 2.0e-01)"]
    other = TraceExtension().serialize(replace(TRACE, fingerprint="0" * 64))
    assert not TraceExtension().matches(serialized_data=other, snapshot_data=golden)
    with pytest.raises(RuntimeError, match="pith verify --update"):
        TraceExtension.write_snapshot_collection()
