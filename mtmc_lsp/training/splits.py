"""The part of a program by its family, where no other assignment is given."""

from __future__ import annotations

import hashlib

from mtmc_lsp.core.learning.transitions import Program
from mtmc_lsp.training.dataset import TEST, TRAIN, VALIDATION

TENTHS = {**dict.fromkeys(range(7), TRAIN), 7: VALIDATION, 8: TEST, 9: TEST}
"""The part of each tenth of the families."""


def split_by_family(program: Program) -> str:
    """The part of a program by a hash of its family: all programs of a family are in one part."""
    digest = hashlib.sha256(program.family.encode()).digest()
    return TENTHS[int.from_bytes(digest[:8], "big") % 10]
