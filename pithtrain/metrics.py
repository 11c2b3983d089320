"""What a run reports: one JSON line a step, a display, and the arithmetic behind FLOPs, MFU and expert load.

A record is a plain dict with "step". The display reads, where they are there: loss, grad_norm, learning_rate,
tokens_per_second, validation_loss. Nothing here reads a device value: numbers come in as Python numbers.
"""

import json
import math
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pithtrain.models.architecture import Architecture, parameter_specs

METRICS_NAME = "metrics.jsonl"

Record = Mapping[str, Any]

# Dense bf16 TFLOP/s of one device, from NVIDIA's data sheets; the first name that the device's own holds counts.
PEAK_TFLOPS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200 NVL": 835, "H200": 989, "B200": 2250}


class MetricsWriter:
    """Appends records to `folder`/metrics.jsonl, each flushed as it is written. Opening it drops the lines after
    `resume_step` (all of them at 0), and a last line cut short by a kill, in one rename. JSON has no NaN or infinity:
    they are written as the strings "NaN", "Infinity" and "-Infinity", which `float` reads back.
    """

    def __init__(self, folder: Path, resume_step: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS_NAME
        if path.exists():
            kept = [record for record in read_metrics(folder) if record["step"] <= resume_step]
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(_line(record) for record in kept), encoding="utf-8")
            os.replace(temporary, path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()

    def write(self, record: Record) -> None:
        """Appends one record. Raises OSError where the disk is full."""
        assert "step" in record, "a record names its step"
        self._file.write(_line(record))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of `folder`/metrics.jsonl in order, without a last line that was cut short; ValueError, naming the
    line, where an earlier one is not a record.
    """
    path = folder / METRICS_NAME
    whole, _, _ = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
    records = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} line {number} is not valid JSON ({error}); move the file aside") from None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise ValueError(f'{path} line {number} has no whole number "step"; move the file aside')
        records.append(record)
    return records


def _line(record: Record) -> str:
    """One line of JSON. Python writes the bare words NaN and Infinity; read back by `str`, they become strings."""
    return json.dumps(json.loads(json.dumps(record), parse_constant=str), allow_nan=False) + "\n"


class Display:
    """Shows a run while it goes: a live line on a terminal, else a plain line for the first step, every `every` steps,
    the last step, each validation and each step that was skipped. Use as a context.
    """

    def __init__(self, total_steps: int, start_step: int = 0, every: int = 10, console: Console | None = None) -> None:
        self._total, self._start, self._every = total_steps, start_step, every
        self._console = console or Console()
        self._validation, self._began = "", time.monotonic()
        bar, left = BarColumn(bar_width=20), TimeRemainingColumn()
        columns = (TextColumn("step"), MofNCompleteColumn(), bar, TextColumn("{task.description}"), "ETA", left)
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._progress.add_task("", total=total_steps, completed=start_step)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def update(self, record: Record) -> None:
        """Shows one record: a step's, or a validation's (which has "validation_loss")."""
        step, is_validation, shown = record["step"], "validation_loss" in record, _shown(record)
        if not self._console.is_terminal:
            due = step in (self._start + 1, self._total) or step % self._every == 0
            if is_validation or record.get("skipped") or due:
                print(f"step {step}/{self._total}  {shown}{self._eta(step)}", file=self._console.file, flush=True)
        elif is_validation:
            self._validation = shown
        else:
            self._progress.update(self._task, completed=step, description=f"{shown}  {self._validation}")

    def _eta(self, step: int) -> str:
        if not self._start < step < self._total:
            return ""
        seconds = (time.monotonic() - self._began) / (step - self._start) * (self._total - step)
        return f"  ETA {timedelta(seconds=round(seconds))}"


def _shown(record: Record) -> str:
    """A record's main numbers, those that are there, as one line; first that the step was skipped, if it was."""
    formats = {
        "loss": "loss {:.4f}",
        "grad_norm": "grad {:.3f}",
        "learning_rate": "lr {:.2e}",
        "tokens_per_second": "{:,.0f} tokens/s",
        "validation_loss": "validation {:.4f}",
    }
    numbers = [form.format(record[name]) for name, form in formats.items() if record.get(name) is not None]
    return "  ".join(["skipped"] * bool(record.get("skipped")) + numbers)


def parameter_counts(arch: Architecture) -> tuple[int, int]:
    """(total, active) parameters; of the experts, top_k of num_experts are active."""
    specs = parameter_specs(arch)
    total = sum(math.prod(spec.shape) for spec in specs)
    routed = sum(math.prod(spec.shape) for spec in specs if spec.expert)
    return total, total - routed + routed * arch.top_k // max(arch.num_experts, 1)


def flops_per_token(arch: Architecture, sequence_length: int) -> int:
    """FLOPs of forward and backward for one token of a sequence of S tokens; recomputation does not count.

    A parameter in a product costs 2 forward and 4 backward; a tied head is a product, so the embedding stays in there.
    A causal token attends to S / 2 others on average, in two products (Chowdhery et al., PaLM, appendix B, whose
    12 x layers x heads x head_dim x S counts the masked half too). Norms' weights count as if they were in products;
    softmax, rotary and routing arithmetic do not count.
    """
    _, active = parameter_counts(arch)
    lookup = 0 if arch.tie_word_embeddings else arch.vocab_size * arch.hidden_size
    attention = arch.num_layers * sequence_length * arch.num_attention_heads * arch.head_dim
    return 6 * (active - lookup) + 6 * attention


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by the name that its driver gives; None where the table has no such device."""
    return next((1e12 * tflops for name, tflops in PEAK_TFLOPS.items() if name in device_name), None)


def mfu(tokens_per_second: float, flops_per_token: float, peak: float | None, num_devices: int) -> float | None:
    """Share of the peak FLOP/s of all devices that the model's own FLOPs take, or None without a known peak."""
    return None if peak is None else tokens_per_second * flops_per_token / (peak * num_devices)


def peak_memory(device_type: str) -> int:
    """Bytes at the highest so far: "cuda", allocated by torch on the current device; "cpu", resident."""
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def expert_load(counts: Sequence[Sequence[int]]) -> list[float]:
    """Per layer, the busiest expert's tokens over the mean, from counts [layers][experts]; 1 is even, 0 no tokens."""
    return [max(layer) * len(layer) / sum(layer) if sum(layer) else 0.0 for layer in counts]
