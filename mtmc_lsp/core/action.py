"""Macro actions: one semantic optimisation each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

REMARK = "remark"
"""The parameter with the user's own words on how the step is to be done; only a language model can follow them."""


class ActionKind(Enum):
    """The catalogue (DESIGN section 5)."""

    FUSE = "fuse"
    TILE = "tile"
    REORDER = "reorder"
    PIPELINE = "pipeline"
    VECTORIZE = "vectorize"
    TENSOR_CORE = "tensor-core"
    SPLIT = "split"
    PERSIST = "persist"
    SIDE_BY_SIDE = "side-by-side"
    ALGEBRA = "algebra"
    LAYOUT = "layout"
    CHANNELS_LAST = "channels-last"
    FP16_OPERANDS = "fp16-operands"
    IM2WIN = "im2win"
    LIBRARY = "library"
    RECOMPUTE = "recompute"
    CUDA_GRAPH = "cuda-graph"
    SPECIALIZE = "specialize"
    AUTOTUNE = "autotune"


@dataclass(frozen=True)
class Expected:
    """What a planner predicts: an estimate, never shown as a measurement."""

    saved_us: float
    """Predicted microseconds saved per call."""
    bytes_before: float = 0.0
    bytes_after: float = 0.0
    flops_before: float = 0.0
    flops_after: float = 0.0


@dataclass(frozen=True)
class MacroAction:
    """One semantic optimisation of one region."""

    kind: ActionKind
    region: tuple[str, ...]
    """Names of the graph nodes it is about."""
    lines: tuple[int, int]
    """First and last source line of the region; (0, 0) when unknown."""
    params: Mapping[str, object] = field(default_factory=dict)
    """JSON values that pin the action down, so it replays."""
    rationale: str = ""
    """One sentence for people: why."""
    expected: Expected = field(default_factory=lambda: Expected(0.0))
    text: str = ""
    """The one-line form: ``fuse the linear and the max in lines 15 to 20``."""
    changes_rounding: bool = False
    """Whether results may differ by more than reassociation of the same precision; then the title says so."""

    @property
    def key(self) -> str:
        """Same key, same action: kind, region and params, not the words."""
        params = ",".join(f"{name}={self.params[name]}" for name in sorted(self.params))
        return f"{self.kind.value}({'+'.join(self.region)};{params})"
