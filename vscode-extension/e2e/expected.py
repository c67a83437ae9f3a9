"""Prints the expected file after keeping some steps of a run: ``expected.py FILE TARGET STEP...``.

Applies the steps that the planner proposes without a GPU, without a search, a language server or an editor.
"""

import sys
from pathlib import Path

from mtmc_lsp.app.pipeline import Pipeline
from mtmc_lsp.app.target_file import open_target, parse_request
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.run import Step, StepStatus
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.device.choice import planning_model
from mtmc_lsp.planners.roofline import RooflinePlanner


def main() -> None:
    """Print the file with the requested steps."""
    path, target, *numbers = sys.argv[1:]
    wanted = {int(number) for number in numbers}
    opened = open_target(parse_request(f"{path}::{target}", Settings(archs=("sm_90",)), sys.executable))
    with Pipeline(opened) as pipeline:
        capture = pipeline.capture()
    planner, device = RooflinePlanner(), planning_model(("sm_90",))
    coder = BuiltinCoder(device)
    best = kept = coder.start(capture, Path(path).read_text())
    history: list[Step] = []
    while len(history) < max(wanted):
        action = planner.propose(State(capture, best, tuple(history), device, has_gpu=False))
        assert action is not None, "the planner proposes fewer steps"
        best = coder.write(capture, best, action)
        history.append(Step(len(history) + 1, action, StepStatus.ACCEPTED, "", candidate=best))
        if len(history) in wanted:
            kept = coder.write(capture, kept, action)
    sys.stdout.write(kept.source)


if __name__ == "__main__":
    main()
