"""Parameters: what one is in the whole model, what it starts from, and what compute sees of it."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter as compute sees it: its value, in the dtype it is computed in, and the fp32 buffer of the same shape
    that its gradient adds up in.
    """

    value: Tensor
    grad: Tensor


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the whole model, whatever the mesh.

    shape: the global shape; the first dimension counts experts where `expert` is set. decay: whether weight decay
    applies. mean, std: of the normal its values are drawn from. fp32: whether compute reads it in fp32 whatever the
    precision.
    """

    name: str
    shape: tuple[int, ...]
    expert: bool = False
    decay: bool = True
    mean: float = 0.0
    std: float = 0.0
    fp32: bool = False


def initial_values(spec: ParameterSpec, expert: int | None, seed: int) -> Tensor:
    """The fp64 values a parameter (or one expert of it) starts from, on CPU.

    A function of the global name, the expert and the seed alone, so every mesh starts from the same model.
    """
    shape = spec.shape if expert is None else spec.shape[1:]
    key = f"{spec.name}/{'' if expert is None else expert}/{seed}".encode()
    stream = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little", signed=True)
    generator = torch.Generator().manual_seed(stream)
    return torch.empty(shape, dtype=torch.float64).normal_(spec.mean, spec.std, generator=generator)
