"""The skill debug-nan: which value of a run was the first not to be finite, and what cures it."""

from pathlib import Path

from pydantic import Field

from pithtrain.checkpoint import TrainState
from pithtrain.checkpoint.folder import STATE, step_folders
from pithtrain.config import RunConfig, check_files, load, smallest_world
from pithtrain.metrics import METRICS_NAME, read_metrics
from pithtrain.train.plan import CHECKPOINTS, RESOLVED
from skills.debug_nan import script
from skills.debug_nan.work import ANSWER, ORDER, Answer, Order
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


class DebugNan(Skill[DebugParams, DebugResult]):
    params = DebugParams
    result = DebugResult

    def preconditions(self, params: DebugParams, root: Path) -> list[Missing]:
        path = run_file(params.run)
        if not path.is_file():
            return [Missing(f"no {path}", "give the folder of a run that was started, or a run file")]
        return [Missing(problem, "make it, or change it with --set") for problem in check_files(_config(params))]

    def steps(self, params: DebugParams, workspace: Workspace) -> DebugResult:
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


def run_file(run: Path) -> Path:
    return run / RESOLVED if run.is_dir() else run


def _config(params: DebugParams) -> RunConfig:
    return load(run_file(params.run), params.set)


def make_order(params: DebugParams) -> Order:
    """From the parameters and what the run has left."""
    cfg = _config(params)
    own = cfg.checkpoint.resume if isinstance(cfg.checkpoint.resume, Path) else None
    recorded = params.run if (params.run / METRICS_NAME).is_file() else None
    records = [record for record in read_metrics(recorded) if "skipped" in record] if recorded else []
    skipped = [record["step"] for record in records if record["skipped"]]
    last = params.step or min(skipped, default=max((record["step"] for record in records), default=cfg.train.steps))
    folders = [path for path in step_folders(params.run / CHECKPOINTS) if int(path.stem[5:]) < last]
    return Order(
        run=run_file(params.run),
        overrides=tuple(params.set),
        starts=(*folders, own),
        last=last,
        ranks=params.nproc or _ranks(cfg, folders),
        ladder=params.ladder,
        recorded=recorded,
        seconds=params.seconds,
    )


def _ranks(cfg: RunConfig, folders: list[Path]) -> int:
    ranks = smallest_world(cfg.mesh)
    if cfg.mesh.dp == "rest" and folders:
        ranks *= TrainState.read(folders[0] / STATE).mesh.get("dp", 1)
    return ranks


SKILL = DebugNan()
