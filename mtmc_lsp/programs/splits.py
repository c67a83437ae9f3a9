"""Which programs train a policy, which choose its settings, and which test it: whole families, so that a test family is new."""

from __future__ import annotations

import hashlib
from enum import Enum

from mtmc_lsp.core.learning.transitions import Program

SALT = "mtmc-programs-190"
"""Chosen before any training so that most kinds of programs have a family that is held out. A change of it assigns every family
again and makes trained policies incomparable."""
TEST_SHARE, VALIDATION_SHARE = 0.15, 0.15


class Split(Enum):
    """What programs of a family are for."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


def split_of(program: Program) -> Split:
    """The split of a program, by its family alone."""
    return split_of_family(program.family)


def split_of_family(family: str) -> Split:
    """The split of a family: a hash of its name, so that new families change no other."""
    position = int.from_bytes(hashlib.sha256(f"{SALT}/{family}".encode()).digest()[:8], "big") / 2**64
    if position < TEST_SHARE:
        return Split.TEST
    return Split.VALIDATION if position < TEST_SHARE + VALIDATION_SHARE else Split.TRAIN
