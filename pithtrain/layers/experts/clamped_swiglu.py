"""GPT-OSS's experts: a clamped gate and up, and biases (arXiv 2508.10925; transformers, GptOssExperts)."""

from dataclasses import dataclass

from torch import Tensor

from pithtrain.layers.experts.base import Experts, Shapes
from pithtrain.ops.linear import Compute, Groups, grouped_linear, grouped_vector
from pithtrain.ops.parameter import Weight
from pithtrain.ops.swiglu import clamped_swiglu
from pithtrain.ops.wide import wide

ALPHA, LIMIT = 1.702, 7.0


@dataclass(frozen=True, eq=False)
class ClampedSwiGLUExperts(Experts):
    """gate_up: [L, 2F, D], gate_up_bias: [L, 2F], gate first. down: [L, D, F], down_bias: [L, D]."""

    gate_up: Weight
    gate_up_bias: Weight
    down: Weight
    down_bias: Weight

    @staticmethod
    def shapes(hidden: int, wide: int) -> Shapes:
        return {
            "gate_up": {"gate": (wide, hidden), "up": (wide, hidden)},
            "gate_up_bias": {"gate_bias": (wide,), "up_bias": (wide,)},
            "down": {"down": (hidden, wide)},
            "down_bias": {"down_bias": (hidden,)},
        }

    def __call__(self, x: Tensor, groups: Groups, compute: Compute) -> Tensor:
        gate_up = wide(grouped_linear(x, self.gate_up, groups, compute))
        gate_up = gate_up + grouped_vector(self.gate_up_bias, groups, compute)
        rows = clamped_swiglu(gate_up, ALPHA, LIMIT).to(x.dtype)
        down = wide(grouped_linear(rows, self.down, groups, compute))
        return (down + grouped_vector(self.down_bias, groups, compute)).to(x.dtype)
