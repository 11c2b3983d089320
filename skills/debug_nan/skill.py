"""The skill debug-nan: which value of a run was the first not to be finite, and what cures it."""

from pathlib import Path

from pydantic import Field

from pithtrain.config import ConfigError, check_files, check_run, load, refusal
from skills.debug_nan import script, words
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
    seconds: float = Field(3600, gt=0, allow_inf_nan=False)
    """For the whole investigation."""


class DebugResult(Result):
    answer: Answer
    """What was replayed, the step that is not finite, and the first value in it that is not."""
    script: Path | None
    """A script that fails while the step is not finite; None where every step was finite."""

    def summary(self) -> str:
        return "\n".join(words.summary(self.answer, self.script))


_REMEDY = "give the folder of a run that was started, or a run file"


class DebugNan(Skill[DebugParams, DebugResult]):
    params = DebugParams
    result = DebugResult

    def preconditions(self, params: DebugParams, root: Path) -> list[Missing]:
        if not params.run.exists():
            return [Missing(f"no {params.run}", _REMEDY)]
        from pithtrain.models.qwen3_moe import load_architecture
        from skills.debug_nan.order import make_order, other_run, run_file

        path = run_file(params.run)
        if not path.is_file():
            return [Missing(f"no {path}", _REMEDY)]
        cfg = load(path, params.set)
        if missing := check_files(cfg):
            return [Missing(problem, "make it, or change it with --set") for problem in missing]
        order = make_order(params)
        arch = load_architecture(str(cfg.model.config), cfg.model.experts)
        if problems := check_run(cfg, arch, order.ranks, None):
            raise ConfigError(refusal(str(path), problems))
        return [*other_run(order)]

    def steps(self, params: DebugParams, workspace: Workspace) -> DebugResult:
        from skills.debug_nan.order import make_order

        order = make_order(params)
        (workspace.out / ORDER).write_text(order.model_dump_json(indent=1))
        for note in order.notes:
            workspace.say(note)
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
        """The replay is the run, unless --set changed it; the script fails, with the words of the finding, where that
        is deterministic.
        """
        answer = result.answer
        if answer.is_another_run:
            return [*words.summary(answer, None), words.REMEDY]
        if result.script is None or not answer.deterministic:
            return []
        done = workspace.run("skills.debug_nan.script", str(result.script), seconds=params.seconds)
        said = answer.origin.words() if answer.origin else "no operator"
        if done.returncode == 1 and said in done.stdout:
            return []
        return [f"{result.script} returned {done.returncode}, expected 1 and `{said}`:\n{done.stdout}{done.stderr}"]


SKILL = DebugNan()
