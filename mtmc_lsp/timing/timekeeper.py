"""Has a worker time something while it alone holds the GPU, notes how the GPU was, and remembers what came of it."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mtmc_lsp.core.errors import GpuInUse
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.results import Timing
from mtmc_lsp.process.gpu_lock import alone
from mtmc_lsp.timing.gpu_watch import GRAVE, Gpu, open_gpu, watching
from mtmc_lsp.timing.messages import TimeAnswer, TimeRequest

TIME_SECONDS = 300.0
"""Limit for timing one candidate, preparation of the baselines included."""
VERSION = 1
"""Of how times are taken: what was measured by another version is measured again."""
COOLING_SECONDS = 5.0
"""The pause after a timing in which the GPU was slowed down."""
VOLATILE = ("seconds", "bound_us", "least_us")
"""Parts of a request that follow from others, or do not change what is measured."""

Ask = Callable[[TimeRequest], TimeAnswer]
"""Lets the timing worker run a request."""


@dataclass(frozen=True)
class TimingCache:
    """Timings by what they depend on."""

    folder: Path
    fresh: bool = False
    """Whether what is known is measured again, and replaced."""

    def key(self, request: TimeRequest, gpu: str) -> str:
        """Names a timing: sources, inputs and the graph, the baselines, the GPU, its driver and the versions."""
        kept = {name: value for name, value in to_json(request).items() if name not in VOLATILE}
        text = json.dumps([VERSION, gpu, kept], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def known(self, key: str) -> Timing | None:
        """What was measured before, marked as such."""
        if self.fresh:
            return None
        try:
            data = json.loads(self._file(key).read_text(encoding="utf-8"))
            return replace(from_json(Timing, data), cached=True)
        except (OSError, ValueError, TypeError):
            # Not there, or written by another version.
            return None

    def remember(self, key: str, timing: Timing) -> None:
        """Keep it for later runs; where no cache can be written it is measured each time."""
        file = self._file(key)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_name(f"{file.name}.{os.getpid()}")
            part.write_text(json.dumps(to_json(timing)), encoding="utf-8")
            part.replace(file)
        except OSError:
            return

    def _file(self, key: str) -> Path:
        return self.folder / "timings" / f"{key}.json"


class Timekeeper:
    """Times on one GPU."""

    def __init__(
        self,
        ask: Ask,
        gpu: str,
        *,
        cache: TimingCache,
        find_gpu: Callable[[str], tuple[Gpu | None, str]] = open_gpu,
        pause: Callable[[float], None] = time.sleep,
        before: Callable[[TimeRequest], None] = lambda request: None,
    ) -> None:
        """Prepare.

        Args:
            ask: lets the worker run a request.
            gpu: the GPU's UUID.
            cache: what was measured before.
            find_gpu: gives what reads the GPU's state.
            pause: waits for the GPU to cool down.
            before: does for a request what the GPU need not be held alone for.
        """
        self._before = before
        self._ask, self._gpu, self._cache, self._pause = ask, gpu, cache, pause
        self._found = find_gpu(gpu)

    def time(self, request: TimeRequest) -> Timing:
        """The timing of a request, from the cache if it was measured before.

        Raises:
            MeasurementRejected: it cannot be true.
            GpuInUse: another program used the GPU meanwhile.
        """
        key = self._cache.key(request, self._gpu)
        timing = self._cache.known(key)
        if timing is None:
            timing = self._has_gpu(request)
            self._cache.remember(key, timing)
        return timing

    def _has_gpu(self, request: TimeRequest) -> Timing:
        self._before(request)
        with alone(self._gpu):
            timing = self._once(request)
            if _is_slowed(timing):
                self._pause(COOLING_SECONDS)
                timing = self._once(request)
        return timing

    def _once(self, request: TimeRequest) -> Timing:
        with watching(*self._found) as watch:
            answer = self._ask(request)
        conditions = watch.conditions(answer.window)
        if conditions.busy:
            raise GpuInUse(
                f"another program computed on the GPU while this was timed: {', '.join(conditions.busy)}",
                remedy="End it, or choose another GPU with CUDA_VISIBLE_DEVICES.",
            )
        return replace(answer.timing, conditions=conditions, measured_at=time.time())


def _is_slowed(timing: Timing) -> bool:
    return timing.conditions is not None and bool(GRAVE & set(timing.conditions.throttled))
