"""The golden traces, replayed on one rank and on every layout, as snapshots."""

from typing import get_args

import pytest
from syrupy.assertion import SnapshotAssertion

from golden.cases import CASES, Case, Layout
from golden.compare import compare_costs
from golden.trace import Trace, read
from golden.verify import Replayed, judge_layout, replay_all
from pithtrain.choices import ExpertType
from pithtrain.parallel.pipeline.schedule import ScheduleKind
from pithtrain.passes import Recompute
from tests.golden.extension import FirstStepsExtension, TraceExtension

ITEMS = [(case, layout) for case in CASES for layout in case.layouts]
FP32 = [item for item in ITEMS if item[1].precision == "fp32"]
NARROW = [item for item in ITEMS if item[1].precision != "fp32"]


def name(item: Case | Layout) -> str:
    return item.name if isinstance(item, Case) else str(item)


@pytest.fixture(scope="module")
def replayed() -> Replayed:
    return replay_all(CASES)


def trace_of(replayed: Replayed, case: Case, layout: Layout) -> Trace:
    trace = replayed[case, layout]
    assert isinstance(trace, Trace), trace
    return trace


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_rank_is_the_golden_trace(replayed: Replayed, case: Case, snapshot: SnapshotAssertion) -> None:
    trace = trace_of(replayed, case, case.one_rank)
    assert trace == snapshot(name=case.name, extension_class=TraceExtension)
    golden = read(case.name)
    assert not compare_costs(golden, str(case.one_rank), trace.costs)
    assert golden.trace.smallest_gap > 5e-6, "a choice of experts is so close that another machine may make another one"


@pytest.mark.parametrize(("case", "layout"), FP32, ids=name)
def test_meshes_follow_the_one_rank_trace(
    replayed: Replayed, case: Case, layout: Layout, snapshot: SnapshotAssertion
) -> None:
    trace = trace_of(replayed, case, layout)
    assert trace == snapshot(name=case.name, extension_class=FirstStepsExtension)
    assert not compare_costs(read(case.name), str(layout), trace.costs)


@pytest.mark.parametrize(("case", "layout"), NARROW, ids=name)
def test_lower_precisions_stay_within_their_bands(replayed: Replayed, case: Case, layout: Layout) -> None:
    verdict = judge_layout(case, layout, replayed, read(case.name))
    assert verdict.word == "same", verdict
    assert verdict.largest > 1e-3, "as close to fp32 as another layout in fp32"


def test_the_cases_cover_what_they_should() -> None:
    layouts = {(layout.ep, layout.dp) for case in CASES for layout in case.layouts}
    assert layouts >= {(2, 1), (1, 2), (2, 2), (4, 1), (1, 1)}
    counts = {layout.num_microbatches for case in CASES for layout in (case.one_rank, *case.layouts)}
    assert counts == {1, 2, 4, 8}
    meshes = {(layout.pp, layout.ep, layout.dp) for case in CASES for layout in case.layouts}
    assert meshes >= {(2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 1, 1)}
    executions = {layout.execution for case in CASES for layout in case.layouts if layout.pp > 1}
    assert {execution.schedule for execution in executions} == set(get_args(ScheduleKind))
    assert {execution.recompute for execution in executions} == set(get_args(Recompute))
    assert {case.objective.balance for case in CASES} == {"none", "sequence", "micro_batch", "global_batch"}
    assert {case.optimizer.rate.kind for case in CASES} == {"wsd", "cosine", "constant"}
    assert {case.optimizer.kind for case in CASES} == {"adamw", "sgd"}
    narrow = {(layout.precision, layout.mesh) for _, layout in NARROW}
    assert narrow >= {("bf16", "1 rank"), ("bf16", "PP2"), ("bf16", "EP2"), ("fp8", "DP2"), ("fp8", "EP2")}
    assert {case.arch.expert_type for case in CASES} == set(get_args(ExpertType))
    assert all(case.steps == 50 for case in CASES if case.arch.expert_type == "swiglu")
    assert any(case.bias_rate for case in CASES) and any(case.objective.z_coef for case in CASES)
