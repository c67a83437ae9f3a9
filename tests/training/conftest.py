"""A checker that the tests of this folder share."""

from __future__ import annotations

from tests.codegen.conftest import checker

__all__ = ["checker"]
