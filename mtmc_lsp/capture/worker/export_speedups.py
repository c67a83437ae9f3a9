"""Makes torch's export quicker without changing what it gives. Runs in workers, after which it holds for the process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any


def hasten_export() -> None:
    """What torch prepares anew for every program that it takes apart, it prepares once."""
    import torch._export.utils
    import torch._subclasses.fake_impls
    import torch.export.exported_program

    program = torch.export.exported_program
    # A torch that is built otherwise is only slower.
    with contextlib.suppress(AttributeError):
        if program._override_composite_implicit_decomp.__module__ != __name__:
            _keep_overrides(program, torch._subclasses.fake_impls.op_implementations_dict)
            _look_up_operations_once(program, torch._export.utils)


def _look_up_operations_once(program: Any, utils: Any) -> None:
    """For a program, operations are made known to Python once, not again for each of the namespaces they are sought in."""
    original, make_known = program._collect_all_valid_cia_ops, utils._materialize_cpp_cia_ops

    def _collect_all_valid_cia_ops() -> Any:
        make_known()
        utils._materialize_cpp_cia_ops = lambda: None
        try:
            return original()
        finally:
            utils._materialize_cpp_cia_ops = make_known

    program._collect_all_valid_cia_ops = _collect_all_valid_cia_ops


def _keep_overrides(exported_program: Any, rules: dict[Any, Any]) -> None:
    """The kernels by which hundreds of operations stay whole are put in place as they were made the first time.

    They are made anew where other operations stay whole, or where one of them has got other kernels of its own since.
    """
    original = exported_program._override_composite_implicit_decomp
    kept: dict[Any, Any] = {}
    own: dict[Any, dict[Any, Any]] = {}
    made: dict[Any, tuple[dict[Any, Any], Any]] = {}

    @contextlib.contextmanager
    def _override_composite_implicit_decomp(table: Mapping[Any, Any]) -> Iterator[None]:
        if table == kept and all(op.py_kernels == own[op] and op not in rules for op in table):
            for op, (kernels, rule) in made.items():
                op.py_kernels.update(kernels)
                op._dispatch_cache.clear()
                rules[op] = rule
            try:
                yield
            finally:
                for op, kernels in own.items():
                    op.py_kernels.clear()
                    op.py_kernels.update(kernels)
                    op._dispatch_cache.clear()
                    rules.pop(op, None)
            return
        before = {op: dict(op.py_kernels) for op in table}
        # Torch leaves a rule that there is in place, and yet takes it away in the end: it makes one the next time.
        lasting = not any(op in rules for op in table)
        with original(table):
            if lasting:
                for known in (kept, own, made):
                    known.clear()
                kept.update(table)
                own.update(before)
                made.update({op: (dict(op.py_kernels), rules[op]) for op in table})
            yield

    exported_program._override_composite_implicit_decomp = _override_composite_implicit_decomp
