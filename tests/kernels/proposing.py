"""The edits that are proposed for the kernels of a text, as if a call with large sizes had been observed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from mtmc_lsp.core.run import KernelLaunch
from mtmc_lsp.device.choice import default_model
from mtmc_lsp.kernels.actions.base import Facts, Proposal
from mtmc_lsp.kernels.actions.catalogue import proposals
from mtmc_lsp.kernels.messages import Access, LaunchWork
from mtmc_lsp.kernels.repairs.site import sites_of
from mtmc_lsp.source.syntax import first_error, parse


def facts(
    text: str,
    types: str = "*fp32",
    accesses: Sequence[Access] = (),
    *,
    has_gpu: bool = False,
    constants: Mapping[str, object] = MappingProxyType({"BLOCK": 32}),
) -> list[Facts]:
    """The facts about the kernels of a file after a call with large sizes."""
    known = []
    for site in sites_of("model.py", text.encode()):
        pointers = {name: types for name in site.kernel.parameters if name.endswith("_ptr")}
        numbers = {name: 8192 for name in site.kernel.parameters if name in ("n", "M", "N", "K")}
        launch = KernelLaunch(site.kernel.name, pointers, dict(constants), 4, 3)
        work = LaunchWork(launch, (256, 256, 1), 65536, 4, 1e12, numbers)
        large = [Access(site.kernel.name, 0, "load", "a_ptr", "contiguous", True, 1, 10**11, 10**9)]
        known.append(Facts(site, tuple(accesses or large), (work,), (), default_model(), has_gpu, (3, 6)))
    return known


def proposed(text: str, name: str, **options: object) -> list[Proposal]:
    """The edits of one kind. Each must keep the file's syntax."""
    proposed = proposals(facts(text, **options), has_gpu=False, tries_all=True)  # type: ignore[arg-type]
    for item in proposed:
        assert first_error(parse(item.applied(text.encode()))) is None, item.title
        assert item.rationale and item.title[0].isupper()
    return [item for item in proposed if item.name == name]


def applied(text: str, name: str, **options: object) -> str:
    return proposed(text, name, **options)[0].applied(text.encode()).decode()
