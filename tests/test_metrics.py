"""Metrics: a file that survives kills and resumes, a display for terminals and logs, and counted FLOPs."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from pithtrain import metrics
from pithtrain.metrics import Display, MetricsWriter, expert_load, flops_per_token, mfu, parameter_counts
from pithtrain.models.architecture import Architecture

# The configuration whose figures are known: 9,193,984 parameters, 17.42 MFLOP a token at 256 tokens.
ARCH = Architecture(
    vocab_size=4096,
    hidden_size=256,
    num_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    intermediate_size=768,
    moe_intermediate_size=128,
    num_experts=16,
    top_k=2,
    norm_topk_prob=True,
    sparse_layers=(True,) * 4,
    tie_word_embeddings=False,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    max_position_embeddings=512,
    initializer_range=0.02,
)
STEP = {"loss": 2.5, "grad_norm": 0.75, "learning_rate": 3e-4, "tokens_per_second": 12345.6}


def lines(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()


def write_steps(folder: Path, steps: range, resume_step: int = 0) -> MetricsWriter:
    writer = MetricsWriter(folder, resume_step)
    for step in steps:
        writer.write({"step": step, "loss": step / 8})
    return writer


def test_each_record_is_a_line_that_is_there_before_close(tmp_path: Path) -> None:
    writer = write_steps(tmp_path / "run", range(1, 4))
    assert [json.loads(line) for line in lines(tmp_path / "run")] == [
        {"step": step, "loss": step / 8} for step in (1, 2, 3)
    ]
    writer.close()


def test_numbers_that_json_cannot_hold_are_strings(tmp_path: Path) -> None:
    record = {"step": 1, "loss": math.nan, "rooms": {"experts": [math.inf, -math.inf, 1.5, None]}, "n": 3}
    MetricsWriter(tmp_path).write(record)
    read = json.loads(lines(tmp_path)[0], parse_constant=lambda name: pytest.fail(f"bare {name}"))
    assert read == {
        "step": 1,
        "loss": "NaN",
        "rooms": {"experts": ["Infinity", "-Infinity", 1.5, None]},
        "n": 3,
    }
    assert math.isnan(float(read["loss"])) and float(read["rooms"]["experts"][1]) == -math.inf


def test_resuming_drops_later_lines_and_a_torn_one(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 9)).close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "lo')
    write_steps(tmp_path, range(6, 8), resume_step=5).close()
    assert [json.loads(line)["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    MetricsWriter(tmp_path).close()
    assert lines(tmp_path) == []


def test_kept_lines_do_not_change_in_truncation(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write({"step": 1, "loss": math.nan, "x": 0.1, "load": [[3, 1], [2, 2]]})
    before = lines(tmp_path)
    MetricsWriter(tmp_path, resume_step=1).close()
    assert lines(tmp_path) == before


@pytest.mark.parametrize(
    ("line", "message"),
    [("{oops\n", "line 2 is not valid JSON"), ('{"loss": 1}\n', 'line 2 has no .*"step"')],
)
def test_a_broken_file_is_named_and_left(tmp_path: Path, line: str, message: str) -> None:
    content = '{"step": 1}\n' + line + '{"step": 2}\n'
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ValueError, match=rf"metrics\.jsonl {message}"):
        MetricsWriter(tmp_path, resume_step=1)
    assert (tmp_path / "metrics.jsonl").read_text() == content


def show(is_terminal: bool, records: list[dict[str, float]], total: int = 100, start: int = 0) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=160)
    with Display(total, start, every=10, console=console) as display:
        for record in records:
            display.update(record)
    return out.getvalue()


def test_plain_lines_come_every_few_steps() -> None:
    records = [{"step": step, **STEP} for step in range(41, 101)]
    records.insert(25, {"step": 65, "validation_loss": 2.125})
    shown = show(False, records, start=40).splitlines()
    assert [line.split("  ")[0] for line in shown] == [f"step {n}/100" for n in (41, 50, 60, 65, 70, 80, 90, 100)]
    assert shown[0].startswith("step 41/100  loss 2.5000  grad 0.750  lr 3.00e-04  12,346 tokens/s  ETA 0:00:0")
    assert "validation 2.1250" in shown[3] and "validation" not in shown[4]
    assert "ETA" not in shown[-1]


def test_the_live_line_keeps_the_last_validation() -> None:
    shown = show(True, [{"step": 1, **STEP}, {"step": 1, "validation_loss": 2.125}, {"step": 2, **STEP}])
    last = shown[shown.rindex("step") :]
    for part in ("2/100", "loss 2.5000", "grad 0.750", "12,346 tokens/s", "validation 2.1250", "ETA"):
        assert part in last


def test_a_non_finite_or_missing_number_is_shown_not_raised() -> None:
    assert "loss nan" in show(False, [{"step": 1, "loss": math.nan}])


def test_flops_and_parameters_are_those_of_the_known_configuration() -> None:
    total, active = parameter_counts(ARCH)
    routed = 4 * 16 * 3 * 256 * 128
    assert (total, active) == (9_193_984, 9_193_984 - routed * 14 // 16)
    assert flops_per_token(ARCH, 256) == 6 * (active - 4096 * 256) + 6 * 4 * 256 * 8 * 32
    assert flops_per_token(ARCH, 256) / 1e6 == pytest.approx(17.42, abs=0.005)


def test_flops_count_a_tied_head_and_dense_layers() -> None:
    tied = dataclasses.replace(ARCH, tie_word_embeddings=True)
    assert parameter_counts(ARCH)[0] - parameter_counts(tied)[0] == 4096 * 256
    assert flops_per_token(tied, 256) == flops_per_token(ARCH, 256)
    dense = dataclasses.replace(ARCH, sparse_layers=(False, True, True, True))
    moved = 3 * 256 * 768 - 2 * 3 * 256 * 128 - 16 * 256
    assert flops_per_token(dense, 256) - flops_per_token(ARCH, 256) == 6 * moved


def test_more_experts_cost_only_their_router() -> None:
    wider = dataclasses.replace(ARCH, num_experts=64)
    assert flops_per_token(wider, 256) - flops_per_token(ARCH, 256) == 6 * 4 * 48 * 256


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("a processor", None),
    ],
)
def test_mfu_is_of_all_devices_or_unknown(name: str, peak: float | None) -> None:
    assert metrics.peak_flops(name) == peak
    share = mfu(1e6, 2e9, metrics.peak_flops(name), 8)
    assert share == (None if peak is None else pytest.approx(2e15 / (8 * peak)))


def test_peak_memory_is_in_bytes_and_never_falls() -> None:
    before = metrics.peak_memory("cpu")
    block = bytearray(b"x") * 200_000_000
    after = metrics.peak_memory("cpu")
    assert len(block) < after < 2**36 and after >= before
    del block
    assert metrics.peak_memory("cpu") >= after


def test_expert_load_is_the_busiest_over_the_mean() -> None:
    assert expert_load([[4, 4, 4, 4], [16, 0, 0, 0], [6, 2, 0, 0], [0, 0, 0, 0]]) == [1.0, 4.0, 3.0, 0.0]
