"""What a step's time goes to, against what it should cost: causes in the order of what they cost too much.

What a part should cost is what an earlier profile says; without one, what plain torch takes for the same work, times an
allowance. Waiting is judged by what cannot be avoided: nothing, or a pipeline's own bubble with the costs that its
passes really had. Other processes of a machine only ever add time, to another place in every step: so for each segment
the quiet steps count, a tenth from below.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from pithtrain.parallel.pipeline.schedule import make_schedule
from skills.profile_bottleneck.attribution import CAUSES, OTHER, WAITING, Step
from skills.profile_bottleneck.profile import Cause, Table
from spec.simulate import Costs, simulate

ALLOWANCE = {  # times plain torch, where nothing is wrong
    "data": 5.0,
    "attention": 1.7,
    "router": 2.0,
    "experts": 3.0,
    "aggregate": 2.0,
    "loss": 2.0,
    "optimizer": 5.0,
    "gradient reduction": 4.0,
    "dispatch": 2.0,
    "combine": 1.0,
}
SETTINGS = {
    "data": "fewer batch.num_microbatches, or data.train on a faster disk",
    "attention": "train.recompute = none or experts; data.sequence_length; train.precision",
    "router": "train.routing = balanced tells what choosing experts costs; larger micro-batches",
    "dispatch": "mesh.ep; pipeline.schedule = dualpipev hides it behind compute; larger micro-batches",
    "experts": "mesh.ep; balance.coef, where loads are uneven; train.recompute = none; train.precision",
    "combine": "mesh.ep; pipeline.schedule = dualpipev hides it behind compute; larger micro-batches",
    "aggregate": "fewer, larger micro-batches (batch.num_microbatches)",
    "loss": "fewer, larger micro-batches (batch.num_microbatches); mesh.pp puts it on a rank of its own",
    "weight gradients": "pipeline.schedule = 1f1b does not put them off",
    "optimizer": "more mesh.dp (each rank then owns less); a larger batch.global_batch_size a step",
    "gradient reduction": "a larger batch.global_batch_size a step; less mesh.dp",
    "pipeline bubble": "more batch.num_microbatches; pipeline.schedule (pith schedule compares them); less mesh.pp",
    "checkpoint": "a longer checkpoint.interval; checkpoint.background = true; checkpoint.optimizer = false",
    "host reads": "fewer, larger micro-batches (batch.num_microbatches): one read a layer and micro-batch",
}
LEAST = 0.05  # of the step: less is not called too much


def quiet(values: Iterable[float]) -> float:
    """What a tenth of the values stay below."""
    ordered = sorted(values)
    return ordered[len(ordered) // 10]


def table_of(steps: Sequence[Step], facts: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """Quiet milliseconds a step; a checkpoint's are spread over the steps between two."""
    table = defaultdict[int, dict[str, float]](dict)
    for rank in sorted({step.rank for step in steps}):
        own = [step for step in steps if step.rank == rank]
        table[rank] = dict.fromkeys((*CAUSES, WAITING, OTHER), 0.0)
        for place in {place for step in own for place in step.names}:
            table[rank][place[0]] += quiet(step.names.get(place, 0.0) for step in own)
        saves = [step.causes["checkpoint"] for step in own if "checkpoint" in step.causes]
        interval = facts["checkpoint_interval"]
        table[rank]["checkpoint"] = quiet(saves) / interval if saves and interval else 0.0
    return dict(table)


def bubbles(steps: Sequence[Step], kind: Any, num_microbatches: int, chunks: int, ranks: Sequence[int]) -> list[float]:
    """By pipeline rank, the milliseconds it idles if messages took no time and passes what they took here.

    ranks: one of each pipeline rank, in order.
    """
    seen = defaultdict[tuple[str, int], list[float]](list)
    for step in steps:
        for name, milliseconds in step.actions.items() if step.rank in ranks else ():
            parts = re.findall(r"([FBIW])(\d+)\.\d+", name)
            for action, stage in parts:
                seen[action, int(stage)].append(milliseconds / len(parts))
    table = make_schedule(kind, len(ranks), num_microbatches, chunks)

    def costs(action: str) -> list[float]:
        return [quiet(seen[action, stage]) if seen[action, stage] else 0.0 for stage in range(len(table.rank_of))]

    split = any(action == "I" for action, _ in list(seen))
    found = simulate(table, Costs(costs("F"), costs("I" if split else "B"), costs("W")))
    return [found.time - sum(span.end - span.start for span in row) for row in found.spans]


def expectations(
    table: Table, facts: Sequence[Mapping[str, Any]], earlier: Table | None
) -> tuple[dict[int, dict[str, float]], float]:
    """What everything should cost, and the machine's pace that is in it; a bubble is left to `bubbles`."""
    if earlier is not None:
        pace = _pace(table, earlier)
        return {rank: {cause: pace * ms for cause, ms in row.items()} for rank, row in earlier.items()}, pace
    plain = {
        fact["rank"]: {cause: ALLOWANCE.get(cause, 0.0) * fact["yardstick"].get(cause, 0.0) for cause in CAUSES}
        for fact in facts
    }
    pace = max(1.0, _pace(table, plain))
    return {rank: {cause: pace * ms for cause, ms in row.items()} for rank, row in plain.items()}, pace


def _pace(table: Table, expected: Table) -> float:
    """How many times as long as expected what has a yardstick takes; in the middle, so single causes do not count."""
    ratios = [
        now / expected[rank][cause]
        for rank, row in table.items()
        for cause, now in row.items()
        if cause in ALLOWANCE and expected[rank][cause] > 0.02 * sum(expected[rank].values())
    ]
    return median(ratios) if ratios else 1.0


def rank_causes(steps: Sequence[Step], table: Table, expected: Table, interval: int) -> list[Cause]:
    """All causes, what costs most too much first."""
    step = max(sum(row.values()) for row in table.values())
    found = []
    for cause in CAUSES:
        rank = max(table, key=lambda r: (table[r][cause] - expected[r].get(cause, 0.0), table[r][cause]))
        now, should = table[rank][cause], expected[rank].get(cause, 0.0)
        own = [s for s in steps if s.rank == rank and (cause != "checkpoint" or cause in s.causes)]
        values = [s.causes.get(cause, 0.0) / (max(interval, 1) if cause == "checkpoint" else 1) for s in own] or [0.0]
        found.append(
            Cause(
                cause=cause,
                rank=rank,
                milliseconds=now,
                expected=should,
                excess=now - should,
                share=now / step,
                too_much=now - should >= LEAST * step,
                median=median(values),
                least=min(values),
                most=max(values),
                where=_where(own, cause),
                setting=SETTINGS[cause],
            )
        )
    return sorted(found, key=lambda row: -row.excess)


def _where(steps: Sequence[Step], cause: str) -> list[str]:
    """The three places that take most of a cause, and how they stand to their like in other layers."""
    seen = defaultdict[tuple[str, str], list[float]](list)
    for step in steps:
        for (of, name, phase), milliseconds in step.names.items():
            if of == cause:
                seen[name, phase].append(milliseconds)
    figures = {place: median(values) for place, values in seen.items()}
    lines = []
    for (name, phase), milliseconds in sorted(figures.items(), key=lambda item: -item[1])[:3]:
        last = name.rpartition(".")[2]
        like = [ms for (other, way), ms in figures.items() if other.rpartition(".")[2] == last and way == phase]
        times = milliseconds / median(like) if len(like) > 1 and median(like) else 1.0
        more = f", {times:.1f} times its like" if times >= 1.5 else ""
        lines.append(f"{name} {phase} {milliseconds:.1f} ms{more}")
    return lines
