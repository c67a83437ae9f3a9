"""Checks of the Python around kernels: launchers and ``forward`` methods."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.source.lint.finding import Context, Finding, Severity, found
from mtmc_lsp.source.lint.kernel import above
from mtmc_lsp.source.syntax import field, text_of, walk

SYNCS = {"item": ".item()", "cpu": ".cpu()", "tolist": ".tolist()", "numpy": ".numpy()"}
"""Methods of tensors that wait for the GPU."""
TENSOR_USES = frozenset("shape numel size stride dtype device is_cuda ndim element_size data_ptr".split())
"""Attributes that show a name to be a tensor."""
CARES = ("stride", "reshape", "view", "flatten", "ravel", "TensorDescriptor")
"""Words that show that a launcher thinks of layout, however it does."""


def host_sync(root: Node, context: Context) -> Iterator[Finding]:
    """Waiting for the GPU inside a launcher or a ``forward``."""
    for function in _functions(root):
        where = "a launcher" if _launches(function, context) else "forward" if _is_forward(function) else ""
        if not where:
            continue
        for node in _own(function):
            call = _sync(node)
            if call:
                message = f"{call} inside {where} waits for the GPU to finish, and leaves it idle after that"
                yield found("host-sync", Severity.HINT, node, message)


def _sync(node: Node) -> str:
    if node.type != "call":
        return ""
    function, arguments = field(node, "function"), field(node, "arguments")
    given = arguments.named_children if arguments is not None else []
    if function is None:
        return ""
    if text_of(function) == "torch.cuda.synchronize":
        return "torch.cuda.synchronize()"
    if function.type != "attribute" or given:
        return ""
    owner, name = field(function, "object"), text_of(field(function, "attribute"))
    # `self.x.cpu()` of a module moves the module; a plain name may be anything, but only tensors have these four.
    is_shape = owner is not None and any(word in text_of(owner) for word in (".shape", ".size(", ".stride("))
    return SYNCS.get(name, "") if not is_shape else ""


def assumed_contiguous(root: Node, context: Context) -> Iterator[Finding]:
    """A launcher that gives a kernel a tensor it was given, and nothing of how the tensor lies in memory."""
    if context.minds_layout:
        return
    for function in _functions(root):
        tensors = _tensor_parameters(function)
        # What the file itself calls may get tensors that were made contiguous before.
        is_inner = text_of(field(function, "name")) in context.called
        if is_inner or not tensors or any(word in text_of(function) for word in CARES):
            continue
        for launch in _launches(function, context):
            arguments = field(launch, "arguments")
            given = arguments.named_children if arguments is not None else []
            passed = [node for node in given if node.type == "identifier" and text_of(node) in tensors]
            if passed:
                # One report for a launch: what is done about one tensor is done about all.
                names = " and ".join(f"`{text_of(node)}`" for node in passed[:2])
                names += f" and {len(passed) - 2} more" if len(passed) > 2 else ""
                message = (
                    f"the kernel gets {names} without strides, so it computes nonsense where these are not contiguous; "
                    "pass the strides, or call `.contiguous()` first"
                )
                yield found("assumed-contiguous", Severity.HINT, passed[0], message)


def python_loop(root: Node, context: Context) -> Iterator[Finding]:
    """A Python loop over a tensor's elements or rows in ``forward``: each turn launches kernels of its own."""
    if not {"torch", "torch.nn"} & set(context.imports.values()):
        return
    for function in _functions(root):
        if not _is_forward(function):
            continue
        for node in _own(function):
            if node.type != "for_statement":
                continue
            over, index = field(node, "right"), field(node, "left")
            sized = _sized_by(over)
            body = field(node, "body")
            if sized and index is not None and body is not None and _indexes(body, sized, text_of(index)):
                message = f"each turn works on one part of `{sized}` with kernels of its own; work on the whole tensor"
                yield found("python-loop", Severity.HINT, over or node, message)


def _sized_by(node: Node | None) -> str:
    """``x`` for ``range(x.shape[0])``, ``range(x.size(0))`` and ``range(len(x))``."""
    if node is None or node.type != "call" or text_of(field(node, "function")) != "range":
        return ""
    arguments = field(node, "arguments")
    last = arguments.named_children[-1] if arguments is not None and arguments.named_children else None
    text = text_of(last)
    for mark in (".shape[", ".size("):
        if mark in text and text.split(mark)[0].isidentifier():
            return text.split(mark)[0]
    inner = text.removeprefix("len(").removesuffix(")")
    return inner if text.startswith("len(") and inner.isidentifier() else ""


def _indexes(body: Node, tensor: str, index: str) -> bool:
    """Whether ``tensor[index]`` or ``tensor[:, index]`` occurs."""
    for node in walk(body):
        if node.type == "subscript" and text_of(field(node, "value")) == tensor:
            subscripts = node.children_by_field_name("subscript")
            if any(text_of(item) == index for item in subscripts):
                return True
    return False


def _functions(root: Node) -> Iterator[Node]:
    return (node for node in walk(root) if node.type == "function_definition")


def _own(function: Node) -> Iterator[Node]:
    """The nodes of a function that are not in a function inside it."""
    for node in walk(function):
        if next(above(node, "function_definition", function), None) is None:
            yield node


def _is_forward(function: Node) -> bool:
    parameters = text_of(field(function, "parameters"))
    return text_of(field(function, "name")) == "forward" and parameters.startswith("(self")


def _launches(function: Node, context: Context) -> list[Node]:
    """Calls ``kernel[grid](...)`` of the file's own kernels in a function."""
    launches = []
    for node in _own(function):
        called = field(node, "function") if node.type == "call" else None
        if called is not None and called.type == "subscript" and text_of(field(called, "value")) in context.kernels:
            launches.append(node)
    return launches


def _tensor_parameters(function: Node) -> set[str]:
    """Parameters that the function itself uses as tensors or declares to be."""
    listed = field(function, "parameters")
    names = {}
    for item in listed.named_children if listed is not None else ():
        name = item if item.type == "identifier" else field(item, "name") or (item.named_children or [item])[0]
        names[text_of(name)] = text_of(field(item, "type"))
    changed = {text_of(field(n, "left")) for n in walk(function) if n.type == "assignment"}
    tensors = {name for name, kind in names.items() if kind.rpartition(".")[2] == "Tensor"}
    for node in walk(function):
        if node.type == "attribute" and text_of(field(node, "attribute")) in TENSOR_USES:
            tensors.add(text_of(field(node, "object")))
    return (tensors & names.keys()) - changed - {"self", "ctx"}
