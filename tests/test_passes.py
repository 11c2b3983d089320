"""One micro-batch through the model: segments, their names, their gradients, and what the host waits for."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pithtrain import passes, step
from pithtrain.data import Batch
from pithtrain.models.decoder import DenseLayer, SparseLayer
from pithtrain.ops.cross_entropy import head_loss
from pithtrain.ops.linear import Compute
from pithtrain.parallel.tape import Pass, Phase, drive
from pithtrain.parallel.transport import Transport
from tests.agreement import assert_agree, assert_close, randn
from tests.parallel.meshes import in_step, mesh_of
from tests.whole_model import ARCH, new_batch, new_trainee, whole_of

B, S, M = 4, 9, 2
GRAD_PROB_SUMS = {row: randn(B, ARCH.num_experts, seed=7 + row, std=0.1) for row in range(M)}
GRAD_Z_SUM = torch.tensor(0.01)
WHOLE = slice(None)


def inputs_of(trainee: step.Trainee, batch: Batch, scale: float | None) -> passes.Inputs:
    (choices,) = step.learned(trainee, 1, None)
    return passes.Inputs(batch.tokens, batch.labels, batch.padding, trainee.tables, choices, scale)


def setting_of(trainee: step.Trainee, compute: Compute | None = None) -> passes.Setting:
    return passes.Setting(trainee.mesh, compute or Compute(), compute or Compute())


def grads_in(trainee: step.Trainee) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in trainee.shard.weights().items()}


def both_ways(trainee: step.Trainee, batch: Batch, compute: Compute, rows: slice = WHOLE) -> Pass[passes.Forwarded]:
    """Forward and backward of one micro-batch, which holds these rows of the global batch."""
    stage, setting = whole_of(trainee), setting_of(trainee, compute)
    done = yield from passes.forward(stage, inputs_of(trainee, batch, 0.05), None, setting)
    yield from passes.backward(stage, done, None, {row: grad[rows] for row, grad in GRAD_PROB_SUMS.items()}, GRAD_Z_SUM)
    return done


def loss_of(done: passes.Forwarded) -> Tensor:
    assert done.head is not None and done.hidden is None
    return done.head.loss


def plainly(trainee: step.Trainee, batch: Batch) -> Tensor:
    """The same in one graph of plain autograd, without a tape: the loss; gradients go to the buffers."""
    inputs, compute = inputs_of(trainee, batch, 0.05), Compute()
    stage, ends, end_grads = whole_of(trainee), list[Tensor](), list[Tensor]()
    (hidden,) = stage.embed(inputs.tokens)
    for layer in stage.layers:
        match layer:
            case DenseLayer():
                (hidden,) = layer.attend(hidden, inputs.tables, compute)
            case SparseLayer():
                attended = layer.attend(hidden, inputs.tables, inputs.choices[layer.row], inputs.padding, compute)
                residual, x, weights, ids, prob_sum, z_sum, counts, _ = attended
                (rows,) = layer.compute_experts(x, weights, ids, tuple(counts.sum(0).tolist()), compute)
                (hidden,) = layer.aggregate(residual, rows, None)
                end_grads += [GRAD_PROB_SUMS[layer.row], GRAD_Z_SUM]
                ends += [prob_sum, z_sum]
    (final,) = stage.final_norm(hidden)
    assert stage.head is not None
    head = head_loss(final, stage.head, inputs.labels.flatten(), inputs.scale, compute)
    assert head.grad is not None
    torch.autograd.backward([final, *ends], [head.grad, *end_grads])
    return head.loss


def test_tape_gives_the_gradients_of_autograd() -> None:
    batch, taped, plain = new_batch(B, S), new_trainee(S), new_trainee(S)
    (done,) = drive(taped.transport, both_ways(taped, batch, Compute()))
    assert_close(loss_of(done), plainly(plain, batch))
    expected = grads_in(plain)
    assert all(bool(grad.any()) for grad in expected.values())
    assert_agree(grads_in(taped), expected)
    assert done.tape.pieces == [] and done.tape.routes == [], "the backward pass consumes the tape"


def sharded(ranks: int) -> list[step.Trainee]:
    """The same model on each rank of an expert axis."""
    whole, trainees = new_trainee(S).shard.weights(), list[step.Trainee]()
    for rank in range(ranks):
        trainee = step.build(ARCH, mesh_of(rank, ep=ranks), Transport(), S, torch.device("cpu"))
        for name, weight in trainee.shard.weights().items():
            experts = trainee.shard.local_experts(name)
            source = whole[name].value
            weight.value.copy_(source if experts is None else source[experts.start : experts.stop])
        trainees.append(trainee)
    return trainees


def halves(batch: Batch) -> list[Batch]:
    return [Batch(*parts) for parts in zip(batch.tokens.split(B // 2), batch.labels.split(B // 2), strict=True)]


def test_segments_have_their_names() -> None:
    """In order, as an observer sees them; and where exchanges stand between them, and what those are called."""
    seen: list[str] = []

    def observe(name: str, phase: Phase, run: Callable[[], Any]) -> Any:
        seen.append(f"host {name}" if phase == "host" else name)
        return run()

    trainees = sharded(2)
    settings = [replace(setting_of(trainees[0]), observe=observe), setting_of(trainees[1])]
    runs = [
        passes.forward(whole_of(trainee), inputs_of(trainee, half, 0.05), None, setting)
        for trainee, half, setting in zip(trainees, halves(new_batch(B, S)), settings, strict=True)
    ]
    done = in_step(runs, lambda request: seen.append(f"({request.name})"))
    assert seen == [
        "embedding",
        *("layers.0.attention", "(layers.0.counts)", "host layers.0.sizes", "(layers.0.dispatch)"),
        *("layers.0.experts", "(layers.0.combine)", "layers.0.aggregate"),
        "layers.1.attention",
        *("layers.2.attention", "(layers.2.counts)", "host layers.2.sizes", "(layers.2.dispatch)"),
        *("layers.2.experts", "(layers.2.combine)", "layers.2.aggregate"),
        *("norm", "head"),
    ]
    assert [piece.name for piece in done[0].tape.pieces] == [
        name for name in seen if name[0] != "(" and name[:4] != "host"
    ][:-1]

    seen.clear()
    backwards = [
        passes.backward(whole_of(trainee), one, None, {}, None) for trainee, one in zip(trainees, done, strict=True)
    ]
    in_step(backwards, lambda request: seen.append(f"({request.name})"))
    assert seen == [
        "norm",
        *("layers.2.aggregate", "(layers.2.combine_backward)", "layers.2.experts"),
        *("(layers.2.dispatch_backward)", "layers.2.attention"),
        "layers.1.attention",
        *("layers.0.aggregate", "(layers.0.combine_backward)", "layers.0.experts"),
        *("(layers.0.dispatch_backward)", "layers.0.attention"),
        "embedding",
    ]


def test_one_rank_moves_nothing() -> None:
    trainee = new_trainee(S)
    drive(trainee.transport, both_ways(trainee, new_batch(B, S), Compute()))
    assert trainee.transport.records == []


def test_an_expert_axis_gives_the_same() -> None:
    """Two ranks in one process, each with half of the batch: gradients of dense parameters add up over ranks."""
    batch, one, trainees = new_batch(B, S), new_trainee(S), sharded(2)
    (expected,) = drive(one.transport, both_ways(one, batch, Compute()))
    parts = zip(trainees, halves(batch), (slice(0, B // 2), slice(B // 2, B)), strict=True)
    done = in_step([both_ways(trainee, half, Compute(), rows) for trainee, half, rows in parts])
    assert_close(loss_of(done[0]) + loss_of(done[1]), loss_of(expected))
    got = {}
    for name, place in one.shard.placements.items():
        grads = [trainee.shard.weights()[name].grad for trainee in trainees]
        got[name] = torch.cat(grads) if place.spec.expert else grads[0] + grads[1]
    assert_agree(got, grads_in(one))


def test_deferred_weight_gradients_are_the_same() -> None:
    """Through the whole model: no product's weight gradient before the queue is drained, the same bytes after."""
    batch, now, later = new_batch(B, S), new_trainee(S), new_trainee(S)
    queue: list[Callable[[], None]] = []
    drive(now.transport, both_ways(now, batch, Compute()))
    drive(later.transport, both_ways(later, batch, Compute(deferred=queue)))
    not_waiting = ("norm", "embedding")
    for name, grad in grads_in(later).items():
        assert bool(grad.any()) == name.endswith(not_waiting), name
    for add in queue:
        add()
    for name, grad in grads_in(later).items():
        assert torch.equal(grad, grads_in(now)[name]), name


def test_evaluation_leaves_no_tape_and_no_gradient() -> None:
    trainee, batch = new_trainee(S), new_batch(B, S)
    evaluation = passes.forward(whole_of(trainee), inputs_of(trainee, batch, None), None, setting_of(trainee))
    (evaluated,) = drive(trainee.transport, evaluation)
    assert evaluated.tape.pieces == [] and evaluated.tape.routes == [] and evaluated.head.grad is None
    assert not loss_of(evaluated).requires_grad and not evaluated.loads[0].prob_sum.requires_grad
    assert not any(grad.any() for grad in grads_in(trainee).values())
    (trained,) = drive(trainee.transport, both_ways(trainee, batch, Compute()))
    assert torch.equal(loss_of(evaluated), loss_of(trained))
    assert evaluated.loads.keys() == trained.loads.keys() == set(range(M))
    for row, expected in trained.loads.items():
        assert torch.equal(evaluated.loads[row].topk_expert_ids, expected.topk_expert_ids)
        assert torch.equal(evaluated.loads[row].num_tokens_per_expert, expected.num_tokens_per_expert)


READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "index")  # index: it may be by a mask


class _Waits(TorchDispatchMode):
    """Notes each operator whose result's size or value the host needs."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in WAITS:
            self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Every way in which a tensor's values or their number reach Python, as it happens."""
    seen: list[str] = []

    def noted(name: str, method: Any) -> Any:
        def call(*args: Any) -> Any:
            seen.append(name)
            return method(*args)

        return call

    with pytest.MonkeyPatch.context() as patch, _Waits(seen):
        for name in READS:
            patch.setattr(Tensor, name, noted(name, getattr(Tensor, name)))
        yield seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_host_waits_once_a_layer(ranks: int) -> None:
    """On each rank, forward and backward together: one reading of sizes in each of the two sparse layers."""
    trainees = sharded(ranks)
    parts = [new_batch(B, S)] if ranks == 1 else halves(new_batch(B, S))
    rows = slice(0, B // ranks)
    runs = [both_ways(trainee, part, Compute(), rows) for trainee, part in zip(trainees, parts, strict=True)]
    with host_reads() as seen:
        in_step(runs)
    assert seen == ["tolist"] * M * ranks


def test_host_reads_are_seen() -> None:
    """In a forward pass, in a backward pass, by value or by size."""
    x = torch.tensor([1.0, 0.0], requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: grad.tolist() and grad * float(grad[0]))
    with host_reads() as seen:
        y.sum().backward()
        assert x[x > 0].shape == (1,) and x.any() and int(x.detach()[0]) == 1
    assert [name for name in seen if name in READS] == ["tolist", "__float__", "__bool__", "__int__"]
    assert [name for name in seen if name in WAITS] == [WAITS[0], "index", WAITS[0], WAITS[0]]
