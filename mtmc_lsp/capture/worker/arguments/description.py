"""Describes the arguments of a captured call: their structure, the names of their tensors, the values that matter."""

from __future__ import annotations

import ast
import inspect
import keyword
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mtmc_lsp.capture.worker.arguments.containers import container_of, items_of
from mtmc_lsp.capture.worker.calls import Call
from mtmc_lsp.core.errors import Location, TargetUnsupported
from mtmc_lsp.core.workload import CapturedArgument, ContainerKind, Target, is_torch_name

PLAIN = (bool, int, float, str)
OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
NOT_PLAIN = object()
"""Result of :func:`plain_value` for other values."""


def plain_value(value: Any) -> object:
    """A number, a string, ``None``, or nested lists of these; tuples become lists. A dtype, a layout or a memory format is its
    text. Anything else is ``NOT_PLAIN``."""
    if isinstance(value, OF_TORCH):
        return str(value)
    if is_torch_name(value):
        return NOT_PLAIN
    if isinstance(value, (tuple, list)):
        items = [NOT_PLAIN if isinstance(item, OF_TORCH) else plain_value(item) for item in value]
        return NOT_PLAIN if NOT_PLAIN in items else items
    return value if value is None or isinstance(value, PLAIN) else NOT_PLAIN


def captured_arguments(
    call: Call, inputs: Mapping[str, str], class_name: Callable[[type], str]
) -> tuple[CapturedArgument, ...]:
    """The arguments of the call.

    Args:
        inputs: names of the graph inputs by path.
        class_name: Python expression for the class of a named tuple or a dataclass.
    """
    leaves = dict(zip(call.names, call.values, strict=True))

    def captured(path: str, value: Any) -> CapturedArgument:
        is_keyword = path in call.keyword
        if isinstance(value, torch.Tensor):
            low, high = _range(value)
            return CapturedArgument(path, inputs[path], None, is_keyword, low, high, path in call.state_homes)
        container = container_of(value, class_name)
        if container is None:
            return CapturedArgument(path, None, str(value) if isinstance(value, OF_TORCH) else value, is_keyword)
        keyed = zip(container.keys, items_of(value, container), strict=True)
        items = tuple(captured(container.path(path, key), item) for key, item in keyed)
        return CapturedArgument(path, None, None, is_keyword, container=container, items=items)

    return tuple(captured(name, call.containers.get(name, leaves.get(name))) for name in call.parameters)


def _range(value: torch.Tensor) -> tuple[float | None, float | None]:
    """The observed range of an integer tensor. For floats only 0 as the lower limit, if no element is negative."""
    if not value.numel() or value.dtype is torch.bool:
        return None, None
    if not value.is_floating_point():
        return float(value.min()), float(value.max())
    # Verification needs only the sign: sums of non-negative numbers have no cancellation.
    comparable = value.detach().float() if value.itemsize == 1 else value.detach()
    return (0.0 if bool(comparable.amin() >= 0) else None), None


def refuse_unknown_containers(call: Call, class_name: Callable[[type], str], target: Target) -> None:
    """Refuse containers whose class the file does not name: the guard must compare it.

    Raises:
        TargetUnsupported: names the first such class.
    """
    for path, value in call.containers.items():
        for kind, name in _classes(value, class_name):
            if not name.replace(".", "").isidentifier():
                raise TargetUnsupported(
                    f"argument {path!r} of {target.qualname} has a {kind.__name__}, which its file does not name",
                    where=Location(target.path, target.start_line),
                    remedy=f"Import {kind.__name__} at the top of the file.",
                )


def _classes(value: Any, class_name: Callable[[type], str]) -> Iterator[tuple[type, str]]:
    container = container_of(value, class_name)
    if container is None:
        return
    if container.kind is ContainerKind.FIELDS or container.class_name:
        yield type(value), container.class_name
    for item in items_of(value, container):
        yield from _classes(item, class_name)


# Names ---------------------------------------------------------------------------------------------------------------


def names_of_leaves(call: Call) -> dict[str, str]:
    """An identifier for each path: the user's variable where an assignment in the target unpacks it, else from the path.

    ``cos, sin = position_embeddings`` and ``mask = batch["mask"]`` are such assignments.
    """
    names = {path: path for path in call.names if path.isidentifier()}
    taken = {*names, *call.parameters, *_names_outside(call.function)}
    user_names = _unpacked(call)
    for path in call.names:
        if path in names:
            continue
        derived = re.sub(r"\W+", "_", path).strip("_")
        name = user_names.get(path, derived)
        name = derived if name in taken or keyword.iskeyword(name) else name
        while name in taken or keyword.iskeyword(name):
            name += "_"
        taken.add(name)
        names[path] = name
    return names


def _names_outside(function: Any) -> set[str]:
    """The names of globals and builtins, which generated code may use."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    outside = getattr(function, "__globals__", {})
    return {*outside, *vars(__import__("builtins")), "torch", "triton", "tl", "tensors", "self", "t"}


def _unpacked(call: Call) -> dict[str, str]:
    """The variables that the target assigns leaves to, by path."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(call.function)))
    except (OSError, TypeError, SyntaxError):
        return {}
    paths_by_parts = {_parts(path): path for path in call.names}
    containers = {
        _parts(path): [_parts(item) for item in items]
        for name, value in call.containers.items()
        for path, items in _container_paths(name, value)
    }
    result: dict[str, str] = {}

    def assign(to: ast.expr, parts: tuple[str, ...]) -> None:
        if isinstance(to, ast.Name):
            if parts in paths_by_parts:
                result.setdefault(paths_by_parts[parts], to.id)
        elif isinstance(to, (ast.Tuple, ast.List)) and parts in containers:
            for item, path in zip(to.elts, containers[parts], strict=False):
                assign(item, path)

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            parts = _parts(ast.unparse(node.value))
            if isinstance(node.targets[0], (ast.Tuple, ast.List)) and isinstance(node.value, ast.Tuple):
                for to, value in zip(node.targets[0].elts, node.value.elts, strict=False):
                    assign(to, _parts(ast.unparse(value)))
            else:
                assign(node.targets[0], parts)
    return {path: name for path, name in result.items() if list(result.values()).count(name) == 1}


def _container_paths(path: str, value: Any) -> Iterator[tuple[str, list[str]]]:
    """The path of each container, with the paths of its items."""
    container = container_of(value)
    if container is not None:
        paths = [container.path(path, key) for key in container.keys]
        yield path, paths
        for item_path, item in zip(paths, items_of(value, container), strict=True):
            yield from _container_paths(item_path, item)


def _parts(path: str) -> tuple[str, ...]:
    """The name, keys and fields of a path: ``('batch', "'mask'")``; empty for other expressions."""
    try:
        node = ast.parse(path, mode="eval").body
    except SyntaxError:
        return ()
    parts: list[str] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            parts.append(repr(node.slice.value))
        else:
            return ()
        node = node.value
    return (node.id, *reversed(parts))
