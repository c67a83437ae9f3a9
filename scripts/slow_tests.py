"""Move tests that take long out of `make test`: add them to ``tests/slow_tests.txt``.

    python -m pytest -n 3 -m "not slow and not gpu" --durations=0 --durations-min=0.02 | tee LOG
    python scripts/slow_tests.py LOG

Measure on an idle machine with two cores. A test in :data:`KEPT` stays, because it is the only fast one of a main use.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

LIST = Path(__file__).resolve().parent.parent / "tests" / "slow_tests.txt"
SECONDS = 3.0
"""A test that takes longer is slow. In November 2026, 5 % of the tests were, and took half of the time."""
DURATION = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown)\s+(tests/.*\S)\s*")
KEPT = (
    "tests/cli/test_optimize.py::test_apply_writes_the_accepted_steps_keeps_the_old_text_and_leaves_other_bytes_alone",
    "tests/server/test_kill.py::test_after_a_kill_at_any_point_the_file_is_intact_and_the_run_can_be_resumed",
    "tests/server/test_neovim.py::test_neovim_optimises_keeps_and_undoes[real search]",
    "tests/server/test_runs.py::test_a_real_run_finds_verified_steps_that_can_be_kept_and_undone",
)


def main(log: Path) -> int:
    """Add the tests that a log shows to be slow. Lines of modules and of other tests stay."""
    seconds: Counter[str] = Counter()
    for line in log.read_text("utf-8", errors="replace").splitlines():
        if found := DURATION.fullmatch(line):
            seconds[found[2]] += float(found[1])
    slow = {name for name, total in seconds.items() if total > SECONDS and name not in KEPT}
    variants = Counter(map(_function, seconds))
    for function, count in Counter(map(_function, slow)).items():
        if count == variants[function]:
            slow = {name for name in slow if _function(name) != function} | {function}
    lines = LIST.read_text("utf-8").splitlines()
    comments = [line for line in lines if line.startswith("#")]
    names = sorted({line for line in lines if line and not line.startswith("#")} | slow)
    LIST.write_text("\n".join([*comments, *names]) + "\n", "utf-8")
    long = [total for name, total in seconds.items() if not slow.isdisjoint((name, _function(name)))]
    print(f"{len(long)} tests of {len(seconds)} in the log are slow: {sum(long):.0f} of {seconds.total():.0f} s")
    return 0


def _function(name: str) -> str:
    """A test without its parameters."""
    return name.partition("[")[0]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
