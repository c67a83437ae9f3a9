"""One candidate of the suite."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """The texts of a reference and of what claims to equal it; `args` and `before` show the difference in use."""

    name: str
    kind: str  # sizes, layouts, values, dtypes, use, state, harness, probing, faking or honest
    target: str
    reference: str
    text: str
    args: str = "torch.randn(3, 40),"
    before: str = ""

    @property
    def honest(self) -> bool:
        """Tell whether it is right."""
        return self.kind == "honest"
