"""What the runs of the body of a nest leave, and what the loop over diagonals computes from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from mtmc_lsp.capture.worker.loops.iteration import NotKept
from mtmc_lsp.capture.worker.loops.nests.positions import Edge
from mtmc_lsp.capture.worker.loops.nests.tables import Distance, Table
from mtmc_lsp.capture.worker.loops.nests.tape import Tape
from mtmc_lsp.capture.worker.loops.tensors import storage_of

Place = tuple[int, Distance, int]
"""An earlier cell that is read: the number of the result, the distance, and the run whose rows begin with the value."""
Edges = dict[Place, list[Edge]]
"""What cells at the edges read."""


@dataclass
class Ends:
    """What one run of the body began with and left."""

    tape: Tape
    outer_before: dict[str, Any] = field(default_factory=dict)
    outer_symbols: dict[str, torch.Tensor] = field(default_factory=dict)
    outer_after: dict[str, Any] = field(default_factory=dict)
    inner_before: dict[str, Any] = field(default_factory=dict)
    inner_symbols: dict[str, torch.Tensor] = field(default_factory=dict)
    inner_after: dict[str, Any] = field(default_factory=dict)
    lasts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that stand for the variables after the inner loop."""
    items: dict[str, tuple[Any, torch.Tensor, bool]] = field(default_factory=dict)
    """What an iteration of the outer loop appends to each list, and whether in front."""

    def row_name(self, tensor: torch.Tensor) -> str:
        """The variable of a tensor that the iteration of the outer loop has created; empty for other tensors."""
        if storage_of(tensor) not in self.tape.local:
            return ""
        names = [name for name, value in self.inner_before.items() if value is tensor]
        if not names:
            raise NotKept("it writes an intermediate value")
        return names[0]


@dataclass
class Result:
    """A value of each cell that the nest computes."""

    like: torch.Tensor
    values: list[torch.Tensor | None]
    """In each run of the body; ``None`` where it does not write the table."""
    table: Table | None = None
    name: str = ""
    delay: int = 0
    """For how many iterations later cells read it."""
    is_kept: bool = True
    """Whether something after the loop may read it."""
