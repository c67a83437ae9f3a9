"""The archive of an island: the best version of each niche.

A niche is one workload (fastest there), one class of device memory or one number of launches (fastest on all workloads). Versions
that are slow on average survive in it, as starting points that lead elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mtmc_lsp.evolve.lineage import EventKind, Lineage, Version

LEAST_GAIN = 1e-3
"""Relative gain by which a version must be faster to take a niche. Estimates of equal versions differ only by rounding."""


@dataclass
class Archive:
    """The best version of each niche."""

    workloads: Sequence[str]
    """Names of the workloads."""
    best: dict[str, Version] = field(default_factory=dict)
    root_memory: float = 0.0
    """Memory of the user's code in bytes."""

    def add(self, version: Version) -> tuple[str, ...]:
        """Add a correct version; returns the niches that it is now the best of."""
        taken = []
        for niche, value in self._values(version):
            holder = self.best.get(niche)
            if holder is None or value > dict(self._values(holder)).get(niche, 0.0) * (1.0 + LEAST_GAIN):
                self.best[niche] = version
                taken.append(niche)
        return tuple(taken)

    def _values(self, version: Version) -> Iterator[tuple[str, float]]:
        """The niches of a version with its value there; larger is better."""
        for name, score in zip(self.workloads, version.scores, strict=True):
            yield f"fastest: {name}", score.gain
        yield f"launches: {version.launches}", version.gain
        if version.memory > 0 and self.root_memory > 0:
            yield memory_niche(version.memory / self.root_memory), version.gain

    @property
    def elites(self) -> list[Version]:
        """The versions that are the best of a niche, each once, by number."""
        return sorted({version.number: version for version in self.best.values()}.values(), key=lambda v: v.number)

    def fastest(self) -> Version:
        """The fastest version on all workloads."""
        return max(self.elites, key=lambda version: (version.gain, -version.number))


def memory_niche(share: float) -> str:
    """The class of a version's memory by its share of the memory of the user's code, in powers of two."""
    power = round(math.log2(share))
    return f"memory: about {2.0**power:g}x"


def archives(lineage: Lineage, workloads: Sequence[str], islands: int) -> list[Archive]:
    """The archive of each island, with what migrated to it."""
    memory = lineage.versions[0].memory if lineage.versions else 0.0
    result = [Archive(workloads, root_memory=memory) for _ in range(islands)]
    migrants: dict[int, list[tuple[int, Version]]] = {}
    for number, event in lineage.events:
        if event.kind is EventKind.MIGRATION and event.version is not None:
            migrants.setdefault(number, []).append((event.island, lineage.version(event.version)))
    generations: dict[int, list[Version]] = {}
    for version in lineage.versions:
        if version.is_alive:
            generations.setdefault(version.generation, []).append(version)
    for number in sorted({*generations, *migrants}):
        # A version migrates before the versions of the generation are made.
        for island, version in migrants.get(number, []):
            result[island].add(version)
        for version in generations.get(number, []):
            for island, archive in enumerate(result):
                if version.generation == 0 or version.island == island:
                    archive.add(version)
    return result
