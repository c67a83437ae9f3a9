"""Whole families train, validate or test."""

from __future__ import annotations

import collections
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from mtmc_lsp.app.bench.manifest import read_manifests
from mtmc_lsp.core.learning.transitions import Program
from mtmc_lsp.programs.corpus import HALF
from mtmc_lsp.programs.family import FAMILIES
from mtmc_lsp.programs.generator import family_names, generate
from mtmc_lsp.programs.splits import Split, split_of, split_of_family

PUBLIC = Path(__file__).resolve().parents[2] / "benchmarks" / "public"


def a_program(family: str, name: str = "f") -> Program:
    return cast(Program, SimpleNamespace(family=family, name=name, id=f"{family}/{name}"))


def test_no_family_is_in_two_splits() -> None:
    splits = collections.defaultdict(set)
    for item in generate(300, 4):
        splits[item.family].add(split_of(a_program(item.family, item.name)))
    assert len(splits) == len(family_names())
    assert all(len(found) == 1 for found in splits.values())


def test_each_split_has_its_share_of_the_families() -> None:
    counts = collections.Counter(split_of_family(name) for name in family_names())
    assert counts[Split.TRAIN] >= 60
    assert counts[Split.VALIDATION] >= 10
    assert counts[Split.TEST] >= 10


def test_most_kinds_of_programs_have_a_family_that_is_held_out() -> None:
    """A kind is a module of families; validation and test families are both held out of training."""
    kinds = collections.defaultdict(set)
    for family in FAMILIES.values():
        kinds[family.rule.__module__].add(split_of_family(family.name))
    held_out = [kind for kind, splits in kinds.items() if splits - {Split.TRAIN}]
    assert len(held_out) >= 0.8 * len(kinds)


def test_each_split_has_its_share_of_the_public_suite() -> None:
    entries = [entry for entry in read_manifests(PUBLIC) if entry.half == HALF]
    counts = collections.Counter(split_of_family(entry.package) for entry in entries)
    assert all(counts[split] >= 0.08 * len(entries) for split in Split)


def test_the_assignment_is_the_one_that_policies_were_trained_with() -> None:
    """A change would let programs that a stored policy was trained on test it."""
    known = {
        "softmax": "test",
        "mlp": "test",
        "rms_norms": "validation",
        "transformer_block": "train",
        "layer_norms": "train",
    }
    assert {name: split_of_family(name).value for name in known} == known
