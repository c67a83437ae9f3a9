"""The number of torch's threads while several processes of a run compute on the CPU. Runs in workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

PROCESSES = 5
"""Processes of a run on a GPU that may construct the user's module at the same time: the capture, the reference, the candidate,
the trials and the baselines."""


@contextlib.contextmanager
def few_threads() -> Iterator[None]:
    """Let torch use this process's share of the threads, unless the code within sets another number.

    The threads of an operation wait for each other in busy loops. Two processes that each initialised parameters with two
    threads on two cores took 1.5 s, with one thread 0.4 s each.
    """
    before = torch.get_num_threads()
    few = max(1, before // PROCESSES)
    torch.set_num_threads(few)
    try:
        yield
    finally:
        if torch.get_num_threads() == few:
            torch.set_num_threads(before)
