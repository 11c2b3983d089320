"""profile-bottleneck: where the time of a run's steps goes, and what of it is too much."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import Field

from pithtrain.checkpoint.folder import step_folders
from pithtrain.config import check_files, load, resolve_mesh, smallest_world
from pithtrain.metrics import mfu, peak_flops
from pithtrain.timeline import merge
from pithtrain.train.plan import CHECKPOINTS, RESOLVED
from skills.frame import Failed, Missing, Params, Result, Skill, Workspace
from skills.profile_bottleneck.attribution import BUBBLE, Step, World, attribute
from skills.profile_bottleneck.ranking import Cause, Table, bubbles, expectations, rank_causes, table_of

TOLERANCE = 0.01  # of a step: what its causes may differ from it
SECONDS = 1800.0
PROFILE, TIMELINE_FILE = "profile.json", "timeline.json"


class ProfileParams(Params):
    run: Path
    """A run file, or the folder of a run, which is measured from its newest checkpoint on."""
    set: list[str] = Field(default=[])
    """KEY=VALUE that takes the place of a value of the run file, as for `pith train`."""
    steps: int = Field(default=12, ge=4)
    """Steps that are measured, behind three that are not."""
    nproc: int | None = Field(default=None, ge=1)
    """Processes; without it what the mesh asks for."""
    compare: Path | None = None
    """The profile.json of an earlier profile of the same run and mesh."""


class Profile(Result):
    mesh: str
    """How ranks lay."""
    steps: int
    """How many were measured."""
    step_milliseconds: float
    """The slowest rank's median step, without checkpoints."""
    causes: list[Cause]
    """What costs most too much first."""
    baseline: str
    """What the expected milliseconds come from."""
    pace: float
    """How many times as long everything took: expected milliseconds have it in them."""
    table: dict[int, dict[str, float]]
    """By rank, quiet milliseconds a step by cause; waits for other ranks and what is left included."""
    unaccounted: float
    """The largest share of any step that no cause has."""
    expert_load: dict[str, float]
    """By sparse layer, the busiest expert's tokens over the mean: 1 is even."""
    padding: float
    """Share of positions that are padding."""
    unlabelled: float
    """Share of positions without a label."""
    tokens_per_second: float
    """From the median step."""
    mfu: float | None
    """Share of the peak FLOP/s that active parameters take; None without run.peak_flops or a known device."""
    checkpoint_problem: str
    """Why a checkpoint could not be saved; empty if it was."""
    timeline: Path
    """For https://ui.perfetto.dev."""

    def summary(self) -> str:
        """The ranked causes, then the figures of the run."""
        rows = [
            f"step {self.step_milliseconds:.1f} ms on {self.mesh}; expected: {self.baseline}, pace {self.pace:.2f}",
            "",
        ]
        rows.append(f"{'cause':20}{'ms':>8}{'expected':>10}{'excess':>8}{'share':>7}  rank  median (least to most)")
        for row in self.causes:
            spread = f"{row.median:.1f} ({row.least:.1f} to {row.most:.1f})"
            figures = f"{row.milliseconds:>8.1f}{row.expected:>10.1f}{row.excess:>8.1f}{row.share:>7.1%}"
            rows.append(f"{row.cause:20}{figures}  {row.rank:>4}  {spread}")
        found = [row for row in self.causes if row.too_much]
        rows.append("")
        rows += [_told(row) for row in found] or ["nothing costs 5% of the step more than expected"]
        loads = ", ".join(f"{layer} {load:.2f}" for layer, load in self.expert_load.items()) or "no sparse layers"
        share = "unknown: set run.peak_flops" if self.mfu is None else f"{self.mfu:.2%}"
        rows.append(f"busiest expert over mean: {loads}; padding {self.padding:.1%}; MFU {share}")
        return "\n".join([*rows, f"{self.tokens_per_second:,.0f} tokens/s; timeline {self.timeline}"])


def _told(row: Cause) -> str:
    places = "; ".join(row.where)
    return f"{row.cause}: {row.excess:.1f} ms too much on rank {row.rank}: {places}\n  would change it: {row.setting}"


class ProfileBottleneck(Skill[ProfileParams, Profile]):
    params, result = ProfileParams, Profile

    def preconditions(self, params: ProfileParams, root: Path) -> list[Missing]:
        run, sets, _ = _source(params)
        if not run.is_file():
            return [Missing(f"{run}: no such file", "name a run file, or the folder of a run that has started")]
        cfg = load(run, sets)
        resolve_mesh(cfg.mesh, params.nproc or smallest_world(cfg.mesh))
        missing = [Missing(problem, "see pith data prepare --help, pith train --help") for problem in check_files(cfg)]
        if params.compare is not None and not params.compare.is_file():
            missing.append(Missing(f"{params.compare}: no such file", "name the profile.json of an earlier profile"))
        return missing

    def steps(self, params: ProfileParams, workspace: Workspace) -> Profile:
        run, sets, start = _source(params)
        world = params.nproc or smallest_world(load(run, sets).mesh)
        job = {"run": str(run), "overrides": sets, "start": start, "steps": params.steps, "folder": str(workspace.out)}
        path = workspace.out / "job.json"
        path.write_text(json.dumps(job))
        workspace.say(f"measuring {params.steps} steps on {world} ranks")
        launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={world}")
        done = workspace.run(*launcher, "-m", "skills.profile_bottleneck.probe", str(path), seconds=SECONDS)
        shutil.rmtree(workspace.out / "run", ignore_errors=True)  # its checkpoints
        if done.returncode:
            raise Failed(f"the measured run ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
        profile = evaluate(workspace.out, _earlier(params.compare))
        (workspace.out / PROFILE).write_text(profile.model_dump_json(indent=1) + "\n")
        return profile

    def postconditions(self, params: ProfileParams, result: Profile, workspace: Workspace) -> list[str]:
        failures = []
        if result.unaccounted > TOLERANCE:
            failures.append(f"causes miss {result.unaccounted:.1%} of a step, expected at most {TOLERANCE:.0%}")
        events = json.loads(result.timeline.read_text())["traceEvents"]
        ranks = {event["pid"] for event in events if event["ph"] == "X"}
        if ranks != set(result.table):
            failures.append(f"{result.timeline}: spans of ranks {sorted(ranks)}, expected {sorted(result.table)}")
        if Profile.model_validate_json((workspace.out / PROFILE).read_text()) != result:
            failures.append(f"{workspace.out / PROFILE}: does not read back as the result")
        if result.checkpoint_problem:
            failures.append(f"a checkpoint was not saved: {result.checkpoint_problem}")
        return failures


def _source(params: ProfileParams) -> tuple[Path, list[str], str]:
    """The run file, what is set, and where to start from."""
    if not params.run.is_dir():
        return params.run, params.set, "never"
    folders = step_folders(params.run / CHECKPOINTS)
    newest = str(max(folders, key=lambda folder: folder.name)) if folders else "never"
    return params.run / RESOLVED, params.set, newest


def _earlier(path: Path | None) -> Profile | None:
    if path is None:
        return None
    fields = json.loads(path.read_text())
    return Profile.model_validate(fields.get("result", fields))


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
        baseline="plain torch on the same shapes" if earlier is None else "the earlier profile",
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


SKILL = ProfileBottleneck()
