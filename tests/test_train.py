"""The training loop: resume to the bit, signals, non-finite steps, dead and hung ranks, refusals, records, dry run."""

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from golden.world import run_world
from pithtrain.checkpoint import ONE_RANK
from pithtrain.config import ConfigError, load, parse
from pithtrain.data import validation_batches
from pithtrain.metrics import read_metrics
from pithtrain.optim import LearningRate
from pithtrain.parallel.mesh import make_mesh
from pithtrain.parallel.transport import Transport
from pithtrain.step import Trainee, build, evaluate
from pithtrain.train import dry_run, main
from pithtrain.train.checkpoints import Checkpoints
from pithtrain.train.loop import make_optimizer
from pithtrain.train.plan import Plan, bytes_per_rank, make_plan, resolved_toml
from pithtrain.train.watch import COMPLETE, FAILED, HUNG, NONFINITE, REFUSED, STOPPED, Status
from tests.runs import (
    PRELOAD,
    Rank,
    Trouble,
    killed,
    make_run,
    not_a_number,
    raises,
    run_ranks,
    sleeps,
    start_ranks,
    terminated,
)

MEASURED = {"tokens_per_second", "mfu", "peak_memory"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path)


def records(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in r.items() if key not in MEASURED} for r in read_metrics(folder)]


def steps(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder) if "loss" in record]


def saved(folder: Path, step: int) -> dict[str, Any]:
    """Size and checksum of every file of a checkpoint."""
    manifest = (folder / f"checkpoints/step-{step:08d}/pith/manifest.json").read_text()
    return dict(json.loads(manifest)["files"])


def state_of(folder: Path, step: int) -> dict[str, Any]:
    return dict(json.loads((folder / f"checkpoints/step-{step:08d}/pith/state.json").read_text()))


def status(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "status.json").read_text()))


# --- stop and resume


@pytest.mark.parametrize("background", ["true", pytest.param("false", marks=pytest.mark.prove)])
def test_ten_straight_steps_are_five_then_resumed_five_to_the_bit(run: Path, background: str) -> None:
    options = ["mesh.ep=2", "balance.bias_update_rate=0.01", f"checkpoint.background={background}", "checkpoint.keep=9"]
    options += ["batch.num_microbatches=2", "checkpoint.interval=2"]
    straight, stopped = run.parent / "straight", run.parent / "stopped"
    assert run_ranks(2, run, *options, f"run.folder={straight}").exit_code == COMPLETE

    stop = Trouble(terminated, steps=[5], ranks=[1])
    ending = run_ranks(2, run, *options, f"run.folder={stopped}", trouble=stop)
    assert (ending.exit_code, ending.step) == (STOPPED, 5)
    ending = run_ranks(2, run, *options, f"run.folder={stopped}")
    assert (ending.exit_code, ending.step) == (COMPLETE, 10)

    assert "pith/routing_bias.safetensors" in saved(straight, 10)
    for step in (2, 4, 6, 8, 10):
        assert saved(stopped, step) == saved(straight, step), step
    assert state_of(stopped, 5)["step"] == 5
    assert records(stopped) == records(straight)
    assert [r["step"] for r in records(straight) if "validation_loss" in r] == [5, 10]


def test_a_complete_run_is_left_as_it_is(run: Path) -> None:
    out = run.parent / "out"
    first = run_ranks(1, run)
    before, lines = saved(out, 10), (out / "metrics.jsonl").read_bytes()
    assert run_ranks(1, run) == first
    assert saved(out, 10) == before and (out / "metrics.jsonl").read_bytes() == lines


def test_resuming_on_another_mesh_goes_on_with_the_same_numbers(run: Path) -> None:
    straight, moved = run.parent / "straight", run.parent / "moved"
    run_ranks(1, run, f"run.folder={straight}")
    run_ranks(2, run, "mesh.ep=2", f"run.folder={moved}", trouble=Trouble(terminated, steps=[5]))
    assert run_ranks(2, run, "mesh.dp=2", f"run.folder={moved}").exit_code == COMPLETE
    ours, theirs = ([record["loss"] for record in steps(folder)] for folder in (moved, straight))
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_run_without_saved_moments_goes_on_and_says_so(run: Path) -> None:
    run_ranks(1, run, "checkpoint.optimizer=false", "train.steps=5", "schedule.kind=constant")
    (rank,) = start_ranks(1, run, "checkpoint.optimizer=false", "train.steps=6", "schedule.kind=constant")
    assert rank.wait(60) == COMPLETE
    output = rank.output.read_text()
    assert "no moments of the optimizer" in output and "the run's config is not the checkpoint's" in output
    state = state_of(run.parent / "out", 6)
    assert (state["step"], state["optimizer_steps"], state["data_position"]) == (6, 1, 48)


def test_weights_of_another_run_are_where_a_run_starts(run: Path) -> None:
    first = run_ranks(1, run)
    weights = run.parent / "out/checkpoints/step-00000010"
    options = ["train.steps=1", "optim.lr=1e-20", "schedule.kind=constant", f"run.folder={run.parent / 'second'}"]
    second = run_ranks(2, run, *options, "schedule.warmup_steps=0", f"model.weights={weights}")
    assert second.validation_loss == pytest.approx(first.validation_loss, rel=1e-6)


def test_where_a_run_cannot_start_or_write_is_refused_before_it_starts(run: Path) -> None:
    run_ranks(1, run, "train.steps=5")
    (run.parent / "file").write_text("")
    for override, says in (
        ("checkpoint.resume=never", r'checkpoint.resume = "never", but .*checkpoints of another run'),
        (f"checkpoint.resume={run.parent}", r"checkpoint.resume: .*manifest.json is missing"),
        (f"model.weights={run.parent}", r"model.weights = .*holds no .safetensors file"),
        (f"run.folder={run.parent / 'file'}", r"run.folder = .*file is a file"),
        (f"run.folder={run.parent / 'file' / 'below'}", r"run.folder = .*file is a file"),
    ):
        with pytest.raises(ConfigError, match=says):
            make_plan(load(run, [override]), str(run), 1)
        assert main([str(run), f"--set={override}"]) == REFUSED and not dist.is_initialized()


def test_another_models_checkpoint_is_refused_before_it_starts(run: Path) -> None:
    """By the newest checkpoint, a named one, or weights to start from; the resolved run file stays that of the run."""
    sparse = json.loads((run.parent / "config.json").read_text()) | {"mlp_only_layers": []}
    (run.parent / "config.json").write_text(json.dumps(sparse))
    run_ranks(1, run, "train.steps=5")
    newest, resolved = run.parent / "out/checkpoints/step-00000005", run.parent / "out/config.resolved.toml"
    resolved.write_text("the run's own")
    (run.parent / "shallow.json").write_text(json.dumps(sparse | {"num_hidden_layers": 2}))
    elsewhere = f"run.folder={run.parent / 'elsewhere'}"
    layers, experts = f"model.config={run.parent / 'shallow.json'}", "model.experts=relu2"
    for override, begin, says in (
        (layers, (), r"checkpoint.resume: .*step-00000005.*num_hidden_layers: got 3, expected 2; .*model.config"),
        (experts, (), r"checkpoint.resume: .*expert_type: got None, expected 'relu2'; .*model.experts"),
        (layers, (elsewhere, f"checkpoint.resume={newest}"), r"checkpoint.resume: .*num_hidden_layers"),
        (layers, (elsewhere, f"model.weights={newest}"), r"model.weights: .*num_hidden_layers"),
    ):
        words = [str(run), *(f"--set={word}" for word in (override, *begin))]
        with pytest.raises(ConfigError, match=says):
            make_plan(load(run, [override, *begin]), str(run), 1)
        assert main(words) == main([*words, "--dry-run"]) == REFUSED and not dist.is_initialized()
    assert resolved.read_text() == "the run's own"


def test_a_dense_model_has_no_biases_to_balance(run: Path) -> None:
    config = json.loads((run.parent / "config.json").read_text()) | {"mlp_only_layers": [0, 1, 2]}
    (run.parent / "config.json").write_text(json.dumps(config))
    assert run_ranks(1, run, "balance.bias_update_rate=0.01", "train.steps=5").exit_code == COMPLETE


def test_sigterm_saves_and_resumes(run: Path) -> None:
    """A signal that reaches one rank only, through `main`: all stop after the same step, and the run goes on."""
    ranks = start_ranks(2, run, "mesh.ep=2", troubles=[Trouble(terminated, steps=[3], ranks=[1])])
    assert [rank.wait(60) for rank in ranks] == [STOPPED, COMPLETE], outputs(ranks)
    assert status(run.parent / "out")["exit_code"] == STOPPED and status(run.parent / "out")["step"] == 3
    assert [record["step"] for record in steps(run.parent / "out")] == [1, 2, 3]
    ranks = start_ranks(2, run, "mesh.ep=2")
    assert [rank.wait(60) for rank in ranks] == [COMPLETE, COMPLETE], outputs(ranks)
    assert [record["step"] for record in steps(run.parent / "out")] == list(range(1, 11))
    assert status(run.parent / "out") == {"exit_code": COMPLETE, "reason": "complete", "step": 10}
    assert "resumed from" in ranks[0].output.read_text() and "pith export" in ranks[0].output.read_text()
    assert ranks[1].output.read_text() == ""


def test_a_save_that_fails_is_told_and_the_run_goes_on_to_fail_at_its_end(run: Path) -> None:
    (run.parent / "out").mkdir()
    (run.parent / "out/checkpoints").symlink_to("nowhere/at/all")  # a disk that went away
    (rank,) = start_ranks(1, run, "checkpoint.interval=5")
    assert rank.wait(60) == FAILED, rank.output.read_text()
    assert [record["step"] for record in steps(run.parent / "out")] == list(range(1, 11))
    assert rank.output.read_text().count("was not saved in") >= 2
    assert "the last checkpoint was not saved: step-00000010" in status(run.parent / "out")["reason"]


# --- non-finite steps


def test_a_nonfinite_step_is_skipped_and_counted(run: Path) -> None:
    ending = run_ranks(2, run, "mesh.ep=2", trouble=Trouble(not_a_number, steps=[3]))
    assert ending.exit_code == COMPLETE
    found = steps(run.parent / "out")
    assert [record["skipped"] for record in found] == [step == 3 for step in range(1, 11)]
    assert found[2]["loss"] == "NaN" and math.isfinite(found[3]["loss"])
    state = state_of(run.parent / "out", 10)
    assert (state["optimizer_steps"], state["nonfinite_total"], state["nonfinite_in_a_row"]) == (9, 1, 0)
    assert (state["data_position"], state["tokens_seen"]) == (80, 9 * 8 * 16)


def test_nonfinite_steps_in_a_row_end_the_run(run: Path) -> None:
    out = run.parent / "out"
    trouble = Trouble(not_a_number, steps=[2, 4, 5, 6])
    (rank,) = start_ranks(1, run, "train.max_nonfinite_steps=3", "schedule.kind=constant", troubles=[trouble])
    assert rank.wait(60) == NONFINITE, rank.output.read_text()
    assert status(out)["step"] == 6 and "3 steps in a row" in status(out)["reason"]
    said = rank.output.read_text()
    assert "3 steps in a row" in said and "skipped so far: 4 of 6 steps" in said
    assert [said.count(f"step {step}/10  skipped  loss nan") for step in range(1, 7)] == [0, 1, 0, 1, 1, 1], said
    assert said.index("pith skill run debug-nan") < said.index("pith train"), said
    bad = saved(out, 6)

    good = run.parent / "good"
    run_ranks(1, run, "schedule.kind=constant", f"run.folder={good}", trouble=Trouble(not_a_number, steps=[2]))
    assert steps(good)[2]["loss"] == steps(out)[2]["loss"]
    (rank,) = start_ranks(1, run, "train.max_nonfinite_steps=3", "schedule.kind=constant")
    assert rank.wait(60) == COMPLETE, rank.output.read_text()  # the count starts anew
    assert steps(out)[6]["skipped"] is False
    assert {name: bad[name] for name in bad if name.endswith(".safetensors")}


# --- dead and hung ranks


def outputs(ranks: list[Rank]) -> str:
    return "\n".join(f"--- {rank.output.name}\n{rank.output.read_text()}" for rank in ranks)


def test_a_dead_rank_ends_the_job(run: Path) -> None:
    """Killed without a word while the other waits for it in a collective."""
    ranks = start_ranks(2, run, "mesh.ep=2", troubles=[Trouble(killed, steps=[3], ranks=[1])])
    assert ranks[1].wait(60) == -9, outputs(ranks)
    assert ranks[0].wait(10) == FAILED, outputs(ranks)
    assert status(run.parent / "out")["exit_code"] == FAILED
    assert "on rank 0 of 2, in the step after step 2" in ranks[0].output.read_text()


def test_a_dead_rank_ends_one_that_is_not_waiting_for_it(run: Path) -> None:
    troubles = [Trouble(killed, steps=[3], ranks=[1]), Trouble(sleeps, steps=[3], ranks=[0])]
    ranks = start_ranks(2, run, "mesh.ep=2", troubles=troubles)
    assert ranks[1].wait(60) == -9, outputs(ranks)
    assert ranks[0].wait(10) == FAILED, outputs(ranks)
    assert status(run.parent / "out")["reason"].startswith("rank 0: rank 1 died")
    assert "in sleeps" in ranks[0].output.read_text()


def test_a_rank_that_raises_shows_its_own_traceback(run: Path) -> None:
    ranks = start_ranks(2, run, "mesh.dp=2", troubles=[Trouble(raises, steps=[2], ranks=[1])])
    assert ranks[1].wait(60) == FAILED, outputs(ranks)
    assert ranks[0].wait(10) == FAILED, outputs(ranks)
    wanted = ("RuntimeError: planted", "on rank 1 of 2, in the step after step 1", "in raises")
    assert all(words in ranks[1].output.read_text() for words in wanted)
    assert status(run.parent / "out") == {"exit_code": FAILED, "reason": "rank 1: RuntimeError: planted", "step": 1}


def test_a_hung_rank_ends_the_job(run: Path) -> None:
    ranks = start_ranks(2, run, "mesh.ep=2", "train.hang_timeout=8", troubles=[Trouble(sleeps, steps=[3], ranks=[1])])
    assert ranks[1].wait(60) in (HUNG, FAILED), outputs(ranks)
    assert ranks[0].wait(10) in (HUNG, FAILED), outputs(ranks)
    assert "train.hang_timeout = 8 s" in outputs(ranks) and "in sleeps" in ranks[1].output.read_text()
    assert status(run.parent / "out")["exit_code"] == HUNG


def test_the_first_failure_is_the_one_recorded(tmp_path: Path) -> None:
    first, second = (Status(tmp_path / "status.json", rank) for rank in (1, 0))
    first.write(FAILED, "its own", 3)
    second.write(FAILED, "Connection closed by peer", 3)
    assert status(tmp_path)["reason"] == "rank 1: its own"
    second.path.unlink()
    second.write(FAILED, "later", 4)
    assert status(tmp_path)["reason"] == "rank 0: later"


# --- numbers


def test_validation_and_losses_are_equal_on_every_mesh(run: Path) -> None:
    meshes = {
        "one": (1, []),
        "ep2": (2, ["mesh.ep=2"]),
        "dp2": (2, []),
        "ep2dp2": (4, ["mesh.ep=2"]),
        "halves": (1, ["batch.num_microbatches=2"]),
        "halves, pp2": (2, ["batch.num_microbatches=2", "mesh.pp=2"]),
    }
    found = {}
    for name, (count, options) in meshes.items():
        folder = run.parent / name
        ending = run_ranks(count, run, *options, "train.steps=5", "schedule.kind=constant", f"run.folder={folder}")
        found[name] = [ending.validation_loss, *(record["loss"] for record in steps(folder))]
    for name, losses in found.items():  # over the global batch, balance counts as far as the micro-batches went
        assert losses == pytest.approx(found["halves" if name.startswith("halves") else "one"], rel=1e-5)


def test_validation_is_the_mean_over_all_held_out_samples(run: Path) -> None:
    ending = run_ranks(2, run, "mesh.ep=2")
    assert ending.validation_loss == pytest.approx(run_world(1, _mean_of_samples, run, preload=PRELOAD)[0], rel=1e-5)


def _restored(run: Path) -> tuple[Plan, Trainee, int]:
    """A run's newest model, and its position in the data."""
    plan = make_plan(load(run), str(run), 1)
    trainee = build(plan.arch, make_mesh(), Transport(), 16, torch.device("cpu"))
    optimizer = make_optimizer(plan.cfg, trainee.shard)
    state, _ = Checkpoints(plan, trainee.shard, optimizer, ONE_RANK).restore()
    return plan, trainee, state.data_position


def _mean_of_samples(run: Path) -> float:
    plan, trainee, _ = _restored(run)
    assert plan.validation is not None
    samples = plan.validation.num_samples(16)
    assert samples % 8, "no batch would be padded"
    losses = [evaluate(trainee, [batch]) for batch in validation_batches(plan.validation, 16, 1)]
    assert len(losses) == samples
    return sum(losses) / samples


def test_another_batch_size_goes_on_at_the_same_sample(run: Path) -> None:
    run_ranks(1, run, "train.steps=5")
    expected = run_world(1, _loss_of_next_four, run, preload=PRELOAD)[0]
    run_ranks(2, run, "train.steps=6", "batch.global_batch_size=4")
    assert steps(run.parent / "out")[5]["loss"] == pytest.approx(expected, rel=1e-5)


def _loss_of_next_four(run: Path) -> float:
    plan, trainee, position = _restored(run)
    assert position == 40
    return evaluate(trainee, [plan.train.microbatch(position, 4, 1, 0, 0, 1, 16)])


def test_metrics_have_every_field(run: Path) -> None:
    run_ranks(2, run, "mesh.ep=2", "run.peak_flops=1e9", "balance.z_loss=1e-3")
    found = steps(run.parent / "out")
    lr = LearningRate("wsd", 1e-2, 10, 2, 3, 0.0)
    assert [record["learning_rate"] for record in found] == [lr.at(step) for step in range(10)]
    for record in found:
        rooms = record["grad_norms"]
        assert set(rooms) == {"embedding", "attention", "router", "experts", "mlp", "norm", "head"}
        assert record["grad_norm"] == pytest.approx(math.sqrt(sum(norm**2 for norm in rooms.values())))
        assert len(record["expert_load"]) == 2 and all(1 <= load <= 4 for load in record["expert_load"])
        assert record["balance_loss"] > 0 and record["z_loss"] > 0 and record["peak_memory"] > 1e6
        assert record["tokens_per_second"] > 0 and 0 < record["mfu"] < 100
        assert record["tokens_seen"] == record["step"] * 8 * 16
    assert found[-1]["loss"] < found[0]["loss"] - 1


def test_forced_balance_loads_every_expert_alike(run: Path) -> None:
    run_ranks(1, run, "train.routing=balanced", "train.steps=5")
    assert {load for record in steps(run.parent / "out") for load in record["expert_load"]} == {1.0}


# --- before anything starts


def test_refused_run_is_told_once_and_recorded(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = [str(run), "--set=batch.global_batch_size=9", "--set=data.sequence_length=900", "--set=mesh.ep=3"]
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in (2, 0):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert main(refused) == (COMPLETE if rank else REFUSED)
        assert not dist.is_initialized()
        told = capsys.readouterr().err
        assert told == "" if rank else "refused, 4 problems" in told and "max_position_embeddings" in told, told
    assert status(run.parent / "out")["exit_code"] == REFUSED
    assert "num_experts = 8" in status(run.parent / "out")["reason"]


def test_a_damaged_dataset_and_a_foreign_model_are_refused_together(run: Path) -> None:
    (run.parent / "data/train/shard-00000.bin").write_bytes(b"short")
    (run.parent / "config.json").write_text('{"model_type": "other"}')
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*model_type.*shard-00000.bin has 5 bytes"):
        make_plan(load(run), str(run), 1)


def test_dry_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--set=mesh.ep=2", "--set=mesh.dp=2", "--dry-run"]) == COMPLETE
    text = capsys.readouterr().out
    assert not (run.parent / "out").exists()
    cfg = load(run, ["mesh.ep=2", "mesh.dp=2"])
    assert text.strip() == dry_run(cfg, 4, str(run)).strip()
    assert (
        make_plan(cfg, str(run), 4).fingerprint in text and "mesh           4 ranks: pp 1 x dp 2 x cp 1 x ep 2" in text
    )
    held = run_world(4, _bytes_held, run, ["mesh.ep=2", "mesh.dp=2"], preload=PRELOAD)
    parts = bytes_per_rank(make_plan(cfg, str(run), 4))
    assert held == [parts] * 4 and f"{sum(parts.values()):,} = {parts['values']:,} values" in text
    with pytest.raises(ConfigError, match="needs exactly 4 processes"):
        dry_run(cfg, 3)
    assert "pipeline       1f1b, 1 micro-batches" in text
    degraded = load(run, ["pipeline.schedule=dualpipev"])
    assert "pipeline       dualpipev on 1 ranks is published for 2 micro-batches, not for 1" in dry_run(degraded, 1)


def _bytes_held(run: Path, overrides: list[str]) -> dict[str, int]:
    plan = make_plan(load(run, overrides), str(run), dist.get_world_size())
    shard = build(plan.arch, make_mesh(*plan.shape), Transport(), 16, torch.device("cpu")).shard
    moments = make_optimizer(plan.cfg, shard).state().values()
    return {
        "values": sum(bucket.values.nbytes for bucket in shard.buckets.values()),
        "gradients": sum(bucket.grads.nbytes for bucket in shard.buckets.values()),
        "masters": 0,
        "moments": sum(part.nbytes for flat in moments for part in flat.values()),
    }


def test_the_resolved_run_file_loads_to_the_same_run(run: Path) -> None:
    cfg = load(run, ["optim.eps=1e-12", "mesh.ep=2"])
    (run.parent / "again.toml").write_text(resolved_toml(cfg))
    assert load(run.parent / "again.toml") == cfg
    tables = tomllib.loads(resolved_toml(cfg))
    assert parse(
        tables | {"run": {"folder": Path("/x")}, "data": cfg.data.model_dump(), "model": {"config": Path("/m")}}, ""
    )
