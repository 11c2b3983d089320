"""The answer in lines for people."""

from pathlib import Path

from skills.debug_nan.answer import Answer, Rung
from skills.debug_nan.record import Difference

ROOT = Path(__file__).parents[2]
ANOTHER = (
    "The config may have been changed on a resume (RUN/config.resolved.toml is the last one), or the data or the "
    "trainer's source since; train.precision = auto is bf16 on a GPU and fp32 on a CPU"
)
ROUNDING = "as another machine, mesh or torch rounds; a small change of the config would look the same"
UNMET = (
    "on a GPU it may have been a kernel or NCCL, which this replay on the CPU does not run; or memory, or a value that "
    "depends on time; or the run is not repeated exactly"
)
REMEDY = (
    "start behind the change, from a checkpoint that you have kept: --set checkpoint.resume=FOLDER; or give what the "
    "run had then, by --set; let the next run keep more with checkpoint.keep"
)


def summary(answer: Answer, script: Path | None) -> list[str]:
    """What was replayed, whether it is the run that was recorded, and what was found."""
    start = answer.start or "the beginning of the run"
    lines = [*against_record(answer), f"replayed {answer.replayed} steps from {start} (step {answer.first})"]
    lines += answer.notes
    return lines + (finding(answer, script) if answer.bad is not None else [_FINITE])


_FINITE = "every step was finite: loss, gradients, weights and moments"
_UNSTEADY = (
    "not deterministic: run again from the same state, the step came out in another way; what follows is one of its "
    "outcomes, and nothing was tried against it"
)


def against_record(answer: Answer) -> list[str]:
    """The replay beside metrics.jsonl."""
    record, lines = answer.record, list[str]()
    if record is None:
        return lines
    if record.first is None or record.largest is None:
        if record.compared:
            lines.append(f"the same run: {record.same} of {record.compared} replayed steps are exactly as recorded")
    else:
        lines.append(f"{record.verdict}: differs first in {record.first.words()}{_relative(record.first)}")
        lines += [f"  most in {record.largest.words()}{_relative(record.largest)}"] * (record.largest != record.first)
        lines.append(f"  {_reason(answer)}")
    if record.unmet is not None:
        why = f"what --set changes may avoid it; {UNMET}" if answer.changed else UNMET
        lines.append(f"the run's own record has step {record.unmet} as skipped; the replay did not meet it: {why}")
    return lines


def _reason(answer: Answer) -> str:
    assert answer.record is not None
    if answer.changed:
        return "the changes by --set make it another run, as asked"
    return ROUNDING if answer.record.verdict == "the same up to rounding" else ANOTHER


def _relative(difference: Difference) -> str:
    return f" ({difference.distance:.1e} relative)" if isinstance(difference.distance, float) else ""


def finding(answer: Answer, script: Path | None) -> list[str]:
    """The step, its origin, and what cures it."""
    lines = [answer.headline(), *_steps(answer)]
    lines += {True: ["deterministic: it came out the same again, twice"], None: []}.get(
        answer.deterministic, [_UNSTEADY]
    )
    if answer.origin is None:
        lines.append("no operator was seen to begin it")
    else:
        lines.append(f"first: {answer.origin.words()}")
        lines += [f"  input {stats.words()}" for stats in answer.origin.inputs]
        lines += [f"  {answer.origin.output.words()}"] if answer.origin.output else []
        lines += [f"  {answer.others} more began without it"] if answer.others else []
    for rung in answer.rungs:
        lines += _rung(rung)
    if script is None:
        return lines
    path = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script
    words = "fails until it is mended" if answer.deterministic else "takes the step once more, and may pass"
    return [*lines, f"{words}: .venv/bin/python {path}"]


def _steps(answer: Answer) -> list[str]:
    """The last steps, where there are several, and how large weights became."""
    lines = [f"  {'step':>6} {'loss':>12} {'gradient norm':>14} {'learning rate':>14}"] if answer.lines[1:] else []
    for line in answer.lines if lines else ():
        numbers = f"{float(line.loss):12.5g} {float(line.grad_norm):14.4g} {line.learning_rate:14.3g}"
        lines.append(f"  {line.step:6} {numbers}")
    before, after = map(float, answer.largest_weights)
    return [*lines, f"  largest weight: {before:.3g} at step {answer.first}, {after:.3g} before step {answer.bad}"]


def _rung(rung: Rung) -> list[str]:
    words = {True: "cures it", False: "does not cure it", None: "could not be tried"}[rung.cured]
    steps = f", {rung.steps} steps replayed" if rung.steps > 1 else ""
    line = f"{rung.name} ({' '.join(rung.overrides)}){steps}: {words}{rung.note and ': '}{rung.note}"
    return [line, f"  trains on: {rung.command}"] if rung.command else [line]
