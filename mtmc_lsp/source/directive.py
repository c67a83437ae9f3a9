"""Workloads written in the source: the ``# mtmc:`` comment above a target, and jaxtyping annotations.

The comment's words, in any order::

    # mtmc: x=bf16[B,S,D] weight=bf16[D] eps=1e-6 B=8 S=2048 D=4096 grad=x device=cuda
    # mtmc: index=i64[B]@0..V-1 y=f32[64,32]{1,64} B=64 V=50257
    # mtmc: x=f32[64,512] init: dim=512 hidden=2048

``name=dtype[sizes]`` makes a tensor (``{strides}`` and an inclusive ``@low..high`` may follow), ``name=value`` a constant, an
upper-case or otherwise unused ``NAME=integer`` a named size, and words after ``init:`` are the constructor's arguments.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field, replace

from mtmc_lsp.core.dtypes import SHORT
from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import ArgumentSpec, Target, TargetKind, TensorSpec, Workload, WorkloadSource
from mtmc_lsp.source.signatures import Parameter, constructor_parameters, parameters_of
from mtmc_lsp.source.targets import find_definition

JAXTYPING = {
    "Float": "float32", "Float64": "float64", "Float32": "float32", "Float16": "float16", "BFloat16": "bfloat16",
    "Int": "int64", "Int64": "int64", "Int32": "int32", "Int16": "int16", "Int8": "int8", "UInt8": "uint8",
    "Integer": "int64", "Bool": "bool", "Shaped": "float32", "Num": "float32", "Inexact": "float32",
}  # fmt: skip
"""jaxtyping's names to dtypes."""

VAGUE = frozenset({"Float", "Int", "Integer", "Shaped", "Num", "Inexact"})
"""jaxtyping names that leave the width open."""

DEFAULT_SIZE = 256
"""Assumed for a named dimension that nothing gives a value."""

TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?:\{(?P<stride>[^}]*)\})?(?:@(?P<low>.+?)\.\.(?P<high>.+))?$")
EXAMPLE = "Write `# mtmc: x=f32[64,1024] eps=1e-6`, sizes as numbers or as names such as B with `B=64` behind."


@dataclass
class _Words:
    """The words of a directive, sorted by what they are."""

    tensors: dict[str, tuple[TensorSpec, int]] = field(default_factory=dict)
    bounds: dict[str, tuple[str, str]] = field(default_factory=dict)
    constants: dict[str, tuple[object, int]] = field(default_factory=dict)
    init: dict[str, object] = field(default_factory=dict)
    init_tensors: dict[str, TensorSpec] = field(default_factory=dict)
    device: str = "cuda"
    grad: tuple[str, ...] = ()
    line: int = 0


def parse_directive(text: bytes, target: Target, path: str) -> Workload | None:
    """The workload of the comment above the target (or above its class), or None where there is no such comment.

    Raises:
        RequestError: a word of it cannot be read; names file, line and remedy.
    """
    comments = _comments(text, target)
    if not comments:
        return None
    words = _read(comments, path)
    if not words.tensors:
        return None
    parameters = parameters_of(text, target)
    return _workload(words, parameters, _constructor(text, target), target, path, WorkloadSource.DIRECTIVE)


def workload_from_annotations(text: bytes, target: Target, path: str) -> Workload | None:
    """The workload of jaxtyping annotations, sizes completed by a directive's; None where a tensor has no annotation.

    Raises:
        RequestError: as :func:`parse_directive`.
    """
    parameters = parameters_of(text, target)
    comments = _comments(text, target)
    words = _read(comments, path) if comments else _Words(line=target.start_line)
    assumed: list[str] = []
    for parameter in parameters:
        spec = _annotated(parameter, assumed)
        if spec is not None and parameter.name not in words.tensors:
            words.tensors[parameter.name] = (spec, parameter.line)
        elif (
            parameter.name not in words.tensors and parameter.name not in words.constants and not parameter.has_default
        ):
            return None
    if not words.tensors:
        return None
    given = {name for name, (value, _) in words.constants.items() if isinstance(value, int)}
    names = {symbol for spec, _ in words.tensors.values() for size in spec.shape for symbol in size.symbols()}
    for name in sorted(names - given):
        words.constants[name] = (DEFAULT_SIZE, words.line)
        assumed.append(f"size {name} is assumed to be {DEFAULT_SIZE}; set it with `# mtmc: {name}=...`")
    workload = _workload(words, parameters, _constructor(text, target), target, path, WorkloadSource.ANNOTATIONS)
    return replace(workload, assumed=tuple(assumed))


def suggest_directive(text: bytes, target: Target) -> str:
    """The directive to paste, filled in as far as the code tells."""
    words = []
    for parameter in parameters_of(text, target):
        if parameter.has_default:
            continue
        spec = _annotated(parameter, [])
        sizes = ",".join(str(size).replace(" ", "") for size in spec.shape) if spec else "64,1024"
        short = next((s for s, full in SHORT.items() if spec and full == spec.dtype), "f32")
        scalar = {"int": "1", "float": "1.0", "bool": "True", "str": '""'}.get(parameter.annotation)
        words.append(f"{parameter.name}={scalar or f'{short}[{sizes}]'}")
    if target.class_name:
        init = [f"{p.name}={_guess(p)}" for p in constructor_parameters(text, target) if not p.has_default]
        words += ["init:", *init] if init else []
    return "# mtmc: " + " ".join(words)


def _constructor(text: bytes, target: Target) -> set[str]:
    return {p.name for p in constructor_parameters(text, target)} if target.class_name else set()


def _guess(parameter: Parameter) -> str:
    return {"float": "1.0", "bool": "True", "str": '""'}.get(parameter.annotation, "1024")


def _comments(text: bytes, target: Target) -> list[tuple[int, str]]:
    """``(line, words)`` of the directive lines that touch the target from above, or its class."""
    found = _comments_above(text, target, target.qualname)
    if not found and target.kind is TargetKind.METHOD:
        found = _comments_above(text, target, target.class_name)
    if not found and target.kind is TargetKind.MODULE:
        found = _comments_above(text, target, f"{target.qualname}.forward")
    return found


def _comments_above(text: bytes, target: Target, qualname: str) -> list[tuple[int, str]]:
    try:
        node = find_definition(text, target.path, qualname).node
    except RequestError:
        return []
    if node.parent is not None and node.parent.type == "decorated_definition":
        node = node.parent
    lines = text.decode("utf-8", "replace").split("\n")
    found = []
    number = node.start_point[0]
    while number > 0 and lines[number - 1].strip().startswith("#"):
        number -= 1
        words = re.match(r"\s*#\s*mtmc:\s*(.*)", lines[number].rstrip("\r"))
        if words and not words[1].startswith(("begin", "end", "dispatch")):
            found.append((number + 1, words[1]))
    return list(reversed(found))


def _read(comments: list[tuple[int, str]], path: str) -> _Words:
    words = _Words(line=comments[0][0])
    init = False
    for line, text in comments:
        for word in _split(text):
            if word == "init:":
                init = True
                continue
            name, equals, value = word.partition("=")
            if not equals or not name.isidentifier() or not value:
                raise _bad(f"cannot read {word!r}", path, line)
            _sort(words, name, value, path, line, init=init)
    return words


def _split(text: str) -> list[str]:
    """Words between spaces, where brackets and quotes hold together."""
    words, current, depth, quote = [], "", 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[({":
            depth += 1
        elif character in "])}":
            depth -= 1
        if character.isspace() and not depth and not quote:
            words.append(current)
            current = ""
        else:
            current += character
    return [word for word in [*words, current] if word]


def _sort(words: _Words, name: str, value: str, path: str, line: int, *, init: bool) -> None:
    match = TENSOR.match(value)
    if match and not value.startswith("["):
        spec = _tensor(match, path, line)
        if match["low"]:
            words.bounds[name] = (match["low"], match["high"])
        if init:
            words.init_tensors[name] = spec
        else:
            words.tensors[name] = (spec, line)
    elif name == "device" and not init:
        if value not in ("cuda", "cpu"):
            raise _bad(f"device is cuda or cpu, not {value!r}", path, line)
        words.device = value
    elif name == "grad" and not init:
        words.grad = tuple(value.split(","))
    else:
        constant = _constant(value, path, line)
        if init:
            words.init[name] = constant
        else:
            words.constants[name] = (constant, line)


def _tensor(match: re.Match[str], path: str, line: int) -> TensorSpec:
    dtype = SHORT.get(match["dtype"]) or JAXTYPING.get(match["dtype"])
    if dtype is None:
        raise _bad(f"no dtype {match['dtype']!r}: there are {', '.join(SHORT)}", path, line)
    stride = _sizes(match["stride"], path, line) if match["stride"] is not None else None
    return TensorSpec(_sizes(match["shape"], path, line), dtype, stride)


def _sizes(text: str, path: str, line: int) -> tuple[Size, ...]:
    items = [item for item in re.split(r"[,\s]+", text.strip()) if item]
    try:
        return tuple(Size.parse(item) for item in items)
    except (ValueError, SyntaxError):
        raise _bad(f"cannot read the sizes [{text}]", path, line) from None


def _constant(value: str, path: str, line: int) -> object:
    try:
        result = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        raise _bad(f"cannot read the value {value!r}", path, line, "Quote text, as in mode='sum'.") from None
    return list(result) if isinstance(result, tuple) else result


def _bad(message: str, path: str, line: int, remedy: str = EXAMPLE) -> RequestError:
    return RequestError(f"in the mtmc directive: {message}", where=Location(path, line), remedy=remedy)


def _workload(
    words: _Words,
    parameters: list[Parameter],
    constructor: set[str],
    target: Target,
    path: str,
    source: WorkloadSource,
) -> Workload:
    names = {parameter.name for parameter in parameters}
    # A named size may also stand behind `init:`, as long as the constructor has no parameter of that name.
    needed = {symbol for spec, _ in words.tensors.values() for size in spec.shape for symbol in size.symbols()}
    late = {n: v for n, v in words.init.items() if isinstance(v, int) and n in needed and n not in constructor}
    sizes = {n: v for n, (v, _) in words.constants.items() if n not in names and isinstance(v, int)}
    sizes.update(late)
    arguments: list[ArgumentSpec] = []
    for parameter in parameters:
        if parameter.name in words.tensors:
            spec, line = words.tensors[parameter.name]
            spec = _with_range(spec, words.bounds.get(parameter.name), sizes, path, line)
            spec = replace(spec, requires_grad=parameter.name in words.grad)
            _check_sizes(spec, sizes, path, line)
            arguments.append(ArgumentSpec(parameter.name, spec))
        elif parameter.name in words.constants:
            arguments.append(ArgumentSpec(parameter.name, None, words.constants[parameter.name][0]))
        elif not parameter.has_default:
            raise _bad(f"nothing is said of {parameter.name!r}", path, words.line, f"Add {parameter.name}=f32[...].")
    unknown = [(n, line) for n, (_, line) in words.tensors.items() if n not in names]
    unknown += [(n, line) for n, (v, line) in words.constants.items() if n not in names and not isinstance(v, int)]
    if unknown:
        expected = ", ".join(p.name for p in parameters)
        raise _bad(f"{target.qualname} has no parameter {unknown[0][0]!r}: it has {expected}", path, unknown[0][1])
    init = [ArgumentSpec(name, None, value) for name, value in words.init.items() if name not in late]
    init += [ArgumentSpec(name, spec) for name, spec in words.init_tensors.items()]
    return Workload(target, source, tuple(arguments), tuple(init), sizes, words.device, words.line)


def _with_range(
    spec: TensorSpec, bounds: tuple[str, str] | None, sizes: dict[str, int], path: str, line: int
) -> TensorSpec:
    if bounds is None:
        return spec
    try:
        low, high = (
            float(b) if re.fullmatch(r"-?\d+\.\d*(e-?\d+)?", b) else Size.parse(b).value(sizes) for b in bounds
        )
    except (ValueError, SyntaxError, KeyError):
        raise _bad(f"cannot read the range {bounds[0]}..{bounds[1]}", path, line) from None
    follows = None
    if re.search(r"[A-Za-z_]", bounds[1]) and not re.fullmatch(r"-?\d+\.\d*(e-?\d+)?", bounds[1]):
        follows = Size.parse(bounds[1])
    return replace(spec, low=float(low), high=float(high), high_size=follows)


def _check_sizes(spec: TensorSpec, sizes: dict[str, int], path: str, line: int) -> None:
    for size in (*spec.shape, *(spec.stride or ())):
        for name in size.symbols():
            if name not in sizes:
                raise _bad(f"size {name!r} has no value", path, line, f"Add {name}=64 to the directive.")
        if size.value(sizes) < 0:
            raise _bad(f"size {size} is negative", path, line)


def _annotated(parameter: Parameter, assumed: list[str]) -> TensorSpec | None:
    """A tensor from ``Float[Tensor, "batch dim"]``."""
    match = re.fullmatch(r"(?:\w+\.)*(\w+)\[\s*[\w.]*Tensor\s*,\s*[rf]?[\"'](.*)[\"']\s*\]", parameter.annotation)
    if not match or match[1] not in JAXTYPING:
        return None
    if match[1] in VAGUE:
        assumed.append(f"{parameter.name} is assumed to be {JAXTYPING[match[1]]}: {match[1]} leaves the width open")
    words = [word.split("=")[-1].lstrip("#?") for word in match[2].split()]
    if any(word in ("...", "_") or word.startswith("*") for word in words):
        return None
    try:
        return TensorSpec(tuple(Size.parse(word) for word in words), JAXTYPING[match[1]])
    except (ValueError, SyntaxError):
        return None
