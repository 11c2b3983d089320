"""From what the ranks recorded to the profile."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pithtrain.metrics import mfu, peak_flops
from pithtrain.timeline import merge
from skills.frame import Failed
from skills.profile_bottleneck.attribution import BUBBLE, Step, World, attribute
from skills.profile_bottleneck.profile import EARLIER, PLAIN, Profile, Table
from skills.profile_bottleneck.ranking import bubbles, expectations, rank_causes, table_of

TIMELINE_FILE = "timeline.json"


def evaluate(folder: Path, earlier: Profile | None = None) -> Profile:
    """The profile of what ranks recorded in `folder`; writes the timeline there. Raises Failed for another mesh."""
    facts: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(folder.glob("facts-*.json"))]
    first = facts[0]
    mesh = " ".join(f"{axis}{size}" for axis, size in first["mesh"].items())
    if earlier is not None and earlier.mesh != mesh:
        raise Failed(f"the earlier profile is of {earlier.mesh}, this one of {mesh}; compare profiles of one mesh")
    steps = attribute(folder, World(len(facts), first["mesh"]["pp"], first["mesh"]["ep"]))
    table = table_of(steps, first)
    expected, pace = expectations(table, facts, None if earlier is None else earlier.table)
    if earlier is None and first["mesh"]["pp"] > 1:
        stride = len(facts) // first["mesh"]["pp"]
        kind, num_microbatches, chunks = first["schedule"]
        idle = bubbles(steps, kind, num_microbatches, chunks, range(0, len(facts), stride))
        for rank, row in expected.items():
            row[BUBBLE] = idle[rank // stride]
    timeline = folder / TIMELINE_FILE
    timeline.write_text(json.dumps({"traceEvents": merge(folder)}))
    length = _length(steps, table)
    rate = 1e3 * first["tokens_per_step"] / length
    peak = first["peak_flops"] or peak_flops(first["device"])
    positions = sum(fact["positions"] for fact in facts)
    loads = list(zip(*first["expert_load"], strict=True))
    return Profile(
        mesh=mesh,
        steps=first["steps"],
        step_milliseconds=length,
        causes=rank_causes(steps, table, expected, first["checkpoint_interval"]),
        baseline=PLAIN if earlier is None else EARLIER,
        pace=pace,
        table=table,
        unaccounted=max(abs(step.total - sum(step.causes.values())) / step.total for step in steps),
        expert_load={
            f"layers.{layer}": median(load) for layer, load in zip(first["sparse_layers"], loads, strict=True)
        },
        padding=sum(fact["padding"] for fact in facts) / positions,
        unlabelled=sum(fact["unlabelled"] for fact in facts) / positions,
        tokens_per_second=rate,
        mfu=mfu(rate, first["flops_per_token"], peak, len(facts)),
        checkpoint_problem=first["checkpoint_problem"],
        timeline=timeline,
    )


def _length(steps: Sequence[Step], table: Table) -> float:
    """The median step of the slowest rank, without checkpoints, in milliseconds."""
    own = [[s.total - s.causes.get("checkpoint", 0.0) for s in steps if s.rank == rank] for rank in table]
    return max(median(values) for values in own)
