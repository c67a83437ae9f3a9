"""Macro actions: each is one semantic optimisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

REMARK = "remark"
"""Parameter that holds the user's instruction for the step, as free text. Only a language model can follow it."""


class ActionKind(Enum):
    """All kinds of macro actions."""

    FUSE = "fuse"
    TENSOR_CORE = "tensor-core"
    SPLIT = "split"
    PARALLEL_SCAN = "parallel-scan"
    CHUNK_PRODUCTS = "chunk-products"
    SIDE_BY_SIDE = "side-by-side"
    ALGEBRA = "algebra"
    CHANNELS_LAST = "channels-last"
    FP16_OPERANDS = "fp16-operands"
    IM2WIN = "im2win"
    LIBRARY = "library"
    RECOMPUTE = "recompute"
    CHUNK_ROWS = "chunk-rows"
    RECOMPUTE_ATTENTION = "recompute-attention"
    CUDA_GRAPH = "cuda-graph"
    AUTOTUNE = "autotune"
    EDIT = "edit"
    """An edit of Triton code that the file contains: an optimisation or a repair."""


GRAPH_KINDS = tuple(kind for kind in ActionKind if kind is not ActionKind.EDIT)
"""Kinds of actions on a captured graph: those that planners and policies choose from."""


@dataclass(frozen=True)
class Expected:
    """A planner's prediction. An estimate, never shown as a measurement."""

    saved_us: float
    """Predicted microseconds saved per call."""
    bytes_before: float = 0.0
    bytes_after: float = 0.0
    flops_before: float = 0.0
    flops_after: float = 0.0
    saved_memory: float = 0.0
    """Predicted bytes of device memory that a call allocates less."""


@dataclass(frozen=True)
class MacroAction:
    """One semantic optimisation of one region."""

    kind: ActionKind
    region: tuple[str, ...]
    """Names of the graph nodes that the action covers."""
    lines: tuple[int, int]
    """First and last source line of the region; (0, 0) when unknown."""
    params: Mapping[str, object] = field(default_factory=dict)
    """JSON values that define the action completely, so it can be applied again."""
    rationale: str = ""
    """Reason for the action, one sentence for the user."""
    expected: Expected = field(default_factory=lambda: Expected(0.0))
    text: str = ""
    """One-line description: ``fuse the linear and the max in lines 15 to 20``."""
    changes_rounding: bool = False
    """Whether results may differ by more than a reassociation in the same precision. If so, the title mentions it."""

    @property
    def key(self) -> str:
        """Identity of the action: kind, region and params. The text does not count."""
        params = ",".join(f"{name}={self.params[name]}" for name in sorted(self.params))
        return f"{self.kind.value}({'+'.join(self.region)};{params})"


@dataclass(frozen=True)
class Stop:
    """A planner's decision to end the search."""

    reason: str
    """Reason for the user, a sentence that begins with a small letter and has no full stop."""


def capitalized(text: str) -> str:
    """The text with a capital first letter, as titles and sentences begin."""
    return text[:1].upper() + text[1:]
