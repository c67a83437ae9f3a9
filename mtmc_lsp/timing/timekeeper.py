"""Runs timings in a worker, which uses the GPU alone meanwhile, records the GPU's state and caches the results."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from mtmc_lsp.core.errors import GpuInUse
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.results import Timing
from mtmc_lsp.process.gpu_lock import USING_ALONE, WAITING_ALONE, alone, lock_seconds
from mtmc_lsp.process.protocol import Request
from mtmc_lsp.timing.gpu_monitor import REPEAT_REASONS, Gpu, monitor_gpu, open_gpu
from mtmc_lsp.timing.messages import TimeAnswer

TIME_SECONDS = 300.0
"""Time limit for timing one candidate, including preparation of the baselines."""
TIMING_VERSION = 5
"""Version of the timing method; timings of other versions are not reused."""
COOLING_SECONDS = 5.0
"""Pause before a throttled timing is repeated."""
NOT_IN_KEY = ("bound_us", "least_us")
"""Request fields that are derived from others or do not affect the measurement; not part of the cache key."""

R = TypeVar("R", bound=Request[TimeAnswer])
Ask = Callable[[R, bool], TimeAnswer]
"""Sends a request to the timing worker, which locks the GPU itself unless the second argument says that the caller has."""


@dataclass(frozen=True)
class TimingCache:
    """Timings on disk, by a hash of everything that they depend on."""

    folder: Path
    fresh: bool = False
    """Whether to ignore cached timings and replace them."""

    def key(self, request: Request[TimeAnswer], gpu: str) -> str:
        """The cache key of a timing: sources, inputs, graph, baselines, GPU, driver and versions."""
        relevant = {name: value for name, value in to_json(request).items() if name not in NOT_IN_KEY}
        text = json.dumps([TIMING_VERSION, gpu, relevant], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def known(self, key: str) -> Timing | None:
        """The cached timing, marked as cached; ``None`` if there is none."""
        if self.fresh:
            return None
        try:
            data = json.loads(self._file(key).read_text(encoding="utf-8"))
            return replace(from_json(Timing, data), cached=True)
        except (OSError, ValueError, TypeError):
            # Missing, or written by another version.
            return None

    def remember(self, key: str, timing: Timing) -> None:
        """Cache a timing; if the cache is not writable, each run measures again."""
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


class Timekeeper(Generic[R]):
    """Times candidates on one GPU."""

    def __init__(
        self,
        ask: Ask[R],
        gpu: str,
        *,
        cache: TimingCache,
        find_gpu: Callable[[str], tuple[Gpu | None, str]] = open_gpu,
        pause: Callable[[float], None] = time.sleep,
        prepare: Callable[[R], None] = lambda request: None,
    ) -> None:
        """Prepare for timings.

        Args:
            gpu: the GPU's UUID.
            find_gpu: opens the interface to the GPU's state.
            pause: sleeps while the GPU cools down.
            prepare: prepares a request that is not cached, before the GPU is locked.
        """
        self._ask, self._gpu, self._cache, self._pause, self._prepare = ask, gpu, cache, pause, prepare
        self._gpu_state = find_gpu(gpu)

    def time(self, request: R) -> Timing:
        """The timing of a request, from the cache if available.

        Raises:
            MeasurementRejected: the timing is not plausible.
            GpuInUse: another program used the GPU during the timing.
        """
        key = self._cache.key(request, self._gpu)
        timing = self._cache.known(key)
        if timing is None:
            timing = self._measure(request)
            self._cache.remember(key, timing)
        return timing

    def _measure(self, request: R) -> Timing:
        self._prepare(request)
        timing = self._measure_once(request)
        if timing.conditions is not None and REPEAT_REASONS & set(timing.conditions.throttled):
            with alone(self._gpu):
                self._pause(COOLING_SECONDS)
                timing = self._measure_once(request, is_locked=True)
        return timing

    def _measure_once(self, request: R, *, is_locked: bool = False) -> Timing:
        with monitor_gpu(*self._gpu_state) as monitor:
            answer = self._ask(request, is_locked)
        if not is_locked:
            lock_seconds[WAITING_ALONE] += answer.waited_seconds
            lock_seconds[USING_ALONE] += answer.window[1] - answer.window[0]
        conditions = monitor.conditions(answer.window)
        if conditions.busy:
            raise GpuInUse(
                f"another program computed on the GPU during the timing: {', '.join(conditions.busy)}",
                remedy="Stop it, or select another GPU with CUDA_VISIBLE_DEVICES.",
            )
        return replace(answer.timing, conditions=conditions, measured_at=time.time())
