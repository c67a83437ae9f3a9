"""The dtype and mode that a file gives to instances of a module: ``Block().to(torch.bfloat16).eval()``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from tree_sitter import Node

from mtmc_lsp.core.workload import ModuleForm, Target
from mtmc_lsp.source.syntax import field, line_of, parse_with_recovery, text_of, undecorated, walk

METHOD_DTYPES = {"half": "float16", "bfloat16": "bfloat16", "float": "float32", "double": "float64"}
"""Methods of a module that convert its floating-point tensors."""
TORCH_DTYPES = {
    "torch.bfloat16": "bfloat16", "torch.float16": "float16", "torch.half": "float16", "torch.float32": "float32",
    "torch.float": "float32", "torch.float64": "float64", "torch.double": "float64",
}  # fmt: skip


@dataclass(frozen=True)
class ModuleUsage:
    """How a file prepares its instances of a module."""

    form: ModuleForm
    line: int
    """1-based line of the last call that determines the form."""


def module_usage(text: bytes, target: Target) -> ModuleUsage | None:
    """How the file's statements outside classes prepare instances of the target's class.

    If there are none, the instances of the classes that contain it count: a method such as ``half`` converts submodules, too.
    None if the statements prepare no instance, or if two instances differ.
    """
    if not target.class_name:
        return None
    root, _ = parse_with_recovery(text)
    scopes, dtypes = [root, *_functions(root)], _dtype_names(root)

    def usages(names: Iterable[str]) -> list[ModuleUsage]:
        return [usage for name in names for scope in scopes for usage in _Scope(name, dtypes).usages(scope)]

    found = usages([target.class_name]) or usages(_containers(root, target.class_name))
    if len({usage.form for usage in found}) != 1 or found[0].form == ModuleForm():
        return None
    return max(found, key=lambda usage: usage.line)


def _containers(root: Node, class_name: str) -> list[str]:
    """The classes of a file whose bodies make instances of a class, or of a class that does so."""
    classes = [node for node in map(undecorated, root.children) if node.type == "class_definition"]
    makes = {
        text_of(field(node, "name")): {text_of(field(call, "function")) for call in walk(node) if call.type == "call"}
        for node in classes
    }
    found, new = dict.fromkeys([class_name]), True
    while new:
        added = [name for name, made in makes.items() if name not in found and made & found.keys()]
        found |= dict.fromkeys(added)
        new = bool(added)
    return list(found)[1:]


def _functions(root: Node) -> list[Node]:
    """The functions at the top level of a file."""
    inner = (undecorated(child) for child in root.children)
    return [node for node in inner if node.type == "function_definition"]


def _dtype_names(root: Node) -> dict[str, str]:
    """Variables that the file sets to a dtype, as in ``DTYPE = torch.bfloat16``."""
    assignments = (node for node in walk(root) if node.type == "assignment")
    pairs = ((text_of(field(node, "left")), text_of(field(node, "right"))) for node in assignments)
    return {name: TORCH_DTYPES[value] for name, value in pairs if value in TORCH_DTYPES}


@dataclass(frozen=True)
class _MethodCall:
    name: str
    arguments: Node | None
    line: int


@dataclass(frozen=True)
class _Chain:
    """An expression such as ``Block().half().eval()``, or ``model.half()(x)``."""

    variable: str = ""
    """The variable with the instance; empty for a new instance."""
    methods: tuple[_MethodCall, ...] = ()
    is_instance: bool = True
    """Whether the value is the instance, not the result of its call."""


class _Scope:
    """Follows the instances of one class through the statements of one scope."""

    def __init__(self, class_name: str, dtype_names: Mapping[str, str]) -> None:
        self._class_name = class_name
        self._dtypes = {**TORCH_DTYPES, **dtype_names}
        self._by_variable: dict[str, ModuleUsage] = {}
        self._unnamed: list[ModuleUsage] = []

    def usages(self, scope: Node) -> list[ModuleUsage]:
        """The form of each instance at the end of the scope."""
        for child in scope.children if scope.type == "module" else [scope]:
            if undecorated(child).type not in ("class_definition", "function_definition") or child is scope:
                self._follow(child, "")
        return [*self._by_variable.values(), *self._unnamed]

    def _follow(self, node: Node, variable: str) -> None:
        """Apply the method calls in a node, whose value is assigned to ``variable`` if that is not empty."""
        if node.type == "assignment":
            right, left = field(node, "right"), field(node, "left")
            if right is not None:
                self._follow(right, text_of(left) if left is not None and left.type == "identifier" else "")
            return
        chain = self._chain(node) if node.type in ("call", "identifier") else None
        if chain is None:
            for child in node.named_children:
                self._follow(child, "")
            return
        usage = self._by_variable.get(chain.variable) or ModuleUsage(ModuleForm(), line_of(node))
        for method in chain.methods:
            form = self._form_after(method)
            if form != ModuleForm():
                usage = replace(usage, form=form.completed_by(usage.form), line=method.line)
        # Methods of a module change it, so an earlier variable of the instance sees them, too.
        names = {chain.variable, variable if chain.is_instance else ""} - {""}
        self._by_variable |= dict.fromkeys(names, usage)
        if not names:
            self._unnamed.append(usage)

    def _chain(self, node: Node) -> _Chain | None:
        """The calls on an instance in an expression; None for other expressions."""
        if node.type == "identifier":
            return _Chain(text_of(node)) if text_of(node) in self._by_variable else None
        function = field(node, "function")
        if node.type != "call" or function is None:
            return None
        if text_of(function) == self._class_name:
            return _Chain()
        if function.type != "attribute":
            called = self._chain(function)
            return replace(called, is_instance=False) if called is not None else None
        owner = field(function, "object")
        inner = self._chain(owner) if owner is not None else None
        if inner is None or not inner.is_instance:
            return inner
        method = _MethodCall(text_of(field(function, "attribute")), field(node, "arguments"), line_of(node))
        return replace(inner, methods=(*inner.methods, method))

    def _form_after(self, call: _MethodCall) -> ModuleForm:
        """What one method call sets."""
        arguments = call.arguments.named_children if call.arguments is not None else []
        if call.name in METHOD_DTYPES:
            return ModuleForm(METHOD_DTYPES[call.name])
        if call.name in ("eval", "train"):
            is_off = any(text_of(_value(item)) == "False" for item in arguments)
            return ModuleForm("", call.name == "train" and not is_off)
        dtypes = [self._dtypes[text] for text in _texts(arguments) if text in self._dtypes] if call.name == "to" else []
        return ModuleForm(dtypes[0]) if dtypes else ModuleForm()


def _value(argument: Node) -> Node | None:
    return field(argument, "value") if argument.type == "keyword_argument" else argument


def _texts(arguments: list[Node]) -> Iterator[str]:
    return (text_of(_value(item)) for item in arguments)
