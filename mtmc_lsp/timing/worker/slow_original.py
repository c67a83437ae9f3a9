"""What a process measured of user code whose call takes long, so that later timings do not call it again. Runs in workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

SLOW_SECONDS = 0.05
"""Calls that take less are made again for each timing."""
MOST_BYTES = 256 << 20
"""Limit for the inputs and results that are kept."""


@dataclass
class Original:
    """The user's code on the timed inputs."""

    samples: list[tuple[float, float]] = field(default_factory=list)
    """Device and host microseconds of calls; none if later timings must take samples themselves."""
    peak_bytes: int | None = None
    """The most device memory that a call allocates."""
    _inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    _results: dict[str, list[Any]] = field(default_factory=dict)

    def results(self, contents: str, inputs: Mapping[str, torch.Tensor]) -> list[Any] | None:
        """The results that are kept; None if there are none for these inputs. What was measured on other inputs is dropped.

        Args:
            contents: a name for what the inputs contain during the call.
            inputs: the inputs from which these contents are made.
        """
        is_same = self._inputs.keys() == inputs.keys() and all(
            torch.equal(tensor, self._inputs[name]) for name, tensor in inputs.items()
        )
        if not is_same and self._inputs:
            self.samples, self.peak_bytes, self._inputs, self._results = [], None, {}, {}
        return self._results.get(contents)

    def keep(self, contents: str, inputs: Mapping[str, torch.Tensor], results: Sequence[Any], seconds: float) -> None:
        """Keep the results of a call that changed no input, if it took long and they are not large."""
        tensors = [t for t in (*inputs.values(), *results) if isinstance(t, torch.Tensor)]
        tensors += [t for known in self._results.values() for t in known if isinstance(t, torch.Tensor)]
        if seconds >= SLOW_SECONDS and sum(t.numel() * t.element_size() for t in tensors) <= MOST_BYTES:
            self._inputs = self._inputs or {name: tensor.clone() for name, tensor in inputs.items()}
            self._results[contents] = list(results)
