"""Opens the planner that follows a trained policy; without a usable policy, the roofline planner goes on."""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.protocols import Planner
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.policies.model_file import ModelHeader, model_path
from mtmc_lsp.policies.planner import PolicyPlanner
from mtmc_lsp.policies.ranker import RankerModel, RankerPolicy


@dataclass(frozen=True)
class OpenedPlanner:
    """A planner, and what the user should know about it."""

    planner: Planner
    note: str = ""
    """A sentence; empty if there is nothing to tell."""


def open_ranker(ranking: RooflinePlanner, policy_file: str, device: DeviceModel | None) -> OpenedPlanner:
    """The planner that follows the ranker; if the ranker cannot be used, ``ranking`` with a note that says why.

    Args:
        ranking: lists the legal actions.
        policy_file: path of the model; empty for the shipped model.
        device: the GPU of the run.
    """
    try:
        model = RankerModel.of_file(model_path(policy_file))
    except MtmcError as error:
        where = f"{error.where}: " if error.where is not None else ""
        note = f"The ranker is not used, and the roofline planner chooses the steps: {where}{error.message}. {error.remedy}"
        return OpenedPlanner(ranking, note.strip())
    return OpenedPlanner(PolicyPlanner(ranking, RankerPolicy(model)), _transfer_note(model.header, device))


def _transfer_note(header: ModelHeader, device: DeviceModel | None) -> str:
    """A note if the model was trained on another GPU than that of the run."""
    trained_on = [name for name in header.device.split(", ") if name]
    if device is None or not trained_on or device.name in trained_on:
        return ""
    return f"The ranker was trained on {', '.join(trained_on)}; how well it chooses for {device.name} was not measured."
