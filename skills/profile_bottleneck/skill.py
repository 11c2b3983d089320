"""profile-bottleneck: where the time of a run's steps goes, and what of it is too much."""

import json
import shutil
from pathlib import Path

from pydantic import Field

from pithtrain.config import ConfigError, check_files, check_run, load, refusal, smallest_world
from skills.frame import Failed, Missing, Params, Skill, Workspace
from skills.profile_bottleneck.profile import Profile

TOLERANCE = 0.01  # of a step: what its causes may differ from it
SECONDS = 1800.0
PROFILE = "profile.json"


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


class ProfileBottleneck(Skill[ProfileParams, Profile]):
    params, result = ProfileParams, Profile

    def preconditions(self, params: ProfileParams, root: Path) -> list[Missing]:
        run, sets, _ = _source(params)
        if not run.is_file():
            return [Missing(f"{run}: no such file", "name a run file, or the folder of a run that has started")]
        from pithtrain.models.qwen3_moe import load_architecture

        cfg = load(run, sets)
        arch = load_architecture(str(cfg.model.config), cfg.model.experts)
        if problems := check_run(cfg, arch, params.nproc or smallest_world(cfg.mesh), None):
            raise ConfigError(refusal(str(run), problems))
        missing = [Missing(problem, "see pith data prepare --help, pith train --help") for problem in check_files(cfg)]
        if params.compare is not None and not params.compare.is_file():
            missing.append(Missing(f"{params.compare}: no such file", "name the profile.json of an earlier profile"))
        elif params.compare is not None:
            _earlier(params.compare)
        return missing

    def steps(self, params: ProfileParams, workspace: Workspace) -> Profile:
        from skills.profile_bottleneck.evaluation import evaluate

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
        profile = evaluate(workspace.out, None if params.compare is None else _earlier(params.compare))
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
    from pithtrain.checkpoint.folder import step_folders
    from pithtrain.train.plan import CHECKPOINTS, RESOLVED

    folders = step_folders(params.run / CHECKPOINTS)
    newest = str(max(folders, key=lambda folder: folder.name)) if folders else "never"
    return params.run / RESOLVED, params.set, newest


def _earlier(path: Path) -> Profile:
    """A profile.json, or what --json printed. Raises ValueError for another file."""
    try:
        fields = json.loads(path.read_text())
        return Profile.model_validate(fields.get("result", fields))
    except (ValueError, AttributeError) as error:
        what = str(error).splitlines()[0]
        raise ValueError(f"--compare: {path} is no profile ({what}); name the profile.json of an earlier one") from None


SKILL = ProfileBottleneck()
