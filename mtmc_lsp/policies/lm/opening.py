"""Opens the planner that follows a language model. Whenever the model cannot be used, the roofline planner goes on."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mtmc_lsp.core.action import MacroAction, Stop
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import MtmcError, RequestError
from mtmc_lsp.core.learning.policy import Choice
from mtmc_lsp.core.protocols import Planner, State
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.policies.lm.client import LmPolicy
from mtmc_lsp.policies.lm.policy_folder import NOT_A_POLICY
from mtmc_lsp.policies.planner import PolicyPlanner
from mtmc_lsp.policies.roofline import RooflinePolicy

OnNote = Callable[[str], None]
Result = TypeVar("Result")


class LmPlanner:
    """Follows the policy until it fails once; then the roofline planner chooses, and a note says why."""

    def __init__(self, ranking: RooflinePlanner, policy: LmPolicy, on_note: OnNote) -> None:
        self._ranking = ranking
        self._policy = policy
        self._planner = PolicyPlanner(ranking, policy)
        self._on_note = on_note
        self._has_failed = False

    def propose(self, state: State) -> MacroAction | Stop:
        """The policy's choice, or that of the roofline planner."""
        return self._tried(lambda: self._planner.propose(state), lambda: self._ranking.propose(state))

    def choices(self, state: State) -> list[Choice]:
        """The probability of each untried legal action and of STOP, by the policy or else by the cost model."""
        others = PolicyPlanner(self._ranking, RooflinePolicy())
        return self._tried(lambda: self._planner.choices(state), lambda: others.choices(state))

    def _tried(self, ask: Callable[[], Result], otherwise: Callable[[], Result]) -> Result:
        if not self._has_failed:
            try:
                return ask()
            except MtmcError as error:
                self._has_failed = True
                self._on_note(_note(error))
                self._policy.close()
        return otherwise()


def open_lm(ranking: RooflinePlanner, policy_folder: str, device: DeviceModel | None, on_note: OnNote) -> Planner:
    """The planner that follows the policy in a folder; ``ranking`` if there is none, with a note that says why.

    Args:
        ranking: lists the legal actions.
        policy_folder: the folder that the training wrote; there is none in this package.
        device: the GPU of the run.
        on_note: called with what the user should know, now or during the run.
    """
    try:
        if not policy_folder:
            raise RequestError(
                "no policy is named", remedy=f"Name it with --policy-file or policy-file. {NOT_A_POLICY}"
            )
        policy = _policy(policy_folder)
    except MtmcError as error:
        on_note(_note(error))
        return ranking
    trained_on = policy.description.devices
    if device is not None and trained_on and device.name not in trained_on:
        on_note(
            f"The lm policy was trained on {', '.join(trained_on)}; how well it chooses for {device.name} was not measured."
        )
    return LmPlanner(ranking, policy, on_note)


def prepare_lm(policy_folder: str) -> None:
    """Begin to load the model of a policy. What fails here fails again at the first decision, and is told there."""
    if policy_folder:
        with contextlib.suppress(MtmcError):
            threading.Thread(target=_policy(policy_folder).load, daemon=True).start()


@functools.lru_cache(maxsize=1)
def _policy(folder: str) -> LmPolicy:
    """One policy for all runs of this process: loading the model takes seconds."""
    return LmPolicy(Path(folder))


def _note(error: MtmcError) -> str:
    where = f"{error.where}: " if error.where is not None else ""
    note = (
        f"The lm policy is not used, and the roofline planner chooses the steps: {where}{error.message}. {error.remedy}"
    )
    return note.strip()
