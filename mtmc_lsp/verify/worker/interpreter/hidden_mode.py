"""A mode that sees torch's operations, and that the code which calls them does not see. Runs in workers.

Guards of kernels call the user's code while a mode is active, because something may trace or transform the call then. With such a
mode they decide as in a plain call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtmc_lsp.verify.worker.interpreter.stand_in import stand_in

LENGTH = "_len_torch_dispatch_stack"
"""The name of the function that returns how many modes are active. Torch's Python code keeps a reference to it, by which it
switches hidden modes off, too."""
_length = torch._C._len_torch_dispatch_stack


class HiddenMode(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """The base of modes that do not count as active."""

    def __enter__(self) -> Any:
        """Become active."""
        entered = super().__enter__()
        setattr(torch._C, LENGTH, stand_in(_without_hidden, _length))
        return entered

    def __exit__(self, *error: Any) -> None:
        """Give torch its function back."""
        setattr(torch._C, LENGTH, _length)
        super().__exit__(*error)


def _without_hidden() -> int:
    """The number of active modes without those that are hidden."""
    modes = map(torch._C._get_dispatch_stack_at, range(_length()))
    return sum(not isinstance(mode, HiddenMode) for mode in modes)
