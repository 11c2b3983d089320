"""Loading: verify first, then read each parameter's part by its family names, on any mesh."""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pithtrain.checkpoint import folder as files
from pithtrain.checkpoint.state import MOMENTS, ONE_RANK, WEIGHT, Family, ModelState, Ranks, TrainState

T = TypeVar("T")

# keys of config.json that do not change what the weights compute
_FREE_CONFIG_KEYS = {"architectures", "torch_dtype", "initializer_range", "max_position_embeddings"}
_FLOATS = ("F32", "BF16", "F16")


def latest(folder: Path, ranks: Ranks = ONE_RANK) -> tuple[Path | None, list[str]]:
    """Collective. The newest whole checkpoint, checksums read, and why newer ones were skipped."""
    skipped = [f"{path}: a save that was not finished" for path in sorted(folder.glob(".tmp-step-*"))]
    for path in files.step_folders(folder):
        problems = files.verify(path, ranks)
        if not problems:
            return path, skipped
        skipped.append(_join(problems))
    return None, skipped


def load(
    checkpoint: Path,
    state: ModelState,
    family: Family,
    ranks: Ranks = ONE_RANK,
    *,
    moments: Sequence[str] = MOMENTS,
    verified: bool = False,
) -> tuple[TrainState, dict[str, Tensor]]:
    """Collective. Load a checkpoint of any mesh into `state`; returns the run's state and its routing biases.

    moments   kinds of the optimizer's tensors to load; none for plain SGD or for weights only
    verified  `latest` has just read the checksums of this folder: do not read them again
    Raises ValueError, on every rank and before `state` is touched, naming a file that is missing, damaged or
    of another model.
    """
    problems = [] if verified else files.verify(checkpoint, ranks)
    if problems:
        raise ValueError(f'{_join(problems)}; choose another checkpoint, or resume = "latest"')
    kinds = (WEIGHT, *moments)
    places = _together(lambda: _places_checked(checkpoint, kinds, state, family, ("F32",)), ranks)
    saved = _together(lambda: (TrainState.read(checkpoint / files.STATE), _read_biases(checkpoint)), ranks)
    _together(lambda: _load_kinds(places, state, family), ranks)
    return saved


def import_weights(folder: Path, state: ModelState, family: Family, ranks: Ranks = ONE_RANK) -> dict[str, Tensor]:
    """Collective. Load only the weights of a model folder, released or our own; returns its routing biases.

    A released folder has config.json and one or more safetensors files in fp32, bf16 or fp16, cast to fp32.
    Raises ValueError as `load` does.
    """
    if (folder / files.MANIFEST).exists():
        return load(folder, state, family, ranks, moments=())[1]
    places = _together(lambda: _places_checked(folder, (WEIGHT,), state, family, _FLOATS), ranks)
    _together(lambda: _load_kinds(places, state, family), ranks)
    return {}


def export(checkpoint: Path, out: Path, *, drop_biases: bool = False) -> str:
    """Copy a checkpoint's Hugging Face part to a new folder; returns what was done and what was left out.

    Needs no mesh. Raises ValueError when the checkpoint is not whole, when `out` exists, or, unless
    `drop_biases`, when routing biases that are not zero would be lost.
    """
    problems = files.verify(checkpoint, ONE_RANK)
    if problems:
        raise ValueError(f"{_join(problems)}; export another checkpoint")
    if out.exists():
        raise ValueError(f"{out} exists; expected a new folder: name another one or remove it")
    biased = [name for name, bias in _read_biases(checkpoint).items() if bool(bias.ne(0).any())]
    if biased and not drop_biases:
        raise ValueError(
            f"{checkpoint / files.BIASES}: {len(biased)} layers route with a bias, which the family cannot "
            "express, so the exported model would choose other experts; drop the biases to export it anyway"
        )
    records = files.read_manifest(checkpoint)
    parts = [name for name in records if "/" not in name]
    aside = out.with_name(f".tmp-{out.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for name in parts:
        shutil.copyfile(checkpoint / name, aside / name)
    os.rename(aside, out)
    size = sum(records[name].size for name in parts)
    lost = f"; left out: routing biases of {len(biased)} layers" if biased else ""
    return f"{out}: {len(parts)} files, {size:,} bytes, fp32 weights{lost}"


def _join(problems: list[str]) -> str:
    more = f", and {len(problems) - 3} more files" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more


def _together(read: Callable[[], T], ranks: Ranks) -> T:
    """Collective. The result of a local reading, or ValueError on every rank if it failed on any."""
    try:
        result, error = [read()], None
    except (ValueError, OSError) as problem:
        result, error = [], problem
    if ranks.agree(error is None):
        return result[0]
    raise ValueError(str(error) if error else "another rank could not load its part; see its message") from error


def _places_checked(
    folder: Path, kinds: Sequence[str], state: ModelState, family: Family, dtypes: Sequence[str]
) -> dict[str, dict[str, Path]]:
    """Where each kind's tensors lie; ValueError unless config, names, shapes and dtypes are this model's."""
    _check_config(folder / files.CONFIG, family)
    shapes = {theirs: shape for name in state.names() for theirs, shape in family.names.family_names(name)}
    places = {kind: _places(folder, kind) for kind in kinds}
    for kind in kinds:
        _check_names(folder / files.index_name(kind), set(places[kind]), set(shapes))
        _check_tensors(places[kind], shapes, dtypes)
    return places


def _load_kinds(places: Mapping[str, Mapping[str, Path]], state: ModelState, family: Family) -> None:
    """Hand `state` this rank's part of every parameter."""
    for kind, paths in places.items():
        with _Files() as opened:

            def read(name: str, paths: Mapping[str, Path] = paths, opened: _Files = opened) -> Tensor:
                tensor: Tensor = opened.get(paths[name]).get_tensor(name)
                return tensor.to(torch.float32)

            for name in state.names():
                experts = state.local_experts(name)
                part = None if experts is None else slice(experts.start, experts.stop)
                state.scatter(kind, name, part, family.names.from_family(name, experts, read))


class _Files(ExitStack):
    """Safetensors files, each opened once and closed together."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[Path, Any] = {}

    def get(self, path: Path) -> Any:
        """A file's handle. Raises ValueError naming a file that is missing or no safetensors file."""
        if path not in self._opened:
            try:
                self._opened[path] = self.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path}: cannot be read as safetensors ({error}); fetch it again") from error
        return self._opened[path]


def _places(folder: Path, kind: str) -> dict[str, Path]:
    """Family tensor name -> the file that holds it, from the index, or from the only file there is."""
    index = folder / files.index_name(kind)
    single = folder / f"{files.stem_of(kind)}.safetensors"
    if not index.is_file():
        if not single.is_file():
            raise ValueError(f"{folder}: neither {index.name} nor {single.name} is there: no {kind} to load")
        with _Files() as opened:
            return dict.fromkeys(opened.get(single).keys(), single)
    try:
        weight_map = {str(name): str(file) for name, file in json.loads(index.read_bytes())["weight_map"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{index}: not a safetensors index ({error!r}); fetch it again") from error
    outside = [file for file in weight_map.values() if Path(file).name != file]
    if outside:
        raise ValueError(f"{index}: names {outside[0]!r}, expected files beside it; fetch it again")
    return {name: index.parent / file for name, file in weight_map.items()}


def _check_config(path: Path, family: Family) -> None:
    """Raises ValueError when the folder's model would compute something else than the run's."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; name a model's folder")
    try:
        theirs = family.respell(dict(json.loads(path.read_bytes())))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: not a config of this model's family ({error})") from error
    ours = family.config_json()
    differ = [key for key in ours if key not in _FREE_CONFIG_KEYS and theirs[key] != ours[key]]
    if differ:
        what = "; ".join(f"{key}: got {theirs[key]!r}, expected {ours[key]!r}" for key in differ)
        raise ValueError(f"{path}: another model's: {what}; make the run's model the same, or name another folder")


def _check_names(path: Path, got: set[str], expected: set[str]) -> None:
    if got != expected:
        missing, extra = sorted(expected - got), sorted(got - expected)
        raise ValueError(
            f"{path}: another model's tensors: {len(missing)} missing {missing[:3]}, "
            f"{len(extra)} not expected {extra[:3]}; make the run's model the same, or name another folder"
        )


def _check_tensors(places: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]], dtypes: Sequence[str]) -> None:
    with _Files() as opened:
        for name, path in places.items():
            try:
                found = opened.get(path).get_slice(name)
            except SafetensorError as error:
                raise ValueError(f"{path}: lacks {name}, which the index places there; fetch it again") from error
            shape, dtype = tuple(found.get_shape()), found.get_dtype()
            if shape != shapes[name]:
                raise ValueError(
                    f"{path}: {name} has shape {list(shape)}, expected {list(shapes[name])}; "
                    "make the run's model the same, or name another folder"
                )
            if dtype not in dtypes:
                raise ValueError(f"{path}: {name} has dtype {dtype}, expected one of {list(dtypes)}; convert it first")


def _read_biases(checkpoint: Path) -> dict[str, Tensor]:
    """Routing biases by layer name; empty when the checkpoint has none."""
    path = checkpoint / files.BIASES
    if files.BIASES not in files.read_manifest(checkpoint):
        return {}
    with _Files() as opened:
        file = opened.get(path)
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
