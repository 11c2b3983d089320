"""Plants each bug of tests/mutants/*.toml in a copy of the checkout and sees what turns red.

A bug meets `pith verify` first, then its likely catcher, then the whole of `make test`'s pytest run; the first that
fails has caught it. Before any bug is planted, the unchanged copy must pass verify and every likely catcher: a check
that is red anyway catches nothing. Verdicts are kept by commit, so an interrupted run goes on where it stopped.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from spec.document import Mutant, read

ROOT = Path(__file__).resolve().parents[2]
VERDICTS = ROOT / "runs" / "mutants" / "verdicts.json"
VERIFY = "pith verify"
EVERYTHING = "make test"
SECONDS = 900  # for one check; a bug that makes it hang longer is caught by that


@dataclass(frozen=True)
class Verdict:
    """What became of one bug: the check that caught it, or None; and what that check said last."""

    id: str
    catcher: str | None
    output: str


def problems(mutants: Iterable[Mutant], root: Path = ROOT) -> list[str]:
    """Bugs that cannot be planted: their text does not stand in their file exactly once, or nothing would change."""
    found = []
    for mutant in mutants:
        path = root / mutant.file
        times = path.read_text().count(mutant.text) if path.is_file() else 0
        if times != 1:
            found.append(
                f"mutant {mutant.id}: its text stands {times} times in {mutant.file}; it must stand there once"
            )
        elif mutant.text == mutant.replacement:
            found.append(f"mutant {mutant.id}: its replacement is its text; nothing would change")
    return found


def commit(root: Path = ROOT) -> str:
    """The commit checked out, with "+changes" when tracked files differ from it."""
    head = _git(root, "rev-parse", "HEAD")
    return head + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def copy_tree(destination: Path, root: Path = ROOT) -> None:
    """The files git tracks, and new ones it does not ignore, as they are now."""
    for name in _git(root, "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        if (root / name).is_file():
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, destination / name)


def command(check: str) -> list[str]:
    """The command of a check: verify, everything, or a pytest node."""
    if check == VERIFY:
        return [sys.executable, "-m", "typer_cli.main", "verify"]
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not prove"]
    return pytest if check == EVERYTHING else [*pytest, check]


def passes(check: str, tree: Path) -> tuple[bool, str]:
    """Whether a check passes in a tree, and the end of what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command(check), cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {SECONDS} s"
    return done.returncode == 0, (done.stdout + done.stderr)[-2000:]


def judge(mutant: Mutant) -> Verdict:
    """Plants one bug and runs the checks until one fails."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        path = tree / mutant.file
        path.write_text(path.read_text().replace(mutant.text, mutant.replacement))
        for check in dict.fromkeys((VERIFY, mutant.catcher, EVERYTHING)):
            passed, output = passes(check, tree)
            if not passed:
                return Verdict(mutant.id, check, output)
    return Verdict(mutant.id, None, "")


def baseline(mutants: Sequence[Mutant], workers: int = 2) -> list[str]:
    """Checks that fail in the unchanged tree."""
    checks = list(dict.fromkeys([VERIFY, *(mutant.catcher for mutant in mutants)]))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        copy_tree(Path(folder))
        outcomes = list(pool.map(lambda check: passes(check, Path(folder)), checks))
    return [
        f"{check} fails without any bug:\n{output}"
        for check, (passed, output) in zip(checks, outcomes, strict=True)
        if not passed
    ]


def kept(key: str) -> dict[str, Verdict]:
    """Verdicts of an earlier run on this commit, by mutant."""
    if not VERDICTS.is_file():
        return {}
    stored = json.loads(VERDICTS.read_text())
    return {row["id"]: Verdict(**row) for row in stored["verdicts"]} if stored["commit"] == key else {}


def _keep(key: str, verdicts: dict[str, Verdict]) -> None:
    VERDICTS.parent.mkdir(parents=True, exist_ok=True)
    temporary = VERDICTS.with_suffix(".tmp")
    temporary.write_text(json.dumps({"commit": key, "verdicts": [asdict(v) for v in verdicts.values()]}, indent=1))
    temporary.replace(VERDICTS)


def table(mutants: Sequence[Mutant], verdicts: dict[str, Verdict]) -> Table:
    """One row a bug: where it was planted and what caught it."""
    shown = Table("mutant", "file", "caught by", title=score(verdicts))
    for mutant in mutants:
        if mutant.id in verdicts:
            shown.add_row(mutant.id, mutant.file, verdicts[mutant.id].catcher or "[bold red]nothing[/]")
    return shown


def score(verdicts: dict[str, Verdict]) -> str:
    """Caught of planted, and how many of them by verify alone."""
    caught = [verdict for verdict in verdicts.values() if verdict.catcher is not None]
    by_verify = sum(verdict.catcher == VERIFY for verdict in caught)
    return f"{len(caught)} of {len(verdicts)} planted bugs caught, {by_verify} of them by {VERIFY}"


def run(only: Sequence[str] = (), resume: bool = False, workers: int = 2) -> int:
    """Judges every bug (or only those named), prints the table; 0 when all are caught."""
    console = Console(stderr=True)
    mutants = [m for m in read(ROOT).mutants if not only or m.id in only]
    unknown = sorted(set(only) - {m.id for m in mutants})
    wrong = [f"no mutant is called {name}" for name in unknown] + problems(mutants)
    key = commit()
    verdicts = kept(key) if resume else {}
    left = [m for m in mutants if m.id not in verdicts]
    wrong = wrong or (baseline(left) if left else [])
    if wrong:
        console.print("\n".join(wrong), markup=False)
        return 2
    with ThreadPoolExecutor(workers) as pool:
        for future in as_completed([pool.submit(judge, mutant) for mutant in left]):
            verdict = future.result()
            verdicts[verdict.id] = verdict
            _keep(key, verdicts)
            console.print(
                f"{len(verdicts)}/{len(mutants)} {verdict.id}: {verdict.catcher or 'NOT CAUGHT'}", markup=False
            )
    chosen = {m.id: verdicts[m.id] for m in mutants}
    Console().print(table(mutants, chosen))
    return 0 if all(v.catcher is not None for v in chosen.values()) else 1
