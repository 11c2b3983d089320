"""The router's kernel names the reference's experts, in its order, whatever the scores."""

import pytest
import torch
from torch import Tensor

from pithtrain.layers import router
from pithtrain.layers.router import topk_lowest_index
from pithtrain.ops.kernels.router import topk_lowest_index_triton
from tests.agreement import randn
from tests.layers.test_router import SIZES, assert_distinct

NAN, INF = float("nan"), float("inf")
SPECIAL = torch.tensor([NAN, -NAN, INF, -INF, 0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38])


@pytest.mark.parametrize(("num_experts", "top_k"), [*SIZES, (160, 6), (10, 10)])
def test_choice(num_experts: int, top_k: int) -> None:
    scores = randn(13, num_experts)
    scores[3:6] = scores[3:6].round()  # ties
    scores[6] = 0.25
    picks = torch.randint(10, (6, num_experts), generator=torch.Generator().manual_seed(0))
    scores[7:] = SPECIAL[picks]
    scores[7] = torch.nan
    around = torch.full((15, num_experts), 1e38)  # which nobody may choose
    around[1:-1] = scores
    scores, expected = around[1:-1], topk_lowest_index(scores, top_k)
    got = topk_lowest_index_triton(scores, top_k)
    assert_distinct(got, num_experts)
    assert torch.equal(got, expected)


def test_no_tokens_and_strides() -> None:
    assert topk_lowest_index_triton(randn(0, 5), 2).shape == (0, 2)
    across = randn(7, 4).T
    assert torch.equal(topk_lowest_index_triton(across, 3), topk_lowest_index(across, 3))


def test_ties_and_zeros_of_either_sign() -> None:
    scores = torch.tensor([[-0.0, 0.0, -1.0, 0.0, -0.0], [-INF] * 5])
    assert topk_lowest_index_triton(scores, 4).tolist() == [[0, 1, 3, 4], [0, 1, 2, 3]]


def test_the_public_function_chooses_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tensor] = []
    scores = randn(4, 6)
    expected = topk_lowest_index(scores, 2)
    monkeypatch.setattr(router, "use_triton", lambda x: asked.append(x) is None)
    assert torch.equal(topk_lowest_index(scores, 2), expected) and len(asked) == 1
