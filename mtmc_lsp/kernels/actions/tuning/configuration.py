"""One configuration of an autotuner, as source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OPTIONS = {"num_warps": 4, "num_stages": 3}
"""Options of a configuration with Triton's defaults."""
ONLY = {"num_ctas": "1"}
"""Further options that a configuration sets to its default, so that a launch cannot pass them; with the text of the default."""
EXPECTED = 0.1
"""Estimated share of the time that tuned options save, where the kernel is far from the roofline."""


@dataclass(frozen=True)
class Configuration:
    """One configuration of an autotuner."""

    blocks: tuple[tuple[str, Any], ...]
    """Constants of the kernel."""
    warps: int
    stages: int

    def text(self, prefix: str) -> str:
        """The configuration as source."""
        blocks = ", ".join(f'"{name}": {value!r}' for name, value in self.blocks)
        return f"{prefix}.Config({{{blocks}}}, num_warps={self.warps}, num_stages={self.stages})"
