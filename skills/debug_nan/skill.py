"""The skill debug-nan: which value of a run was the first not to be finite, and what cures it."""

from pathlib import Path

from pydantic import Field

from pithtrain.config import check_files, load
from skills.debug_nan import script
from skills.debug_nan.answer import ANSWER, ORDER, Answer
from skills.frame import Failed, Missing, Params, Result, Skill, Workspace


class DebugParams(Params):
    run: Path
    """A run's folder, replayed from its last checkpoint before the step; or a run file, replayed from its start."""
    set: list[str] = Field([])
    """A change to the run, as in train.recompute=none."""
    step: int | None = Field(None, ge=1)
    """The last step to replay; left out, the first that metrics.jsonl has as skipped, or else the run's last."""
    nproc: int | None = Field(None, ge=1)
    """How many ranks; left out, those of the checkpoint, or as few as the mesh asks for."""
    ladder: bool = True
    """Try which change cures it."""
    seconds: float = 3600
    """For the whole investigation."""


class DebugResult(Result):
    answer: Answer
    """What was replayed, the step that is not finite, and the first value in it that is not."""
    script: Path | None
    """A script that fails while the step is not finite; None where every step was finite."""

    def summary(self) -> str:
        return "\n".join(_summary(self.answer, self.script))


def _summary(answer: Answer, path: Path | None) -> list[str]:
    start = answer.start or "the beginning of the run"
    lines = [f"replayed {answer.replayed} steps from {start} (step {answer.first})", *answer.notes]
    if answer.compared:
        lines.append(f"{answer.same} of {answer.compared} replayed steps equal the run's own record exactly")
    if answer.bad is None:
        return [*lines, "every step was finite: loss, gradients, weights and moments"]
    lines.append(f"step {answer.bad} is not finite: loss {answer.loss}, gradient norm {answer.grad_norm}")
    lines.append(
        {True: "deterministic: it came out the same again, twice", None: ""}.get(answer.deterministic, _UNSTEADY)
    )
    if answer.origin is None:
        lines.append("no operator was seen to begin it")
    else:
        lines.append(f"first: {answer.origin.words()}")
        lines += [f"  input {stats.words()}" for stats in answer.origin.inputs]
        lines += [f"  {answer.origin.output.words()}"] if answer.origin.output else []
        lines += [f"  {answer.others} more began without it"] if answer.others else []
    words = {True: "cures it", False: "does not cure it", None: "could not be tried"}
    for rung in answer.rungs:
        lines.append(f"{rung.name} ({' '.join(rung.overrides)}): {words[rung.cured]}{rung.note and ': '}{rung.note}")
    return [*lines, f"fails until it is mended: {path}"]


_UNSTEADY = "not deterministic: run again from the same state, the step came out in another way"
_REMEDY = "give the folder of a run that was started, or a run file"


class DebugNan(Skill[DebugParams, DebugResult]):
    params = DebugParams
    result = DebugResult

    def preconditions(self, params: DebugParams, root: Path) -> list[Missing]:
        if not params.run.exists():
            return [Missing(f"no {params.run}", _REMEDY)]
        from skills.debug_nan.order import run_file

        path = run_file(params.run)
        if not path.is_file():
            return [Missing(f"no {path}", _REMEDY)]
        return [Missing(problem, "make it, or change it with --set") for problem in check_files(load(path, params.set))]

    def steps(self, params: DebugParams, workspace: Workspace) -> DebugResult:
        from skills.debug_nan.order import make_order

        order = make_order(params)
        (workspace.out / ORDER).write_text(order.model_dump_json(indent=1))
        workspace.say(f"replaying {order.run} on {order.ranks} ranks up to step {order.last}")
        done = workspace.run("skills.debug_nan.work", str(workspace.out), seconds=params.seconds)
        if done.returncode:
            raise Failed(f"the replay broke off with {done.returncode}:\n{done.stderr.strip()[-2000:]}")
        answer = Answer.model_validate_json((workspace.out / ANSWER).read_text())
        path = None
        if answer.bad is not None and answer.state is not None:
            path = script.write(workspace.out, workspace.root, order, answer)
        return DebugResult(answer=answer, script=path)

    def postconditions(self, params: DebugParams, result: DebugResult, workspace: Workspace) -> list[str]:
        """The script fails, with the words of the finding, where that is deterministic."""
        if result.script is None or not result.answer.deterministic:
            return []
        done = workspace.run("skills.debug_nan.script", str(result.script), seconds=params.seconds)
        words = result.answer.origin.words() if result.answer.origin else "no operator"
        if done.returncode == 1 and words in done.stdout:
            return []
        return [f"{result.script} returned {done.returncode}, expected 1 and `{words}`:\n{done.stdout}{done.stderr}"]


SKILL = DebugNan()
