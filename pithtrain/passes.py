"""One micro-batch through the model: the forward pass, and the backward pass over what it left.

Both are generators that yield exchanges, so a schedule can run one micro-batch's compute behind another's
communication. Compute segments go on a tape, one piece each; the backward pass walks it in reverse and sends
gradients through the reversed exchanges. Without a tape (evaluation) the same segments run plainly.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from pithtrain.layers.router import Choice
from pithtrain.models.decoder import Decoder, DenseLayer, SparseLayer
from pithtrain.ops.cross_entropy import head_loss
from pithtrain.ops.linear import Compute
from pithtrain.parallel.expert import (
    Route,
    combine,
    combine_backward,
    dispatch,
    dispatch_backward,
    make_route,
)
from pithtrain.parallel.mesh import Mesh
from pithtrain.parallel.tape import Pass, Piece
from pithtrain.parallel.transport import Request

Segment = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class Inputs:
    """One micro-batch: tokens, labels [B, S] int64; padding [B, S] bool or None; RoPE's tables; and for each sparse
    layer how its experts are chosen. scale: what the summed loss is multiplied with, None to evaluate.
    """

    tokens: Tensor
    labels: Tensor
    padding: Tensor | None
    tables: tuple[Tensor, Tensor]
    choices: Sequence[Choice]
    scale: float | None


@dataclass(frozen=True, eq=False)
class LayerLoad:
    """What one sparse layer said of one micro-batch: see SparseLayer.attend."""

    topk_expert_ids: Tensor
    prob_sum: Tensor
    z_sum: Tensor
    num_tokens_per_expert: Tensor
    gap: Tensor


@dataclass(frozen=True, eq=False)
class Tape:
    """What the backward pass needs: pieces in the order they ran, and each sparse layer's route."""

    pieces: list[Piece] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)

    def run(self, name: str, segment: Segment, *inputs: Tensor) -> tuple[Tensor, ...]:
        piece = Piece(name, segment, inputs)
        self.pieces.append(piece)
        outputs = piece.outputs
        piece.outputs = ()  # the next segment holds what it needs
        return outputs


@dataclass(frozen=True, eq=False)
class Forwarded:
    """loss: 0-d fp32, summed over labels. grad: of the final hidden states, [T, D]. loads: one a sparse layer."""

    loss: Tensor
    grad: Tensor | None
    loads: tuple[LayerLoad, ...]
    tape: Tape


def forward(model: Decoder, inputs: Inputs, mesh: Mesh, compute: Compute) -> Pass[Forwarded]:
    """The forward pass and the loss. Leaves a tape when inputs.scale is given."""
    tape = Tape()
    final, loads = yield from encode(model, inputs, mesh, compute, tape if inputs.scale is not None else None)
    head = head_loss(final, model.head, inputs.labels.flatten(), inputs.scale, compute)
    return Forwarded(head.loss, head.grad, loads, tape)


def encode(
    model: Decoder, inputs: Inputs, mesh: Mesh, compute: Compute, tape: Tape | None = None
) -> Pass[tuple[Tensor, tuple[LayerLoad, ...]]]:
    """What the head reads, [T, D], and every sparse layer's load; segments go on `tape` where one is given."""
    run = _plainly if tape is None else tape.run
    loads, choices = list[LayerLoad](), iter(inputs.choices)
    (hidden,) = run("embedding", model.embed, inputs.tokens)
    for layer in model.layers:
        match layer:
            case DenseLayer():
                segment = partial(layer.attend, tables=inputs.tables, compute=compute)
                (hidden,) = run(f"{layer.name}.attention", segment, hidden)
            case SparseLayer():
                hidden, load, route = yield from _sparse_forward(
                    run, layer, hidden, inputs, next(choices), mesh, compute
                )
                loads.append(load)
                if tape is not None:
                    tape.routes.append(route)
    (final,) = run("norm", model.final_norm, hidden)
    return final, tuple(loads)


def _plainly(name: str, segment: Segment, *inputs: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return segment(*inputs)


def _sparse_forward(
    run: Callable[..., tuple[Tensor, ...]],
    layer: SparseLayer,
    hidden: Tensor,
    inputs: Inputs,
    choice: Choice,
    mesh: Mesh,
    compute: Compute,
) -> Generator[Request, tuple[Tensor, ...], tuple[Tensor, LayerLoad, Route]]:
    attend = partial(layer.attend, tables=inputs.tables, choice=choice, padding=inputs.padding, compute=compute)
    residual, x, weights, ids, prob_sum, z_sum, counts, gap = run(f"{layer.name}.attention", attend, hidden)
    route = yield from make_route(ids, counts.shape[-1], mesh.ep)
    x, weights, local_ids = yield from dispatch(route, x, weights, ids)
    experts = partial(layer.compute_experts, expert_ids=local_ids, sizes=route.expert_sizes, compute=compute)
    (rows,) = run(f"{layer.name}.experts", experts, x, weights)
    (rows,) = yield from combine(route, rows)
    (hidden,) = run(f"{layer.name}.aggregate", partial(layer.aggregate, sent=route.sent), residual, rows)
    return hidden, LayerLoad(ids, prob_sum, z_sum, counts, gap), route


def backward(
    model: Decoder, done: Forwarded, grad_prob_sums: Sequence[Tensor | None], grad_z_sum: Tensor | None
) -> Pass[None]:
    """The backward pass. Consumes the tape; parameter gradients add to their buffers.

    grad_prob_sums: for each sparse layer, the gradient of its prob_sum [B, E]; grad_z_sum: of every layer's z_sum [].
    """
    pieces, routes, balance = done.tape.pieces, done.tape.routes, list(grad_prob_sums)
    (grad,) = pieces.pop().backward(done.grad)
    for layer in reversed(model.layers):
        assert grad is not None
        match layer:
            case DenseLayer():
                (grad,) = pieces.pop().backward(grad)
            case SparseLayer():
                grad = yield from _sparse_backward(pieces, routes.pop(), grad, balance.pop(), grad_z_sum)
    pieces.pop().backward(grad)


def _sparse_backward(
    pieces: list[Piece], route: Route, grad: Tensor, grad_prob_sum: Tensor | None, grad_z_sum: Tensor | None
) -> Generator[Request, tuple[Tensor, ...], Tensor]:
    grad_residual, grad_rows = _all(pieces.pop().backward(grad))
    (grad_rows,) = yield from combine_backward(route, grad_rows)
    grad_x, grad_weights = _all(pieces.pop().backward(grad_rows))
    grad_x, grad_weights = yield from dispatch_backward(route, grad_x, grad_weights)
    outputs = (grad_residual, grad_x, grad_weights, None, grad_prob_sum, grad_z_sum, None, None)
    (grad,) = _all(pieces.pop().backward(*outputs))
    return grad


def _all(grads: Sequence[Tensor | None]) -> list[Tensor]:
    assert all(grad is not None for grad in grads), "a segment's input got no gradient"
    return [grad for grad in grads if grad is not None]
