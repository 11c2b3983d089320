"""What can run: the mesh for a number of processes, and checks of a run against its model, data and files.

The checks take plain values and return problems, each naming field, value, constraint and remedy, so that a
run is refused with all of them before any process group starts.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, get_args

from pithtrain.config.sections import BatchConfig, ConfigError, MeshConfig, Preset, RunConfig

if TYPE_CHECKING:
    from pithtrain.models.architecture import Architecture


class MeshShape(NamedTuple):
    """Sizes of the four axes; their product is the world size."""

    pp: int
    dp: int
    cp: int
    ep: int


class DatasetSize(Protocol):
    """What the checks need to know of a dataset."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


def smallest_world(mesh: MeshConfig) -> int:
    """Number of processes that the mesh asks for; dp = "rest" counts as 1."""
    return mesh.pp * (1 if mesh.dp == "rest" else mesh.dp) * mesh.cp * mesh.ep


def resolve_mesh(mesh: MeshConfig, world_size: int) -> MeshShape:
    """The mesh with dp = "rest" worked out. Raises ConfigError if `world_size` processes do not fit it."""
    ranks = smallest_world(mesh)
    if mesh.dp == "rest" and world_size > 0 and world_size % ranks == 0:
        return MeshShape(mesh.pp, world_size // ranks, mesh.cp, mesh.ep)
    if mesh.dp != "rest" and world_size == ranks:
        return MeshShape(mesh.pp, mesh.dp, mesh.cp, mesh.ep)
    sizes = f"pp {mesh.pp} x dp {mesh.dp} x cp {mesh.cp} x ep {mesh.ep}"
    number = f"a multiple of {ranks}" if mesh.dp == "rest" else f"exactly {ranks}"
    constraint = f"needs {number} processes, got {world_size}"
    raise ConfigError(_problem("mesh", sizes, constraint, f"start {ranks}, or change mesh.dp or mesh.ep"))


def hf_config_path(path: Path) -> Path:
    """The config.json that a path in `model.config` means: the file itself, or the one in the folder."""
    return path / "config.json" if path.is_dir() else path


def check_files(cfg: RunConfig) -> list[str]:
    """Problems with the files that the run reads, by their existence alone; empty if none."""
    prepare = "make it with `pith data prepare`, or correct the path"
    weights = "correct the path, or leave it out and let train.seed draw the weights"
    resume = cfg.checkpoint.resume
    folders = [
        ("data.train", cfg.data.train, prepare),
        ("data.validation", cfg.data.validation, prepare),
        ("model.weights", cfg.model.weights, weights),
        ("checkpoint.resume", resume if isinstance(resume, Path) else None, 'or use "latest" or "never"'),
    ]
    problems = [
        _problem(field, folder, "no such folder", remedy)
        for field, folder, remedy in folders
        if folder is not None and not folder.is_dir()
    ]
    if isinstance(cfg.model.config, Path) and not hf_config_path(cfg.model.config).is_file():
        remedy = f"correct the path of the config.json or its folder, or use one of {', '.join(get_args(Preset))}"
        problems.append(_problem("model.config", cfg.model.config, "no such file", remedy))
    return problems


def check_run(
    cfg: RunConfig,
    arch: "Architecture",
    world_size: int,
    train: DatasetSize,
    validation: DatasetSize | None = None,
) -> list[str]:
    """Everything that makes the run impossible; empty if nothing does.

    `arch` is the model that `model.config` describes, `train` and `validation` the sizes of the datasets.
    """
    problems = list(_check_schedule(cfg))
    try:
        mesh = resolve_mesh(cfg.mesh, world_size)
    except ConfigError as error:
        problems.append(str(error))
    else:
        problems += [*_check_batch(cfg.batch, mesh), *_check_experts(arch, mesh)]
    longest = arch.max_position_embeddings
    if cfg.data.sequence_length > longest:
        constraint = f"must be at most the model's max_position_embeddings = {longest}"
        remedy = "shorten it, or use a model that reads more"
        problems.append(_problem("data.sequence_length", cfg.data.sequence_length, constraint, remedy))
    problems += _check_dataset("data.train", cfg.data.train, train, cfg, arch)
    if validation is not None:
        problems += _check_dataset("data.validation", cfg.data.validation, validation, cfg, arch)
    return problems


def _problem(field: str, value: object, constraint: str, remedy: str) -> str:
    return f"{field} = {value}: {constraint}; {remedy}"


def _check_schedule(cfg: RunConfig) -> Iterator[str]:
    warmup, decay, steps = cfg.schedule.warmup_steps, cfg.schedule.decay_steps, cfg.train.steps
    if warmup > steps:
        constraint = f"must be at most train.steps = {steps}"
        yield _problem("schedule.warmup_steps", warmup, constraint, "shorten it, or train longer")
    elif cfg.schedule.kind == "wsd" and warmup + decay > steps:
        left = f"{steps} - {warmup} = {steps - warmup}"
        constraint = f"must be at most train.steps - schedule.warmup_steps = {left}"
        yield _problem("schedule.decay_steps", decay, constraint, "shorten it or the warm-up, or train longer")


def _check_batch(batch: BatchConfig, mesh: MeshShape) -> Iterator[str]:
    size, slices = batch.global_batch_size, batch.num_microbatches
    unit = slices * mesh.dp * mesh.ep
    if size % unit:
        lower = size // unit * unit
        factors = f"{slices} x {mesh.dp} x {mesh.ep} = {unit}"
        constraint = f"must be a multiple of batch.num_microbatches x dp x ep = {factors}"
        use = f"{lower} or {lower + unit}" if lower else f"{unit}"
        remedy = f"use {use}, or change batch.num_microbatches or the number of processes"
        yield _problem("batch.global_batch_size", size, constraint, remedy)


def _check_experts(arch: "Architecture", mesh: MeshShape) -> Iterator[str]:
    if not any(arch.sparse_layers):
        if mesh.ep > 1:
            yield _problem("mesh.ep", mesh.ep, "must be 1 for a model without experts", "use mesh.dp instead")
    elif arch.num_experts % mesh.ep:
        divisors = [str(size) for size in range(1, arch.num_experts + 1) if arch.num_experts % size == 0]
        constraint = f"must divide the model's num_experts = {arch.num_experts}"
        yield _problem("mesh.ep", mesh.ep, constraint, f"use one of {', '.join(divisors)}")


def _check_dataset(
    field: str, folder: Path | None, size: DatasetSize, cfg: RunConfig, arch: "Architecture"
) -> Iterator[str]:
    if size.vocab_size > arch.vocab_size:
        constraint = f"its tokenizer's {size.vocab_size} tokens exceed the model's vocab_size = {arch.vocab_size}"
        remedy = "use a model with a larger one, or prepare the data with another tokenizer"
        yield _problem(field, folder, constraint, remedy)
    sequences, length = cfg.batch.global_batch_size, cfg.data.sequence_length
    tokens = sequences * length + 1
    if size.num_tokens < tokens:
        need = f"batch.global_batch_size x data.sequence_length + 1 = {sequences} x {length} + 1 = {tokens}"
        constraint = f"holds {size.num_tokens} tokens, but one global batch needs {need}"
        yield _problem(field, folder, constraint, "prepare more data, or use a smaller batch or shorter sequences")
