"""Launches on a GPU without one: Triton compiles, and its driver only notes the launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)


class Launches(list[tuple[Any, ...]]):
    """What reached the GPU's driver: grid, stream, function and arguments of each launch."""

    searches = 0
    """How often Triton searched for a compiled kernel."""


def note_launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Replace the driver during a test; returns the list of its launches."""
    noted = Launches()

    def launcher(source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any) -> None:
            launch_metadata, enter, leave, *arguments = rest
            for hook in (enter, leave):
                if hook is not None:
                    hook(launch_metadata)
            noted.append(((x, y, z), stream, function, metadata.num_warps, arguments))

        return launch

    utils = SimpleNamespace(
        load_binary=lambda name, binary, shared, device: (1, hash(binary), 32, 0, 1024),
        unload_module=lambda module: None,
        get_device_properties=lambda device: {"max_shared_mem": 232448},
    )
    gpu = SimpleNamespace(
        launcher_cls=launcher,
        utils=utils,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 7,
        get_current_target=lambda: TARGET,
    )
    monkeypatch.setattr(driver, "_active", gpu)
    search = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        noted.searches += 1
        return search(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", run)
    return noted
