"""A family of distributions of values, which a search changes step by step. Workers draw from it, too."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from random import Random

VARIED = "varied "
"""The beginning of the name of such a distribution."""
LIMITS = {"scale": (1e-3, 1e3), "mean": (-100.0, 100.0), "rows": (0.0, 3.0), "zeros": (0.0, 0.95), "large": (0.0, 0.25)}
"""The range of each parameter: within it, the fixed distributions of a verification have values, too."""
STEP = 0.5
"""A step changes a parameter by up to this part of its range."""


@dataclass(frozen=True)
class ValueMix:
    """Normal values, changed in five ways."""

    scale: float = 1.0
    """The spread."""
    mean: float = 0.0
    """In units of the spread."""
    rows: float = 0.0
    """Rows are multiplied by ten to the power of minus to plus this."""
    zeros: float = 0.0
    """The part of the values that are 0."""
    large: float = 0.0
    """The part of the values that are 30 times as large."""

    @property
    def name(self) -> str:
        """The name of the distribution."""
        return VARIED + ", ".join(f"{field.name} {getattr(self, field.name):g}" for field in fields(self))

    @staticmethod
    def of(name: str) -> ValueMix:
        """The mix with this name."""
        parts = (part.split(" ") for part in name.removeprefix(VARIED).split(", "))
        return ValueMix(**{parameter: float(value) for parameter, value in parts})

    def changed(self, random: Random) -> ValueMix:
        """A mix in which one parameter differs."""
        name = random.choice([field.name for field in fields(self)])
        low, high = LIMITS[name]
        value = float(getattr(self, name))
        if name == "scale":
            exponent = math.log10(value) + STEP * math.log10(high / low) * random.uniform(-1, 1)
            value = 10.0**exponent
        else:
            value += STEP * (high - low) * random.uniform(-1, 1)
        # Short numbers, so that the name has the whole value.
        return replace(self, **{name: float(f"{min(high, max(low, value)):.3g}")})
