"""Random numbers that are often extreme, so that what happens rarely by chance happens soon. Runs in workers.

A generator that was seeded gives its usual numbers, because these are the same in each run.
"""

from __future__ import annotations

import os
import random
from typing import Any

EXTREME_PART = 0.5
"""The part of the draws that are extreme. The others are random: code may draw until a number differs."""
LEAST, MOST = 0.0, 1.0 - 2.0**-53


class ExtremeChance:
    """Replaces Python's sources of chance for the rest of the process."""

    def __init__(self, seed: int, *, low: bool) -> None:
        """Make the first number extreme, and after it a part of all.

        Args:
            low: whether the first number is the smallest possible one, or the largest.
        """
        generator = random.Random(seed)
        self._draw, self._bits = generator.random, generator.getrandbits
        self._is_first, self._low = True, low
        self._process, self._calls = os.getpid(), 0
        self._install()

    def relax(self) -> None:
        """Before another call: another process number, and the next number is extreme."""
        self._calls += 1
        self._is_first, self._low = True, self._draw() < 0.5

    def number(self) -> float | None:
        """An extreme number, or ``None`` for a usual one."""
        return (LEAST if self._low else MOST) if self._is_extreme() else None

    def below(self, limit: int) -> int | None:
        """An extreme whole number below a limit, or ``None`` for a usual one."""
        return (0 if self._low else limit - 1) if self._is_extreme() else None

    def _is_extreme(self) -> bool:
        if self._is_first:
            self._is_first = False
            return True
        self._low = self._draw() < 0.5
        return self._draw() < EXTREME_PART

    def _bytes(self, count: int) -> bytes:
        if self._is_extreme():
            return (b"\0" if self._low else b"\xff") * count
        return self._bits(8 * count).to_bytes(count, "little") if count else b""

    def _install(self) -> None:
        chance, original, system = self, random.Random, random.SystemRandom
        usual, usual_below = system.random, system._randbelow  # type: ignore[attr-defined]

        class Random(original):  # type: ignore[valid-type, misc]
            """The usual generator, as long as it is seeded."""

            is_free = True

            def seed(self, a: Any = None, version: int = 2) -> None:
                self.is_free = a is None
                super().seed(a, version)

            def setstate(self, state: Any) -> None:
                self.is_free = False
                super().setstate(state)

            def random(self) -> float:
                number = chance.number() if self.is_free else None
                return super().random() if number is None else number

            def _randbelow(self, limit: int) -> int:
                number = chance.below(limit) if self.is_free else None
                return int(super()._randbelow(limit)) if number is None else number

        def system_number(generator: Any) -> float:
            number = chance.number()
            return float(usual(generator)) if number is None else number

        def system_below(generator: Any, limit: int) -> int:
            number = chance.below(limit)
            return int(usual_below(generator, limit)) if number is None else number

        system.random, system._randbelow = system_number, system_below  # type: ignore
        Random.__module__ = "random"
        Random.__qualname__ = "Random"
        shared = Random()
        for name in random.__all__:
            if getattr(getattr(random, name), "__self__", None) is random._inst:
                setattr(random, name, getattr(shared, name))
        random.Random, random._inst = Random, shared  # type: ignore[misc]
        os.urandom = self._bytes
        os.getpid = lambda: self._process + self._calls
