"""Small trees made by hand, and parameters for a training that takes seconds."""

from __future__ import annotations

from dataclasses import replace

from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.policies.lm.policy_folder import Normalisation
from mtmc_lsp.training.lm.parameters import LmParameters
from mtmc_lsp.training.lm.tree import DecisionTree, Edge, Node
from tests.policies_lm.tiny import model_folder

ROOT, FUSED, TUNED, COPIED = "v0", "v1", "v2", "v3"


def tree(name: str = "p", *, is_held_out: bool = False) -> DecisionTree:
    """Fuse, then tune is best: 2x, then 1.5x. A tempting first step is a dead end at 1.2x. All else fails."""
    root = (
        Edge("tf32", "use tf32.", Outcome.WRONG, None, ""),
        Edge("copy", "copy.", Outcome.FASTER, 1.2, COPIED),
        Edge("fuse", "fuse.", Outcome.FASTER, 2.0, FUSED),
        Edge("split", "split.", Outcome.COMPILE_ERROR, None, ""),
    )
    fused = (
        Edge("graph", "graph.", Outcome.SLOWER, 0.9, "v4"),
        Edge("tune", "tune.", Outcome.FASTER, 1.5, TUNED),
        Edge("tf32", "use tf32.", Outcome.WRONG, None, ""),
    )
    last = (Edge("tf32", "use tf32.", Outcome.WRONG, None, ""), Edge("graph", "graph.", Outcome.SLOWER, 0.9, ""))
    copied = (
        Edge("tf32", "use tf32.", Outcome.WRONG, None, ""),
        Edge("split", "split.", Outcome.COMPILE_ERROR, None, ""),
    )
    nodes = {
        ROOT: Node("Kernels: none", root),
        FUSED: Node("Kernels: 1\nfused", fused, ((ROOT, "fuse"),)),
        TUNED: Node("Kernels: 1\ntuned", last, ((ROOT, "fuse"), (FUSED, "tune"))),
        COPIED: Node("Kernels: 1\ncopied", copied, ((ROOT, "copy"),)),
    }
    return DecisionTree(name, is_held_out, "GPU: test", "test", f"Task: {name}", ROOT, nodes)


def parameters(**changes: object) -> LmParameters:
    small = LmParameters(
        str(model_folder()),
        normalisation=Normalisation.TOKEN_MEAN,
        lora_rank=8,
        lora_alpha=16,
        supervised_epochs=40,
        supervised_batch=8,
        supervised_rate=1e-2,
        warmup_updates=2,
        ppo_updates=30,
        policy_rate=5e-3,
        value_rate=1e-2,
        walks=12,
        minibatch=64,
        microbatch=64,
        target_kl=0.5,
    )
    return replace(small, **changes)  # type: ignore[arg-type]
