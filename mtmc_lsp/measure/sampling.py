"""Samples of calls on a GPU and what may be concluded from them. Runs in workers."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mtmc_lsp.core.results import Ratio, Speed

MIN_SAMPLES, MAX_SAMPLES = 25, 200
BOOTSTRAPS = 1000
FLUSH_BYTES = 256 << 20
"""More than twice the L2 of any GPU of today; writing it also takes longer than launching most kernels."""
RESOLUTION = 0.002
"""Differences below this part are never called real, however small the spread."""
WARM_CALLS = 20

Run = Callable[[], Any]
_buffers: dict[str, torch.Tensor] = {}


@contextlib.contextmanager
def gpu_lock() -> Iterator[None]:
    """Only one process of ours measures on this GPU at a time."""
    import fcntl
    import tempfile

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    # The index depends on CUDA_VISIBLE_DEVICES, so the name does not hang on it where torch tells the GPU's own.
    name = getattr(properties, "uuid", torch.cuda.current_device())
    path = Path(tempfile.gettempdir()) / f"mtmc-gpu-{name}.lock"
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _flush_buffer() -> torch.Tensor:
    if "flush" not in _buffers:
        _buffers["flush"] = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    return _buffers["flush"]


def sample(run: Run) -> tuple[float, float]:
    """Microseconds of one call: on the device with a cold L2, and on the host until it returned."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    _flush_buffer().zero_()
    start.record()
    began = time.perf_counter()
    run()
    host = time.perf_counter() - began
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3, host * 1e6


def interleaved(runs: Mapping[str, Run], seconds: float) -> dict[str, list[tuple[float, float]]]:
    """Rounds of one sample of each contender, in random order within a round."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(3):
            sample(run)
    order = list(runs)
    # A generator of its own: what user code does to the shared one does not make the order foreseeable.
    shuffle = random.Random()
    deadline = time.perf_counter() + seconds
    while True:
        shuffle.shuffle(order)
        for name in order:
            samples[name].append(sample(runs[name]))
        count = len(samples[order[0]])
        if count >= MAX_SAMPLES or (count >= MIN_SAMPLES and time.perf_counter() > deadline):
            return samples


def warm(run: Run) -> tuple[float, float]:
    """Median microseconds of back-to-back calls with a warm L2, by two clocks: device events, and the host's wall."""
    events, walls = [], []
    for _ in range(WARM_CALLS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - began) * 1e6)
        events.append(float(start.elapsed_time(end)) * 1e3)
    return statistics.median(events), statistics.median(walls)


def clocks_agree(event_us: float, wall_us: float) -> bool:
    """Whether the device's events saw all the work that the host had to wait for.

    Work on another stream ends after the events. A call's own host time is in both clocks, so only the synchronisation
    is allowed for.
    """
    return wall_us <= 1.5 * event_us + 200.0


def graph_medians(runs: Mapping[str, Run]) -> dict[str, float]:
    """Median device microseconds of each contender replayed from a CUDA graph; what cannot be captured is left out."""
    replays: dict[str, Run] = {}
    for name, run in runs.items():
        replay = _captured(run)
        if replay is not None:
            replays[name] = replay
    if not replays:
        return {}
    samples = interleaved(replays, 0.2)
    return {name: statistics.median(device for device, _ in values) for name, values in samples.items()}


def _captured(run: Run) -> Run | None:
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        # Code that synchronises or allocates on the host cannot be captured; it is then timed without a graph only.
        torch.cuda.synchronize()
        return None
    replay: Run = graph.replay
    return replay


def ratio_of(slower: Sequence[float], faster: Sequence[float]) -> Ratio:
    """Median over median, with a bootstrap 95 % interval over rounds (pairs stay together)."""
    a, b = torch.tensor(slower, dtype=torch.float64), torch.tensor(faster, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(a), (BOOTSTRAPS, len(a)), generator=generator)
    ratios = (a[picks].median(dim=1).values / b[picks].median(dim=1).values).sort().values
    low, high = ratios[int(0.025 * BOOTSTRAPS)], ratios[int(0.975 * BOOTSTRAPS)]
    return Ratio(float(a.median() / b.median()), float(low), float(high))


def speed_of(ratio: Ratio, noise: Ratio) -> Speed:
    """A verdict that the A/A control cannot explain."""
    spread = max(noise.high - 1.0, 1.0 - noise.low, RESOLUTION)
    if ratio.low > 1.0 and ratio.ratio > 1.0 + spread:
        return Speed.FASTER
    if ratio.high < 1.0 and ratio.ratio < 1.0 - spread:
        return Speed.SLOWER
    if ratio.low > 0.97 and ratio.high < 1.03:
        return Speed.SAME
    return Speed.AMBIGUOUS
