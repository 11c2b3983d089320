"""What a run reports: one JSON line a step, a live display, and the arithmetic behind FLOPs, MFU and expert
load.

A record is a plain dict with "step". The display reads, where they are there: loss, grad_norm, learning_rate,
tokens_per_second, validation_loss. Nothing here reads a device value: numbers come in as Python numbers.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pithtrain.models.architecture import Architecture, parameter_specs

METRICS_NAME = "metrics.jsonl"

Record = Mapping[str, Any]

# Dense bf16 FLOP/s of one device, from NVIDIA's data sheets; the first name that the device's own holds counts.
PEAK_FLOPS = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("B200", 2250e12),
)


class MetricsWriter:
    """Appends records to `folder`/metrics.jsonl, each flushed as it is written.

    Opening it drops the lines after `resume_step` (all of them at 0), and a last line cut short by a kill, in
    one rename. JSON has no NaN or infinity: they are written as the strings "NaN", "Infinity" and
    "-Infinity", which `float` reads back.
    """

    def __init__(self, folder: Path, resume_step: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS_NAME
        if self.path.exists():
            kept = [record for record in read_metrics(folder) if record["step"] <= resume_step]
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text("".join(_line(record) for record in kept), encoding="utf-8")
            os.replace(temporary, self.path)
        self._file: TextIO = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()

    def write(self, record: Record) -> None:
        """Appends one record. Raises OSError where the disk is full."""
        assert "step" in record, "a record names its step"
        self._file.write(_line(record))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of `folder`/metrics.jsonl in order, without a last line that was cut short.

    Raises ValueError, naming the line, where an earlier one is not a record.
    """
    path = folder / METRICS_NAME
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    return [_parse(path, number, line) for number, line in enumerate(lines, 1)]


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} line {number} is not valid JSON ({error}); move the file aside") from None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError(f'{path} line {number} has no whole number "step"; move the file aside')
    return record


def _line(record: Record) -> str:
    return json.dumps(_spelled(record), allow_nan=False) + "\n"


def _spelled(value: Any) -> Any:
    """`value` with every float that JSON cannot hold as a string."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(item) for item in value]
    return value


class Display:
    """Shows a run while it goes, on the one rank that has it: a live line on a terminal, else plain lines.

    Use as a context. A plain line is printed for the first step, every `every` steps, the last step and each
    validation.
    """

    def __init__(self, total_steps: int, start_step: int = 0, every: int = 10, console: Console | None = None):
        self._total, self._start, self._every = total_steps, start_step, every
        self._console = console or Console(file=sys.stdout)
        self._began = time.monotonic()
        self._validation = ""
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[shown]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=start_step, shown="")

    def __enter__(self) -> Display:
        self._began = time.monotonic()
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, record: Record) -> None:
        """Shows one record: a step's, or a validation's (which has "validation_loss")."""
        step, is_validation = int(record["step"]), "validation_loss" in record
        if is_validation:
            self._validation = f"validation {record['validation_loss']:.4f}"
        shown = _shown(record)
        if self._console.is_terminal:
            if "loss" in record:
                self._progress.update(self._task, completed=step, shown=f"{shown}  {self._validation}".rstrip())
        elif is_validation or step in (self._start + 1, self._total) or step % self._every == 0:
            parts = [
                f"step {step}/{self._total}",
                shown,
                self._validation if is_validation else "",
                self._eta(step),
            ]
            self.say("  ".join(part for part in parts if part))

    def say(self, message: str) -> None:
        """Prints a line of its own, above the live one."""
        self._progress.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def _eta(self, step: int) -> str:
        done = step - self._start
        if done < 1 or step >= self._total:
            return ""
        seconds = round((time.monotonic() - self._began) / done * (self._total - step))
        return f"ETA {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _shown(record: Record) -> str:
    """The record's main numbers, those that are there, as one line."""
    formats = (
        ("loss", "loss {:.4f}"),
        ("grad_norm", "grad {:.3f}"),
        ("learning_rate", "lr {:.2e}"),
        ("tokens_per_second", "{:,.0f} tokens/s"),
    )
    return "  ".join(form.format(record[name]) for name, form in formats if record.get(name) is not None)


def parameter_counts(arch: Architecture) -> tuple[int, int]:
    """(total, active) parameters: of the experts a token uses, top_k of num_experts, only those are
    active."""
    total = active = 0
    for spec in parameter_specs(arch):
        size = math.prod(spec.shape)
        total += size
        active += size * arch.top_k // arch.num_experts if spec.expert else size
    return total, active


def flops_per_token(arch: Architecture, sequence_length: int) -> int:
    """FLOPs of forward and backward for one token of a sequence of S tokens; recomputation does not count.

    6 x (active parameters - embedding) + 6 x layers x S x heads x head_dim. Each parameter in a product costs
    2 forward and 4 backward; a tied head is a product, so the embedding stays in there. A causal token
    attends to S / 2 others on average, in two products (Chowdhery et al., PaLM, appendix B, whose 12 x layers
    x heads x head_dim x S counts the masked half as well). Norms count with the parameters; softmax, rotary
    and routing arithmetic do not.
    """
    _, active = parameter_counts(arch)
    lookup = 0 if arch.tie_word_embeddings else arch.vocab_size * arch.hidden_size
    attention = arch.num_layers * sequence_length * arch.num_attention_heads * arch.head_dim
    return 6 * (active - lookup) + 6 * attention


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by the name that its driver gives; None where the table has no such
    device."""
    return next((flops for name, flops in PEAK_FLOPS if name in device_name), None)


def mfu(tokens_per_second: float, flops_per_token: float, peak: float | None, num_devices: int) -> float | None:
    """Share of the peak FLOP/s of all devices that the model's own FLOPs take, or None without a known
    peak."""
    return None if peak is None else tokens_per_second * flops_per_token / (peak * num_devices)


def peak_memory(device_type: str) -> int:
    """Bytes at the highest so far: "cuda", allocated by torch on the current device; "cpu", resident."""
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def expert_load(counts: Sequence[Sequence[int]]) -> list[float]:
    """Per layer, the busiest expert's tokens over the mean, from counts [layers][experts]; 1 is even, 0 no
    tokens."""
    return [max(layer) * len(layer) / sum(layer) if sum(layer) else 0.0 for layer in counts]
