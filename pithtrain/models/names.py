"""Our parameter names against a family's tensor names: a table, read in both directions.

A row says that our tensor is the family's tensors one below the other (fused projections), once for each expert where
the row counts experts. Patterns hold {layer} and {expert}. A product's weight is [out, in] on both sides.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """ours: our name. theirs: (pattern, rows) of each family tensor in order; rows None for a whole tensor."""

    ours: str
    theirs: tuple[tuple[str, int | None], ...]
    expert: bool = False


@dataclass(frozen=True)
class NameTable:
    """A family's table for one architecture, with the shapes of our tensors by name."""

    rows: tuple[Row, ...]
    shapes: dict[str, Shape]

    def row(self, name: str) -> tuple[Row, str]:
        """The row of our `name`, and its layer's number as text ("" outside the layers)."""
        match = re.fullmatch(r"(layers\.)(\d+)(\..+)", name)
        pattern, layer = ("layers.{layer}" + match[3], match[2]) if match else (name, "")
        for row in self.rows:
            if row.ours == pattern:
                return row, layer
        raise ValueError(f"parameter {name!r}: the family's table of names has no row for {pattern!r}")

    def family_names(self, name: str, experts: range | None = None) -> list[tuple[str, Shape]]:
        """The family's names and shapes that make up our `name` (only these experts of it, where given)."""
        row, layer = self.row(name)
        shape = self.shapes[name]
        if row.expert:
            experts = range(shape[0]) if experts is None else experts
            shape = shape[1:]
        return [
            (pattern.format(layer=layer, expert=expert), shape if rows is None else (rows, *shape[1:]))
            for expert in (experts if row.expert and experts is not None else [None])
            for pattern, rows in row.theirs
        ]

    def to_family(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Our whole tensor as the family's tensors: contiguous copies where one of ours is several of theirs."""
        row, _ = self.row(name)
        parts: list[Tensor] = []
        for matrix in tensor.unbind(0) if row.expert else [tensor]:
            sizes = [rows for _, rows in row.theirs if rows is not None]
            parts += matrix.split(sizes) if sizes else [matrix]
        names = [their for their, _ in self.family_names(name)]
        return {their: part.contiguous() for their, part in zip(names, parts, strict=True)}

    def from_family(self, name: str, experts: range | None, read: Callable[[str], Tensor]) -> Tensor:
        """Our tensor (only these experts of it, where given) from the family's, each read by its name."""
        row, _ = self.row(name)
        parts = []
        for their, shape in self.family_names(name, experts):
            part = read(their)
            if tuple(part.shape) != shape:
                raise ValueError(
                    f"tensor {their!r}: got shape {tuple(part.shape)}, expected {shape}; "
                    "the weights and config.json are not of one model"
                )
            parts.append(part)
        step = len(row.theirs)
        matrices = [torch.cat(parts[at : at + step]) for at in range(0, len(parts), step)]
        return torch.stack(matrices) if row.expert else matrices[0]
