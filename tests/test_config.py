"""The run config: what is read, what is refused and in which words, what the fingerprint covers."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import pytest

from pithtrain.config import (
    ConfigError,
    MeshShape,
    RunConfig,
    check_files,
    check_run,
    fingerprint,
    json_schema,
    load,
    parse,
    refusal,
    resolve_mesh,
    smallest_world,
)
from pithtrain.config.sections import MeshConfig, PipelineConfig, Preset
from pithtrain.models.architecture import Architecture

ROOT = Path(__file__).parents[1]

RUN = """
[model]
config = "qwen3-moe-tiny"
[data]
train = "data/train"
validation = "data/validation"
sequence_length = 16
[batch]
global_batch_size = 8
num_microbatches = 2
[mesh]
ep = 2
[train]
steps = 100
[run]
folder = "runs/one"
"""

ARCH = Architecture(
    vocab_size=300,
    hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=64,
    moe_intermediate_size=16,
    num_experts=6,
    top_k=2,
    norm_topk_prob=True,
    sparse_layers=(False, True),
    tie_word_embeddings=False,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    max_position_embeddings=32,
    initializer_range=0.02,
)


@dataclass(frozen=True)
class Size:
    num_tokens: int
    vocab_size: int


LARGE = Size(num_tokens=10_000, vocab_size=257)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def refused(run_file: Path, overrides: Sequence[str] = (), text: str = "") -> str:
    if text:
        run_file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(run_file, overrides)
    return str(error.value)


# --- reading


def test_load_gives_the_files_values_and_defaults(run_file: Path) -> None:
    cfg = load(run_file)
    assert (cfg.model.config, cfg.data.sequence_length, cfg.mesh.ep) == ("qwen3-moe-tiny", 16, 2)
    assert (cfg.mesh.dp, cfg.optim.optimizer, cfg.checkpoint.resume) == ("rest", "adamw", "latest")


def test_relative_paths_in_the_file_are_taken_from_its_folder(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    cfg = load(run_file, ["run.folder=runs/two", "checkpoint.resume=old/step-00000005"])
    assert cfg.data.train == run_file.parent / "data/train"
    assert cfg.run.folder == elsewhere / "runs/two"
    assert cfg.checkpoint.resume == elsewhere / "old/step-00000005"


def test_relative_run_file_gives_absolute_paths(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_file.parent)
    assert load(Path("run.toml")).data.train == run_file.parent / "data/train"


def test_words_of_a_path_field_are_not_taken_for_paths(run_file: Path) -> None:
    cfg = load(run_file, ["checkpoint.resume=never", "model.config=qwen3-30b-a3b"])
    assert (cfg.checkpoint.resume, cfg.model.config) == ("never", "qwen3-30b-a3b")
    assert load(run_file, ["model.config=some/config.json"]).model.config == Path.cwd() / "some/config.json"


@pytest.mark.parametrize(
    ("override", "section", "field", "value"),
    [
        ("optim.lr=1e-4", "optim", "lr", 1e-4),
        ("optim.lr=1", "optim", "lr", 1.0),
        (" optim.lr = 0.5 ", "optim", "lr", 0.5),
        ("optim.optimizer=sgd", "optim", "optimizer", "sgd"),
        ('optim.optimizer="sgd"', "optim", "optimizer", "sgd"),
        ("mesh.dp=4", "mesh", "dp", 4),
        ("mesh.dp=rest", "mesh", "dp", "rest"),
        ("pipeline.schedule=1f1b", "pipeline", "schedule", "1f1b"),
        ("pipeline.chunks=3", "pipeline", "chunks", 3),
        ("checkpoint.background=false", "checkpoint", "background", False),
        ("run.folder=/runs/a=b", "run", "folder", Path("/runs/a=b")),
        ("run.folder=/runs/2024", "run", "folder", Path("/runs/2024")),
        ('run.folder="/runs/a b"', "run", "folder", Path("/runs/a b")),
        ("run.folder=/runs/a b", "run", "folder", Path("/runs/a b")),
        ('checkpoint.resume="latest"', "checkpoint", "resume", "latest"),
        ("run.folder=~no such user/a", "run", "folder", Path.cwd() / "~no such user/a"),
    ],
)
def test_override(run_file: Path, override: str, section: str, field: str, value: object) -> None:
    assert load(run_file, [override]).model_dump()[section][field] == value


def test_a_path_override_that_looks_like_a_number_stays_a_path(run_file: Path) -> None:
    assert load(run_file, ["run.folder=2024"]).run.folder == Path.cwd() / "2024"


def test_the_last_override_wins_and_a_missing_section_is_made(run_file: Path) -> None:
    cfg = load(run_file, ["optim.lr=1", "optim.lr=2", "balance.loss=none"])
    assert (cfg.optim.lr, cfg.balance.loss) == (2.0, "none")


def test_an_override_can_set_one_key_only(run_file: Path) -> None:
    message = refused(run_file, ["train.seed=1\nsteps=3"])
    assert "train.seed = '1\\nsteps=3'" in message and "expected a valid integer" in message


def test_config_is_frozen(run_file: Path) -> None:
    cfg = load(run_file)
    with pytest.raises(ValueError, match="frozen"):
        cfg.optim.lr = 1.0  # type: ignore[misc]


# --- refusals of the file itself: field, value, what was expected, remedy


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        (
            "optim.lr=-1",
            ["optim.lr = -1", "expected a number greater than 0", "--set optim.lr=", "Peak learning"],
        ),
        ("optim.lr=nan", ["optim.lr = nan", "expected a finite number"]),
        ("optim.beta2=1.0", ["optim.beta2 = 1.0", "expected a number less than 1"]),
        ("train.steps=ten", ["train.steps = 'ten'", "expected a valid integer"]),
        ('train.steps="10"', ["train.steps = '10'", "expected a valid integer"]),
        ("train.steps=true", ["train.steps = True", "expected a valid integer"]),
        ("train.steps=[1]", ["train.steps = '[1]'", "expected a valid integer"]),
        ("train.precision=fp16", ["train.precision = 'fp16'", "expected 'auto', 'fp32', 'bf16' or 'fp8'"]),
        ("schedule.kind=linear", ["schedule.kind = 'linear'", "'wsd', 'cosine' or 'constant'"]),
        ("mesh.dp=all", ["mesh.dp = 'all'", "expected a valid integer or 'rest'"]),
        ("mesh.cp=2", ["mesh.cp = 2", "expected 1; change it", "--set mesh.cp="]),
        ("mesh.pp=0", ["mesh.pp = 0", "expected a number greater than 0", "--set mesh.pp=", "Pipeline ranks"]),
        ("mesh.schedule=zbv", ["mesh.schedule: unknown key", "did you mean pipeline.schedule?"]),
        ("pipeline.schedule=gpipe", ["= 'gpipe'", "expected '1f1b', 'interleaved', 'zbv' or 'dualpipev'"]),
        ("pipeline.chunks=two", ["pipeline.chunks = 'two'", "expected a valid integer or 'auto'"]),
        ("train.recompute=all", ["train.recompute = 'all'", "expected 'none', 'experts' or 'layer'"]),
        ("run.timeline_steps=-1", ["run.timeline_steps = -1", "expected a number greater than or equal to 0"]),
        ("checkpoint.background=1", ["checkpoint.background = 1", "expected a valid boolean"]),
        ("run.folder=", ["run.folder = ''", "expected a path"]),
        (
            "optim.learning_rate=1",
            ["optim.learning_rate: unknown key", "expected one of optim.optimizer, optim.lr"],
        ),
        ("optim.weight_decy=1", ["optim.weight_decy: unknown key", "did you mean optim.weight_decay?"]),
        ("train.lr=1", ["train.lr: unknown key", "did you mean optim.lr?"]),
        ("optm.lr=1", ["optm: unknown key", "did you mean optim?"]),
        ("optim.lr", ["--set optim.lr", "expected section.field=value", "--set optim.lr=1e-4"]),
        ("lr=1", ["--set lr=1", "expected section.field=value"]),
        ("optim.lr.peak=1", ["--set optim.lr.peak=1", "expected section.field=value"]),
    ],
)
def test_refused_value(run_file: Path, override: str, wanted: list[str]) -> None:
    message = refused(run_file, [override])
    assert [part for part in wanted if part not in message] == [], message


def test_all_problems_are_listed_at_once_with_the_file(run_file: Path) -> None:
    message = refused(run_file, text='[model]\nconfig = "qwen3-moe-tiny"\n[optim]\nlr = 0\nlrr = 1\n')
    lines = message.splitlines()
    assert lines[0] == f"{run_file}: this run is refused, 7 problems:"
    assert [line.split()[0].rstrip(":") for line in lines[1:]] == [
        *("data.train", "data.sequence_length", "batch.global_batch_size"),
        *("optim.lr", "optim.lrr", "train.steps", "run.folder"),
    ]
    assert "missing; add it under [data]: Dataset folder written by `pith data prepare`." in lines[1]


@pytest.mark.parametrize("overrides", [(), ("optim.lr=1",)])
def test_a_section_that_is_no_table(run_file: Path, overrides: Sequence[str]) -> None:
    message = refused(run_file, overrides, text="optim = 3\n" + RUN)
    assert "optim = 3: expected a table; write [optim]" in message


def test_unreadable_run_files(run_file: Path) -> None:
    assert f"{run_file}: not a TOML file: " in refused(run_file, text="[model\n")
    run_file.write_bytes(b"# \xff\n")
    assert f"{run_file}: not a TOML file: " in refused(run_file)
    missing = run_file.with_name("none.toml")
    assert refused(missing) == f"{missing}: cannot read it: No such file or directory; give the path of a run file"


def test_refusal_counts() -> None:
    assert refusal("run.toml", ["a"]) == "run.toml: this run is refused, 1 problem:\n  a"


# --- the mesh


@pytest.mark.parametrize(
    ("mesh", "world_size", "shape"),
    [
        (MeshConfig(), 1, (1, 1, 1, 1)),
        (MeshConfig(ep=2), 2, (1, 1, 1, 2)),
        (MeshConfig(ep=2), 6, (1, 3, 1, 2)),
        (MeshConfig(dp=2, ep=3), 6, (1, 2, 1, 3)),
        (MeshConfig(pp=2, ep=2), 8, (2, 2, 1, 2)),
    ],
)
def test_resolve_mesh(mesh: MeshConfig, world_size: int, shape: tuple[int, ...]) -> None:
    assert resolve_mesh(mesh, world_size) == MeshShape(*shape)


@pytest.mark.parametrize(
    ("mesh", "world_size", "message"),
    [
        (
            MeshConfig(ep=4),
            6,
            "mesh = pp 1 x dp rest x cp 1 x ep 4: needs a multiple of 4 processes, got 6; start 4",
        ),
        (MeshConfig(ep=4), 0, "needs a multiple of 4 processes, got 0"),
        (
            MeshConfig(dp=2, ep=2),
            8,
            "mesh = pp 1 x dp 2 x cp 1 x ep 2: needs exactly 4 processes, got 8; start 4",
        ),
        (
            MeshConfig(dp=2, ep=2),
            2,
            "needs exactly 4 processes, got 2; start 4, or change mesh.pp, mesh.dp or mesh.ep",
        ),
        (MeshConfig(pp=4), 6, "mesh = pp 4 x dp rest x cp 1 x ep 1: needs a multiple of 4 processes, got 6"),
    ],
)
def test_refused_mesh(mesh: MeshConfig, world_size: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_mesh(mesh, world_size)
    assert message in str(error.value)


def test_smallest_world() -> None:
    meshes = (MeshConfig(ep=4), MeshConfig(dp=3, ep=2), MeshConfig(pp=2, ep=4))
    assert [smallest_world(mesh) for mesh in meshes] == [4, 6, 8]


@pytest.mark.parametrize(
    ("pipeline", "num_chunks"),
    [
        (PipelineConfig(), 1),
        (PipelineConfig(schedule="interleaved"), 2),
        (PipelineConfig(schedule="interleaved", chunks=3), 3),
        (PipelineConfig(schedule="zbv"), 2),
        (PipelineConfig(schedule="dualpipev", chunks=2), 2),
    ],
)
def test_num_chunks(pipeline: PipelineConfig, num_chunks: int) -> None:
    assert pipeline.num_chunks == num_chunks


# --- the run against its model, data and files


def test_a_sound_run_has_no_problems(run_file: Path) -> None:
    assert check_run(load(run_file), ARCH, 2, LARGE, LARGE) == []


@pytest.mark.parametrize(
    ("overrides", "world_size", "wanted"),
    [
        (
            ["batch.global_batch_size=10"],
            2,
            "batch.global_batch_size = 10: must be a multiple of batch.num_microbatches x dp x ep = "
            "2 x 1 x 2 = 4; use 8 or 12, or change batch.num_microbatches or the number of processes",
        ),
        (["batch.global_batch_size=2"], 2, "batch.global_batch_size = 2: must be a multiple of"),
        (["batch.global_batch_size=12"], 4, "= 2 x 2 x 2 = 8; use 8 or 16"),
        (
            ["mesh.ep=4"],
            4,
            "mesh.ep = 4: must divide the model's num_experts = 6; use one of 1, 2, 3, 6",
        ),
        (["mesh.ep=2"], 3, "mesh = pp 1 x dp rest x cp 1 x ep 2: needs a multiple of 2 processes, got 3"),
        (
            ["data.sequence_length=33"],
            2,
            "data.sequence_length = 33: must be at most the model's max_position_embeddings = 32; "
            "shorten it, or use a model that reads more",
        ),
        (
            ["schedule.warmup_steps=101"],
            2,
            "schedule.warmup_steps = 101: must be at most train.steps = 100; shorten it, or train longer",
        ),
        (
            ["schedule.warmup_steps=30", "schedule.decay_steps=71"],
            2,
            "schedule.decay_steps = 71: must be at most train.steps - schedule.warmup_steps = 100 - 30 = 70; "
            "shorten it or the warm-up, or train longer",
        ),
        (["mesh.pp=2", "batch.global_batch_size=12"], 8, "x dp x ep = 2 x 2 x 2 = 8; use 8 or 16"),
        (
            ["mesh.pp=3"],
            6,
            "mesh.pp x stages per rank = 3 x 1 = 3: must be at most the model's num_hidden_layers = 2; "
            "lower mesh.pp, or use a pipeline.schedule with fewer stages per rank (1f1b has 1)",
        ),
        (["mesh.pp=2", "pipeline.schedule=zbv"], 4, "2 x 2 = 4: must be at most the model's num_hidden_layers = 2"),
        (["pipeline.schedule=interleaved", "pipeline.chunks=3"], 2, "mesh.pp x stages per rank = 1 x 3 = 3: must be"),
        (
            ["pipeline.schedule=dualpipev", "pipeline.chunks=3"],
            2,
            'pipeline.chunks = 3: must be 2 for pipeline.schedule = "dualpipev"; '
            'use "auto", or the interleaved schedule, which takes any number',
        ),
        (["mesh.pp=2", "pipeline.chunks=2"], 4, 'pipeline.chunks = 2: must be 1 for pipeline.schedule = "1f1b"'),
    ],
)
def test_refused_run(run_file: Path, overrides: list[str], world_size: int, wanted: str) -> None:
    problems = check_run(load(run_file, overrides), ARCH, world_size, LARGE, LARGE)
    assert len(problems) == 1 and wanted in problems[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ["batch.global_batch_size=12"],
        ["data.sequence_length=32"],
        ["schedule.warmup_steps=100"],
        ["schedule.warmup_steps=30", "schedule.decay_steps=70"],
        ["schedule.kind=cosine", "schedule.warmup_steps=30", "schedule.decay_steps=71"],
        ["mesh.pp=2", "mesh.ep=1", "batch.global_batch_size=2"],
        ["pipeline.schedule=dualpipev", "pipeline.chunks=2"],
        ["pipeline.schedule=interleaved", "pipeline.chunks=1"],
    ],
)
def test_the_bounds_themselves_are_allowed(run_file: Path, overrides: list[str]) -> None:
    assert check_run(load(run_file, overrides), ARCH, 2, LARGE, LARGE) == []


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(run_file: Path) -> None:
    cfg = load(run_file)
    assert check_run(cfg, ARCH, 2, replace(LARGE, vocab_size=300)) == []
    (train,) = check_run(cfg, ARCH, 2, replace(LARGE, vocab_size=301))
    assert train == (
        f"data.train = {cfg.data.train}: its tokenizer's 301 tokens exceed the model's vocab_size = 300; "
        "use a model with a larger one, or prepare the data with another tokenizer"
    )
    (validation,) = check_run(cfg, ARCH, 2, LARGE, replace(LARGE, vocab_size=301))
    assert validation.startswith(f"data.validation = {cfg.data.validation}: its tokenizer's 301 tokens")


def test_training_data_must_hold_one_batch_and_validation_data_one_sample(run_file: Path) -> None:
    cfg = load(run_file)
    assert check_run(cfg, ARCH, 2, replace(LARGE, num_tokens=129), replace(LARGE, num_tokens=17)) == []
    assert check_run(cfg, ARCH, 2, replace(LARGE, num_tokens=128), replace(LARGE, num_tokens=16)) == [
        f"data.train = {cfg.data.train}: holds 128 tokens, but one global batch needs "
        "batch.global_batch_size x data.sequence_length + 1 = 8 x 16 + 1 = 129; "
        "prepare more data, or use a smaller batch or shorter sequences",
        f"data.validation = {cfg.data.validation}: holds 16 tokens, but one sample needs "
        "data.sequence_length + 1 = 16 + 1 = 17; prepare more data, or use shorter sequences",
    ]


def test_expert_parallel_ranks_need_experts(run_file: Path) -> None:
    dense = replace(ARCH, sparse_layers=(False, False), num_experts=0)
    (problem,) = check_run(load(run_file), dense, 2, LARGE)
    assert problem == "mesh.ep = 2: must be 1 for a model without experts; use mesh.dp instead"
    assert check_run(load(run_file, ["mesh.ep=1"]), dense, 2, LARGE) == []


def test_missing_files_are_named_together(run_file: Path) -> None:
    overrides = ["model.config=qwen3-moe-tinny", "model.weights=/none/w", "checkpoint.resume=/none/c"]
    problems = check_files(load(run_file, overrides))
    assert [problem.split(":")[0] for problem in problems] == [
        f"data.train = {run_file.parent}/data/train",
        f"data.validation = {run_file.parent}/data/validation",
        "model.weights = /none/w",
        "checkpoint.resume = /none/c",
        f"model.config = {Path.cwd()}/qwen3-moe-tinny",
    ]
    assert "no such folder; make it with `pith data prepare`" in problems[0]
    assert "no such file; " in problems[-1] and "one of qwen3-moe-tiny, qwen3-moe-small" in problems[-1]


def test_files_that_are_there(run_file: Path, tmp_path: Path) -> None:
    for name in ("data/train", "data/validation", "model"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "model/config.json").write_text("{}")
    for config in ("qwen3-moe-tiny", f"{tmp_path}/model", f"{tmp_path}/model/config.json"):
        assert check_files(load(run_file, [f"model.config={config}"])) == []


# --- fingerprint and schema


SAME_NUMBERS = [
    *("run.folder=/else", "run.log_interval=3", "run.peak_flops=1e12", "checkpoint.interval=5"),
    *(
        "checkpoint.keep=9",
        "checkpoint.resume=never",
        "checkpoint.background=false",
        "checkpoint.optimizer=false",
    ),
    *("mesh.ep=1", "mesh.dp=2", "mesh.pp=2", "pipeline.schedule=zbv", "pipeline.chunks=2", "train.recompute=layer"),
    *("train.threads=2", "train.hang_timeout=5", "train.eval_interval=7", "train.eval_batches=2"),
    *("train.max_nonfinite_steps=3", "data.validation=/else", "run.timeline_steps=3"),
]
OTHER_NUMBERS = [
    *(
        "model.config=qwen3-moe-small",
        "model.experts=geglu",
        "model.weights=/w",
        "data.train=/else",
        "data.sequence_length=17",
    ),
    *("batch.global_batch_size=16", "batch.num_microbatches=4", "optim.optimizer=sgd", "optim.lr=1e-4"),
    *("optim.beta1=0.8", "optim.beta2=0.9", "optim.eps=1e-6", "optim.weight_decay=0", "optim.clip_norm=0"),
    *("schedule.kind=cosine", "schedule.warmup_steps=1", "schedule.decay_steps=1", "schedule.min_lr_ratio=1"),
    *("balance.loss=none", "balance.coef=1", "balance.z_loss=1", "balance.bias_update_rate=1"),
    *("train.steps=101", "train.seed=1", "train.routing=balanced", "train.precision=bf16"),
]


def test_fingerprint_covers_what_determines_the_numbers_and_nothing_else(run_file: Path) -> None:
    base = fingerprint(load(run_file))
    assert [o for o in SAME_NUMBERS if fingerprint(load(run_file, [o])) != base] == []
    others = [fingerprint(load(run_file, [o])) for o in OTHER_NUMBERS]
    assert len({base, *others}) == 1 + len(OTHER_NUMBERS)


def test_every_field_is_judged_by_the_fingerprint_test() -> None:
    fields = {
        f"{section}.{name}"
        for section, info in RunConfig.model_fields.items()
        if info.annotation is not None
        for name in info.annotation.model_fields
    }
    judged = {override.split("=")[0] for override in SAME_NUMBERS + OTHER_NUMBERS}
    assert fields == judged | {"mesh.cp"}, "the last has one value only"


def test_fingerprint_is_the_same_in_another_process_and_however_written(run_file: Path) -> None:
    base = fingerprint(load(run_file))
    code = (
        "import sys; from pathlib import Path; from pithtrain.config import *;"
        "print(fingerprint(load(Path(sys.argv[1]))))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", code, str(run_file)]
    assert subprocess.check_output(command, text=True, env=environment, cwd=ROOT).strip() == base
    assert fingerprint(load(run_file, ["optim.lr=0.0003", "optim.weight_decay=1e-1"])) == base


def test_fingerprint_contents_replace_paths(run_file: Path) -> None:
    here, there = load(run_file), load(run_file, ["data.train=/else"])
    digest = {"data.train": "abc"}
    assert fingerprint(here, digest) == fingerprint(there, digest) != fingerprint(here)
    assert fingerprint(here, {"data.train": "abd"}) != fingerprint(here, digest)
    with pytest.raises(AssertionError, match=r"run\.folder"):
        fingerprint(here, {"run.folder": "abc"})


def test_schema_file_is_what_the_config_says() -> None:
    written = json.loads((ROOT / "spec/run.schema.json").read_text())
    assert written == json_schema(), "run: pith spec schema --write"


def test_every_field_has_its_help_in_the_schema() -> None:
    schema = json_schema()
    sections = [name for name in schema["$defs"] if name.endswith("Config")]
    assert len(sections) == len(RunConfig.model_fields)
    for name in sections:
        assert schema["$defs"][name]["additionalProperties"] is False
        assert all(entry.get("description") for entry in schema["$defs"][name]["properties"].values()), name


def test_presets_are_the_files_that_exist() -> None:
    files = {path.stem for path in (ROOT / "pithtrain/models/presets").glob("*.json")}
    assert files == set(get_args(Preset))


def test_config_imports_no_torch() -> None:
    code = "import sys, pithtrain.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_dumped_config_parses_to_itself(run_file: Path) -> None:
    cfg = load(run_file)
    assert parse(cfg.model_dump(), "dump") == cfg
    assert RunConfig.model_validate_json(cfg.model_dump_json()) == cfg
