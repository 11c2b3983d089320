"""`pith schedule`: the chart as text, the figures under it, the picture, what is refused."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion
from typer.testing import CliRunner

from typer_cli.main import app

COLUMNS = {"COLUMNS": "100", "NO_COLOR": "1"}


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["schedule", *arguments], env=COLUMNS, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.output.splitlines())


@pytest.mark.parametrize(
    "arguments",
    [
        "1f1b --pp 4 --microbatches 4",
        "dualpipev --pp 4 --microbatches 8",
        "interleaved --pp 2 --microbatches 3 --chunks 3 --exchange 0",
        "zbv --pp 2 --microbatches 4 --weight-grad 0.5 --transfer 0.25",
    ],
)
def test_charts(arguments: str, snapshot: SnapshotAssertion) -> None:
    assert printed(*arguments.split()) == snapshot


def test_schedules_are_compared_in_one_table(snapshot: SnapshotAssertion) -> None:
    assert printed("compare", "--pp", "4", "--microbatches", "8") == snapshot


def test_all_of_the_comparison_fits_a_terminal() -> None:
    result = CliRunner().invoke(app, ["schedule", "compare"], env={"COLUMNS": "80"})
    rows = [line.split() for line in result.output.splitlines() if "%" in line]
    assert [row[:3] for row in rows[:4]] == [["4", "8", kind] for kind in ("1f1b", "interleaved", "zbv", "dualpipev")]
    assert len(rows) == 2 * 4 * 4 and all(len(row) == 8 for row in rows)
    assert "…" not in result.output


def test_no_row_is_wider_than_the_terminal_and_none_is_lost() -> None:
    output = printed("1f1b", "--pp", "2", "--microbatches", "64")
    lines = [line for line in output.splitlines() if line.startswith("rank 0")]
    assert all(len(line) <= 100 for line in output.splitlines())
    cells = " ".join(line.removeprefix("rank 0") for line in lines).split()
    assert sorted(cells) == sorted(f"{kind}{number}" for kind in "FB" for number in range(64))


def test_the_picture_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "dualpipev.svg"
    printed("dualpipev", "--pp", "4", "--microbatches", "16", "--svg", str(path))
    text = path.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    words = " ".join("".join(ElementTree.fromstring(text).itertext()).replace("\xa0", " ").split())
    assert "F0" in words and "W15" in words and "bubble: " in words and words.count("rank 3 ") >= 1
    assert words.count("time 0 to ") == 1, "one band, however wide"
    assert "#8ab4f8" in text and "#81c995" in text, "forwards and backwards have colours"
    assert "url(http" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "gpipe",
            "schedule gpipe: no such schedule, expected one of 1f1b, interleaved, zbv, dualpipev, compare; "
            "choose one of them",
        ),
        (
            "zbv --chunks 3",
            'schedule zbv: got 3 chunks per rank, expected 2; leave them out, or take "interleaved"',
        ),
        (
            "dualpipev --exchange 2",
            "costs: got an exchange of 2, a forward of 1, an input gradient of 1, expected an exchange that is part "
            "of both, and not all 0; give a smaller --exchange or longer times",
        ),
        (
            "zbv --svg /nowhere/at/all.svg",
            "--svg /nowhere/at/all.svg: no folder /nowhere/at, expected one that is there; make it first",
        ),
    ],
)
def test_refusals(arguments: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        CliRunner().invoke(app, ["schedule", *arguments.split()], catch_exceptions=False)
    assert str(error.value) == message


def test_schedule_explains_itself() -> None:
    result = CliRunner().invoke(app, ["schedule", "--help"])
    assert result.exit_code == 0 and "Usage: " in result.output and "--microbatches" in result.output
