"""What can run: the mesh for a number of processes, and checks of a run against its model, data and files.

A problem names field, value, constraint and remedy; a run is refused with all of them before a process group starts.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

from pithtrain.config.sections import STAGES_PER_RANK, ConfigError, MeshConfig, Preset, RunConfig

if TYPE_CHECKING:
    from pithtrain.data import Dataset
    from pithtrain.models.architecture import Architecture


class MeshShape(NamedTuple):
    """Sizes of the four axes; their product is the world size."""

    pp: int
    dp: int
    cp: int
    ep: int


def smallest_world(mesh: MeshConfig) -> int:
    """Number of processes that the mesh asks for; dp = "rest" counts as 1."""
    return mesh.pp * (1 if mesh.dp == "rest" else mesh.dp) * mesh.cp * mesh.ep


def resolve_mesh(mesh: MeshConfig, world_size: int) -> MeshShape:
    """The mesh with dp = "rest" worked out. Raises ConfigError if `world_size` processes do not fit it."""
    ranks = smallest_world(mesh)
    dp = max(world_size // ranks, 1) if mesh.dp == "rest" else mesh.dp
    shape = MeshShape(mesh.pp, dp, mesh.cp, mesh.ep)
    if math.prod(shape) == world_size:
        return shape
    sizes = f"pp {mesh.pp} x dp {mesh.dp} x cp {mesh.cp} x ep {mesh.ep}"
    number = f"a multiple of {ranks}" if mesh.dp == "rest" else f"exactly {ranks}"
    constraint = f"needs {number} processes, got {world_size}"
    raise ConfigError(_problem("mesh", sizes, constraint, f"start {ranks}, or change mesh.pp, mesh.dp or mesh.ep"))


def check_files(cfg: RunConfig) -> list[str]:
    """Problems with the files that the run reads, by their existence alone; empty if none."""
    prepare = "make it with `pith data prepare`, or correct the path"
    folders = [
        ("data.train", cfg.data.train, prepare),
        ("data.validation", cfg.data.validation, prepare),
        ("model.weights", cfg.model.weights, "correct the path, or leave it out and let train.seed draw the weights"),
        ("checkpoint.resume", cfg.checkpoint.resume, 'or use "latest" or "never"'),
    ]
    problems = [
        _problem(field, folder, "no such folder", remedy)
        for field, folder, remedy in folders
        if isinstance(folder, Path) and not folder.is_dir()
    ]
    model = cfg.model.config
    if isinstance(model, Path) and not (model / "config.json" if model.is_dir() else model).is_file():
        remedy = f"correct the path of the config.json or its folder, or use one of {', '.join(get_args(Preset))}"
        problems.append(_problem("model.config", model, "no such file", remedy))
    return problems


def check_run(
    cfg: RunConfig, arch: "Architecture", world_size: int, train: "Dataset | None", validation: "Dataset | None" = None
) -> list[str]:
    """Everything that makes the run impossible; empty if nothing does. `arch`: what `model.config` describes; of a
    dataset that could not be opened nothing is said.
    """
    problems = [*_check_lengths(cfg, arch), *_check_pipeline(cfg, arch)]
    try:
        problems += _check_layout(cfg, arch, resolve_mesh(cfg.mesh, world_size))
    except ConfigError as error:
        problems.append(str(error))
    if train is not None:
        problems += _check_dataset(cfg, arch, train, is_train=True)
    if validation is not None:
        problems += _check_dataset(cfg, arch, validation, is_train=False)
    return problems


def _problem(field: str, value: object, constraint: str, remedy: str) -> str:
    return f"{field} = {value}: {constraint}; {remedy}"


def _at_most(field: str, value: int, limit: int, whence: str, remedy: str) -> list[str]:
    return [_problem(field, value, f"must be at most {whence} = {limit}", remedy)] if value > limit else []


def _check_lengths(cfg: RunConfig, arch: "Architecture") -> Iterator[str]:
    warmup, steps, length = cfg.schedule.warmup_steps, cfg.train.steps, cfg.data.sequence_length
    yield from _at_most("schedule.warmup_steps", warmup, steps, "train.steps", "shorten it, or train longer")
    if cfg.schedule.kind == "wsd" and warmup <= steps:
        rest = f"train.steps - schedule.warmup_steps = {steps} - {warmup}"
        remedy = "shorten it or the warm-up, or train longer"
        yield from _at_most("schedule.decay_steps", cfg.schedule.decay_steps, steps - warmup, rest, remedy)
    longest, whence = arch.max_position_embeddings, "the model's max_position_embeddings"
    yield from _at_most("data.sequence_length", length, longest, whence, "shorten it, or use a model that reads more")


def _check_pipeline(cfg: RunConfig, arch: "Architecture") -> Iterator[str]:
    schedule, chunks, ranks = cfg.pipeline.schedule, cfg.pipeline.num_chunks, cfg.mesh.pp
    if chunks != STAGES_PER_RANK[schedule] and schedule != "interleaved":
        constraint = f'must be {STAGES_PER_RANK[schedule]} for pipeline.schedule = "{schedule}"'
        remedy = 'use "auto", or the interleaved schedule, which takes any number'
        yield _problem("pipeline.chunks", chunks, constraint, remedy)
    else:
        stages = f"mesh.pp x stages per rank = {ranks} x {chunks}"
        remedy = "lower mesh.pp, or use a pipeline.schedule with fewer stages per rank (1f1b has 1)"
        yield from _at_most(stages, ranks * chunks, arch.num_layers, "the model's num_hidden_layers", remedy)


def _check_layout(cfg: RunConfig, arch: "Architecture", mesh: MeshShape) -> Iterator[str]:
    size, slices, experts = cfg.batch.global_batch_size, cfg.batch.num_microbatches, arch.num_experts
    unit = slices * mesh.dp * mesh.ep
    if size % unit:
        lower = size // unit * unit
        factors = f"batch.num_microbatches x dp x ep = {slices} x {mesh.dp} x {mesh.ep} = {unit}"
        use = f"{lower} or {lower + unit}" if lower else f"{unit}"
        remedy = f"use {use}, or change batch.num_microbatches or the number of processes"
        yield _problem("batch.global_batch_size", size, f"must be a multiple of {factors}", remedy)
    if not any(arch.sparse_layers):
        if mesh.ep > 1:
            yield _problem("mesh.ep", mesh.ep, "must be 1 for a model without experts", "use mesh.dp instead")
    elif experts % mesh.ep:
        divisors = ", ".join(str(size) for size in range(1, experts + 1) if experts % size == 0)
        constraint = f"must divide the model's num_experts = {experts}"
        yield _problem("mesh.ep", mesh.ep, constraint, f"use one of {divisors}")


def _check_dataset(cfg: RunConfig, arch: "Architecture", data: "Dataset", is_train: bool) -> Iterator[str]:
    field, folder = ("data.train", cfg.data.train) if is_train else ("data.validation", cfg.data.validation)
    if data.vocab_size > arch.vocab_size:
        constraint = f"its tokenizer's {data.vocab_size} tokens exceed the model's vocab_size = {arch.vocab_size}"
        remedy = "use a model with a larger one, or prepare the data with another tokenizer"
        yield _problem(field, folder, constraint, remedy)
    size, length = cfg.batch.global_batch_size if is_train else 1, cfg.data.sequence_length
    if data.num_tokens <= size * length:
        batch = f"one global batch needs batch.global_batch_size x data.sequence_length + 1 = {size} x {length} + 1"
        need = batch if is_train else f"one sample needs data.sequence_length + 1 = {length} + 1"
        constraint = f"holds {data.num_tokens} tokens, but {need} = {size * length + 1}"
        remedy = "prepare more data, or use a smaller batch or shorter sequences"
        yield _problem(field, folder, constraint, remedy if is_train else "prepare more data, or use shorter sequences")
