"""Expert types with a gate: activation(x @ gate.T, x @ up.T) @ down.T (arXiv 2002.05202, equation 6)."""

from abc import abstractmethod
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from pithtrain.layers.experts.base import Experts, Shapes
from pithtrain.ops.linear import Compute, Groups, grouped_linear
from pithtrain.ops.parameter import Weight
from pithtrain.ops.swiglu import swiglu
from pithtrain.ops.wide import wide


@dataclass(frozen=True, eq=False)
class GatedExperts(Experts):
    """gate_up: [L, 2F, D], gate first. down: [L, D, F]."""

    gate_up: Weight
    down: Weight

    @staticmethod
    def shapes(hidden: int, wide: int) -> Shapes:
        return {"gate_up": {"gate": (wide, hidden), "up": (wide, hidden)}, "down": {"down": (hidden, wide)}}

    def __call__(self, x: Tensor, groups: Groups, compute: Compute) -> Tensor:
        rows = self.activate(grouped_linear(x, self.gate_up, groups, compute))
        return grouped_linear(rows, self.down, groups, compute)

    @staticmethod
    @abstractmethod
    def activate(gate_up: Tensor) -> Tensor:
        """[N, 2F] -> [N, F], in fp32, given in the dtype it came in."""


class SwiGLUExperts(GatedExperts):
    """silu(gate) * up."""

    activate = staticmethod(swiglu)


class GeGLUExperts(GatedExperts):
    """gelu(gate) * up, with the exact GELU."""

    @staticmethod
    def activate(gate_up: Tensor) -> Tensor:
        gate, up = wide(gate_up).chunk(2, dim=-1)
        return (F.gelu(gate) * up).to(gate_up.dtype)


class GatedReLU2Experts(GatedExperts):
    """relu(gate) ** 2 * up."""

    @staticmethod
    def activate(gate_up: Tensor) -> Tensor:
        gate, up = wide(gate_up).chunk(2, dim=-1)
        return (F.relu(gate).square() * up).to(gate_up.dtype)
