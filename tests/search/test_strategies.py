"""Which trial a beam and MCTS choose, and the probabilities that they use."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import action, capture, timing
from landscapes import Landscape, LandscapePlanner

from mtmc_lsp.core.action import Expected, MacroAction, Stop
from mtmc_lsp.core.learning.policy import Choice
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.results import Verdict, VerdictStatus
from mtmc_lsp.core.run import Candidate, Step, StepStatus, parents
from mtmc_lsp.device.choice import model_of_arch
from mtmc_lsp.search.tree.beam import Beam
from mtmc_lsp.search.tree.mcts import Mcts
from mtmc_lsp.search.tree.priors import PROPOSED, by_saving, choices_of
from mtmc_lsp.search.tree.strategy import Option, Options
from mtmc_lsp.search.tree.versions import Tree, Version, timed_gain

ROOT = Candidate("root", None, None, "", None, None)
CORRECT = Verdict(VerdictStatus.CORRECT, (), "gpu")


def step(index: int, base: str, name: str, ratio: float, *, prior: float = 0.5, kept: bool = True) -> Step:
    """A step that is ``ratio`` times as fast as its base."""
    measured = timing(100.0 / ratio, eager=100.0, previous=None if base == "root" else 100.0)
    status = StepStatus.ACCEPTED if kept else StepStatus.REJECTED
    candidate = Candidate(name, base, None, name, None, None)
    return Step(index, action(index, "better"), status, "", "", candidate, CORRECT, measured, base=base, prior=prior)


def tree(*steps: Step) -> Tree:
    return Tree(ROOT, steps, timed_gain)


def options(**probabilities: float) -> object:
    """``root_7=0.5``: on the user's code, action 7 has the probability 0.5."""

    def of(version: Version) -> Options:
        prefix = f"{version.candidate.id}_"
        open_ = [(int(k.removeprefix(prefix)), p) for k, p in probabilities.items() if k.startswith(prefix)]
        return Options(tuple(Option(action(n, "better"), p) for n, p in open_), "nothing is left")

    return of


def choice(strategy: Beam | Mcts, of: object, *steps: Step) -> tuple[str, str] | None:
    """The version and the action's node."""
    pick = strategy.choose(tree(*steps), of)  # type: ignore[arg-type]
    return (pick.version.candidate.id, pick.option.action.region[0]) if pick is not None else None


def test_a_beam_tries_the_most_probable_action_first() -> None:
    assert choice(Beam(), options(root_1=0.3, root_2=0.6)) == ("root", "n2")


def test_a_beam_goes_on_with_a_version_as_soon_as_it_is_kept() -> None:
    of = options(root_2=0.9, a_5=0.1, a_6=0.2, b_7=0.1)
    assert choice(Beam(), of, step(1, "root", "a", 1.1)) == ("a", "n6"), "the alternative of its base waits"
    assert choice(Beam(), of, step(1, "root", "a", 1.1), step(2, "a", "b", 1.01)) == ("b", "n7")


def test_a_beam_stays_on_a_version_while_its_trials_fail() -> None:
    of = options(root_3=0.1, root_9=0.9, a_5=0.1)
    failed = step(1, "root", "x", 0.5, kept=False), step(2, "root", "y", 0.5, kept=False)
    assert choice(Beam(), of, *failed) == ("root", "n9")
    path = [*failed, step(3, "root", "a", 1.1), step(4, "a", "z", 0.5, kept=False)]
    assert choice(Beam(), of, *path) == ("a", "n5")


def test_a_beam_continues_with_the_best_pair_that_it_left_behind_when_a_path_ends() -> None:
    steps = [step(1, "root", "a", 1.1), step(2, "a", "b", 1.3), step(3, "b", "c", 1.1)]
    assert choice(Beam(), options(root_8=0.6, a_1=0.5, b_2=0.5), *steps) == ("b", "n2"), (
        "the product of b is the largest"
    )
    assert choice(Beam(), options(root_8=0.9, a_1=0.5, b_2=0.5), *steps) == ("root", "n8"), "that of the code is"
    again = [*steps, step(4, "b", "x", 0.5, kept=False)]
    assert choice(Beam(), options(root_8=0.9, b_2=0.1), *again) == ("b", "n2"), "it stays there until nothing is left"
    assert choice(Beam(), options(), *again) is None


def test_a_beam_continues_where_it_was_if_the_base_of_its_last_step_was_withdrawn() -> None:
    steps = [step(1, "root", "a", 1.1), step(3, "gone", "x", 0.5, kept=False)]
    # A version named `gone` was tried and is no version any more.
    withdrawn = step(2, "root", "gone", 1.2, kept=False)
    of = options(root_8=0.2, a_1=0.1)
    assert choice(Beam(), of, steps[0], withdrawn, steps[1]) == ("root", "n8")


def test_mcts_goes_on_with_a_gain_and_returns_to_other_actions_later() -> None:
    of = options(root_2=0.4, a_5=0.3, b_6=0.3, c_7=0.3)
    assert choice(Mcts(), of) == ("root", "n2")
    assert choice(Mcts(), of, step(1, "root", "a", 1.2)) == ("a", "n5")
    failed = [step(number, "a", f"x{number}", 0.9, kept=False) for number in range(2, 7)]
    assert choice(Mcts(), of, step(1, "root", "a", 1.2), *failed) == ("root", "n2")


def test_mcts_backs_up_the_maximum_and_not_the_mean() -> None:
    """Failed trials on a good version do not make it worse than a version that is slower."""
    of = options(a_5=0.05, b_6=0.05)
    best = [step(1, "root", "a", 1.01), step(2, "root", "b", 1.2), step(3, "a", "c", 2.0)]
    failed = [step(number, "c", f"x{number}", 0.5, kept=False) for number in (4, 5)]
    assert choice(Mcts(), of, *best, *failed) == ("a", "n5")


def test_mcts_passes_over_versions_on_which_nothing_is_left() -> None:
    steps = [step(1, "root", "a", 2.0), step(2, "a", "c", 1.5), step(3, "root", "b", 1.1)]
    assert choice(Mcts(), options(b_6=0.01), *steps) == ("b", "n6")
    assert choice(Mcts(), options(), *steps) is None


def test_ratios_of_a_path_are_multiplied() -> None:
    grown = tree(step(1, "root", "a", 1.5), step(2, "a", "b", 2.0))
    fastest = grown.fastest(verified=True)
    assert fastest is not None and [v.candidate.id for v in fastest.path] == ["root", "a", "b"]
    assert fastest.gain == pytest.approx(1.0986, abs=1e-3)


def test_versions_that_follow_a_withdrawn_one_are_no_part_of_the_tree() -> None:
    wrong = replace(step(1, "root", "a", 1.5), status=StepStatus.FAILED)
    grown = tree(wrong, step(2, "a", "b", 2.0), step(3, "root", "c", 1.1))
    assert [step.status.value for step in grown.arranged()] == ["failed", "rejected", "accepted"]
    assert grown.arranged()[1].reason.startswith("the version that it changes was withdrawn")


def test_parents_of_steps_of_earlier_releases_follow_from_the_accepted_ones() -> None:
    old = [replace(step(n, "", f"v{n}", 1.1, kept=n != 2), base="") for n in (1, 2, 3)]
    assert parents(old) == {1: 0, 2: 1, 3: 1}


# Probabilities ------------------------------------------------------------------------------------------------------


def saving(*values: float) -> list[MacroAction]:
    return [replace(action(n, "better"), expected=Expected(value)) for n, value in enumerate(values)]


def test_probabilities_follow_the_predicted_savings() -> None:
    found = [item.probability for item in by_saving(saving(100.0, 50.0, 0.0))]
    assert sum(found) == pytest.approx(1.0)
    assert found[0] / found[2] == pytest.approx(20.1, abs=0.1)
    assert found[0] / found[1] == pytest.approx(4.48, abs=0.01)


def test_the_order_of_the_planner_stays_where_it_is_not_that_of_the_savings() -> None:
    found = [item.probability for item in by_saving(saving(0.0, 100.0, 50.0))]
    assert found[0] == found[1] > found[2]
    equal = [item.probability for item in by_saving(saving(0.0, -5.0))]
    assert equal == [0.5, 0.5]


class Weighing(LandscapePlanner):
    def choices(self, state: State) -> list[Choice]:
        return [Choice(None, 1.0, "enough")]


class Proposing:
    def __init__(self, answer: MacroAction | Stop) -> None:
        self._answer = answer

    def propose(self, state: State) -> MacroAction | Stop:
        return self._answer


def test_a_policy_is_asked_for_its_probabilities_and_other_planners_for_their_order() -> None:
    landscape = Landscape({"0": 1.0, "1": 1.0})
    root = Candidate("root", None, None, "", None, {"set": "", "us": 1.0, "outcome": "root"})
    state = State(capture(), root, (), model_of_arch("sm_90"), True)
    assert choices_of(Weighing(landscape), state) == [Choice(None, 1.0, "enough")]
    assert [item.probability for item in choices_of(LandscapePlanner(landscape), state)] == [0.5, 0.5]
    (proposed,) = choices_of(Proposing(action(1, "better")), state)
    assert (proposed.action, proposed.probability) == (action(1, "better"), PROPOSED)
    assert choices_of(Proposing(Stop("no more")), state) == [Choice(None, 1.0, "no more")]
