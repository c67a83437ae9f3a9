"""Accesses: Python expressions for what a module holds, such as ``self.layers[0].weight``. Only this file parses them.

Names that are no Python identifiers are items of containers that have items, ``self.layers['a-b']``, or of the dictionary in
which a module stores them, ``self._modules['conv-1']``. :mod:`mtmc_lsp.capture.worker.modules.members` writes accesses.
"""

from __future__ import annotations

import ast
import functools
import keyword
import re
import unicodedata
from dataclasses import dataclass

OWN = "__dict__"
"""The dictionary of an object's plain attributes."""
STORES = ("_parameters", "_buffers", "_modules")
"""Dictionaries of a module besides its plain attributes."""
_TEXT = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_STORED = rf"\.(?:{'|'.join((*STORES, OWN))})\[(?:{_TEXT})\]"
PATH = re.compile(rf"\bself(?:{_STORED}|\.\w+|\[(?:\d+|{_TEXT})\])+")
"""An access in a text."""
_STEP = re.compile(rf"(?P<stored>{_STORED})|\.(?P<name>\w+)|\[(?P<item>-?\d+|{_TEXT})\]")


@dataclass(frozen=True)
class Step:
    """One step of an access."""

    text: str
    """Its part of the expression: ``.weight``, ``[0]``, ``['a-b']``, ``._modules['conv-1']``."""
    key: str | int
    """The name of the attribute, or the index or key of the item."""

    @property
    def is_item(self) -> bool:
        """Whether it reads an item of a container, not an attribute."""
        return self.text.startswith("[")


def steps(access: str) -> tuple[Step, ...]:
    """The steps from ``self``, or an argument, to what the access reads."""
    return tuple(map(_step, _STEP.finditer(access)))


def _step(match: re.Match[str]) -> Step:
    if match["name"]:
        return Step(match[0], match["name"])
    key = match["item"] or match["stored"].partition("[")[2].removesuffix("]")
    return Step(match[0], ast.literal_eval(key))


def prefixes(access: str) -> list[str]:
    """The accesses on the way: ``self.a[0]`` has ``self``, ``self.a`` and itself."""
    return [access[: _start(access)], *(access[: match.end()] for match in _STEP.finditer(access))]


def _start(access: str) -> int:
    first = _STEP.search(access)
    return first.start() if first else len(access)


def is_of_module(access: str) -> bool:
    """Whether it reads something that the target's module holds, not an argument."""
    return access.startswith(("self.", "self["))


def owner_of(access: str) -> str:
    """The access without its last step; empty if it has none."""
    return ["", *prefixes(access)][-2]


def dotted(access: str) -> str:
    """The name of a module's tensor in torch: ``layers.0.weight`` for ``self.layers[0].weight``."""
    root = access[: _start(access)]
    return ".".join([*([root] if root != "self" else []), *(str(step.key) for step in steps(access))])


def words(access: str) -> str:
    """The keys of the steps as one word, such as ``layers_a_b_weight`` for ``self.layers['a-b'].weight``."""
    return "_".join(re.findall(r"\w+", dotted(access)))


def is_indexed(access: str) -> bool:
    """Whether its last step reads an item by its position."""
    found = steps(access)
    return bool(found) and isinstance(found[-1].key, int)


@functools.cache
def is_attribute_name(name: str) -> bool:
    """Whether ``.name`` reads the attribute: Python normalises the letters of identifiers."""
    return name.isidentifier() and not keyword.iskeyword(name) and unicodedata.normalize("NFKC", name) == name


def quoted(name: str) -> str:
    """A name as a string in double quotes, if no letter needs an escape."""
    return repr(name) if re.search(r"[\"\\]", name) or not name.isprintable() else f'"{name}"'
