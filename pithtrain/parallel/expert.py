"""Expert parallelism: a token goes once to each rank that holds one of its experts, and comes back summed there.

Dispatch and combine are linear maps, each the other's transpose, so the backward pass is the same two moves the other
way round. They are generators: they yield a request and go on with what came back, so that whoever drives them may
run something else behind the exchange. Dropless: every copy is computed.

T tokens, K experts a token, E experts, L experts a rank, P ranks, R rows received, W rows sent, D hidden.
"""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from pithtrain.ops.host import read_ints
from pithtrain.ops.permute import Permutation, gather_rows, plan, sum_copies
from pithtrain.parallel.mesh import Axis
from pithtrain.parallel.tape import Observe, unobserved
from pithtrain.parallel.transport import AllToAll, Counts, Request

Exchange = Generator[Request, tuple[Tensor, ...], tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class Route:
    """Where one micro-batch's tokens go in the layer `name`.

    sent: the rows sent, by destination rank and then token; None at P = 1, where the rows are the tokens.
    send_sizes, recv_sizes: rows a peer. expert_sizes: copies each local expert gets, from all ranks.
    """

    ep: Axis
    num_local_experts: int
    sent: Permutation | None
    send_sizes: tuple[int, ...]
    recv_sizes: tuple[int, ...]
    expert_sizes: tuple[int, ...]
    name: str = ""


def make_route(
    topk_expert_ids: Tensor, num_experts: int, ep: Axis, name: str = "", observe: Observe = unobserved
) -> Generator[Request, tuple[Tensor, ...], Route]:
    """ids [T, K] int64 -> the route of layer `name`. One small exchange of counts and one host read."""
    tokens, local = topk_expert_ids.shape[0], num_experts // ep.size
    chosen = topk_expert_ids.new_zeros(tokens, num_experts).scatter_(1, topk_expert_ids, 1)
    copies = chosen.sum(0).view(ep.size, local)
    if ep.size == 1:
        loads = tuple(observe(f"{name}.sizes", "host", lambda: read_ints(copies[0])))
        return Route(ep, local, None, (tokens,), (tokens,), loads, name)
    goes = chosen.view(tokens, ep.size, local).any(-1)
    sent, received = yield Counts(torch.cat([goes.sum(0)[:, None], copies], 1), ep, f"{name}.counts")
    numbers = torch.cat([sent[:, 0], received[:, 0], received[:, 1:].sum(0)])
    host = observe(f"{name}.sizes", "host", lambda: read_ints(numbers))
    send, recv, sizes = host[: ep.size], host[ep.size : 2 * ep.size], host[2 * ep.size :]
    ranks = torch.where(goes, torch.arange(ep.size, device=goes.device), -1)
    return Route(ep, local, plan(ranks, ep.size, sum(send)), tuple(send), tuple(recv), tuple(sizes), name)


def dispatch(route: Route, x: Tensor, weights: Tensor, topk_expert_ids: Tensor) -> Exchange:
    """x [T, D], weights [T, K], ids [T, K] -> (x [R, D], weights [R, K], local expert ids [R, K], -1 for elsewhere)."""
    if route.sent is None:
        return x, weights, topk_expert_ids
    sizes = torch.tensor(route.send_sizes, device=x.device)
    ranks = torch.arange(route.ep.size, device=x.device)
    first = torch.repeat_interleave(ranks * route.num_local_experts, sizes, output_size=sum(route.send_sizes))
    local_ids = gather_rows(topk_expert_ids, route.sent) - first[:, None]
    here = (local_ids >= 0) & (local_ids < route.num_local_experts)
    sent_weights = gather_rows(weights, route.sent) * here
    rows = (gather_rows(x, route.sent), sent_weights, torch.where(here, local_ids, -1))
    return (yield AllToAll(rows, route.send_sizes, route.recv_sizes, route.ep, f"{route.name}.dispatch"))


def dispatch_backward(route: Route, grad_x: Tensor, grad_weights: Tensor) -> Exchange:
    """Gradients of what dispatch gave, [R, D] and [R, K] -> of what it took, [T, D] and [T, K]."""
    if route.sent is None:
        return grad_x, grad_weights
    name = f"{route.name}.dispatch_backward"
    rows = yield AllToAll((grad_x, grad_weights), route.recv_sizes, route.send_sizes, route.ep, name)
    return tuple(sum_copies(row, route.sent) for row in rows)


def combine(route: Route, rows: Tensor) -> Exchange:
    """rows [R, D], this rank's expert sums -> ([W, D],), one row for each (token, rank) sent."""
    return (yield AllToAll((rows,), route.recv_sizes, route.send_sizes, route.ep, f"{route.name}.combine"))


def combine_backward(route: Route, grad_rows: Tensor) -> Exchange:
    """The gradient of what combine gave, [W, D] -> of what it took, ([R, D],)."""
    name = f"{route.name}.combine_backward"
    return (yield AllToAll((grad_rows,), route.send_sizes, route.recv_sizes, route.ep, name))
