"""add-expert: what it writes for formulas of many kinds computes them, its bugs are bugs, its edits fit this tree."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from pydantic import ValidationError

from pithtrain.ops.linear import Compute, Groups
from pithtrain.ops.parameter import Weight
from skills.add_expert import edits
from skills.add_expert.bugs import bugs_of
from skills.add_expert.skill import SKILL, AddParams, AddResult, fresh_ids, notes_on
from skills.add_expert.writer import class_name, fields_of, module
from skills.frame import Failed
from spec.document import read
from spec.evaluator import evaluate, sample
from spec.formula import Formula
from spec.parser import parse
from tests.agreement import assert_close
from tests.mutants.runner import copy_tree

ROOT = Path(__file__).resolve().parents[2]
GATED = "gate:F,D up:F,D down:D,F"
FORMULAS = {
    "swish_relu": ("((silu(x @ gate.T) + relu(x @ gate.T)) / 2 * (x @ up.T)) @ down.T", GATED),
    "low_rank": ("x @ a.T @ b.T", "a:4,D b:D,4"),
    "scaled_swiglu": ("(silu(x @ gate.T) * (x @ up.T)) @ down.T * (1 + scale)", f"{GATED} scale:D"),
    "upside_down": ("((x @ up.T) * silu(x @ gate.T)) @ down.T", "up:F,D gate:F,D down:D,F"),
    "squared_silu": ("square(silu(x @ up.T)) @ down.T", "up:F,D down:D,F"),
    "residual": ("x + gelu(relu(x @ a.T) @ b.T) @ c.T", "a:F,D b:2F,F c:D,2F"),
    "bias_gate": ("(sigmoid(gate) * (x @ up.T)) @ down.T + bias", "gate:F up:F,D down:D,F bias:D"),
    "clamped_gate": ("(sigmoid(clamp(x @ gate.T, -3, 3)) * (x @ up.T)) @ down.T", GATED),
    "maxout": ("maximum(x @ a.T, x @ b.T) @ c.T", "a:F,D b:F,D c:D,F"),
    "one_gate": ("sigmoid(x @ g.T) * (elu(x @ up.T) @ down.T)", "g:1,D up:F,D down:D,F"),
    "attention_like": ("softmax(x @ keys.T) @ values.T - x / (2 + mean(square(x))) * v", "keys:3F,D values:D,3F v:D"),
    "shared": ("(x @ a.T) @ c.T + tanh(x @ a.T) ** 3 @ c.T", "a:F,D c:D,F"),
    "brackets": ("x - (x @ a.T - (v - x / (4 / (2 + square(v)))))", "a:D,D v:D"),
    "three_at_once": ("(cos(x @ a.T) * -(x @ b.T) - abs(x @ c.T)) @ d.T", "a:F,D b:F,D c:F,D d:D,F"),
}


def load(text: str, path: Path) -> ModuleType:
    path.write_text(text)
    loader = importlib.util.spec_from_file_location(path.stem, path)
    assert loader is not None and loader.loader is not None
    loaded = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(loaded)
    return loaded


def outcome(loaded: ModuleType, name: str, formula: Formula) -> dict[str, torch.Tensor]:
    """Output and gradients of one expert written for the formula, in fp32, on the sample of the formula."""
    x, values = sample(formula)
    rows = x.detach().float().requires_grad_()
    weights = {}
    for field in fields_of(formula):
        value = torch.cat([values[part.name].detach().float() for part in field.parts])[None]
        weights[field.name] = Weight(value, torch.zeros_like(value))
    experts = getattr(loaded, class_name(name))(**weights)
    output = experts(rows, Groups.of((len(rows),), torch.device("cpu"), Compute()), Compute())
    if output.requires_grad:  # a bug can take every gradient away
        output.backward(torch.ones_like(output))
    found = {"output": output.detach(), "x": torch.zeros_like(rows) if rows.grad is None else rows.grad}
    for field in fields_of(formula):
        parts = weights[field.name].grad[0].split([len(values[part.name]) for part in field.parts])
        found |= dict(zip((part.name for part in field.parts), parts, strict=True))
    return found


@pytest.mark.parametrize("name", FORMULAS)
def test_what_is_written_computes_the_formula(name: str, tmp_path: Path) -> None:
    """Forward and backward; and it declares the formula's weights, each once."""
    formula = parse(*FORMULAS[name])
    loaded = load(module(name, formula), tmp_path / f"{name}.py")
    shapes = getattr(loaded, class_name(name)).shapes(6, 5)
    assert {part: shape for parts in shapes.values() for part, shape in parts.items()} == {
        weight.name: weight.shape(6, 5) for weight in formula.weights
    }
    x, values = sample(formula)
    expected = {"output": evaluate(formula, x, values)}
    leaves = {"x": x, **values}
    expected |= zip(leaves, torch.autograd.grad(expected["output"].sum(), list(leaves.values())), strict=True)
    for what, value in outcome(loaded, name, formula).items():
        assert_close(value, expected[what], what)


def test_products_of_the_same_rows_are_one_and_swiglu_is_fused() -> None:
    for name in ("scaled_swiglu", "upside_down"):
        text = module(name, parse(*FORMULAS[name]))
        assert "swiglu(grouped_linear(x, self.gate_up, groups, compute))" in text
        assert '"gate_up": {"gate": (wide, hidden), "up": (wide, hidden)}' in text
    assert "a, b, c = wide(grouped_linear(x, self.a_b_c, groups, compute)).chunk(3, dim=-1)" in module(
        "three_at_once", parse(*FORMULAS["three_at_once"])
    )
    assert module("shared", parse(*FORMULAS["shared"])).count("self.a,") == 1, "a product used twice is computed once"


@pytest.mark.parametrize("name", ["swish_relu", "scaled_swiglu", "bias_gate", "clamped_gate", "maxout"])
def test_each_bug_stands_once_and_changes_something(name: str, tmp_path: Path) -> None:
    formula = parse(*FORMULAS[name])
    text = module(name, formula)
    expected = outcome(load(text, tmp_path / f"{name}.py"), name, formula)
    bugs = bugs_of(formula)
    assert len(bugs) >= 2
    for number, bug in enumerate(bugs):
        changed = module(name, formula, bug.root)
        old, new = edits.plant(text, changed)
        assert text.count(old) == 1 and text.replace(old, new) == changed
        assert max(old.count("\n"), new.count("\n")) <= 8, f"too long to read: {new}"
        got = outcome(load(changed, tmp_path / f"bug{number}.py"), name, formula)
        assert any(not torch.allclose(got[what], expected[what], rtol=1e-4, atol=1e-6) for what in expected), bug.words


def test_bugs_are_named_by_the_text_of_the_formula() -> None:
    """In words for people, and in ids that are valid and each its own."""
    bugs = {bug.slug: bug.words for bug in bugs_of(parse(*FORMULAS["bias_gate"]))}
    assert (
        bugs["plus-bias-is-lost"] == "`+ bias` is lost" and bugs["gate-gets-no-gradient"] == "`gate` gets no gradient"
    )
    assert bugs["times-x-up-is-lost"] == "`* (x @ up.T)` is lost"
    assert bugs["sigmoid-gate-is-computed-with-tanh"] == "`sigmoid(gate)` is computed with tanh"
    clamped = {bug.slug: bug.words for bug in bugs_of(parse(*FORMULAS["clamped_gate"]))}
    assert clamped["minus-3-is-taken-for-minus-3-75"] == "`-3` is taken for -3.75"
    for slug, words in (bugs | clamped).items():
        assert re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", slug) and len(slug) <= 48 and len(words) < 100
    assert fresh_ids(["a", "b", "a"], {"b", "a-2"}) == ["a", "b-2", "a-3"]


def test_notes_say_what_starts_late() -> None:
    notes = notes_on(parse("x @ w.T + v * (silu(x @ up.T) @ down.T)", "w:D,D up:24,D down:D,24 v:D"))
    assert notes == [
        "v: zero at the start, and not decayed.",
        "down, up: without a gradient until v moved from zero; to have them learn from the first step, "
        "write x @ w.T + (1 + v) * (silu(x @ up.T) @ down.T).",
        "down:D,24, up:24,D: grouped products on GPUs want sizes in multiples of 16.",
    ]


def test_what_is_said_at_the_end() -> None:
    """After a landing: the bugs, how to keep the change, a line to type. After a dry run: that nothing is proven."""
    bugs = ["`+ bias` is lost", "`x` gets no gradient"]
    result = AddResult(
        name="mine", file="f.py", parameters=1, flops=2, case="experts-mine", seed=3, bugs=bugs, notes=[]
    )
    summary = result.summary()
    assert "\n  `+ bias` is lost\n" in summary and "git diff && git commit" in summary
    command = shlex.split(summary.splitlines()[-1])
    sets = ["--set", "model.experts=mine", "--set", "run.folder=runs/mine"]
    assert command == [".venv/bin/pith", "train", "examples/small.toml", *sets]
    assert (ROOT / command[2]).is_file()
    outlook = result.outlook()
    assert outlook.startswith("Nothing was proven") and "plant 2 bugs" in outlook and "git" not in outlook


def test_edits_fit_the_files_as_they_are() -> None:
    """Each adds its line where the others are; a second golden row replaces the first."""
    choices = edits.add_to_literal((ROOT / "pithtrain/choices.py").read_text(), "maxout")
    assert choices.count(', "maxout"]') == 1
    build = edits.add_to_match((ROOT / "pithtrain/layers/experts/build.py").read_text(), "maxout", "MaxoutExperts")
    assert build.endswith('        case "maxout":\n            return MaxoutExperts\n')
    cases = edits.add_golden_case((ROOT / "golden/cases.py").read_text(), "maxout", 0)
    cases = edits.add_golden_case(cases, "maxout", 7)
    assert '    ("maxout", 7),\n)\n' in cases and cases.count('"maxout"') == 1
    readme = edits.add_to_readme((ROOT / "README.md").read_text(), "maxout", "x @ a.T")
    assert "`gelu(x @ up.T) @ down.T` |\n| `maxout` | `x @ a.T` |\n\n" in readme
    with pytest.raises(Failed, match=r"golden/cases.py: no .*EXPERT_TYPES"):
        edits.add_golden_case("CASES = ()\n", "maxout", 0)


def test_budgets_are_moved_within_the_limit() -> None:
    text = "\n".join(
        f'{{ name = "{room}", paths = ["p/{room}"], budget = {budget} }},' for room, budget in ROOMS.items()
    )
    fitted = edits.fit_budgets(text, {"a": 130, "b": 60, "c": 50}, 250)
    assert [line.split("budget = ")[1] for line in fitted.splitlines()] == ["130 },", "60 },", "60 },"]


ROOMS = {"a": 100, "b": 90, "c": 60}
REFUSED = [
    ("tanhGated2", "tanh(x @ a.T)", "a:D,D", "expected small letters, digits, single underscores; write tanh_gated_2"),
    ("my experts", "tanh(x @ a.T)", "a:D,D", "write my_experts"),
    ("class", "tanh(x @ a.T)", "a:D,D", "write class_experts"),
    ("mine", "tanh(x @ groups.T)", "groups:D,D", "'groups' has a meaning of its own"),
    ("mine", "swosh(x @ a.T)", "a:D,D", "unknown function 'swosh'"),
]


@pytest.mark.parametrize(("name", "formula", "weights", "said"), REFUSED, ids=[row[3] for row in REFUSED])
def test_what_cannot_be_an_expert_is_a_bad_parameter(name: str, formula: str, weights: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        AddParams(name=name, formula=formula, weights=weights)


def test_what_is_missing_is_said_with_its_remedy(tmp_path: Path) -> None:
    """A name that is taken, no lines left, a checkout that was wrong before."""
    params = AddParams(name="maxout", formula=FORMULAS["maxout"][0], weights=FORMULAS["maxout"][1])
    assert SKILL.preconditions(params, ROOT) == []
    with pytest.raises(ValueError, match="no gradient reaches x"):
        SKILL.preconditions(params.model_copy(update={"formula": "x * 0 + b", "weights": "b:D"}), ROOT)
    with pytest.raises(ValueError, match="'geglu' already"):
        SKILL.preconditions(params.model_copy(update={"name": "geglu"}), ROOT)
    (tmp_path / "spec").mkdir()
    (tmp_path / "pithtrain").mkdir()
    rules = (ROOT / "spec/architecture.toml").read_text()
    (tmp_path / "spec/architecture.toml").write_text(rules)
    (tmp_path / "pithtrain/choices.py").write_text((ROOT / "pithtrain/choices.py").read_text())
    (tmp_path / "pithtrain/long.py").write_text("\n" * 6990)
    [missing] = SKILL.preconditions(params, tmp_path)
    assert "room in pithtrain/: it has" in missing.what and "spec/architecture.toml" in missing.remedy
    (tmp_path / "pithtrain/long.py").unlink()
    [missing] = SKILL.preconditions(params, tmp_path)
    assert "whose spec is clean" in missing.what and "pith spec check" in missing.remedy


@pytest.mark.prove
@pytest.mark.timeout(3000)
def test_a_type_is_added_and_proven(tmp_path: Path) -> None:
    """The whole skill, in a copy of the checkout: minutes."""
    copy_tree(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = ["maxout", FORMULAS["maxout"][0], "--weights", FORMULAS["maxout"][1], "--json"]
    command = [sys.executable, "-m", "typer_cli.main", "skill", "run", "add-expert", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
    assert report["changes"]["pithtrain/layers/experts/maxout.py"] == "created"
    assert report["result"]["bugs"][0] == "`maximum(x @ a.T, x @ b.T)` is computed with minimum"
    mutants = [mutant for mutant in read(tmp_path).mutants if mutant.statement == "experts.maxout"]
    assert len(mutants) == len(report["result"]["bugs"]) >= 2
