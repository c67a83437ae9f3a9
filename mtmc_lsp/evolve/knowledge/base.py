"""The knowledge base: notes and lessons that are searched by words, offline."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mtmc_lsp.evolve.knowledge.lessons import Lesson, merged
from mtmc_lsp.llm.coder.prompts import ARCH_NOTES, KNOWLEDGE

SATURATION, LENGTH_SHARE = 1.5, 0.75
"""Constants of Okapi BM25, as usual."""
TITLE_WEIGHT = 3
"""How often the words of a title count."""
HERE = 1.5
"""Factor on what was learned on the same GPU, or is a note on its architecture."""
WORD = re.compile(r"[a-z0-9_]+")
MOST_HITS = 8


@dataclass(frozen=True)
class Entry:
    """One note or lesson."""

    title: str
    """``note: fuse``, ``lesson: autotune``."""
    text: str
    arch: str = ""
    """Prefix of the architectures that a note is about; empty for all."""
    gpu: str = ""
    """The GPU that a lesson was learned on; empty for notes and without a GPU."""


@dataclass(frozen=True)
class Hit:
    """An entry that matches a search."""

    entry: Entry
    score: float


def notes() -> list[Entry]:
    """The notes that ship with the package."""
    archs = {note: prefix for prefix, note in ARCH_NOTES.items()}
    return [
        Entry(f"note: {path.stem}", path.read_text(encoding="utf-8").strip(), archs.get(path.stem, ""))
        for path in sorted(KNOWLEDGE.glob("*.md"))
    ]


def lesson_entries(lessons: Iterable[Lesson], project: str) -> list[Entry]:
    """Lessons as entries for somebody who works on a project; those of all runs about the same are one entry."""
    return [
        Entry(f"lesson: {lesson.kind}", lesson.text(project), gpu=lesson.gpu) for lesson in merged(lessons, project)
    ]


class KnowledgeBase:
    """Entries with a search by words."""

    def __init__(self, entries: Sequence[Entry], *, arch: str = "", gpu: str = "") -> None:
        """Index.

        Args:
            arch: architecture of the user's GPU, such as ``sm_90``: notes on others rank lower.
            gpu: its name.
        """
        self.entries, self._arch, self._gpu = list(entries), arch, gpu
        self._words = [Counter(words(entry.text) + TITLE_WEIGHT * words(entry.title)) for entry in self.entries]
        self._frequency = Counter(word for count in self._words for word in count)
        self._length = sum(count.total() for count in self._words) / max(1, len(self._words))

    def search(self, query: str, limit: int = MOST_HITS) -> list[Hit]:
        """The entries that match best, the best first; those without any of the words are left out."""
        wanted = set(words(query))
        hits = [
            Hit(entry, self._score(count, wanted) * self._weight(entry))
            for entry, count in zip(self.entries, self._words, strict=True)
        ]
        return sorted((hit for hit in hits if hit.score > 0), key=lambda hit: -hit.score)[:limit]

    def _score(self, count: Counter[str], wanted: set[str]) -> float:
        total, score = count.total(), 0.0
        for word in wanted & set(count):
            occurrences, holders = count[word], self._frequency[word]
            rarity = math.log(1.0 + (len(self.entries) - holders + 0.5) / (holders + 0.5))
            length = 1.0 - LENGTH_SHARE + LENGTH_SHARE * total / self._length
            score += rarity * occurrences * (SATURATION + 1.0) / (occurrences + SATURATION * length)
        return score

    def _weight(self, entry: Entry) -> float:
        if entry.arch:
            return HERE if self._arch.startswith(entry.arch) else 1.0 / HERE
        return HERE if entry.gpu and entry.gpu == self._gpu else 1.0


def words(text: str) -> list[str]:
    """The words of a text in lower case, with simple plurals as singulars."""
    return [_singular(word) for word in WORD.findall(text.lower())]


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
