"""A checker that the tests of this folder share, and the clocks of the tests of timings."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.codegen.conftest import checker

__all__ = ["checker"]
sys.path.append(str(Path(__file__).parent.parent / "verify"))
