"""The number of torch's threads while several processes of a run compute on the CPU. Runs in workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

PROCESSES = 5
"""Processes of a run on a GPU that may construct the user's module at the same time: the capture, the reference, the candidate,
the trials and the baselines."""


@contextlib.contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Let torch use this number of threads. A number that the code within sets stays."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() == count:
            torch.set_num_threads(before)


def few_threads() -> contextlib.AbstractContextManager[None]:
    """Let torch use this process's share of the threads.

    The threads of an operation wait for each other in busy loops. Two processes that each initialised parameters with two
    threads on two cores took 1.5 s, with one thread 0.4 s each.
    """
    return using_threads(max(1, torch.get_num_threads() // PROCESSES))


def one_thread() -> contextlib.AbstractContextManager[None]:
    """Compute on one core: several runs share the cores, and their threads would wait for each other."""
    return using_threads(1)
