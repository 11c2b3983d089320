"""What profile-bottleneck answers: causes in their order, and the figures of the run."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from skills.frame import Result

PLAIN, EARLIER = "plain torch on the same shapes", "the earlier profile"  # what baselines are called
Table = Mapping[int, Mapping[str, float]]  # rank -> cause -> milliseconds a step


class Cause(BaseModel):
    """What one cause costs, on the rank where it costs most too much."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    cause: str
    """One of the causes that the page lists."""
    rank: int
    """The rank that the figures are of."""
    milliseconds: float
    """A step; of every segment the quiet steps."""
    expected: float
    """What it should cost."""
    excess: float
    """Milliseconds above that: what causes are ordered by."""
    share: float
    """Of the step."""
    too_much: bool
    """Whether the excess is 5% of the step or more."""
    median: float
    """Over the steps."""
    least: float
    """Over the steps."""
    most: float
    """Over the steps."""
    where: list[str]
    """The segments or parts that take most of it."""
    setting: str
    """What in the run file would change it."""


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

    @property
    def is_compared(self) -> bool:
        return self.baseline == EARLIER

    @property
    def quiet_milliseconds(self) -> float:
        """Of the slowest rank: what its causes and waits sum to."""
        return max(sum(row.values()) for row in self.table.values())

    def summary(self) -> str:
        """The ranked causes, then the figures of the run."""
        rows = [
            f"step {self.step_milliseconds:.1f} ms on {self.mesh}; expected: {self.baseline}, pace {self.pace:.2f}",
            f"ms: in the quiet steps, which take {self.quiet_milliseconds:.1f} with all waits; share: of these",
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
        if found and not self.is_compared:
            rows.append("slower than it was? Profile the commit before, then this one with --compare its profile.json")
        share = "unknown: set run.peak_flops" if self.mfu is None else f"{self.mfu:.2%}"
        rows.append(f"busiest expert over mean: {loads}; padding {self.padding:.1%}; MFU {share}")
        return "\n".join([*rows, f"{self.tokens_per_second:,.0f} tokens/s; timeline {self.timeline}"])


def _told(row: Cause) -> str:
    told = f"{row.cause}: {row.excess:.1f} ms too much on rank {row.rank}; its largest places, in median steps:"
    return f"{told} {'; '.join(row.where)}\n  would change it: {row.setting}"
