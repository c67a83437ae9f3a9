"""Workloads written in the source: the ``# mtmc:`` comment above a target, and jaxtyping annotations.

The comment's words, in any order, on one line or several::

    # mtmc: x=bf16[B,S,D] weight=bf16[D] eps=1e-6 B=8 S=2048 D=4096 grad=x device=cuda
    # mtmc: index=i64[B]@0..V-1 y=f32[64,32]{1,64} B=64 V=50257
    # mtmc: x=f32[64,512] init: dim=512 hidden=4*512

``grad`` and ``device`` are arguments where the target has such ones and the value is a tensor, a number or in quotes.
``name=dtype[sizes]`` makes a tensor (``{strides}`` and an inclusive ``@low..high`` may follow). ``name=value`` is a
constant where the target has a parameter of that name, and else a named size. Words behind ``init:``, up to the end of
the line, are the constructor's arguments. A parameter that is not named has its default or its jaxtyping annotation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from mtmc_lsp.core.errors import Location, TargetUnsupported
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import ArgumentSpec, Target, TargetKind, TensorSpec, Workload, WorkloadSource
from mtmc_lsp.source.syntax import comments_above, line_of, parse_apart, text_of, with_decorators
from mtmc_lsp.source.targets import definitions
from mtmc_lsp.source.workload.annotations import Annotated, annotated_tensor, assumed_sizes
from mtmc_lsp.source.workload.directive_syntax import Reader, Word
from mtmc_lsp.source.workload.signatures import Parameter, Signature, constructor_of, signature_of
from mtmc_lsp.source.workload.suggestion import suggest_directive

__all__ = ["parse_directive", "suggest_directive", "workload_from_annotations"]

OPTIONS = ("device", "grad")


def parse_directive(text: bytes, target: Target, path: str) -> Workload | None:
    """The workload of the comment above the target or its class; None where there is none, or it names no tensor.

    Raises:
        RequestError: a word of it cannot be read or does not fit the target; names file, line and remedy.
    """
    words = _words(text, target, path)
    if not any(word.is_tensor and not word.in_init for word in words):
        return None
    return _Builder(text, target, path, words).workload(WorkloadSource.DIRECTIVE)


def workload_from_annotations(text: bytes, target: Target, path: str) -> Workload | None:
    """The workload of jaxtyping annotations, completed by a directive's sizes and constants.

    None where a parameter has neither annotation, word nor default.

    Raises:
        RequestError: as :func:`parse_directive`.
    """
    words = _words(text, target, path)
    signature = signature_of(text, target)
    parameters = signature.parameters if signature is not None else ()
    given = {word.name for word in words if not word.in_init}
    open_ = [p for p in parameters if not p.has_default and p.name not in given and annotated_tensor(p) is None]
    if open_ or not any(annotated_tensor(p) is not None and not p.has_default for p in parameters):
        return None
    return _Builder(text, target, path, words).workload(WorkloadSource.ANNOTATIONS)


def _words(text: bytes, target: Target, path: str) -> tuple[Word, ...]:
    """The words above the target. Those above a class are about its ``forward``; ``init:`` is for every method."""
    reader = Reader(path)
    above_class = _lines(text, target, target.class_name) if target.class_name else []
    if target.kind is TargetKind.MODULE:
        return reader.words(above_class + _lines(text, target, f"{target.qualname}.forward"))
    own = _lines(text, target, target.qualname)
    if target.kind is TargetKind.METHOD and target.qualname.endswith(".forward"):
        return reader.words(above_class + own)
    words = reader.words(own)
    if any(word.in_init for word in words):
        return words
    return words + tuple(word for word in reader.words(above_class) if word.in_init)


def _lines(text: bytes, target: Target, qualname: str) -> list[tuple[int, str]]:
    """``(line, words)`` of the directive lines that touch a definition from above."""
    found = [item for item in definitions(text, target.path) if item.target.qualname == qualname]
    if not found:
        return []
    node = with_decorators(found[-1].node)
    root, _ = parse_apart(text)
    lines = []
    for comment in comments_above(text, root, node):
        words = re.match(r"#\s*mtmc:(?!\s*(?:begin|end|dispatch|import|ignore)(?:[\s\[]|$))\s*(.*)", text_of(comment))
        if words is not None:
            lines.append((line_of(comment), words[1].rstrip()))
    return lines


@dataclass(frozen=True)
class _Tensor:
    """A tensor argument while its sizes are being worked out."""

    spec: TensorSpec
    line: int
    word: Word | None = None
    """None where an annotation gave it."""
    assumed: tuple[str, ...] = ()


class _Builder:
    """Puts the words of one directive together with the target's parameters."""

    def __init__(self, text: bytes, target: Target, path: str, words: tuple[Word, ...]) -> None:
        signature = signature_of(text, target)
        if signature is None:
            raise TargetUnsupported(
                f"{target.qualname} has no forward in this file",
                where=Location(path, target.start_line),
                remedy="Choose the class that defines forward.",
            )
        self.target = target
        self.reader = Reader(path)
        self.signature: Signature = signature
        self.constructor = constructor_of(text, target)
        self.line = words[0].line if words else target.start_line
        options = {w.name: w for w in words if not w.in_init and w.name in OPTIONS and not self._is_argument(w)}
        self.options = options
        self.words = [word for word in words if word not in options.values()]
        self.given = {w.name: w for w in self.words if not w.in_init and w.name in signature.names}

    def _is_argument(self, word: Word) -> bool:
        """Whether a word that is called as an option is the argument of that name: a tensor, or what no option can be."""
        if word.value[0] in "\"'":
            return True
        is_value = word.is_tensor or not all(part.isidentifier() for part in word.value.split(","))
        return word.name in self.signature.names and (is_value or word.value in ("None", "True", "False"))

    def workload(self, source: WorkloadSource) -> Workload:
        """The workload."""
        sizes, init = self._sizes_and_init()
        tensors = {p.name: found for p in self.signature.parameters if (found := self._tensor(p)) is not None}
        constants = {n: self.reader.constant(w, sizes) for n, w in self.given.items() if not w.is_tensor}
        inits = [self._init(word, sizes) for word in init]
        # What a constant is made from cannot be varied, nor can a size that is itself an argument.
        numbers = {**constants, **{item.name: item.constant for item in inits}}
        fixed = {n: v for n, v in numbers.items() if isinstance(v, int) and not isinstance(v, bool) and n not in sizes}
        plain = [w for w in (*self.given.values(), *init) if not w.is_tensor]
        fixed.update({n: sizes[n] for word in plain for n in word.names if n in sizes})
        known = {**sizes, **fixed}
        assumed = [sentence for tensor in tensors.values() for sentence in tensor.assumed]
        if source is WorkloadSource.ANNOTATIONS:
            for name, value in assumed_sizes([t.spec.shape for t in tensors.values()], known).items():
                sizes[name] = known[name] = value
                assumed.append(f"size {name} is assumed to be {value}; set it with `# mtmc: {name}=...`")
        self._check_unused(sizes)
        specs = {name: self._finished(name, tensor, known, fixed) for name, tensor in tensors.items()}
        self._check_grad(specs)
        arguments = [
            ArgumentSpec(p.name, specs.get(p.name), constants.get(p.name))
            for p in self.signature.parameters
            if p.name in specs or p.name in constants
        ]
        sizes = {name: value for name, value in sizes.items() if name not in fixed}
        return Workload(
            self.target, source, tuple(arguments), tuple(inits), sizes, self._device(), self.line, tuple(assumed)
        )

    def _sizes_and_init(self) -> tuple[dict[str, int], list[Word]]:
        """Named sizes, each worked out from those before it, and the constructor's words."""
        constructor = self.constructor
        needed = frozenset[str]().union(*(word.names for word in self.words if word.is_tensor))
        sizes: dict[str, int] = {}
        init: list[Word] = []
        # Plain numbers first: `H=2*D D=512` is as good as the other way round.
        for word in sorted(self.words, key=lambda word: not word.value.isdigit()):
            if word.in_init:
                own = constructor is None or constructor.takes_any or word.name in constructor.names
                # A named size may stand behind `init:` too, where the constructor has no parameter of that name.
                if own or word.name not in needed:
                    init.append(word)
                    continue
            elif word.name in self.given:
                continue
            elif word.is_tensor:
                raise self._unknown(word)
            value = self.reader.constant(word, sizes)
            if not isinstance(value, int) or isinstance(value, bool):
                raise self._unknown(word)
            sizes[word.name] = value
        init.sort(key=self.words.index)
        self._check_init(init)
        return sizes, init

    def _unknown(self, word: Word) -> Exception:
        names = ", ".join(p.name for p in self.signature.parameters) or "none"
        return self.reader.bad(f"{self.target.qualname} has no parameter {word.name!r}", word.line, f"It has {names}.")

    def _tensor(self, parameter: Parameter) -> _Tensor | None:
        word = self.given.get(parameter.name)
        if word is not None:
            return _Tensor(self.reader.tensor(word), word.line, word) if word.is_tensor else None
        if parameter.has_default:
            return None
        found: Annotated | None = annotated_tensor(parameter)
        if found is None:
            raise self.reader.bad(
                f"nothing is said of {parameter.name!r}", self.line, f"Add {parameter.name}=f32[64,1024] or its value."
            )
        return _Tensor(found.spec, parameter.line, None, found.assumed)

    def _init(self, word: Word, sizes: dict[str, int]) -> ArgumentSpec:
        if not word.is_tensor:
            return ArgumentSpec(word.name, None, self.reader.constant(word, sizes))
        tensor = _Tensor(self.reader.tensor(word), word.line, word)
        return ArgumentSpec(word.name, self._finished(word.name, tensor, sizes, {}))

    def _check_init(self, init: list[Word]) -> None:
        if init and not self.target.class_name:
            raise self.reader.bad(
                f"{self.target.qualname} is a function: it has no constructor", init[0].line, "Leave out `init:`."
            )
        if self.constructor is None:
            return
        parameters = self.constructor.parameters
        for word in init:
            if word.name not in self.constructor.names and not self.constructor.takes_any:
                names = ", ".join(p.name for p in parameters) or "none"
                raise self.reader.bad(
                    f"{self.target.class_name}() has no parameter {word.name!r}", word.line, f"It has {names}."
                )
        missing = [p.name for p in parameters if not p.has_default and p.name not in {word.name for word in init}]
        if missing:
            words = " ".join(f"{name}=..." for name in missing)
            raise self.reader.bad(
                f"nothing is said of {missing[0]!r}, which {self.target.class_name}() needs",
                self.line,
                f"Add `init: {words}`.",
            )

    def _check_unused(self, sizes: dict[str, int]) -> None:
        """A size that nothing uses is a mistyped name."""
        annotations = " ".join(p.annotation for p in self.signature.parameters)
        for word in self.words:
            used = any(word.name in other.names for other in self.words if other is not word)
            if word.name in sizes and not used and not re.search(rf"\b{word.name}\b", annotations):
                raise self._unknown(word)

    def _check_grad(self, specs: dict[str, TensorSpec]) -> None:
        for name in self._grad():
            spec = specs.get(name)
            if spec is None or not spec.requires_grad:
                what = "is no tensor of the target" if spec is None else f"is {spec.dtype}, which has no gradient"
                floats = ", ".join(n for n, s in specs.items() if "float" in s.dtype) or "none"
                raise self.reader.bad(f"grad={name}: {name} {what}", self.options["grad"].line, f"It can be {floats}.")

    def _grad(self) -> list[str]:
        return self.options["grad"].value.split(",") if "grad" in self.options else []

    def _device(self) -> str:
        word = self.options.get("device")
        if word is not None and word.value not in ("cuda", "cpu"):
            raise self.reader.bad(
                f"device is cuda or cpu, not {word.value!r}", word.line, "Write device=cuda or device=cpu."
            )
        return word.value if word is not None else "cuda"

    def _finished(self, name: str, tensor: _Tensor, known: dict[str, int], fixed: dict[str, int]) -> TensorSpec:
        """The tensor with its range, with the sizes that cannot vary as numbers, and checked."""
        spec, line = tensor.spec, tensor.line
        for size in (*spec.shape, *(spec.stride or ())):
            for symbol in size.symbols():
                if symbol not in known:
                    raise self.reader.bad(f"size {symbol!r} has no value", line, f"Add {symbol}=64 to the directive.")
        for size, stride in zip(spec.shape, spec.stride or spec.shape, strict=True):
            try:
                number, step = size.value(known), stride.value(known)
            except ZeroDivisionError:
                raise self.reader.bad(f"size {size} of {name} divides by zero", line, "Change a size.") from None
            if number < 0 or step < 0:
                raise self.reader.bad(f"a size or stride of {name} is negative", line, "Change it.")
            if spec.stride is not None and step == 0 and number > 1:
                raise self.reader.bad(
                    f"stride 0 of {name} makes its elements one", line, "Write the size 1, and let it broadcast."
                )
        spec = self.reader.ranged(tensor.word, spec, known) if tensor.word is not None else spec
        numbers = {key: Size.of(value) for key, value in fixed.items()}
        high = spec.high_size.substitute(numbers) if spec.high_size is not None else None
        return replace(
            spec,
            shape=tuple(size.substitute(numbers) for size in spec.shape),
            stride=tuple(size.substitute(numbers) for size in spec.stride) if spec.stride is not None else None,
            high_size=high if high is not None and not high.is_constant else None,
            requires_grad=name in self._grad() and "float" in spec.dtype,
        )
