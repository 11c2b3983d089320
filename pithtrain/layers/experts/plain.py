"""Expert types of two matrices: activation(x @ up.T) @ down.T."""

from abc import abstractmethod
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from pithtrain.layers.experts.base import Experts, Shapes
from pithtrain.ops.linear import Compute, Groups, grouped_linear
from pithtrain.ops.parameter import Weight
from pithtrain.ops.wide import wide


@dataclass(frozen=True, eq=False)
class PlainExperts(Experts):
    """up: [L, F, D]. down: [L, D, F]."""

    up: Weight
    down: Weight

    @staticmethod
    def shapes(hidden: int, wide: int) -> Shapes:
        return {"up": {"up": (wide, hidden)}, "down": {"down": (hidden, wide)}}

    def __call__(self, x: Tensor, groups: Groups, compute: Compute) -> Tensor:
        rows = grouped_linear(x, self.up, groups, compute)
        return grouped_linear(self.activate(wide(rows)).to(x.dtype), self.down, groups, compute)

    @staticmethod
    @abstractmethod
    def activate(up: Tensor) -> Tensor:
        """[N, F] -> [N, F], fp32."""


class ReLU2Experts(PlainExperts):
    """relu(up) ** 2 (arXiv 2109.08668, section 3)."""

    @staticmethod
    def activate(up: Tensor) -> Tensor:
        return F.relu(up).square()


class GELUExperts(PlainExperts):
    """gelu(up), exact (arXiv 1606.08415)."""

    @staticmethod
    def activate(up: Tensor) -> Tensor:
        return F.gelu(up)
