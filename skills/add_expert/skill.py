"""The skill: parameters, what it needs, the files it writes, and what proves them."""

import importlib.util
import keyword
import re
from collections.abc import Callable
from pathlib import Path

from pydantic import Field, field_validator, model_validator

from skills.add_expert import edits
from skills.add_expert.writer import RESERVED, class_name, module
from skills.frame import Failed, Missing, Params, Result, Skill, Workspace
from spec.check import check, room_lines
from spec.document import Mutant, Rules, read
from spec.formula import Formula
from spec.parser import parse
from spec.source import count_lines, python_files

FOLDER = "pithtrain/layers/experts"
ORACLE = "tests/layers/test_experts.py"
ALSO = (  # what else names every type
    "tests/test_config.py",
    "tests/models/test_qwen3_moe.py",
    "tests/models/test_names.py",
    "tests/mutants/test_runner.py::test_every_mutant_can_be_planted",
)
PYTEST = ("pytest", "-x", "-q", "-p", "no:cacheprovider")
TOOLS = ("ruff", "mypy", "pytest", "transformers")
RUN = "examples/small.toml"
HIDDEN, WIDE = 2048, 768  # of Qwen3-30B-A3B, for the counts that are shown


class AddParams(Params):
    """A new type of experts."""

    name: str
    """The type's name: small letters, digits and single underscores. It becomes a choice of `model.experts`."""
    formula: str
    """What one expert computes from x [.., D], as `(silu(x @ gate.T) * (x @ up.T)) @ down.T`."""
    weights: str = Field(kw_only=True)
    """The formula's weights and their sizes, as "gate:F,D up:F,D down:D,F"; D hidden size, F the expert's own."""
    source: str = "pith"
    """Where the formula is from: paper and section."""

    @field_validator("name")
    @classmethod
    def _named(cls, name: str) -> str:
        if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name) or len(name) > 40:
            words = re.findall("[A-Z]*[a-z]+|[A-Z0-9]+", name)
            better = "_".join(words).lower() if words and words[0][0].isalpha() else "my_experts"
            better = f"{name}_experts" if better == name else better
            raise ValueError(f"got {name!r}, expected small letters, digits, single underscores; write {better[:40]}")
        return name

    @model_validator(mode="after")
    def _readable(self) -> "AddParams":
        if taken := [weight.name for weight in self.parsed().weights if weight.name in RESERVED]:
            raise ValueError(f"weights: {taken[0]!r} has a meaning of its own in the code; call the weight otherwise")
        return self

    def parsed(self) -> Formula:
        """Raises ValueError with the place of what is wrong."""
        return parse(self.formula, self.weights)

    @property
    def file(self) -> str:
        return f"{FOLDER}/{self.name}.py"

    @property
    def slug(self) -> str:
        return self.name.replace("_", "-")

    @property
    def case(self) -> str:
        return f"experts-{self.slug}"

    @property
    def mutants(self) -> str:
        return f"tests/mutants/expert_{self.name}.toml"


class AddResult(Result):
    """What was added."""

    name: str
    """The type's name."""
    file: str
    """Its implementation."""
    parameters: int
    """Parameters of one expert with hidden size 2048 and expert size 768."""
    flops: int
    """FLOPs of one token forward in one expert of that size."""
    case: str
    """The golden case."""
    seed: int
    """The golden case's seed, with which no choice of experts is close."""
    bugs: list[str]
    """Bugs planted in the implementation, by the formula's text; each is caught, or nothing lands."""
    notes: list[str]
    """What to know about it."""

    def summary(self) -> str:
        counts = f"{self.parameters:,} parameters an expert and {self.flops:,} FLOPs a token at {HIDDEN} x {WIDE}"
        lines = [f"{self.name}: {self.file}, {counts}.", *self.notes]
        lines.append(f"Golden case {self.case}, seed {self.seed}. Planted in it and caught, {len(self.bugs)} bugs:")
        lines += [f"  {bug}" for bug in self.bugs]
        lines.append("Review it, and commit it so that git can undo it:")
        lines.append(f'  git add -N . && git diff && git commit -a -m "Experts of type {self.name}"')
        lines.append("Train with it, in a run folder of its own (`make train` prepares the data):")
        sets = f"--set model.experts={self.name} --set run.folder=runs/{self.name}"
        return "\n".join([*lines, f"  .venv/bin/pith train {RUN} {sets}"])

    def outlook(self) -> str:
        return (
            "Nothing was proven, and nothing has changed. A run without --dry-run writes the same, takes minutes to\n"
            f"hold {self.name} against its formula in fp32, bf16 and FP8, replay golden case {self.case} on other\n"
            f"meshes, and plant {len(self.bugs)} bugs that must each be caught. Then all files land together."
        )


class AddExpert(Skill[AddParams, AddResult]):
    params = AddParams
    result = AddResult
    writes = True

    def preconditions(self, params: AddParams, root: Path) -> list[Missing]:
        if params.name in {expert.name for expert in read(root).experts} or (root / params.file).exists():
            raise ValueError(f"NAME: there is a type, or a file, {params.name!r} already; choose another name")
        missing = [
            Missing(f"the package {tool}", "make env") for tool in TOOLS if importlib.util.find_spec(tool) is None
        ]
        rules = _rules(root)
        held, needed = count_lines(python_files(root, rules.total.path)), _lines_needed(params, root)
        if held + needed > rules.total.lines:
            held_of = f"it has {held} lines of at most {rules.total.lines}"
            what = f"room in {rules.total.path}/: {held_of}, this type takes {needed}"
            remedy = "remove a type that is not used, or raise `lines` of `total` in spec/architecture.toml"
            missing.append(Missing(what, remedy))
        if not missing:
            from spec.evaluator import refuse_useless  # torch takes seconds to import, so all else is looked at first

            refuse_useless(params.parsed())
        if not missing and (problems := check(root)):
            what = f"a checkout whose spec is clean before anything is added: {problems[0]}"
            missing.append(Missing(what, "mend it; .venv/bin/pith spec check shows all of it"))
        return missing

    def steps(self, params: AddParams, workspace: Workspace) -> AddResult:
        formula, root = params.parsed(), workspace.root
        for note in (notes := notes_on(formula)):
            workspace.say(note)
        workspace.say(f"writing {params.file}")
        _change(root, params.file, lambda _: module(params.name, formula))
        _change(root, "pithtrain/choices.py", lambda text: edits.add_to_literal(text, params.name))
        cls = class_name(params.name)
        _change(root, f"{FOLDER}/build.py", lambda text: edits.add_to_match(text, params.name, cls))
        _run(workspace, "ruff", "check", "--quiet", "--fix", "--select", "I", f"{FOLDER}/build.py")
        _run(workspace, "ruff", "format", "--quiet", "pithtrain/choices.py", f"{FOLDER}/build.py", params.file)
        _change(root, "spec/experts.toml", lambda text: f"{text.rstrip()}\n\n{_statement(params)}")
        _change(root, "README.md", lambda text: edits.add_to_readme(text, params.name, formula.text))
        _fit_budgets(root)
        _run(workspace, "typer_cli.main", "spec", "schema", "--write")
        bugs = _plant(params, formula, workspace)
        seed = _make_golden(params, workspace)
        return AddResult(
            name=params.name,
            file=params.file,
            parameters=formula.num_parameters(HIDDEN, WIDE),
            flops=formula.flops(HIDDEN, WIDE),
            case=params.case,
            seed=seed,
            bugs=bugs,
            notes=notes,
        )

    def postconditions(self, params: AddParams, result: AddResult, workspace: Workspace) -> list[str]:
        touched = [params.file, f"{FOLDER}/build.py", "pithtrain/choices.py", "golden/cases.py"]
        cache = f"--cache-dir={workspace.out.parent / 'mypy'}"
        checks = (
            ("the formula holds, in every precision", (*PYTEST, ORACLE)),
            ("its code is clean", ("ruff", "check", *touched)),
            ("its code is formatted", ("ruff", "format", "--check", *touched)),
            ("its types hold", ("mypy", cache, *touched)),
            ("the spec is clean", ("typer_cli.main", "spec", "check")),
            ("config and weights' names know it", (*PYTEST, *ALSO)),
            ("meshes agree", ("typer_cli.main", "verify", "--case", params.case)),
        )
        for what, command in checks:
            workspace.say(what)
            if failures := workspace.failures(*command, seconds=600):
                return failures
        return uncaught(params, workspace)


def uncaught(params: AddParams, workspace: Workspace) -> list[str]:
    """Plants each bug of the new module in turn, and says which the oracle test lets pass."""
    path, found = workspace.root / params.file, []
    text = path.read_text(encoding="utf-8")
    mutants = [mutant for mutant in read(workspace.root).mutants if mutant.file == params.file]
    for mutant in mutants:
        workspace.say(f"planting {mutant.id}")
        path.write_text(text.replace(mutant.text, mutant.replacement), encoding="utf-8")
        try:
            done = workspace.run(*PYTEST, mutant.catcher, "-k", params.name, seconds=300)
        finally:
            path.write_text(text, encoding="utf-8")
        if done.returncode != 1:
            found.append(
                f"{mutant.id}: {mutant.catcher} ended with {done.returncode}, expected 1: the bug is not caught"
            )
    return found


def _change(root: Path, name: str, edit: Callable[[str], str]) -> None:
    path = root / name
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    path.write_text(edit(text), encoding="utf-8")


def _run(workspace: Workspace, *command: str, seconds: float = 300) -> str:
    done = workspace.run(*command, seconds=seconds)
    if done.returncode:
        raise Failed(
            f"`{' '.join(command)}` returned {done.returncode}:\n{(done.stdout + done.stderr).strip()[-2000:]}"
        )
    return done.stdout


def _rules(root: Path) -> Rules:
    rules = read(root).rules
    if rules is None:
        raise ValueError("spec/architecture.toml cannot be read; `pith spec check` says why")
    return rules


def _lines_needed(params: AddParams, root: Path) -> int:
    """Of the module, its import and case, and of a list of types that no longer fits one line."""
    literal = (root / "pithtrain/choices.py").read_text(encoding="utf-8")
    longest = max(map(len, edits.add_to_literal(literal, params.name).splitlines()))
    types = len(read(root).experts) + 2 if longest > 120 else 0
    return module(params.name, params.parsed()).count("\n") + 3 + types


def _statement(params: AddParams) -> str:
    formula = params.parsed()
    return edits.table(
        "expert",
        {
            "id": f"experts.{params.slug}",
            "title": f"Experts of type {params.name}",
            "formula": formula.text,
            "weights": " ".join(params.weights.split()),
            "text": "The formula, forward and backward, in every precision and on every mesh. Vectors start at zero.",
            "source": params.source,
            "code": [f"{FOLDER.replace('/', '.')}.{params.name}:{class_name(params.name)}"],
            "check": [ORACLE],
        },
    )


def _fit_budgets(root: Path) -> None:
    rules = _rules(root)
    rooms = [room for room in rules.room if room.paths[0].startswith(rules.total.path)]
    lines = {room.name: room_lines(root, room) for room in rooms}
    if sum(lines.values()) > rules.total.lines:
        raise Failed(
            f"{rules.total.path}/ would have {sum(lines.values())} lines, at most {rules.total.lines}; free some"
        )
    _change(root, "spec/architecture.toml", lambda text: edits.fit_budgets(text, lines, rules.total.lines))


def _plant(params: AddParams, formula: Formula, workspace: Workspace) -> list[str]:
    """Writes the bugs of the new module as tests/mutants has them; what they are, in words."""
    from skills.add_expert.bugs import bugs_of  # it needs torch

    bugs, root = bugs_of(formula), workspace.root
    drafts = [workspace.out / f"{params.name}-{number}.py" for number in range(len(bugs))]
    for bug, draft in zip(bugs, drafts, strict=True):
        draft.write_text(module(params.name, formula, bug.root), encoding="utf-8")
    _run(workspace, "ruff", "format", "--quiet", "--config", "pyproject.toml", *map(str, drafts))
    text = (root / params.file).read_text(encoding="utf-8")
    ids = fresh_ids([f"expert-{params.slug}-{bug.slug}" for bug in bugs], {mutant.id for mutant in read(root).mutants})
    mutants = [
        Mutant(id=id_, file=params.file, text=old, replacement=new, catcher=ORACLE, statement=f"experts.{params.slug}")
        for id_, draft in zip(ids, drafts, strict=True)
        for old, new in [edits.plant(text, draft.read_text(encoding="utf-8"))]
    ]
    head = f"# Planted bugs in the experts of type {params.name}.\n"
    rows = [edits.table("mutant", mutant.model_dump()) for mutant in mutants]
    (root / params.mutants).write_text("\n".join([head, *rows]), encoding="utf-8")
    return [bug.words for bug in bugs]


def fresh_ids(ids: list[str], taken: set[str]) -> list[str]:
    """The ids, each with a number behind it where it is taken already."""
    found: list[str] = []
    for name in ids:
        names = [name, *(f"{name}-{number}" for number in range(2, len(ids) + len(taken) + 2))]
        found.append(next(each for each in names if each not in taken.union(found)))
    return found


def _make_golden(params: AddParams, workspace: Workspace) -> int:
    """Row and trace of the golden case; the seed found."""
    root = workspace.root
    _change(root, "golden/cases.py", lambda text: edits.add_golden_case(text, params.name, 0))
    workspace.say("looking for a seed")
    seed = int(_run(workspace, "skills.add_expert.seed", params.case))
    _change(root, "golden/cases.py", lambda text: edits.add_golden_case(text, params.name, seed))
    workspace.say(f"recording golden/{params.case}.json")
    reason = f"Experts of type {params.name} are new."
    _run(workspace, "typer_cli.main", "verify", "--update", "--case", params.case, "--reason", reason)
    return seed


def notes_on(formula: Formula) -> list[str]:
    """What can be said before a formula is tried in training."""
    from spec.evaluator import idle_at_start, with_ones  # they need torch

    notes = []
    vectors = [weight.name for weight in formula.weights if len(weight.sizes) == 1]
    if vectors:
        notes.append(f"{', '.join(vectors)}: zero at the start, and not decayed.")
    if idle := sorted(idle_at_start(formula)):
        better = f"; to have them learn from the first step, write {text}" if (text := with_ones(formula)) else ""
        notes.append(f"{', '.join(idle)}: without a gradient until {', '.join(vectors)} moved from zero{better}.")
    odd = [
        str(weight) for weight in formula.weights for size in weight.sizes[:2] if not size.letter and size.count % 16
    ]
    matrices = {str(weight) for weight in formula.weights if len(weight.sizes) == 2}
    if fixed := sorted(matrices.intersection(odd)):
        notes.append(f"{', '.join(fixed)}: grouped products on GPUs want sizes in multiples of 16.")
    return notes


SKILL = AddExpert()
