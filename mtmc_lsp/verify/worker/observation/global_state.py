"""The global state of Python and torch, which decides how the rest of the program computes: a call must not change it.

Runs in workers.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import locale
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.modules.module as module_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

try:
    import numpy
except ImportError:
    numpy = None  # type: ignore[assignment]

OF_COMPILERS = ("TRITON_", "TORCHINDUCTOR_", "CUDA_")
"""Prefixes of environment variables that compilers set."""
RANDOM_STATE = "torch's random state"
VARIABLES = "environment variables"
RECURSION = "Python's recursion limit"
OF_TORCH = "PYTORCH_"
"""Prefix of the environment variables that configure torch for the whole program."""
FLAG = "_get_"
"""Prefix of the functions of ``torch._C`` that return a setting."""
NOT_SETTINGS = (
    "caught",
    "thread_name",
    "mobile",
    "operator_version",
    "upgraders",
    "nested_int",
    "tracing",
    "accelerator",
)
"""Parts of the names of functions with this prefix that return something else."""
NAMED_BELOW = ("_get_default_device", "_get_deterministic_algorithms", "_get_float32_matmul_precision")
"""Settings that :data:`STATE` reads by another name."""


def _is_setting(name: str) -> bool:
    if not name.startswith(FLAG) or name in NAMED_BELOW or any(part in name for part in NOT_SETTINGS):
        return False
    try:
        return isinstance(getattr(torch._C, name)(), (bool, int, str, tuple))
    except Exception:  # it takes arguments, or the build of torch lacks the backend
        return False


SETTINGS = {f"torch's setting {name.removeprefix(FLAG)}": name for name in dir(torch._C) if _is_setting(name)}
"""The settings of torch's backends, by the name in messages, and their functions in ``torch._C``."""


def _settings() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: _or_none(getattr(torch._C, function)) for name, function in SETTINGS.items()}


def _or_none(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception:  # old and new settings of the same precision contradict each other
        return None


def _precisions() -> tuple[Any, ...]:
    """The precision of float32 operations, for each backend and operation that torch distinguishes."""
    read = getattr(torch._C, "_get_fp32_precision_getter", None)
    if read is None:
        return ()
    pairs = [("generic", "all"), *((b, o) for b in ("cuda", "mkldnn") for o in ("all", "matmul", "conv", "rnn"))]
    return tuple(_or_none(lambda pair=pair: read(*pair)) for pair in pairs)  # type: ignore[misc]


def _flushes_denormals() -> bool:
    least = sys.float_info.min
    return least / 2 == 0.0


def _autocast() -> tuple[Any, ...]:
    devices = ("cuda", "cpu")
    states = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    return (*states, torch.is_autocast_cache_enabled())


def _signal_handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1)]


def _error_filters() -> list[Any]:
    """The filters that turn warnings into errors; filters that hide warnings are common at import."""
    return [entry for entry in warnings.filters if entry[0] == "error"]


def _module_hooks() -> list[Any]:
    """Hooks that torch calls for each module."""
    return [
        dict(value)
        for name, value in sorted(vars(module_hooks).items())
        if isinstance(value, dict) and "_global_" in name
    ]


@functools.lru_cache(1)
def _implementations(count: int) -> frozenset[str]:
    return frozenset(name for name in torch.library._impls if name.startswith("aten/"))


def _overridden_operations() -> frozenset[str]:
    """The implementations of torch's own operations in Python. Other libraries may register their operations."""
    return _implementations(len(torch.library._impls)) if hasattr(torch.library, "_impls") else frozenset()


def _numpy_random() -> Any:
    if numpy is None:
        return None
    state: Any = numpy.random.get_state()
    return state[0], state[1].tobytes(), *state[2:]


def _random_state() -> tuple[bytes, ...]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return tuple(state.numpy().tobytes() for state in states)


def _limits() -> tuple[Any, ...]:
    with contextlib.suppress(ImportError, OSError):
        import resource

        names = ("RLIMIT_NOFILE", "RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_STACK", "RLIMIT_CORE")
        affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        return (
            *(resource.getrlimit(getattr(resource, name)) for name in names),
            affinity,
            os.getpriority(os.PRIO_PROCESS, 0),
        )
    return ()


STATE: Mapping[str, Callable[[], Any]] = {
    "the default dtype": torch.get_default_dtype,
    "the default device": torch.get_default_device,
    "gradient mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "anomaly detection": lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    "the number of threads": lambda: (torch.get_num_threads(), torch.get_num_interop_threads()),
    "the precision of float32 products": lambda: (torch.get_float32_matmul_precision(), *_precisions()),
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "autocast": _autocast,
    "the treatment of denormal numbers": _flushes_denormals,
    "torch's modes of functions and operations": lambda: (
        [id(mode) for mode in _get_current_function_mode_stack()],
        [id(mode) for mode in _get_current_dispatch_mode_stack()],
    ),
    "torch's hooks of all modules": _module_hooks,
    "torch's own operations": _overridden_operations,
    "how tensors are printed": lambda: (vars(torch._tensor_str.PRINT_OPTS).copy(), numpy and numpy.get_printoptions()),
    "numpy's treatment of errors": lambda: numpy and numpy.geterr(),
    "signal handlers": _signal_handlers,
    "warnings that are errors": _error_filters,
    "what Python calls for errors": lambda: (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook),
    "what Python calls for each line": lambda: (sys.gettrace(), sys.getprofile()),
    "standard output and errors": lambda: (id(sys.stdout), id(sys.stderr), id(sys.stdin)),
    RECURSION: sys.getrecursionlimit,
    "how often Python changes threads": sys.getswitchinterval,
    "garbage collection": lambda: (gc.isenabled(), gc.get_threshold(), gc.get_debug(), list(map(id, gc.callbacks))),
    "the locale": lambda: locale.setlocale(locale.LC_ALL),
    "limits of the process": _limits,
    "how modules are imported": lambda: (list(map(id, sys.meta_path)), list(map(id, sys.path_hooks))),
    "where modules are imported from": lambda: list(sys.path),
    VARIABLES: lambda: {k: v for k, v in os.environ.items() if not k.startswith(OF_COMPILERS)},
    "the working folder": os.getcwd,
    "Python's random state": random.getstate,
    "numpy's random state": _numpy_random,
    RANDOM_STATE: _random_state,
}

OF_IMPORTS = (
    VARIABLES,
    "how modules are imported",
    "where modules are imported from",
    "Python's random state",
    "numpy's random state",
    "how tensors are printed",
    "numpy's treatment of errors",
    RANDOM_STATE,
)
"""What the imports of an honest file may change. Of these, :func:`changed_by_import` still reports the worst."""


def global_state() -> dict[str, Any]:
    """The present state by name."""
    return {**{name: read() for name, read in STATE.items()}, **_settings()}


def changed_state(before: Mapping[str, Any]) -> list[str]:
    """The names of what differs from an earlier state."""
    return [name for name, value in global_state().items() if value != before[name]]


def changed_by_import(before: Mapping[str, Any]) -> list[str]:
    """The names of what differs after the import of a file. It may add environment variables that torch does not read."""
    after = global_state()
    changed = [name for name, value in after.items() if value != before[name] and name not in OF_IMPORTS]
    if after[RECURSION] > before[RECURSION]:
        # A higher limit changes no program that works.
        changed.remove(RECURSION)
    variables, earlier = after[VARIABLES], before[VARIABLES]
    overwritten = any(variables.get(name) != value for name, value in earlier.items())
    overwritten |= any(name.startswith(OF_TORCH) for name in variables.keys() - earlier.keys())
    return [*changed, *([VARIABLES] if overwritten else ())]
