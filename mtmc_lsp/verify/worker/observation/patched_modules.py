"""Which attributes of shared modules and classes were replaced: a candidate must not patch what other code calls.

Attributes are compared by identity, so it does not matter how they were replaced. New attributes of modules are imports and
caches, and are allowed. Runs in workers.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

MODULES = (
    *"builtins collections contextlib copy functools gc importlib inspect io itertools json math operator os os.path".split(),
    *"pickle random string struct sys threading time traceback types typing warnings weakref".split(),
    *"numpy numpy.linalg numpy.random numpy.testing".split(),
    *"torch torch._C torch._C._autograd torch._C._nn torch._C._VariableFunctions torch._tensor torch.amp torch.autograd".split(),
    *"torch.autograd.functional torch.autograd.grad_mode torch.backends torch.backends.cuda torch.backends.cudnn".split(),
    *"torch.cuda torch.cuda.amp torch.cuda.random torch.cuda.memory torch.fft torch.func torch.functional torch.library".split(),
    *"torch.linalg torch.nn torch.nn.functional torch.nn.init torch.nn.modules.module torch.nn.parallel torch.nn.utils".split(),
    *"torch.optim torch.overrides torch.random torch.serialization torch.special torch.testing torch.utils".split(),
    *"torch.utils._python_dispatch torch.utils._pytree torch.utils.benchmark torch.utils.checkpoint".split(),
    *"triton triton.compiler triton.knobs triton.language triton.language.core triton.language.math".split(),
    *"triton.language.semantic triton.language.standard triton.runtime triton.runtime.autotuner triton.runtime.driver".split(),
    *"triton.runtime.interpreter triton.runtime.jit triton.testing".split(),
)
"""Modules whose attributes are compared, if they were imported."""
CLASSES = (
    ("torch", "Tensor Generator Size Event Stream device dtype"),
    ("torch._C", "TensorBase"),
    ("torch.autograd", "Function"),
    ("torch.cuda", "Event Stream CUDAGraph"),
    ("torch.nn", "Module Parameter Linear LayerNorm Conv2d Embedding Sequential ModuleList Dropout ReLU"),
    ("torch.nn.modules.module", "Module"),
    ("random", "Random SystemRandom"),
    ("triton.language", "tensor constexpr dtype"),
    ("triton.runtime.jit", "JITFunction KernelInterface"),
    ("triton.runtime.autotuner", "Autotuner Config Heuristics"),
    ("triton.runtime.interpreter", "InterpretedFunction GridExecutor InterpreterBuilder"),
)
"""Classes whose attributes are compared, by module."""
CONSTANT = (int, float, str, bool, type(None))
OWN_OF_MODULE = frozenset(
    "__builtins__ __cached__ __doc__ __file__ __loader__ __spec__ __warningregistry__ __path__".split()
)
LANGUAGE = "triton.language"
"""The interpreter replaces functions of Triton's language when it first runs a kernel. Only those of a candidate count."""
LAUNCHER = "__triton_launcher"
"""Triton compiles an extension module of this name for each new signature of a kernel, which Python then registers."""
VOLATILE = frozenset("last_exc last_type last_value last_traceback ps1 ps2 stdin stdout stderr excepthook".split())
"""Attributes of ``sys`` that Python sets, or that :mod:`~mtmc_lsp.verify.worker.observation.global_state` compares."""

Attributes = Mapping[str, Mapping[str, Any]]


def public_attributes() -> Attributes:
    """The attributes of the watched modules and classes, and all modules, at present."""
    attributes = {name: dict(vars(holder)) for name, holder in _holders()}
    attributes["sys.modules"] = dict(sys.modules)
    return attributes


def replaced_attributes(before: Attributes, loaded: ModuleType | None = None) -> list[str]:
    """Names of attributes that were replaced or removed since, or added to a class.

    Args:
        loaded: the candidate's module, which is no replaced one.
    """
    replaced = []
    holders: dict[str, Any] = dict(_holders())
    for name, earlier in before.items():
        now = sys.modules if name == "sys.modules" else getattr(holders.get(name), "__dict__", {})
        if _is_unchanged(earlier, now):
            continue
        of_class = isinstance(holders.get(name), type)
        for key, value in earlier.items():
            if now.get(key) is value or (name == "sys.modules" and (now.get(key) is loaded or key == LAUNCHER)):
                continue
            if name.startswith(LANGUAGE) and not _is_defined_in(now.get(key), loaded):
                continue
            if of_class or _is_shared(key, value, now.get(key)):
                replaced.append(f"{name}.{key}" if name != "sys.modules" else f"sys.modules[{key!r}]")
        if of_class:
            replaced += [f"{name}.{key}" for key in now.keys() - earlier.keys() if not key.startswith("__")]
    return sorted(replaced)


def _is_unchanged(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether both have the same keys with the same objects; they may have them in another order if it answers no."""
    return len(earlier) == len(now) and all(map(operator.is_, earlier.values(), now.values())) and [*earlier] == [*now]


def _is_defined_in(value: Any, module: ModuleType | None) -> bool:
    return module is not None and getattr(value, "__module__", "") == module.__name__


def _is_shared(key: str, value: Any, now: Any) -> bool:
    """Whether other code relies on the attribute of a module: it is no cache or state of the module itself."""
    if key in OWN_OF_MODULE or key in VOLATILE:
        return False
    if isinstance(value, ModuleType) or callable(value):
        return True
    return not key.startswith("_") and isinstance(value, CONSTANT) and value != now


def _holders() -> Iterator[tuple[str, Any]]:
    for name in MODULES:
        if name in sys.modules:
            yield name, sys.modules[name]
    for module_name, classes in CLASSES:
        module = sys.modules.get(module_name)
        for name in classes.split() if module is not None else ():
            kind = getattr(module, name, None)
            if isinstance(kind, type):
                yield f"{module_name}.{name}", kind
