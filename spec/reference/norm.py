"""RMSNorm."""

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to unit root mean square, then by a learned weight.

    x [..., D], weight [D] -> [..., D]. Source: arXiv 1910.07467, equation 4, with eps inside the root as in
    Llama.
    """
    mean_square = x.pow(2).mean(dim=-1, keepdim=True)
    return weight * (x / (mean_square + eps).sqrt())
