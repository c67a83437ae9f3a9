"""All candidates that are wrong in use but those that reach for the harness."""

from benchmarks.adversarial.candidate import Candidate
from benchmarks.adversarial.conditions import CONDITIONS, reused_buffers
from benchmarks.adversarial.lines import LINES
from benchmarks.adversarial.modules import module_candidates


def wrong() -> list[Candidate]:
    """Return all wrong candidates but those that reach for the harness."""
    made = [one for condition in CONDITIONS for one in condition.candidates()]
    return [*made, *(line.candidate() for line in LINES), *module_candidates(), *reused_buffers()]
