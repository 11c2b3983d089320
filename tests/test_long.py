"""What takes longer than `make test` allows: whole traces on every mesh, and a run that is killed again and again."""

import json
import os
import random
import signal
from pathlib import Path

import pytest

from golden.cases import CASES, Case
from golden.compare import compare
from golden.verify import replay_world
from pithtrain.train.watch import COMPLETE
from tests.distributed.test_torchrun import processes_of, start, wait_for_steps
from tests.runs import make_run

pytestmark = [pytest.mark.prove, pytest.mark.timeout(1800)]

STEPS, KILLS = 240, 6


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_layout_follows_the_whole_trace(case: Case) -> None:
    expected = replay_world([(case, case.one_rank)], case.steps)[case, case.one_rank]
    assert not isinstance(expected, str), expected
    for layout in case.layouts:
        got = replay_world([(case, layout)], case.steps)[case, layout]
        assert not isinstance(got, str), got
        found = compare(expected, got)
        print(f"{case.name}, {layout}: largest relative difference {found.largest:.1e} over {found.num_steps} steps")
        assert not found.differences, f"{layout}: {found.differences[0]}"


def test_a_run_killed_at_random_moments_ends_as_if_it_never_was(tmp_path: Path) -> None:
    run, moments = make_run(tmp_path), random.Random(0)
    options = [f"train.steps={STEPS}", "checkpoint.interval=3", "train.eval_interval=0", "train.routing=learned"]
    straight = start(run, *options, "run.folder=" + str(tmp_path / "straight"))
    assert straight.wait(600) == COMPLETE, straight.communicate()
    for kill in range(KILLS):
        process = start(run, *options)
        wait_for_steps(process, tmp_path / "out", kill * STEPS // KILLS + moments.randrange(1, STEPS // KILLS))
        for pid in [process.pid, *processes_of(run).values()]:
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    process = start(run, *options)
    assert process.wait(600) == COMPLETE, process.communicate()
    last = f"checkpoints/step-{STEPS:08d}/pith/manifest.json"
    manifests = [json.loads((tmp_path / folder / last).read_text()) for folder in ("straight", "out")]
    assert manifests[0] == manifests[1]
