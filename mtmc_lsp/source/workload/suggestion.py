"""Suggest a directive for a target without a workload, based on its code."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tree_sitter import Node

from mtmc_lsp.core.dtypes import short_dtype
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import Target, TargetKind
from mtmc_lsp.source.syntax import field, text_of, walk
from mtmc_lsp.source.workload.annotations import annotated_tensor
from mtmc_lsp.source.workload.container_suggestion import suggested_container, suggested_record
from mtmc_lsp.source.workload.signatures import Parameter, Signature, constructor_of, signature_of

SCALARS = {"int": "1", "float": "1.0", "bool": "True", "str": '""', "tl.constexpr": "128", "constexpr": "128"}
"""Example value for each annotation of a non-tensor."""

LAYERS = {
    "Linear": ("in_features", 0, "f32[64,{}]"),
    "LayerNorm": ("normalized_shape", 0, "f32[64,{}]"),
    "RMSNorm": ("normalized_shape", 0, "f32[64,{}]"),
    "Embedding": ("num_embeddings", 0, "i64[8,128]@0..{}-1"),
    "Conv1d": ("in_channels", 0, "f32[8,{},256]"),
    "Conv2d": ("in_channels", 0, "f32[8,{},64,64]"),
    "Conv3d": ("in_channels", 0, "f32[4,{},16,32,32]"),
    "ConvTranspose1d": ("in_channels", 0, "f32[8,{},256]"),
    "ConvTranspose2d": ("in_channels", 0, "f32[8,{},32,32]"),
    "ConvTranspose3d": ("in_channels", 0, "f32[4,{},16,16,16]"),
    "BatchNorm1d": ("num_features", 0, "f32[64,{}]"),
    "BatchNorm2d": ("num_features", 0, "f32[8,{},64,64]"),
    "GroupNorm": ("num_channels", 1, "f32[8,{},64,64]"),
}
"""Layer class to the argument that determines its input size (keyword and position), and a template of the input."""

SMALL_INTEGERS = {"head": 8, "group": 8, "expert": 8, "kernel": 3, "stride": 1, "layer": 2, "channel": 64}
"""Values for integer constructor arguments whose names indicate a small number."""

VECTORS = re.compile(r"(?:.*_)?(?:weight|bias|scale|shift|gamma|beta|gain)")
INDICES = re.compile(r"(?:.*_)?(?:idx|ids|index|indices|labels?|targets?|tokens?)")


def suggest_directive(text: bytes, target: Target) -> str:
    """A valid directive to paste above the target."""
    signature = signature_of(text, target)
    constructor = constructor_of(text, target)
    widths = _constructor_values(constructor, text)
    inputs = _layer_inputs(signature, constructor, widths)
    parts, names = [], set()
    for parameter in signature.parameters if signature is not None else ():
        if not parameter.has_default:
            container = suggested_container(parameter, signature, text) if signature is not None else ""
            value, symbols = (container, set[str]()) if container else _argument(parameter, inputs)
            parts.append(f"{parameter.name}={value}")
            names |= symbols
    parts += [f"{name}=64" for name in sorted(names)]
    init = [f"{p.name}={widths[p.name]}" for p in (constructor.parameters if constructor else ()) if not p.has_default]
    if init and target.kind in (TargetKind.MODULE, TargetKind.METHOD):
        parts += ["init:", *init]
    return " ".join(["# mtmc:", *parts])


def _argument(parameter: Parameter, inputs: Mapping[str, str]) -> tuple[str, set[str]]:
    """A value for one argument, and the named sizes that it uses."""
    annotated = annotated_tensor(parameter)
    if annotated is not None:
        sizes = ",".join(str(size).replace(" ", "") for size in annotated.spec.shape)
        return f"{short_dtype(annotated.spec.dtype)}[{sizes}]", {
            name for size in annotated.spec.shape for name in size.symbols()
        }
    annotation = parameter.annotation.strip("\"'")
    if annotation in SCALARS:
        return SCALARS[annotation], set()
    if re.match(r"(?:list|tuple|List|Tuple|Sequence)\b", annotation):
        return "[1]", set()
    if parameter.name in inputs:
        return inputs[parameter.name], set()
    if INDICES.fullmatch(parameter.name):
        return "i64[64]@0..9", set()
    return ("f32[1024]" if VECTORS.fullmatch(parameter.name) else "f32[64,1024]"), set()


def _constructor_values(constructor: Signature | None, text: bytes) -> dict[str, str]:
    """A value for each constructor argument: its default, or a guess based on annotation and name."""
    values = {}
    for parameter in constructor.parameters if constructor is not None else ():
        guess = SCALARS.get(parameter.annotation, "") if parameter.annotation != "int" else ""
        guess = guess or suggested_record(parameter.annotation.strip("\"'"), text)
        small = next((str(value) for part, value in SMALL_INTEGERS.items() if part in parameter.name.lower()), "1024")
        values[parameter.name] = parameter.default or guess or small
    return values


def _layer_inputs(
    signature: Signature | None, constructor: Signature | None, widths: Mapping[str, str]
) -> dict[str, str]:
    """Inputs expected by layers that the target applies to its parameters, as in ``self.proj(x)``."""
    if signature is None or constructor is None:
        return {}
    layers = {}
    for node in walk(constructor.node):
        left, right = field(node, "left"), field(node, "right")
        if node.type == "assignment" and left is not None and right is not None and right.type == "call":
            layers[text_of(left)] = right
    inputs: dict[str, str] = {}
    for node in walk(signature.node):
        layer = layers.get(text_of(field(node, "function"))) if node.type == "call" else None
        arguments = field(node, "arguments")
        first = text_of(arguments.named_children[0]) if arguments is not None and arguments.named_children else ""
        expected = _expected_input(layer, widths) if layer is not None and first in signature.names else None
        if expected is not None:
            inputs.setdefault(first, expected)
    return inputs


def _expected_input(layer: Node, widths: Mapping[str, str]) -> str | None:
    """The input of a layer such as ``nn.Linear(dim, 4 * dim)``, in directive syntax."""
    arguments = field(layer, "arguments")
    argument_nodes = arguments.named_children if arguments is not None else []
    name = text_of(field(layer, "function")).rpartition(".")[2]
    if name == "Sequential" and argument_nodes and argument_nodes[0].type == "call":
        return _expected_input(argument_nodes[0], widths)
    if name not in LAYERS:
        return None
    keyword, position, template = LAYERS[name]
    for index, item in enumerate(argument_nodes):
        is_keyword = item.type == "keyword_argument"
        if is_keyword and text_of(field(item, "name")) == keyword:
            return _fill(template, text_of(field(item, "value")), widths)
        if not is_keyword and index == position:
            return _fill(template, text_of(item), widths)
    return None


def _fill(template: str, width: str, widths: Mapping[str, str]) -> str | None:
    try:
        sizes = {name: int(value) for name, value in widths.items() if value.isdigit()}
        return template.format(Size.parse(width).value(sizes))
    except (ValueError, SyntaxError, KeyError, ZeroDivisionError):
        return None
