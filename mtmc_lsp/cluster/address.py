"""The cluster that ``--cluster`` names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mtmc_lsp.core.errors import RequestError

REMEDY = "Write local, local:4, or the address of a scheduler, as in tcp://host:8786."


@dataclass(frozen=True)
class ClusterAddress:
    """A cluster on this machine, or the address of a scheduler."""

    text: str
    """As the user wrote it."""
    workers: int | None = None
    """Workers of a cluster on this machine, if their number is named."""

    @property
    def is_local(self) -> bool:
        """Whether the cluster is started on this machine for one command."""
        return not self.text.startswith(("tcp://", "tls://"))


def parse_cluster(text: str) -> ClusterAddress:
    """Read ``local``, ``local:N``, ``tcp://host:port`` or ``tls://host:port``.

    Raises:
        RequestError: the text has another form.
    """
    local = re.fullmatch(r"local(?::([1-9]\d{0,3}))?", text)
    if local:
        return ClusterAddress(text, int(local[1]) if local[1] else None)
    if re.fullmatch(r"(tcp|tls)://(\[[0-9a-fA-F:.]+\]|[\w.-]+):\d{1,5}", text):
        return ClusterAddress(text)
    raise RequestError(f"cannot read --cluster {text}", remedy=REMEDY)
