"""Workloads in the source: the ``# mtmc:`` directive above a target, and jaxtyping annotations.

A directive consists of entries in any order, on one line or several::

    # mtmc: x=bf16[B,S,D] weight=bf16[D] eps=1e-6 B=8 S=2048 D=4096 grad=x device=cuda
    # mtmc: index=i64[B]@0..V-1 y=f32[64,32]{1,64} B=64 V=50257
    # mtmc: x=f32[64,512] init: dim=512 hidden=4*512
    # mtmc: module=bf16,eval x=bf16[B,512] B=64 init: dim=512

``name=dtype[sizes]`` describes a tensor, optionally followed by ``{strides}`` and an inclusive value range ``@low..high``. Stride
0 expands a dimension. Containers hold tensors and constants: ``rope=(f32[S,D],f32[S,D])``, ``batch={"x":f32[N],"n":2}``, and
``config=Config(w=f32[D],eps=1e-5)`` for a dataclass or a named tuple that the file names. Items have paths such as ``rope[0]``.
``name=value`` is a constant if the target has a parameter of that name, and a named size otherwise. Entries after ``init:``, up
to the end of the line, are constructor arguments. Parameters without an entry use their default or their jaxtyping annotation.
``module`` is the dtype of the module's floating-point parameters and buffers, ``eval`` or ``train``, or both.
``reference`` names the PyTorch function whose results a launcher of kernels must have.
``autocast=bf16`` (or ``f16``) is for calls under ``torch.autocast`` with that dtype.
``autocast``, ``grad``, ``device``, ``module`` and ``reference`` are options, unless the target has a parameter of that name and
the value is a tensor, a number or quoted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mtmc_lsp.core.errors import Location, TargetUnsupported
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import (
    ArgumentSpec,
    ContainerKind,
    ModuleForm,
    Target,
    TargetKind,
    TensorSpec,
    Workload,
    WorkloadSource,
    leaves_of,
)
from mtmc_lsp.source.syntax import comments_above, line_of, parse_with_recovery, text_of, with_decorators
from mtmc_lsp.source.targets import definitions
from mtmc_lsp.source.workload.annotations import AnnotatedTensor, annotated_tensor, assumed_sizes
from mtmc_lsp.source.workload.directive_syntax import Entry, Reader
from mtmc_lsp.source.workload.signatures import Parameter, Signature, constructor_of, signature_of
from mtmc_lsp.source.workload.suggestion import suggest_directive
from mtmc_lsp.source.workload.value_syntax import Value

__all__ = ["module_form", "parse_directive", "reference_name", "suggest_directive", "workload_from_annotations"]

OPTIONS = ("autocast", "device", "grad", "module", "reference")
PARAMETERS = "parameters"
"""In ``grad=``: the module's parameters. They get gradients with any ``grad=``; the word is for inputs that get none."""


def parse_directive(text: bytes, target: Target, path: str) -> Workload | None:
    """Parse the directive above the target or its class; None if there is none, or if it contains no tensor.

    Raises:
        RequestError: an entry is invalid or does not match the target; contains file, line and remedy.
    """
    entries = _entries(text, target, path)
    if not any(entry.has_tensors and not entry.in_init for entry in entries):
        return None
    return _Builder(text, target, path, entries).workload(WorkloadSource.DIRECTIVE)


def workload_from_annotations(text: bytes, target: Target, path: str) -> Workload | None:
    """Create the workload from jaxtyping annotations, completed by sizes and constants from a directive.

    None if a parameter has no annotation, entry or default.

    Raises:
        RequestError: see :func:`parse_directive`.
    """
    entries = _entries(text, target, path)
    signature = signature_of(text, target)
    parameters = signature.parameters if signature is not None else ()
    entry_names = {entry.name for entry in entries if not entry.in_init}
    unspecified = [
        p for p in parameters if not p.has_default and p.name not in entry_names and annotated_tensor(p) is None
    ]
    if unspecified or not any(annotated_tensor(p) is not None and not p.has_default for p in parameters):
        return None
    return _Builder(text, target, path, entries).workload(WorkloadSource.ANNOTATIONS)


def module_form(text: bytes, target: Target, path: str) -> ModuleForm:
    """The dtype and mode that the directive gives the target's module.

    Raises:
        RequestError: see :func:`parse_directive`.
    """
    entries = _entries(text, target, path)
    signature = signature_of(text, target)
    if signature is None or not any(entry.name == "module" for entry in entries):
        return ModuleForm()
    return _Builder(text, target, path, entries).module


def reference_name(text: bytes, target: Target, path: str) -> str:
    """The function that the directive above a launcher or a kernel names as its reference; empty if it names none.

    Raises:
        RequestError: see :func:`parse_directive`.
    """
    signature = signature_of(text, target)
    names = signature.names if signature is not None else frozenset()
    entries = (entry for entry in _entries(text, target, path) if entry.name == "reference" and not entry.in_init)
    return next((entry.value for entry in entries if "reference" not in names), "")


def _entries(text: bytes, target: Target, path: str) -> tuple[Entry, ...]:
    """The entries above the target.

    A directive above a class, or above its ``__init__``, applies to ``forward``; its ``init:`` part and ``module`` apply to
    every method.
    """
    reader = Reader(path)
    owners = (target.class_name, f"{target.class_name}.__init__") if target.class_name else ()
    above_class = [line for owner in owners for line in _lines(text, target, owner)]
    if target.kind is TargetKind.MODULE:
        return reader.entries(above_class + _lines(text, target, f"{target.qualname}.forward"))
    target_lines = _lines(text, target, target.qualname)
    if target.kind is TargetKind.METHOD and target.qualname.endswith(".forward"):
        return reader.entries(above_class + target_lines)
    entries = reader.entries(target_lines)
    has_init, has_module = any(e.in_init for e in entries), any(e.name == "module" for e in entries)
    return entries + tuple(
        entry
        for entry in reader.entries(above_class)
        if (entry.in_init and not has_init) or (entry.name == "module" and not entry.in_init and not has_module)
    )


def _lines(text: bytes, target: Target, qualname: str) -> list[tuple[int, str]]:
    """``(line, text)`` of the directive lines directly above a definition or one of its decorators."""
    matches = [item for item in definitions(text, target.path) if item.target.qualname == qualname]
    if not matches:
        return []
    node = with_decorators(matches[-1].node)
    root, _ = parse_with_recovery(text)
    # Of a decorated definition, the first part starts where the whole does.
    parts = (
        [item for item in node.children if item.type != "comment"] if node.type == "decorated_definition" else [node]
    )
    lines = []
    for comment in (item for part in parts for item in comments_above(text, root, part)):
        directive = re.match(
            r"#\s*mtmc:(?!\s*(?:begin|end|dispatch|import|ignore)(?:[\s\[]|$))\s*(.*)", text_of(comment)
        )
        if directive is not None:
            lines.append((line_of(comment), directive[1].rstrip()))
    return lines


@dataclass(frozen=True)
class _Tensor:
    """A tensor argument whose sizes are not resolved yet."""

    spec: TensorSpec
    line: int
    entry: Entry | None = None
    """None if it comes from an annotation."""
    assumed: tuple[str, ...] = ()


class _Builder:
    """Combines the entries of a directive with the target's parameters."""

    def __init__(self, text: bytes, target: Target, path: str, entries: tuple[Entry, ...]) -> None:
        signature = signature_of(text, target)
        if signature is None:
            raise TargetUnsupported(
                f"{target.qualname} does not define forward in this file",
                where=Location(path, target.start_line),
                remedy="Select the class that defines forward.",
            )
        self.target = target
        self.reader = Reader(path)
        self.signature: Signature = signature
        self.constructor = constructor_of(text, target)
        self.line = entries[0].line if entries else target.start_line
        options = {w.name: w for w in entries if not w.in_init and w.name in OPTIONS and not self._is_argument(w)}
        self.options = options
        self.module = self.reader.module_form(options.get("module"), target)
        self.entries = [entry for entry in entries if entry not in options.values()]
        self.argument_entries = {w.name: w for w in self.entries if not w.in_init and w.name in signature.names}

    def _is_argument(self, entry: Entry) -> bool:
        """Whether an entry named like an option is an argument: a tensor, or a value that is invalid for options."""
        if entry.value[0] in "\"'":
            return True
        is_not_option = entry.is_tensor or not all(part.isidentifier() for part in entry.value.split(","))
        return entry.name in self.signature.names and (is_not_option or entry.value in ("None", "True", "False"))

    def workload(self, source: WorkloadSource) -> Workload:
        """Build the workload."""
        sizes, init = self._sizes_and_init()
        tensors = {path: tensor for p in self.signature.parameters for path, tensor in self._tensors(p).items()}
        leaves = [leaf for entry in self.argument_entries.values() for leaf in entry.leaves]
        constants = {leaf.name: self.reader.constant(leaf, sizes) for leaf in leaves if not leaf.is_tensor}
        inits = [self._init(entry, sizes) for entry in init]
        # Sizes used in constants, and sizes that are themselves arguments, cannot be varied.
        constants_and_init = {**constants, **{leaf.name: leaf.constant for leaf in leaves_of(inits)}}
        fixed_sizes = {
            n: v
            for n, v in constants_and_init.items()
            if isinstance(v, int) and not isinstance(v, bool) and n not in sizes
        }
        non_tensor_entries = [leaf for entry in (*self.argument_entries.values(), *init) for leaf in entry.leaves]
        non_tensor_entries = [leaf for leaf in non_tensor_entries if not leaf.is_tensor]
        fixed_sizes.update({n: sizes[n] for entry in non_tensor_entries for n in entry.names if n in sizes})
        known_sizes = {**sizes, **fixed_sizes}
        assumed = [sentence for tensor in tensors.values() for sentence in tensor.assumed]
        if source is WorkloadSource.ANNOTATIONS:
            for name, value in assumed_sizes([t.spec.shape for t in tensors.values()], known_sizes).items():
                sizes[name] = known_sizes[name] = value
                assumed.append(f"size {name} is assumed to be {value}; set it with `# mtmc: {name}=...`")
        self._check_unused(sizes)
        specs = {name: self._finish_tensor(name, tensor, known_sizes, fixed_sizes) for name, tensor in tensors.items()}
        self._check_grad(specs)
        arguments = [
            _with_leaves(self._content(p), specs, constants)
            for p in self.signature.parameters
            if p.name in self.argument_entries or p.name in specs
        ]
        sizes = {name: value for name, value in sizes.items() if name not in fixed_sizes}
        return Workload(
            self.target,
            source,
            tuple(arguments),
            tuple(inits),
            sizes,
            self._device(),
            self.line,
            tuple(assumed),
            self.module,
            trains=bool(self._grad()),
            autocast=self.reader.autocast(self.options.get("autocast")),
        )

    def _sizes_and_init(self) -> tuple[dict[str, int], list[Entry]]:
        """Evaluate the named sizes in order of dependency, and collect the constructor's entries."""
        constructor = self.constructor
        leaves = [leaf for entry in self.entries for leaf in entry.leaves]
        needed = frozenset[str]().union(*(leaf.names for leaf in leaves if leaf.is_tensor))
        sizes: dict[str, int] = {}
        init: list[Entry] = []
        # Plain numbers first, so that `H=2*D D=512` works like the opposite order.
        for entry in sorted(self.entries, key=lambda entry: not entry.value.isdigit()):
            if entry.in_init:
                belongs_to_init = constructor is None or constructor.takes_any or entry.name in constructor.names
                # Named sizes are also accepted after `init:`, if the constructor has no parameter of that name.
                if belongs_to_init or entry.name not in needed:
                    init.append(entry)
                    continue
            elif entry.name in self.argument_entries:
                continue
            elif entry.has_tensors or entry.content.container is not None:
                raise self._unknown_parameter(entry)
            value = self.reader.constant(entry, sizes)
            if not isinstance(value, int) or isinstance(value, bool):
                raise self._unknown_parameter(entry)
            sizes[entry.name] = value
        init.sort(key=self.entries.index)
        self._check_init(init)
        return sizes, init

    def _unknown_parameter(self, entry: Entry) -> Exception:
        names = ", ".join(p.name for p in self.signature.parameters) or "none"
        return self.reader.error(
            f"{self.target.qualname} has no parameter {entry.name!r}", entry.line, f"Its parameters: {names}."
        )

    def _content(self, parameter: Parameter) -> Value:
        """The value of an argument in the directive; an annotated tensor without an entry is a leaf."""
        entry = self.argument_entries.get(parameter.name)
        if entry is None:
            return Value(parameter.name, "")
        if parameter.further is None:
            return entry.content
        container = entry.content.container
        is_tuple = parameter.further is ContainerKind.POSITIONAL
        if container is None or container.kind is not (ContainerKind.TUPLE if is_tuple else ContainerKind.DICT):
            stars, example = ("*", "(f32[64],)") if is_tuple else ("**", '{"mask":f32[64]}')
            raise self.reader.error(
                f"{parameter.name} must be a {'tuple' if is_tuple else 'dictionary'}, since it is {stars}{parameter.name}",
                entry.line,
                f"Write {parameter.name}={example}.",
            )
        return replace(entry.content, container=replace(container, kind=parameter.further))

    def _tensors(self, parameter: Parameter) -> dict[str, _Tensor]:
        """The tensors in an argument, by path."""
        entry = self.argument_entries.get(parameter.name)
        if entry is not None:
            return {t.name: _Tensor(self.reader.tensor(t), t.line, t) for t in entry.leaves if t.is_tensor}
        if parameter.has_default:
            return {}
        annotated: AnnotatedTensor | None = annotated_tensor(parameter)
        if annotated is None:
            raise self.reader.error(
                f"parameter {parameter.name!r} has no value",
                self.line,
                f"Add {parameter.name}=f32[64,1024] or a constant.",
            )
        return {parameter.name: _Tensor(annotated.spec, parameter.line, None, annotated.assumed)}

    def _init(self, entry: Entry, sizes: dict[str, int]) -> ArgumentSpec:
        specs, constants = dict[str, TensorSpec](), dict[str, object]()
        for leaf in entry.leaves:
            if leaf.is_tensor:
                tensor = _Tensor(self.reader.tensor(leaf), leaf.line, leaf)
                specs[leaf.name] = self._finish_tensor(leaf.name, tensor, sizes, {})
            else:
                constants[leaf.name] = self.reader.constant(leaf, sizes)
        return _with_leaves(entry.content, specs, constants)

    def _check_init(self, init: list[Entry]) -> None:
        if init and not self.target.class_name:
            raise self.reader.error(
                f"{self.target.qualname} is a function and has no constructor", init[0].line, "Remove `init:`."
            )
        if self.constructor is None:
            return
        parameters = self.constructor.parameters
        for entry in init:
            if entry.name not in self.constructor.names and not self.constructor.takes_any:
                names = ", ".join(p.name for p in parameters) or "none"
                raise self.reader.error(
                    f"{self.target.class_name}() has no parameter {entry.name!r}",
                    entry.line,
                    f"Its parameters: {names}.",
                )
        missing = [p.name for p in parameters if not p.has_default and p.name not in {entry.name for entry in init}]
        if missing:
            missing_entries = " ".join(f"{name}=..." for name in missing)
            raise self.reader.error(
                f"{self.target.class_name}() needs a value for {missing[0]!r}",
                self.line,
                f"Add `init: {missing_entries}`.",
            )

    def _check_unused(self, sizes: dict[str, int]) -> None:
        """Report a size that nothing uses: it is probably a mistyped name."""
        annotations = " ".join(p.annotation for p in self.signature.parameters)
        for entry in self.entries:
            used = any(entry.name in other_entry.names for other_entry in self.entries if other_entry is not entry)
            if entry.name in sizes and not used and not re.search(rf"\b{entry.name}\b", annotations):
                raise self._unknown_parameter(entry)

    def _check_grad(self, specs: dict[str, TensorSpec]) -> None:
        for name in self._grad():
            spec = specs.get(name)
            if self._is_parameters(name, specs):
                continue
            if spec is None or not spec.requires_grad:
                problem = (
                    "is not a tensor argument of the target"
                    if spec is None
                    else f"is {spec.dtype}, which has no gradient"
                )
                possible = [n for n, s in specs.items() if "float" in s.dtype]
                possible += [PARAMETERS] if self.target.class_name else []
                floats = ", ".join(possible) or "none"
                raise self.reader.error(
                    f"grad={name}: {name} {problem}", self.options["grad"].line, f"Possible arguments: {floats}."
                )

    def _is_parameters(self, name: str, specs: Mapping[str, TensorSpec]) -> bool:
        """Whether ``grad=`` names the module's parameters alone, not an argument."""
        return name == PARAMETERS and name not in specs and bool(self.target.class_name)

    def _grad(self) -> list[str]:
        return self.options["grad"].value.split(",") if "grad" in self.options else []

    def _device(self) -> str:
        entry = self.options.get("device")
        if entry is not None and entry.value not in ("cuda", "cpu"):
            raise self.reader.error(
                f"device must be cuda or cpu, not {entry.value!r}", entry.line, "Write device=cuda or device=cpu."
            )
        return entry.value if entry is not None else "cuda"

    def _finish_tensor(
        self, name: str, tensor: _Tensor, known_sizes: dict[str, int], fixed_sizes: dict[str, int]
    ) -> TensorSpec:
        """Check the tensor, add its value range, and replace sizes that cannot vary by numbers."""
        spec, line = tensor.spec, tensor.line
        for size in (*spec.shape, *(spec.stride or ())):
            for symbol in size.symbols():
                if symbol not in known_sizes:
                    raise self.reader.error(f"size {symbol!r} has no value", line, f"Add {symbol}=64 to the directive.")
        for size, stride in zip(spec.shape, spec.stride or spec.shape, strict=True):
            try:
                number, step = size.value(known_sizes), stride.value(known_sizes)
            except ZeroDivisionError:
                raise self.reader.error(f"size {size} of {name} divides by zero", line, "Change a size.") from None
            if number < 0 or step < 0:
                raise self.reader.error(f"a size or stride of {name} is negative", line, "Change it.")
        spec = self.reader.with_range(tensor.entry, spec, known_sizes) if tensor.entry is not None else spec
        numbers = {key: Size.of(value) for key, value in fixed_sizes.items()}
        high = spec.high_size.substitute(numbers) if spec.high_size is not None else None
        return replace(
            spec,
            shape=tuple(size.substitute(numbers) for size in spec.shape),
            stride=tuple(size.substitute(numbers) for size in spec.stride) if spec.stride is not None else None,
            high_size=high if high is not None and not high.is_constant else None,
            requires_grad=name in self._grad() and "float" in spec.dtype,
        )


def _with_leaves(value: Value, tensors: Mapping[str, TensorSpec], constants: Mapping[str, object]) -> ArgumentSpec:
    """The argument with this structure and these leaves, by path."""
    items = tuple(_with_leaves(item, tensors, constants) for item in value.items)
    return ArgumentSpec(value.path, tensors.get(value.path), constants.get(value.path), value.container, items)
