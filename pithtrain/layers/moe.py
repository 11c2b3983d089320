"""The mixture-of-experts layer's compute, on either side of its exchanges.

B sequences, T = B * S tokens, R rows received, K experts a token, E experts, L local experts, N copies, D hidden.
"""

from dataclasses import dataclass

from torch import Tensor

from pithtrain.layers.experts.base import Experts
from pithtrain.layers.router import Routing
from pithtrain.ops.linear import Compute, Groups
from pithtrain.ops.permute import permute, plan, weighted_unpermute


@dataclass(frozen=True, eq=False)
class Load:
    """What balance losses need of one layer and micro-batch, padding left out.

    num_tokens_per_expert: [B, E] int64. prob_sum: [B, E] fp32, summed over positions. z_sum: 0-d fp32, summed squared
    logsumexp. The last two carry gradients, both linear in the losses: the caller knows each loss's gradient to them.
    """

    num_tokens_per_expert: Tensor
    prob_sum: Tensor
    z_sum: Tensor


def chosen_experts(topk_expert_ids: Tensor, num_experts: int) -> Tensor:
    """ids [T, K] -> [T, E] int64, 1 where chosen. A token's ids are distinct, so no two writes meet."""
    chosen = topk_expert_ids.new_zeros(topk_expert_ids.shape[0], num_experts)
    return chosen.scatter_(1, topk_expert_ids, 1)


def measure_load(routing: Routing, batch: int, padding: Tensor | None) -> Load:
    """padding: [B, S] bool, True where a position is padding; None for none."""
    num_experts = routing.probs.shape[1]
    chosen = chosen_experts(routing.topk_expert_ids, num_experts).view(batch, -1, num_experts)
    probs = routing.probs.view(batch, -1, num_experts)
    squared = routing.logsumexp.square().view(batch, -1)
    if padding is not None:
        chosen, probs = chosen * ~padding[:, :, None], probs * ~padding[:, :, None]
        squared = squared * ~padding
    return Load(chosen.sum(1), probs.sum(1), squared.sum())


@dataclass(frozen=True, eq=False)
class LocalExperts:
    """The experts this rank holds, applied to the rows it received."""

    experts: Experts
    num_local_experts: int

    def __call__(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, sizes: tuple[int, ...], compute: Compute
    ) -> Tensor:
        """Each row's weighted sum over this rank's experts: [R, D].

        x [R, D]; weights [R, K] fp32; expert_ids [R, K] int64, local, -1 where an entry's expert is elsewhere;
        sizes: copies each local expert gets (host ints).
        """
        permutation = plan(expert_ids, self.num_local_experts, sum(sizes))
        groups = Groups.of(sizes, x.device, compute)
        copies = self.experts(permute(x, permutation), groups, compute)
        return weighted_unpermute(copies, weights, permutation)
