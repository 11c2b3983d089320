"""SwiGLU experts: silu(x @ gate.T) * (x @ up.T) @ down.T, every expert's rows in one grouped product."""

from dataclasses import dataclass

from torch import Tensor

from pithtrain.ops.linear import Compute, Groups, grouped_linear
from pithtrain.ops.parameter import Weight
from pithtrain.ops.swiglu import swiglu


@dataclass(frozen=True, eq=False)
class SwiGLUExperts:
    """gate_up: [L, 2F, D], gate first. down: [L, D, F]."""

    gate_up: Weight
    down: Weight

    def __call__(self, x: Tensor, groups: Groups, compute: Compute) -> Tensor:
        """x [N, D] sorted by local expert -> [N, D]."""
        return grouped_linear(swiglu(grouped_linear(x, self.gate_up, groups, compute)), self.down, groups, compute)
