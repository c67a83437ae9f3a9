"""The predictions of the cost model as words: for the present version, and for each choice beside the others.

Numbers are rounded coarsely, so that a small model sees each word often. The numbers of a choice depend on the other choices, so
its text changes from one decision to the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.policies.state_features import Version

LAST_RANK = 9
"""Later positions have one word, and so have larger numbers of choices: measured versions have few, those of a run many."""
FINE_PERCENT = 10
"""Percentages below it are rounded to 1, others to 5."""
MOST_PERCENT = 400
UNKNOWN = "unknown"
PARTS: Mapping[str, str] = {"launch_share": "launches", "memory_share": "memory", "arithmetic_share": "arithmetic"}


@dataclass(frozen=True)
class ActionNumbers:
    """What the cost model predicts for one action."""

    saved_us: float = 0.0
    bytes_ratio: float | None = None
    """Bytes after over bytes before; None if they are not known."""
    flops_ratio: float | None = None
    launches: int = 0
    """Launches of the present version that the action covers."""


def action_numbers(action: MacroAction, version: Version) -> ActionNumbers:
    """The predictions for an action on a version."""
    expected = action.expected
    return ActionNumbers(
        expected.saved_us,
        _ratio(expected.bytes_after, expected.bytes_before),
        _ratio(expected.flops_after, expected.flops_before),
        version.units_of(action.region).total,
    )


def version_text(version: Version) -> str:
    """``Predicted: 128 us, launches 30%, memory 60%, arithmetic 10%``."""
    if not math.isfinite(version.predicted_us):
        return f"Predicted: {UNKNOWN}"
    shares = (f"{name} {percent(version.features[f'schedule.{key}'])}" for key, name in PARTS.items())
    return ", ".join([f"Predicted: {power_of_two(version.predicted_us)} us", *shares])


def choices_text(numbers: Sequence[ActionNumbers | None], predicted_us: float) -> str:
    """``Choices: 8, best saves 45%``: what STOP has to be compared with."""
    best = _best(numbers)
    saves = "" if best is None else f", best saves {_share(best, predicted_us)}"
    return f"Choices: {min(len(numbers), LAST_RANK)}{saves}"


def numbered_texts(texts: Sequence[str], numbers: Sequence[ActionNumbers | None], predicted_us: float) -> list[str]:
    """``rank 1 saves 45% of best 100% bytes 50% launches 3: fuse linear, gelu.``

    Args:
        texts: of the choices, in the order of the roofline planner.
        numbers: of the same choices; the text of one without a prediction stays as it is.
        predicted_us: time of the present version.
    """
    best = _best(numbers) or 0.0
    result = []
    for rank, (text, each) in enumerate(zip(texts, numbers, strict=True), 1):
        if each is None:
            result.append(text)
            continue
        words = [f"rank {min(rank, LAST_RANK)}", f"saves {_share(each.saved_us, predicted_us)}"]
        words.append(f"of best {_share(each.saved_us, best)}")
        words += [f"bytes {percent(each.bytes_ratio)}"] * (each.bytes_ratio is not None)
        words += [f"operations {percent(each.flops_ratio)}"] * (each.flops_ratio not in (None, 1.0))
        words.append(f"launches {power_of_two(each.launches) if each.launches > LAST_RANK else each.launches}")
        result.append(f"{' '.join(words)}: {text}")
    return result


def percent(share: float | None) -> str:
    """``45%``, rounded; ``unknown`` if it is none."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    value = 100 * min(MOST_PERCENT / 100, max(-MOST_PERCENT / 100, share))
    rounded = round(value) if abs(value) < FINE_PERCENT else 5 * round(value / 5)
    return f"{rounded}%"


def power_of_two(value: float) -> str:
    """The nearest power of two, for sizes and times whose order of magnitude counts."""
    if not value > 0 or not math.isfinite(value):
        return "0"
    return f"{2.0 ** round(math.log2(value)):.3g}" if value < 1 else str(2 ** round(math.log2(value)))


def _best(numbers: Sequence[ActionNumbers | None]) -> float | None:
    return max((each.saved_us for each in numbers if each is not None), default=None)


def _share(part: float, whole: float) -> str:
    return percent(part / whole if whole > 0 else None)


def _ratio(after: float, before: float) -> float | None:
    return after / before if before > 0 and after > 0 else None
