"""Tells from the time of the file as it stands which kinds of edits cannot make it faster."""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.core.results import Speed, Timing
from mtmc_lsp.kernels.refusals import takes_the_launch

WITHIN_KERNELS = frozenset(
    {
        "autotune",
        "cache",
        "coalesce",
        "descriptors",
        "even-blocks",
        "grouped-order",
        "hoist",
        "one-pass",
        "persist",
        "pipeline",
        "precision",
        "split-k",
        "vectorize",
    }
)
"""Kinds of edits that change nothing but how kernels run on the GPU."""
ON_HOST = frozenset({"direct-launch"})
"""Kinds of edits that change nothing but the host's time."""
HIDDEN_SHARE = 0.5
"""The GPU takes at most this share of a call that the host bounds: a faster kernel changes nothing then."""
HIDDEN_GAIN = 0.97
"""Kernels that take at most this share of the time before are worth a cheaper launch."""
AT_ROOFLINE, IMPLAUSIBLE = 0.92, 1.1
"""Share of the bandwidth from which on no gain is left. A larger share than the second means that the bytes are overestimated."""


@dataclass(frozen=True)
class Limit:
    """What bounds the time of a call."""

    reason: str
    """One clause for people."""
    excluded: frozenset[str] = WITHIN_KERNELS
    """Kinds of edits that gain nothing."""


@dataclass(frozen=True)
class Start:
    """What the time of the file as it stands tells."""

    limit: Limit | None = None
    """What bounds it, so that kinds of edits gain nothing; None if its kernels may become faster."""
    is_launch_bound: bool = False
    """Whether the host takes most of the time, so that launches may be made cheaper."""

    @property
    def excluded(self) -> frozenset[str]:
        """Kinds of edits that are not tried."""
        within = self.limit.excluded if self.limit is not None else frozenset[str]()
        return within if self.is_launch_bound else within | ON_HOST


def start_of(timing: Timing, memory_us: float) -> Start:
    """What a time of the file as it stands tells."""
    return Start(limit_of(timing, memory_us), takes_the_launch(timing) or timing.rows is not None)


def decisive(timing: Timing, rival: str) -> Timing | None:
    """The comparison that shows a version to be faster than a rival, by single calls or by rows of calls; None if it is not.

    Single calls show what the GPU does, since it is busy until the host has launched them. Rows show what the host does. A
    version must be faster by one of them, and slower by none.
    """
    if is_slower(timing, rival):
        return None
    return next((each for each in _both(timing) if each.speed_over(rival) is Speed.FASTER), None)


def is_slower(timing: Timing, rival: str) -> bool:
    """Whether a version is slower than a rival by single calls or by rows of calls."""
    return any(each.speed_over(rival) is Speed.SLOWER for each in _both(timing))


def _both(timing: Timing) -> list[Timing]:
    return [timing, timing.rows] if timing.rows is not None else [timing]


def hides_a_gain(timing: Timing, rival: str) -> bool:
    """Whether a version is not faster because of its launch alone: its kernels may be faster than those of a rival."""
    baseline = timing.baseline(rival)
    before = baseline.graph_us if baseline is not None else None
    is_faster = timing.graph_us is None or before is None or timing.graph_us < HIDDEN_GAIN * before
    return takes_the_launch(timing) and is_faster


def limit_of(timing: Timing, memory_us: float) -> Limit | None:
    """What bounds the time of the file as it stands; None if its kernels may become faster.

    Args:
        memory_us: time to move the bytes that its kernels must move.
    """
    median = timing.median_us
    if takes_the_launch(timing):
        device = timing.graph_us
        if device is None or device > HIDDEN_SHARE * median:
            return None
        reason = f"the launch takes most of the time: {median:.1f} us, {device:.1f} us of them on the GPU"
        return Limit(reason)
    share = memory_us / median if median > 0.0 else 0.0
    if AT_ROOFLINE <= share <= IMPLAUSIBLE:
        return Limit(f"the kernels reach {min(share, 1.0):.0%} of the GPU's bandwidth ({median:.1f} us)")
    return None
