"""From what the ranks recorded to milliseconds by cause. Every moment of a step has one cause, so they sum to it."""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pithtrain.timeline import TIMELINE, Span

COMPUTE = {
    "attention": "attention",
    "router": "router",
    "experts": "experts",
    "aggregate": "aggregate",
    "norm": "loss",
    "head": "loss",
    "weight gradients": "weight gradients",
}
MOVES = {
    "counts": "dispatch",
    "dispatch": "dispatch",
    "dispatch_backward": "dispatch",
    "combine": "combine",
    "combine_backward": "combine",
}
PARTS = {
    "data": "data",
    "reduce": "gradient reduction",
    "optimizer": "optimizer",
    "gather": "optimizer",
    "checkpoint": "checkpoint",
}
BUBBLE, WAITING, OTHER = "pipeline bubble", "waiting for other ranks", "other"
CAUSES = tuple(dict.fromkeys((*PARTS.values(), *COMPUTE.values(), *MOVES.values(), "host reads", BUBBLE)))


@dataclass(eq=False)
class Node:
    """A span and those within it, in order of time."""

    name: str
    phase: str
    start: int
    end: int
    children: list["Node"] = field(default_factory=list)

    @property
    def cause(self) -> str:
        last = self.name.rpartition(".")[2]
        if self.phase == "host":
            return "host reads"
        if self.name.startswith(("before ", "behind ")):
            return WAITING
        if self.phase in ("launch", "wait"):
            return MOVES.get(last, BUBBLE if self.name.startswith(("hidden", "grad")) else WAITING)
        return (PARTS if self.phase == "step" else COMPUTE).get(last, OTHER)


@dataclass(frozen=True)
class Step:
    """A step of a rank: milliseconds in all, by cause, and by (cause, name, phase)."""

    rank: int
    step: int
    total: float
    causes: dict[str, float]
    names: dict[tuple[str, str, str], float]
    actions: dict[str, float]  # of the schedule, without waits for other stages


@dataclass(frozen=True)
class World:
    """How ranks lie: pp outermost, ep innermost."""

    size: int
    pp: int
    ep: int

    def exchange_group(self, rank: int) -> int:
        return rank // self.ep


def read_spans(folder: Path) -> dict[int, dict[int, list[Span]]]:
    """By step and rank."""
    found = defaultdict[int, dict[int, list[Span]]](dict)
    for path in sorted((folder / TIMELINE).glob("step-*.json")):
        file = json.loads(path.read_text())
        found[int(path.stem[5:13])][file["rank"]] = [tuple(span) for span in file["spans"]]
    return found


def attribute(folder: Path, world: World) -> list[Step]:
    """Every recorded step of every rank."""
    return [
        _step(rank, number, _tree(spans, _late(ranks, rank, world)), world)
        for number, ranks in read_spans(folder).items()
        for rank, spans in sorted(ranks.items())
    ]


Late = dict[tuple[str, int], int]  # (exchange, its how-many-eth) -> when the last rank of the group launched it


def _late(ranks: dict[int, list[Span]], rank: int, world: World) -> Late:
    late: Late = {}
    for other, spans in ranks.items():
        if world.exchange_group(other) != world.exchange_group(rank):
            continue
        seen = defaultdict[str, int](int)
        for name, phase, start, _ in spans:
            if phase == "launch" and name.rpartition(".")[2] in MOVES:
                key = name, seen[name]
                seen[name] += 1
                late[key] = max(late.get(key, 0), start)
    return late


def _tree(spans: list[Span], late: Late) -> list[Node]:
    """Spans by nesting. A wait for an exchange that some rank had not launched yet is cut in two there."""
    nodes, seen = list[Node](), defaultdict[str, int](int)
    for name, phase, start, end in spans:
        if phase == "wait" and name.rpartition(".")[2] in MOVES:
            cut = min(max(late.get((name, seen[name]), start), start), end)
            seen[name] += 1
            if cut > start:
                nodes.append(Node(f"before {name}", "wait", start, cut))
            start = cut
        nodes.append(Node(name, phase, start, end))
    nodes.sort(key=lambda node: (node.start, -node.end))
    roots, stack = list[Node](), list[Node]()
    for node in nodes:
        while stack and stack[-1].end < node.end:
            stack.pop()
        (stack[-1].children if stack else roots).append(node)
        stack.append(node)
    return roots


def _step(rank: int, number: int, roots: list[Node], world: World) -> Step:
    causes, names, actions = (defaultdict[Any, float](float) for _ in range(3))
    for node, cause, nanoseconds in _moments(roots):
        if node.name == "before reduce" and world.pp > 1:  # the end of the pipeline's last pass elsewhere
            cause = BUBBLE
        causes[cause] += nanoseconds / 1e6
        name = "step" if node.name.startswith("step ") else node.name
        names[cause, name, node.phase] += nanoseconds / 1e6
    for node in _walk(roots):
        if node.phase == "action":
            waits = sum(end.end - end.start for end in _walk(node.children) if end.cause == BUBBLE)
            actions[node.name] += (node.end - node.start - waits) / 1e6
    total = sum(root.end - root.start for root in roots) / 1e6
    return Step(rank, number, total, dict(causes), dict(names), dict(actions))


def _walk(nodes: list[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        yield from _walk(node.children)


def _moments(nodes: list[Node]) -> Iterator[tuple[Node, str, int]]:
    """(span, cause, nanoseconds): what every span has to itself, its children left out."""
    for node in nodes:
        at, before = node.start, None
        for child in node.children:
            yield from _gap(node, before, child, child.start - at)
            yield from _moments([child])
            at, before = max(at, child.end), child
        yield from _gap(node, before, None, node.end - at)


def _gap(node: Node, before: Node | None, behind: Node | None, length: int) -> Iterator[tuple[Node, str, int]]:
    """Within an action, what lies around an exchange is its packing and unpacking."""
    if node.phase != "action":
        yield node, node.cause, length
        return
    for near in (behind, before):
        if near is not None and near.name.rpartition(".")[2] in MOVES:
            yield near, MOVES[near.name.rpartition(".")[2]], length
            return
    routed = before is not None and before.phase == "host"
    yield node, "dispatch" if routed else OTHER, length
