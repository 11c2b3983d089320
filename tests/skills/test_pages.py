"""Pages of skills: what `pith skill check` finds in a false one, nothing in a true one, and nothing in our own."""

import json
import subprocess
import sys
from pathlib import Path

from typer.main import get_command

from skills.frame import page as pages
from skills.frame.checking import page_problems
from tests.skills.toy import PAGE, ROOT, make_checkout, pith, run_python
from typer_cli.main import app

# What is written instead of what, and what is then said.
FALSE = [
    ("name: add-word", "name: Add--word", "expected 1 to 64 lowercase letters and digits"),
    ("name: add-word", "name: add-words", "expected that of its folder, 'add-word'"),
    ("description: Adds", "summary: Adds", "unknown keys summary"),
    ("description: Adds a word to", f"description: {'x' * 1024}", "expected a text of 1 to 1024 characters"),
    ('"skills.add_word:SKILL"', '"skills.add_word:NONE"', "got NoneType, expected module:object"),
    ('"skills.add_word:SKILL"', '"skills.no_such:SKILL"', "cannot be imported"),
    ('"skills.add_word:SKILL"', '".add_word:SKILL"', "expected module:object"),
    ('  pith.example: "tree --weights 3"', "  pith.example: 3", "expected texts by text"),
    ('"tree --weights 3"', '"tree \'weights"', "No closing quotation"),
    ('  pith.tests: "tests/test_words.py::test_words"\n', "", "metadata has no pith.tests"),
    ("# Add a word", "line\n" * 110, "128 lines; expected at most 120"),
    ("---\n# Add", "# Add", "no front matter"),
    ("../../words.txt", "../words.txt", "link ../words.txt: no such file"),
    ("`words.txt`", "`spec/words.txt`", "spec/words.txt: no such file or folder"),
    ("AddWord.steps", "AddWord.stairs", "skills.add_word:AddWord.stairs: no such symbol"),
    ("`train.steps`", "`train.stairs`", "train.stairs: no such symbol"),
    ("`pith skill list`", "`pith skill lst`", "no sub-command lst of pith skill; there are list"),
    ("`pith verify --case NAME`", "`pith verify --cases NAME`", "no option --cases of pith verify"),
    ("tree --weights 3  #", "Tree --weights 3  #", "WORD: got 'Tree', expected lowercase letters"),
    ("NAME --mood calm", "add-word --mod calm", "no option --mod of the skill add-word"),
    ("pith skill run add-word tree --weights 3 --dry-run", "pith skill run add-tree", "no skill is called 'add-tree'"),
    ("pith skill run add-word tree --weights 3 --dry-run", "make tests", "no target tests in the Makefile"),
]
CODE = """
import json, sys
from pathlib import Path
from typer.main import get_command
from skills.frame.checking import page_problems
from typer_cli.main import app
folder = Path.cwd() / "skills/add-word"
for text in json.load(open(sys.argv[1])):
    (folder / "SKILL.md").write_text(text)
    print(json.dumps([*page_problems(Path.cwd(), folder, get_command(app))]))
"""


def test_a_false_page_is_reported_and_a_true_one_is_not(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    assert all(PAGE.count(old) == 1 for old, _, _ in FALSE)
    (tmp_path / "pages.json").write_text(json.dumps([PAGE, *(PAGE.replace(old, new) for old, new, _ in FALSE)]))
    done = run_python(checkout, "-c", CODE, str(tmp_path / "pages.json"))
    assert done.returncode == 0, done.stderr
    first, *others = [json.loads(line) for line in done.stdout.splitlines()]
    assert first == []
    for problems, (_, new, said) in zip(others, FALSE, strict=True):
        assert any(said in problem for problem in problems), f"{new}: {problems}"


def test_check_runs_the_example_and_the_tests(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    done = pith(checkout, "skill", "check")
    assert (done.returncode, done.stdout) == (0, "PASS add-word\n1 of 1 skills pass\n"), done.stdout + done.stderr
    (checkout / "tests/test_words.py").write_text("def test_words() -> None:\n    assert False\n")
    (checkout / "skills/add-word/SKILL.md").write_text(PAGE.replace('"tree --weights 3"', '"Tree --weights 3"'))
    (checkout / "skills/odd").mkdir()
    (checkout / "skills/odd/SKILL.md").write_bytes(b"---\nname: odd\n---\n\xe9\n")
    done = pith(checkout, "skill", "check", "odd", "add-word")
    assert done.returncode == 1 and done.stdout.startswith("FAIL odd\n"), done.stderr
    assert "FAIL add-word" in done.stdout and "0 of 2 skills pass" in done.stdout
    assert "--dry-run --json` returned 3, expected 0" in done.stdout and "1 failed" in done.stdout


def test_a_page_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    (checkout / "skills/odd").mkdir()
    (checkout / "skills/odd/SKILL.md").write_bytes(b"---\nname: odd\n---\n\xe9\n")
    done = pith(checkout, "skill", "list")
    assert done.returncode == 0 and "Adds a word" in done.stdout and "as UTF-8" in done.stdout, done.stderr
    done = pith(checkout, "skill", "run", "odd")
    assert done.returncode == 1 and "odd/SKILL.md: cannot be read as UTF-8 text" in done.stderr, done.stderr


def test_our_own_pages_name_only_what_exists() -> None:
    problems = {folder.name: [*page_problems(ROOT, folder, get_command(app))] for folder in pages.folders(ROOT)}
    assert not any(problems.values()), problems


def test_reading_about_a_skill_imports_no_torch() -> None:
    """Page, schemas and --help come at once: what a skill works with is imported when it works."""
    code = """
import sys
from pathlib import Path
from skills.frame import page
from skills.frame.catalog import show_skill
for folder in page.folders(Path.cwd()):
    show_skill(folder.name, True)
    assert "torch" not in sys.modules, f"{folder.name} imports torch"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
