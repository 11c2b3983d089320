"""From what every rank saw of a step to the first origin, in the order of causes."""

from collections.abc import Sequence

import numpy as np

from skills.debug_nan.finding import Origin, Row
from skills.debug_nan.watcher import Seen
from skills.debug_nan.whereabouts import Slot


def origins(seen: Sequence[Seen], num_experts: int, ep: int) -> list[Origin]:
    """Every origin that nothing else explains, the first one first. seen: by rank."""
    sent = set().union(*(rank.sent for rank in seen))
    found = []
    for rank in seen:
        for origin, slot in rank.origins:
            if origin.kind == "arrived" and (origin.place.name, origin.place.phase, origin.place.microbatch) in sent:
                continue
            row = None if slot is None else _row(seen, rank, origin, slot, num_experts, ep)
            found.append(origin.model_copy(update={"row": row}))
    return sorted(found, key=Origin.key)


def _row(seen: Sequence[Seen], at: Seen, origin: Origin, slot: Slot, num_experts: int, ep: int) -> Row | None:
    """The token that a row belongs to."""
    microbatch = origin.place.microbatch
    key = origin.place.name.rpartition(".")[0], microbatch
    source, token = at.rank, slot.row
    first = at.rank - at.rank % ep
    if slot.kind == "sent":
        token = int(np.concatenate([_going(at.ids[key], rank, num_experts, ep) for rank in range(ep)])[slot.row])
    if slot.kind == "received" and ep > 1:
        group = seen[first : first + ep]
        there = [
            (peer.rank, int(row)) for peer in group for row in _going(peer.ids[key], at.rank - first, num_experts, ep)
        ]
        source, token = there[slot.row]
    length = at.shape[1]
    mask = seen[source].padding[microbatch or 0]
    sequence, position = token // length, token % length
    return Row(
        rank=source,
        sequence=sequence,
        position=position,
        padding=False if mask is None else bool(mask[sequence, position]),
    )


def _going(ids: np.ndarray, rank: int, num_experts: int, ep: int) -> np.ndarray:
    """The tokens with an expert on EP rank `rank`, ascending; ids [T, K]."""
    local = num_experts // ep
    return np.flatnonzero((ids // local == rank).any(1))
