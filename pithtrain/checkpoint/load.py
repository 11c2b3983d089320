"""Loading: verify first, then read each parameter's part by its family names, on any mesh."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from pithtrain.checkpoint import folder as files
from pithtrain.checkpoint.state import MOMENTS, ONE_RANK, WEIGHT, Family, ModelState, Ranks, TrainState, family_shapes
from pithtrain.models.names import Shape

# keys of config.json that do not change what the weights compute
_FREE_CONFIG_KEYS = {"architectures", "torch_dtype", "initializer_range", "max_position_embeddings"}
_RELEASED = ("F32", "BF16", "F16")  # what import takes
_OTHERWISE = "make the run's model (model.config, model.experts) the same, or name another run.folder"


def latest(folder: Path, ranks: Ranks = ONE_RANK) -> tuple[Path | None, list[str]]:
    """Collective. The newest whole checkpoint, checksums read, and why newer ones were skipped."""
    skipped = [f"{path}: a save that was not finished" for path in sorted(folder.glob(".tmp-step-*"))]
    for path in files.step_folders(folder):
        try:
            files.verify(path, ranks)
            return path, skipped
        except ValueError as error:
            skipped.append(str(error))
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
    if not verified:
        files.verify(checkpoint, ranks)
    saved = ranks.together(checkpoint, lambda: (TrainState.read(checkpoint / files.STATE), _read_biases(checkpoint)))
    _load_tensors(checkpoint, (WEIGHT, *moments), state, family, ranks, dtypes=("F32",))
    return saved


def import_weights(folder: Path, state: ModelState, family: Family, ranks: Ranks = ONE_RANK) -> dict[str, Tensor]:
    """Collective. Load only the weights of a model folder, released or our own; returns its routing biases. A released
    folder has config.json and safetensors in fp32, bf16 or fp16, cast to fp32. Raises ValueError as `load` does.
    """
    if (folder / files.MANIFEST).exists():
        return load(folder, state, family, ranks, moments=())[1]
    _load_tensors(folder, (WEIGHT,), state, family, ranks, _RELEASED)
    return {}


def export(checkpoint: Path, out: Path, *, drop_biases: bool = False) -> str:
    """Copy a checkpoint's Hugging Face part to a new folder; returns what was done and what was left out. Raises
    ValueError when the checkpoint is not whole, when `out` exists, or, unless `drop_biases`, when routing biases that
    are not zero would be lost.
    """
    files.verify(checkpoint, ONE_RANK)
    if out.exists():
        raise ValueError(f"{out} exists; expected a new folder: name another one or remove it")
    biased = [name for name, bias in _read_biases(checkpoint).items() if bool(bias.ne(0).any())]
    if biased and not drop_biases:
        raise ValueError(
            f"{checkpoint / files.BIASES}: {len(biased)} layers route with a bias, which the family cannot "
            "express, so the exported model would choose other experts; export it anyway with --drop-biases"
        )
    aside = out.with_name(f".tmp-{out.name}")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(checkpoint, aside, ignore=shutil.ignore_patterns("pith", "optimizer"))
    os.rename(aside, out)
    lost = f"; left out: routing biases of {len(biased)} layers" if biased else ""
    return f"{out}: a Hugging Face model folder, weights in fp32{lost}"


def _read_biases(checkpoint: Path) -> dict[str, Tensor]:
    """Routing biases by layer name; empty when the checkpoint has none."""
    return load_file(checkpoint / files.BIASES) if files.BIASES in files.read_manifest(checkpoint) else {}


def _load_tensors(
    folder: Path, kinds: Sequence[str], state: ModelState, family: Family, ranks: Ranks, dtypes: Sequence[str]
) -> None:
    """Collective. Check that all kinds' tensors are this model's, then hand `state` this rank's part of each."""
    shapes = family_shapes(state, family)
    ranks.together(folder, lambda: check_model(folder, family))
    found = ranks.together(folder, lambda: {kind: _find(folder, kind, shapes, dtypes) for kind in kinds})
    for kind, slices in found.items():
        ranks.together(folder, partial(_scatter, kind, slices, state, family))


def _scatter(kind: str, slices: Mapping[str, Any], state: ModelState, family: Family) -> None:
    for name in filter(state.holds, state.names()):
        experts = state.local_experts(name)
        tensor = family.names.from_family(name, experts, lambda theirs: slices[theirs][:].to(torch.float32))
        state.scatter(kind, name, tensor)


class OtherModel(ValueError):
    """A folder's model would compute something else than the run's."""


def check_model(folder: Path, family: Family) -> None:
    """Reads only the folder's config. Raises OtherModel, or ValueError when it is none of this family's."""
    path = folder / files.CONFIG
    try:
        theirs = family.respell(dict(json.loads(path.read_bytes())))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: not a config of this model's family ({error}); name its folder") from error
    ours = family.config_json()
    differ = [key for key in ours if key not in _FREE_CONFIG_KEYS and theirs.get(key) != ours[key]]
    if differ:
        what = "; ".join(f"{key}: got {theirs.get(key)!r}, expected {ours[key]!r}" for key in differ)
        raise OtherModel(f"{path}: another model's: {what}; {_OTHERWISE}")


def _find(folder: Path, kind: str, shapes: Mapping[str, Shape], dtypes: Sequence[str]) -> dict[str, Any]:
    """A kind's tensors by family name, as unread slices; ValueError unless they are this model's."""
    slices = {}
    for path in _paths(folder, kind):
        try:
            file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: cannot be read as safetensors ({error}); fetch it again") from error
        for name in file.keys():  # noqa: SIM118
            if name in slices:
                raise ValueError(f"{path}: {name} stands in another file too; fetch the folder again")
            slices[name] = file.get_slice(name)
            shape, dtype = tuple(slices[name].get_shape()), slices[name].get_dtype()
            if shape != shapes.get(name, shape):
                raise ValueError(f"{path}: {name} has shape {list(shape)}, expected {list(shapes[name])}; {_OTHERWISE}")
            if dtype not in dtypes:
                raise ValueError(f"{path}: {name} has dtype {dtype}, expected one of {list(dtypes)}; convert it first")
    missing, extra = sorted(shapes.keys() - slices.keys()), sorted(slices.keys() - shapes.keys())
    if missing or extra:
        raise ValueError(
            f"{folder}: another model's tensors ({kind}): {len(missing)} missing {missing[:3]}, "
            f"{len(extra)} not expected {extra[:3]}; {_OTHERWISE}"
        )
    return slices


def _paths(folder: Path, kind: str) -> list[Path]:
    """A kind's files: those that the index names, or the only one there is."""
    index, single = folder / files.index_name(kind), folder / f"{files.stem_of(kind)}.safetensors"
    if not index.is_file():
        if not single.is_file():
            raise ValueError(f"{folder}: neither {index.name} nor {single.name} is there: no {kind} to load")
        return [single]
    try:
        names = sorted({str(file) for file in json.loads(index.read_bytes())["weight_map"].values()})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{index}: not a safetensors index ({error!r}); fetch it again") from error
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ValueError(f"{index}: names {outside[0]!r}, expected files beside it; fetch it again")
    return [index.parent / name for name in names]
