"""What a run file asks for: the model, the data, the mesh. Built without torch's process group and without weights."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TypeVar

import torch

from pithtrain.checkpoint import OtherModel, check_model
from pithtrain.checkpoint.folder import read_manifest, step_folders
from pithtrain.config import (
    ConfigError,
    MeshShape,
    RunConfig,
    check_files,
    check_run,
    fingerprint,
    refusal,
    resolve_mesh,
)
from pithtrain.data import Dataset
from pithtrain.metrics import flops_per_token, parameter_counts
from pithtrain.models.architecture import Architecture
from pithtrain.models.qwen3_moe import Qwen3MoE, load_architecture
from pithtrain.ops.linear import Precision, dtype_of
from pithtrain.parallel.mesh import DIMS, Axis, AxisName, Mesh
from pithtrain.parallel.pipeline.schedule import make_schedule
from pithtrain.parallel.transport import Transport
from pithtrain.step import Execution, place

T = TypeVar("T")

RESOLVED = "config.resolved.toml"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, eq=False)
class Plan:
    """A run that can be."""

    cfg: RunConfig
    arch: Architecture
    shape: MeshShape
    train: Dataset
    validation: Dataset | None
    precision: Precision
    fingerprint: str


def make_plan(cfg: RunConfig, source: str, world_size: int) -> Plan:
    """The run, every file it reads opened. Raises ConfigError with all that makes it impossible."""
    if problems := check_files(cfg):
        raise ConfigError(refusal(source, problems))
    arch = _try(problems, lambda: load_architecture(str(cfg.model.config), cfg.model.experts))
    train = _try(problems, lambda: Dataset(cfg.data.train, cfg.train.seed))
    held_out = cfg.data.validation
    validation = None if held_out is None else _try(problems, lambda: Dataset(held_out))
    problems += check_places(cfg)
    if arch is not None:
        problems += check_origin(cfg, arch)
        problems += check_run(cfg, arch, world_size, train, validation)
    if problems or arch is None or train is None:
        raise ConfigError(refusal(source, problems))
    shape = json.dumps(asdict(arch), sort_keys=True).encode()
    precision: Precision = "bf16" if torch.cuda.is_available() else "fp32"
    if cfg.train.precision != "auto":
        precision = cfg.train.precision
    contents = {
        "model.config": hashlib.sha256(shape).hexdigest(),
        "data.train": train.index.inputs_sha256,
        "train.precision": precision,
    }
    mesh = resolve_mesh(cfg.mesh, world_size)
    return Plan(cfg, arch, mesh, train, validation, precision, fingerprint(cfg, contents))


def check_places(cfg: RunConfig) -> Iterator[str]:
    """Problems with where the run starts from and with where it writes, by a look that changes nothing."""
    folder, resume, weights = cfg.run.folder, cfg.checkpoint.resume, cfg.model.weights
    if resume == "never" and step_folders(folder / CHECKPOINTS):
        yield (
            f'checkpoint.resume = "never", but {folder / CHECKPOINTS} holds the checkpoints of another run; '
            "name a new run.folder, or remove them"
        )
    if isinstance(resume, Path):
        try:
            read_manifest(resume)
        except ValueError as error:
            yield f"checkpoint.resume: {error}"
    if weights is not None and not any(weights.glob("*.safetensors")):
        yield f"model.weights = {weights}: holds no .safetensors file; name a Hugging Face model folder"
    there = next(path for path in (folder / CHECKPOINTS, *(folder / CHECKPOINTS).parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        what = "cannot be written to" if there.is_dir() else "is a file"
        yield f"run.folder = {folder}: {there} {what}, so nothing could be saved; name another folder"


def check_origin(cfg: RunConfig, arch: Architecture) -> Iterator[str]:
    """The problem with the model that the run starts from, by its config. A damaged checkpoint of the run's own is
    none: it is passed over for an older one.
    """
    resume, weights = cfg.checkpoint.resume, cfg.model.weights
    own = step_folders(cfg.run.folder / CHECKPOINTS)[:1] if resume == "latest" else []
    named = resume if isinstance(resume, Path) else weights
    for folder in own or ([] if named is None else [named]):
        try:
            check_model(folder, Qwen3MoE.of(arch))
        except ValueError as error:
            if isinstance(error, OtherModel) or not own:
                yield f"{'model.weights' if folder == weights else 'checkpoint.resume'}: {error}"


def _try(problems: list[str], build: Callable[[], T]) -> T | None:
    try:
        return build()
    except ValueError as error:
        problems.append(str(error))
        return None


def resolved_toml(cfg: RunConfig) -> str:
    """Every field of the run as a TOML file that loads to the same run."""
    lines = []
    for section, table in cfg.model_dump(mode="json").items():
        fields = [f"{name} = {json.dumps(value)}" for name, value in table.items() if value is not None]
        lines += [f"[{section}]", *fields, ""]
    return "\n".join(lines)


def dry_run(cfg: RunConfig, world_size: int, source: str = "run") -> str:
    """What the run would be, in words; nothing is started or allocated. Raises ConfigError if it cannot be."""
    plan = make_plan(cfg, source, world_size)
    total, active = parameter_counts(plan.arch)
    parts = bytes_per_rank(plan)
    laid_out = execution(cfg)
    schedule = make_schedule(laid_out.schedule, plan.shape.pp, cfg.batch.num_microbatches, laid_out.chunks)
    rows = [
        ("fingerprint", plan.fingerprint),
        ("mesh", f"{world_size} ranks: " + " x ".join(f"{axis} {size}" for axis, size in plan.shape._asdict().items())),
        ("pipeline", schedule.note or f"{schedule.kind}, {schedule.num_microbatches} micro-batches"),
        ("parameters", f"{total:,} in all, {active:,} active for a token"),
        ("FLOPs a token", f"{flops_per_token(plan.arch, cfg.data.sequence_length):,} forward and backward"),
        ("bytes a rank", f"{sum(parts.values()):,} = " + " + ".join(f"{n:,} {name}" for name, n in parts.items())),
        ("", "activations come on top"),
    ]
    return resolved_toml(cfg) + "\n" + "\n".join(f"{name:15}{text}" for name, text in rows)


def bytes_per_rank(plan: Plan) -> dict[str, int]:
    """Bytes that a rank holds for the whole run, on the pipeline rank with the most; fp32 masters are a part of the
    values where those are fp32.
    """
    return max((_bytes(plan, rank) for rank in range(plan.shape.pp)), key=lambda parts: sum(parts.values()))


def _bytes(plan: Plan, pipeline_rank: int) -> dict[str, int]:
    def axis(name: AxisName) -> Axis:
        size = prod(plan.shape[dim] for dim in DIMS[name])
        return Axis(name, size, pipeline_rank if DIMS[name] == DIMS["pp"] else 0, None)

    axes = {name: axis(name) for name in DIMS}
    mesh = Mesh(0, axes["world"].size, **axes)
    device, dtype = torch.device("meta"), dtype_of(plan.precision)
    _, shard = place(plan.arch, mesh, Transport(), device, execution(plan.cfg), dtype)
    buckets, borrowed = shard.buckets.values(), shard.borrowed.values()
    moments = 2 if plan.cfg.optim.optimizer == "adamw" else 0
    return {
        "values": sum(x.values.nbytes for x in buckets) + sum(weight.value.nbytes for weight in borrowed),
        "gradients": sum(x.grads.nbytes for x in buckets) + sum(weight.grad.nbytes for weight in borrowed),
        "masters": sum(x.master.nbytes for x in buckets if x.values.dtype != torch.float32),
        "moments": moments * sum(bucket.master.nbytes for bucket in buckets),
    }


def execution(cfg: RunConfig) -> Execution:
    """How the run's steps are laid out."""
    return Execution(cfg.pipeline.schedule, cfg.pipeline.num_chunks, cfg.train.recompute)
