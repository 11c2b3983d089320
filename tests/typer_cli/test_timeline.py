"""`pith timeline`: the file it writes, the shares it prints, and what it says where nothing was recorded."""

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from pithtrain.timeline import TIMELINE
from typer_cli.main import app

SPANS = [
    ("layers.0.attention", "forward", 0, 500),
    ("layers.0.dispatch", "launch", 500, 600),
    ("layers.0.dispatch", "wait", 600, 900),
    ("step 2", "step", 0, 1000),
]


def timeline(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["timeline", *map(str, arguments)])


def record(run: Path) -> None:
    (run / TIMELINE).mkdir()
    for rank in range(2):
        path = run / TIMELINE / f"step-00000002.rank-{rank:05d}.json"
        path.write_text(json.dumps({"rank": rank, "spans": SPANS[: 4 - rank]}))


def test_ranks_are_joined_into_one_file_with_their_shares(tmp_path: Path) -> None:
    record(tmp_path)
    result = timeline(tmp_path)
    assert result.exit_code == 0
    where, *rows = [line.split() for line in result.output.splitlines() if line]
    assert " ".join(where).startswith(f"{tmp_path / 'timeline.json'}: 7 spans of 2 ranks in 1 steps; ")
    assert rows == [
        ["rank", "compute", "waits", "other"],
        ["0", "50.0%", "30.0%", "20.0%"],
        ["1", "55.6%", "33.3%", "11.1%"],
    ]
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 7


def test_the_file_can_be_named(tmp_path: Path) -> None:
    record(tmp_path)
    assert timeline(tmp_path, "--out", tmp_path / "here.json").exit_code == 0
    assert (tmp_path / "here.json").is_file() and not (tmp_path / "timeline.json").exists()


def test_a_run_without_a_timeline_is_refused_with_the_remedy(tmp_path: Path) -> None:
    result = timeline(tmp_path)
    assert isinstance(result.exception, ValueError)
    assert str(result.exception).startswith(f"{tmp_path}: no step recorded there, expected one or more; train with ")
    assert "run.timeline_steps=1" in str(result.exception)
    assert not (tmp_path / "timeline.json").exists()
