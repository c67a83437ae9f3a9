"""The surroundings of this process, which a candidate's process enters before it loads the candidate. Runs in workers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from mtmc_lsp.verify.messages import Surroundings
from mtmc_lsp.verify.worker.run_target import is_interpreted, keep_mode
from mtmc_lsp.verify.worker.surroundings.addresses import moved
from mtmc_lsp.verify.worker.surroundings.extreme_chance import ExtremeChance
from mtmc_lsp.verify.worker.surroundings.moving_clock import MovingClock
from mtmc_lsp.verify.worker.surroundings.stand_in_gpu import StandInGpu
from mtmc_lsp.verify.worker.surroundings.stand_in_streams import Streams
from mtmc_lsp.verify.worker.surroundings.user_program import UserProgram

MOST_PADDING = 64
"""Limit for the small tensors that move the addresses of later ones."""
_addresses = torch.Generator().manual_seed(0)


class _Current:
    """What was replaced in this process."""

    def __init__(self) -> None:
        self.kind = Surroundings.VERIFICATION
        self.clock: MovingClock | None = None
        self.chance: ExtremeChance | None = None
        self.program: UserProgram | None = None
        self.gpu: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self.streams: Streams | None = None


_current = _Current()


def enter(kind: Surroundings, candidate: str, seed: int) -> None:
    """Change this process for the rest of its life; the surroundings of a process never change twice.

    Args:
        candidate: the path of the candidate's file.
    """
    if _current.kind is not Surroundings.VERIFICATION or kind is Surroundings.VERIFICATION:
        return
    _current.kind = kind
    keep_mode()
    if kind in (Surroundings.EARLY, Surroundings.LATE):
        _current.clock = MovingClock(seed)
        _current.chance = ExtremeChance(seed, low=kind is Surroundings.EARLY)
        if kind is Surroundings.LATE:
            _current.clock.advance()
        return
    _current.program = UserProgram(candidate, keeps_caches=not is_interpreted())
    if kind is Surroundings.PROGRAM_ON_GPU:
        _current.gpu = StandInGpu(streams())


def is_program() -> bool:
    """Whether this process looks like a user's program."""
    return _current.program is not None


def has_gpu_names() -> bool:
    """Whether the interpreter runs the candidate's text unchanged."""
    return _current.kind is Surroundings.PROGRAM_ON_GPU


def advance() -> list[torch.Tensor]:
    """Before another call: a later time, other luck, and other addresses as long as the result is kept."""
    if _current.clock is None or _current.chance is None:
        return []
    _current.clock.advance()
    _current.chance.relax()
    count = 1 + int(torch.randint(MOST_PADDING, (), generator=_addresses))
    return [torch.empty(16 * (1 + i % 7)) for i in range(count)]


def placed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, at other places in a page where addresses change between calls."""
    return {name: moved(tensor) for name, tensor in tensors.items()} if _current.clock is not None else tensors


def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call the candidate in these surroundings, as a program does that computes on some stream."""
    inside = functools.partial(run, function, *arguments, **named)
    return _current.streams.call(inside) if _current.streams is not None else inside()


def streams() -> Streams:
    """The streams of this process, which has no GPU."""
    _current.streams = _current.streams or Streams()
    return _current.streams


def note_launch() -> None:
    """A kernel is launched on the current stream."""
    if _current.streams is not None:
        _current.streams.launch()


def unordered_launches() -> str | None:
    """What launches no synchronisation orders; empty if there are none, ``None`` if streams were not observed.

    They are only observed where the candidate's text is unchanged: elsewhere it has lost its ``torch.cuda.synchronize()``.
    """
    return _current.streams.unordered if _current.streams is not None and has_gpu_names() else None


def run(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call code of the candidate in these surroundings."""
    if _current.program is None:
        return function(*arguments, **named)
    return _current.program.run(functools.partial(function, *arguments, **named), _current.gpu)
