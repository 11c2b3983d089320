"""Runs a case on a mesh and records its trace, through the production step. Files only where a layout resumes.

Every rank of a world calls `replay` with the same arguments; all return the same trace.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from golden.cases import Case, Layout
from golden.synthetic import SyntheticDataset
from golden.trace import Costs, Step, Trace
from pithtrain import step
from pithtrain.checkpoint import Ranks, Saver, TrainState, load
from pithtrain.data import Batch
from pithtrain.layers.router import Learned, Replayed
from pithtrain.models.qwen3_moe import Qwen3MoE
from pithtrain.ops.host import read_floats, read_ints
from pithtrain.optim import SGD, AdamW, Optimizer
from pithtrain.parallel.mesh import AxisName, Mesh, make_mesh
from pithtrain.parallel.shard import Shard
from pithtrain.parallel.tape import Phase, Result
from pithtrain.parallel.transport import AllReduce, Kind, Transport
from pithtrain.train.checkpoints import ShardState

Meshes = dict[tuple[int, int, int, int], Mesh]


class CountCosts(TorchDispatchMode):
    """While it is entered: counts matrix products and their FLOPs, 2 x rows x inner x columns each; values that a cast
    or a copy rounds to each NARROW dtype; and the bytes of storage made in it that are alive, at most. As a step's
    observer it leaves the step's own parts out of the bytes: the threads of a reduction let go of its buffers when they
    will.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = self.flops = self.bytes = self.peak_bytes = 0
        self.roundings = dict.fromkeys(NARROW, 0)
        self._counts_bytes = True
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            left, right = (args[index] for index in PRODUCTS[name])
            self.products += 1
            self.flops += 2 * left.numel() * right.shape[-1]
        result = func(*args, **(kwargs or {}))
        if name in CASTS and result.dtype in NARROW and result.itemsize < args[CASTS[name]].itemsize:
            self.roundings[result.dtype] += result.numel()
        for value in result if isinstance(result, tuple | list) else (result,):
            if self._counts_bytes and isinstance(value, torch.Tensor):
                self._note(value.untyped_storage())
        return result

    def observe(self, name: str, phase: Phase, run: Callable[[], Result], /) -> Result:
        """An `Observe`."""
        self._counts_bytes = phase != "step"
        try:
            return run()
        finally:
            self._counts_bytes = True

    def _note(self, storage: torch.UntypedStorage) -> None:
        """torch keeps a storage's object, and so its id, for as long as the storage lives."""
        key, size = id(storage), storage.nbytes()
        if key in self._alive:
            return

        def forget(_: object) -> None:
            del self._alive[key]
            self.bytes -= size

        self._alive[key] = weakref.ref(storage, forget)
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)


PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2), "bmm": (0, 1)}  # operator -> its two operands
CASTS = {"_to_copy": 0, "copy_": 1}  # operator -> what it casts
NARROW = (torch.bfloat16, torch.float8_e4m3fn)


def make_optimizer(case: Case, shard: Shard) -> Optimizer:
    spec = case.optimizer
    match spec.kind:
        case "adamw":
            return AdamW.create(shard, spec.beta1, spec.beta2, spec.eps, spec.weight_decay)
        case "sgd":
            return SGD(shard, spec.weight_decay)


def make_dataset(case: Case) -> SyntheticDataset:
    return SyntheticDataset(case.arch.vocab_size, case.seed, ignore_labels=case.ignore_labels)


def batches(case: Case, dataset: SyntheticDataset, layout: Layout, mesh: Mesh, index: int) -> list[Batch]:
    """This rank's micro-batches of step `index`."""
    size, n = case.global_batch_size, layout.num_microbatches
    return [
        dataset.microbatch(index * size, size, n, i, mesh.data_rank, mesh.data_ranks, case.sequence_length)
        for i in range(n)
    ]


def make_trainee(case: Case, layout: Layout, transport: Transport, meshes: Meshes) -> tuple[step.Trainee, Optimizer]:
    """A model of the case on the layout's mesh, values zero, and its optimizer. meshes: those this world has made."""
    sizes = layout.pp, layout.dp, 1, layout.ep
    if sizes not in meshes:
        meshes[sizes] = make_mesh(*sizes)
    mesh = meshes[sizes]
    trainee = step.build(
        case.arch, mesh, transport, case.sequence_length, torch.device("cpu"), layout.execution, layout.precision
    )
    return trainee, make_optimizer(case, trainee.shard)


def replay(case: Case, layout: Layout, num_steps: int, folder: Path, meshes: Meshes) -> Trace:
    """The trace of the case's first `num_steps` steps on the layout's mesh. folder: for its checkpoint, if any."""
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")
    if layout.precision == "fp32":
        return run(case, layout, num_steps, folder, meshes, None)[0]
    _, routing = run(case, replace(layout, precision="fp32"), num_steps, folder, meshes, None)
    return run(case, layout, num_steps, folder, meshes, routing)[0]


def run(
    case: Case, layout: Layout, num_steps: int, folder: Path, meshes: Meshes, routing: Sequence[step.Choices] | None
) -> tuple[Trace, list[step.Choices]]:
    """A run's trace, and how each step chose its experts on this rank. routing: to choose them as another run did."""
    transport = Transport()
    trainee, optimizer = make_trainee(case, layout, transport, meshes)
    trainee.shard.initialise(case.seed)
    dataset = make_dataset(case)
    bias = torch.zeros(trainee.num_sparse_layers, case.arch.num_experts) if case.bias_rate else None
    steps, gaps, chosen, updates = list[Step](), list[float](), list[step.Choices](), 0
    for index in range(num_steps):
        if index and index == layout.resumes_after:
            place, layout = folder / str(layout), layout.resumes_as or layout
            trainee, optimizer, bias = through_checkpoint(
                case, layout, trainee, optimizer, updates, bias, place, meshes
            )
        parts = batches(case, dataset, layout, trainee.mesh, index)
        if index == 0:
            with CountCosts() as counter:
                observed = replace(trainee, observe=counter.observe)
                update = take(case, observed, optimizer, parts, index, updates, bias, routing)
            costs = total_costs(counter, transport, trainee.mesh)
        else:
            update = take(case, trainee, optimizer, parts, index, updates, bias, routing)
        bias = update.expert_bias
        updates += update.applied
        gaps.append(update.gradients.gap)
        chosen.append(choices_of(update.gradients, trainee))
        steps.append(record(case, index, update))
    return Trace(case.name, case.fingerprint(), tuple(steps), costs, min(gaps)), chosen


def choices_of(result: step.Gradients, trainee: step.Trainee) -> step.Choices:
    """The choices of a step, to be made again; those of layers on other ranks are not known, nor asked for."""
    rows = range(trainee.num_sparse_layers)
    return [[Replayed(part[row]) if row in part else Learned() for row in rows] for part in result.chosen]


def through_checkpoint(
    case: Case,
    layout: Layout,
    trainee: step.Trainee,
    optimizer: Optimizer,
    updates: int,
    bias: torch.Tensor | None,
    folder: Path,
    meshes: Meshes,
) -> tuple[step.Trainee, Optimizer, torch.Tensor | None]:
    """Saves the run and loads it into a new model on the layout's mesh, as the trainer does."""
    mesh, transport = trainee.mesh, trainee.transport

    def agree(ok: bool) -> bool:
        (refusals,) = transport.run(AllReduce(torch.tensor([int(not ok)]), mesh.world))
        return read_ints(refusals) == [0]

    ranks, family = Ranks(mesh.rank, mesh.world_size, agree), Qwen3MoE.of(case.arch)
    moments = tuple(optimizer.state())
    layers = [f"layers.{index}" for index, sparse in enumerate(case.arch.sparse_layers) if sparse]
    biases = {} if bias is None else dict(zip(layers, bias, strict=True))
    saver = Saver(folder, ranks, keep=1, background=True, moments=moments)
    saver.save(ShardState(trainee.shard, optimizer), family, TrainState(updates, updates, 0, 0), biases)
    path = saver.wait()
    assert path is not None, "the checkpoint was not published"
    trainee, optimizer = make_trainee(case, layout, transport, meshes)
    _, loaded = load(path, ShardState(trainee.shard, optimizer), family, ranks, moments=moments)
    trainee.shard.gather()
    return trainee, optimizer, None if bias is None else torch.stack([loaded[layer] for layer in layers])


def take(
    case: Case,
    trainee: step.Trainee,
    optimizer: Optimizer,
    parts: list[Batch],
    index: int,
    updates: int,
    bias: torch.Tensor | None,
    routing: Sequence[step.Choices] | None,
) -> step.Update:
    """One production step of the case."""
    return step.train_step(
        trainee,
        optimizer,
        parts,
        case.objective,
        lr=case.optimizer.rate.at(index),
        updates=updates,
        clip_norm=case.optimizer.clip_norm,
        expert_bias=bias,
        bias_rate=case.bias_rate,
        choices=None if routing is None else routing[index],
    )


def record(case: Case, index: int, update: step.Update) -> Step:
    result = update.gradients
    return Step(
        loss=result.loss,
        balance_loss=result.balance_loss,
        z_loss=result.z_loss,
        grad_norm=result.norm,
        grad_norms=step.rooms(result.square_norms),
        learning_rate=case.optimizer.rate.at(index),
        num_tokens_per_expert=[read_ints(layer) for layer in result.num_tokens_per_expert],
        expert_bias=None if update.expert_bias is None else [read_floats(layer) for layer in update.expert_bias],
    )


def total_costs(counter: CountCosts, transport: Transport, mesh: Mesh) -> Costs:
    """What every rank counted, and what their transports have carried so far."""
    keys = [f"{kind} {axis}" for kind in get_args(Kind) for axis in get_args(AxisName)]
    collectives = torch.zeros(len(keys), 2, dtype=torch.int64)
    for entry in transport.records:
        collectives[keys.index(f"{entry.kind} {entry.axis}")] += torch.tensor([1, entry.bytes])
    counts = torch.tensor([counter.products, counter.flops, *counter.roundings.values()])
    peaks = torch.zeros(mesh.world_size, dtype=torch.int64)
    peaks[mesh.rank] = counter.peak_bytes
    local = torch.cat([counts, peaks, collectives.flatten()])
    calls, flops, bf16, e4m3, *rest = read_ints(transport.run(AllReduce(local, mesh.world))[0])
    carried = zip(keys, zip(rest[mesh.world_size :: 2], rest[mesh.world_size + 1 :: 2], strict=True), strict=True)
    moved = {key: number for key, number in sorted(carried) if number[0]}
    rounded = {key: number for key, number in (("bf16", bf16), ("e4m3", e4m3)) if number}
    return Costs(calls, flops, max(rest[: mesh.world_size]), moved, rounded)


def replay_layouts(jobs: tuple[tuple[Case, Layout], ...], num_steps: int, folder: Path) -> list[Trace]:
    """Several replays in one world, whose size all their layouts have. folder: for their checkpoints."""
    meshes: Meshes = {}
    return [replay(case, layout, num_steps, folder / case.name, meshes) for case, layout in jobs]
