"""One micro-batch through one stage of the model: the forward pass, and the backward pass over what it left.

Both are generators that yield exchanges, so a schedule can run one micro-batch's compute behind another's
communication. Compute segments go on a tape, one piece each; the backward pass walks it in reverse and sends
gradients through the reversed exchanges. In evaluation the same segments run plainly and leave no tape.

A segment that is recomputed keeps its inputs, received rows among them, so no exchange is run twice; the router's
choice and what it counted are those of the first run.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from torch import Tensor

from pithtrain.layers.router import Choice, Replayed
from pithtrain.models.decoder import DenseLayer, SparseLayer, Stage
from pithtrain.ops.cross_entropy import HeadLoss, head_loss
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
from pithtrain.parallel.tape import Observe, Pass, Piece, Segment, unobserved
from pithtrain.parallel.transport import Request

Recompute = Literal["none", "experts", "layer"]


@dataclass(frozen=True, eq=False)
class Setting:
    """What every pass of a rank runs with. recompute: the segments that run again in the backward pass.

    head: of the head's products, whose weight gradient is known in the forward pass; where it waits, the gradients of
    all logits wait with it.
    """

    mesh: Mesh
    compute: Compute
    head: Compute
    recompute: Recompute = "none"
    observe: Observe = unobserved


@dataclass(frozen=True, eq=False)
class Inputs:
    """One micro-batch: tokens, labels [B, S] int64; padding [B, S] bool or None; RoPE's tables; and for each sparse
    layer of the model how its experts are chosen. scale: what the summed loss is multiplied with, None to evaluate.
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

    observe: Observe
    keeps: bool
    pieces: list[Piece] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)

    def run(
        self,
        name: str,
        segment: Segment,
        *inputs: Tensor,
        recompute: bool = False,
        again: Callable[[tuple[Tensor, ...]], Segment] | None = None,
    ) -> tuple[Tensor, ...]:
        """A segment's outputs; recompute, again: see Piece. A tape that keeps nothing runs it without gradients."""
        piece = Piece(name, segment, inputs, recompute or not self.keeps, again)
        if self.keeps:
            self.pieces.append(piece)
        return self.observe(name, "forward", piece.forward)

    def backward(self, *grads: Tensor | None) -> list[Tensor | None]:
        """The last piece's backward pass; the piece is gone then."""
        piece = self.pieces.pop()
        return self.observe(piece.name, "backward", lambda: piece.backward(*grads))


@dataclass(frozen=True, eq=False)
class Forwarded:
    """A stage's forward pass. loads: of its sparse layers, by row.

    hidden: what the next stage reads, [B, S, D], None in the last. head: the last stage's loss, with its gradient to
    the final hidden states [T, D]; None elsewhere.
    """

    hidden: Tensor | None
    head: HeadLoss | None
    loads: dict[int, LayerLoad]
    tape: Tape


def forward(stage: Stage, inputs: Inputs, hidden: Tensor | None, setting: Setting) -> Pass[Forwarded]:
    """The forward pass, with the loss in the last stage. hidden [B, S, D]: None in the first stage."""
    tape = Tape(setting.observe, keeps=inputs.scale is not None)
    hidden, loads = yield from encode(stage, inputs, hidden, setting, tape)
    head_weight = stage.head
    if head_weight is None:
        return Forwarded(hidden, None, loads, tape)
    (final,) = tape.run("norm", stage.final_norm, hidden)
    labels = inputs.labels.flatten()
    head = setting.observe("head", "forward", lambda: head_loss(final, head_weight, labels, inputs.scale, setting.head))
    return Forwarded(None, head, loads, tape)


def encode(
    stage: Stage, inputs: Inputs, hidden: Tensor | None, setting: Setting, tape: Tape
) -> Pass[tuple[Tensor, dict[int, LayerLoad]]]:
    """What the stage's layers give, [B, S, D], and each sparse layer's load by row."""
    loads = dict[int, LayerLoad]()
    if stage.embedding is not None:
        (hidden,) = tape.run("embedding", stage.embed, inputs.tokens)
    assert hidden is not None, "a stage behind another reads its hidden states"
    for layer in stage.layers:
        match layer:
            case DenseLayer():
                segment = partial(layer.attend, tables=inputs.tables, compute=setting.compute)
                again = setting.recompute == "layer"
                (hidden,) = tape.run(f"{layer.name}.attention", segment, hidden, recompute=again)
            case SparseLayer():
                hidden, loads[layer.row] = yield from _sparse_forward(layer, hidden, inputs, setting, tape)
    return hidden, loads


def _sparse_forward(
    layer: SparseLayer, hidden: Tensor, inputs: Inputs, setting: Setting, tape: Tape
) -> Generator[Request, tuple[Tensor, ...], tuple[Tensor, LayerLoad]]:
    compute, whole = setting.compute, setting.recompute == "layer"
    attend = partial(layer.attend, tables=inputs.tables, padding=inputs.padding, compute=compute)
    residual, x, weights, ids, prob_sum, z_sum, counts, gap = tape.run(
        f"{layer.name}.attention",
        partial(attend, choice=inputs.choices[layer.row]),
        hidden,
        recompute=whole,
        again=lambda outputs: partial(attend, choice=Replayed(outputs[3])),
    )
    route = yield from make_route(ids, counts.shape[-1], setting.mesh.ep, layer.name, setting.observe)
    if tape.keeps:
        tape.routes.append(route)
    x, weights, local_ids = yield from dispatch(route, x, weights, ids)
    experts = partial(layer.compute_experts, expert_ids=local_ids, sizes=route.expert_sizes, compute=compute)
    (rows,) = tape.run(f"{layer.name}.experts", experts, x, weights, recompute=setting.recompute != "none")
    (rows,) = yield from combine(route, rows)
    aggregate = partial(layer.aggregate, sent=route.sent)
    (hidden,) = tape.run(f"{layer.name}.aggregate", aggregate, residual, rows, recompute=whole)
    return hidden, LayerLoad(ids, prob_sum, z_sum, counts, gap)


def backward(
    stage: Stage,
    done: Forwarded,
    grad: Tensor | None,
    grad_prob_sums: Mapping[int, Tensor],
    grad_z_sum: Tensor | None,
) -> Pass[Tensor | None]:
    """The backward pass: the gradient of the stage's hidden states, None in the first. Consumes the tape.

    grad: of the hidden states it gave, None in the last stage. grad_prob_sums: the gradient of each sparse layer's
    prob_sum [B, E], by row, where it has one; grad_z_sum: of every layer's z_sum []. Parameter gradients add to their
    buffers.
    """
    tape = done.tape
    if done.head is not None:
        (grad,) = tape.backward(done.head.grad)
    for layer in reversed(stage.layers):
        assert grad is not None
        match layer:
            case DenseLayer():
                (grad,) = tape.backward(grad)
            case SparseLayer():
                grad = yield from _sparse_backward(tape, grad, grad_prob_sums.get(layer.row), grad_z_sum)
    if stage.embedding is not None:
        (grad,) = tape.backward(grad)
    return grad


def _sparse_backward(
    tape: Tape, grad: Tensor, grad_prob_sum: Tensor | None, grad_z_sum: Tensor | None
) -> Generator[Request, tuple[Tensor, ...], Tensor]:
    route = tape.routes.pop()
    grad_residual, grad_rows = _all(tape.backward(grad))
    (grad_rows,) = yield from combine_backward(route, grad_rows)
    grad_x, grad_weights = _all(tape.backward(grad_rows))
    grad_x, grad_weights = yield from dispatch_backward(route, grad_x, grad_weights)
    (grad,) = _all(tape.backward(grad_residual, grad_x, grad_weights, None, grad_prob_sum, grad_z_sum, None, None))
    return grad


def _all(grads: Sequence[Tensor | None]) -> list[Tensor]:
    assert all(grad is not None for grad in grads), "a segment's input got no gradient"
    return [grad for grad in grads if grad is not None]
