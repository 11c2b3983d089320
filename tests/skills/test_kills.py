"""Every skill there is, killed at random moments of real runs: no process, no half-changed tree, nothing in the way.

The runs are the pages' examples; where an example needs data that no checkout has, a run of a tiny model stands for it.
Each skill is first run whole. After every kill a quick skill, the toy, has to find nothing in its way; after all of
them the skill itself: it runs whole again, or, if it lands, up to there, where it is killed once more.
"""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from skills.frame import landing, page
from skills.frame.staging import git
from tests.mutants.runner import copy_tree
from tests.runs import make_run
from tests.skills import toy

KILLS, OF_LONGEST = 50, 15
MARK = "PITH_TEST_RUN"  # in the environment of a run, so of all that it starts
TINY = {  # the arguments that stand for an example whose data no checkout has
    "debug-nan": "run.toml --step 3 --no-ladder --set optim.lr=1e20 --set mesh.ep=2",
    "profile-bottleneck": "run.toml --steps 4 --set mesh.ep=2",
}
TOY = ("run", "add-word", "tree", "--weights", "3")
WAYS = [(os.kill, signal.SIGKILL), (os.killpg, signal.SIGKILL), (os.kill, signal.SIGTERM), (os.killpg, signal.SIGINT)]


class Target(NamedTuple):
    """A skill's run; how long it takes whole, and the tree that it leaves."""

    name: str
    words: list[str]
    seconds: float
    left: str


def make_checkout(root: Path) -> Path:
    """A copy of this checkout with the toy in it, and a git history of its own."""
    root.mkdir()
    copy_tree(root)
    toy.add_skill(root)
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "-c", "user.name=x", "-c", "user.email=x@localhost", "commit", "--quiet", "--message=first")
    return root


def tree(root: Path) -> str:
    """git's name for everything in the checkout that it does not ignore."""
    git(root, "add", "--all")
    return git(root, "write-tree").strip()


def put_back(root: Path) -> None:
    git(root, "reset", "--quiet", "--hard")
    git(root, "clean", "--quiet", "-fd")


def start(root: Path, mark: str, *words: str) -> "subprocess.Popen[str]":
    return toy.start_python(root, "-m", "typer_cli.main", "skill", *words, env={MARK: mark})


def alive(mark: str) -> list[str]:
    """Command lines of the processes of a run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has ended, or is somebody else's
            continue
    return found


def in_the_way(root: Path) -> list[str]:
    """What a run leaves that is killed before it lands: the next one has to remove it."""
    return [path for path in toy.left_behind(root) if path.startswith(("pith-skill", str(landing.FOLDER)))]


def run_whole(root: Path, *words: str) -> tuple[float, str]:
    """Runs a skill to its end; the seconds, and the tree that it leaves, which is then put back."""
    begin = time.monotonic()
    process = start(root, "whole", *words, "--json")
    stdout, stderr = process.communicate(timeout=1800)
    assert process.returncode == 0 and json.loads(stdout)["status"] == "done", f"{words}: {stdout[-3000:]}{stderr}"
    seconds, left = time.monotonic() - begin, tree(root)
    assert in_the_way(root) == alive("whole") == [], words
    put_back(root)
    return seconds, left


def targets(root: Path, folder: Path) -> list[Target]:
    """Every skill but the toy, run once; the longest last."""
    found = []
    for skill in page.folders(root):
        if skill.name != TOY[1]:
            tiny = TINY[skill.name].split() if skill.name in TINY else page.read(skill).example()
            words = [str(folder / word) if word == "run.toml" else word for word in tiny]
            found.append(Target(skill.name, words, *run_whole(root, "run", skill.name, *words)))
    return sorted(found, key=lambda target: target.seconds)


def shares(count: int, kills: int) -> list[int]:
    """How often each of `count` skills is killed: the last, which is the longest, seldom."""
    longest = kills * OF_LONGEST // KILLS if count > 1 else kills
    others = [(kills - longest + number) // max(1, count - 1) for number in range(count - 1)]
    return [*others, longest]


def until_it_lands(process: "subprocess.Popen[str]") -> None:
    """Waits until a run says that it lands."""
    assert process.stderr is not None
    said = list[str]()
    while not (said and said[-1].startswith("landing ")):
        said.append(process.stderr.readline())
        assert said[-1], f"it ended, and did not land: {said}"


def kill(root: Path, target: Target, number: int, draw: random.Random, landing_now: bool = False) -> str:
    """Kills a run at a moment whose logarithm is even, or, if `landing_now`, as it lands; says what was seen."""
    mark, before, (strike, signum) = f"{target.name}-{number}", tree(root), WAYS[number % len(WAYS)]
    begin, process = time.monotonic(), start(root, mark, "run", target.name, *target.words, "--json")
    if landing_now:
        until_it_lands(process)
        time.sleep(draw.uniform(0, 0.1))
    else:
        time.sleep(target.seconds ** draw.random())
    seconds = time.monotonic() - begin
    strike(process.pid, signum)
    stdout, _ = process.communicate(timeout=60)
    toy.wait_for(lambda: not alive(mark), seconds=20)
    if process.returncode == 130:  # it was asked to end, so it could clear up itself
        assert not in_the_way(root) and (not stdout or json.loads(stdout)["status"] == "interrupted"), mark
    if (root / landing.FOLDER).exists():
        listing = start(root, "list", "list")
        assert (listing.communicate(timeout=60), listing.returncode)[1] == 0
    now = tree(root)
    assert now in (before, target.left), f"{mark}: half changed: {git(root, 'status', '--porcelain')}"
    assert process.returncode or now == target.left, f"{mark} ended with 0, and has not landed"
    put_back(root)
    run_whole(root, *TOY)
    what = "" if target.left == before else ", landed" if now == target.left else ", not landed"
    return f"{target.name}: {strike.__name__} {signum.name} after {seconds:.1f} s: {process.returncode}{what}"


def campaign(folder: Path, kills: int) -> list[str]:
    """Kills the runs of all skills `kills` times together."""
    draw, root = random.Random(kills), make_checkout(folder / "checkout")
    make_run(folder)
    found, seen = targets(root, folder), list[str]()
    for target, share in zip(found, shares(len(found), kills), strict=True):
        print(f"{target.name}: {target.seconds:.0f} s whole, {share} kills", flush=True)
        lands = target.left != tree(root)
        for number in reversed(range(share)):
            seen.append(kill(root, target, number, draw, landing_now=lands and number == 0))
            print(seen[-1], flush=True)
        if not lands:
            run_whole(root, "run", target.name, *target.words)
    return seen


@pytest.mark.prove
@pytest.mark.timeout(5400)
def test_every_skill_can_be_killed_at_any_moment(tmp_path: Path) -> None:
    seen = campaign(tmp_path, KILLS)
    assert len(seen) == KILLS and sum(": 0" not in line for line in seen) >= KILLS // 2
