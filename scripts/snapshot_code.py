"""Prove that a refactoring leaves the generated code as it was, but for names and comments.

    python scripts/snapshot_code.py capture GRAPHS [FILE::NAME ...]    # once: needs torch, takes minutes
    python scripts/snapshot_code.py render GRAPHS OUT                  # before and after the change: no torch, one core
    python scripts/snapshot_code.py compare BEFORE AFTER

``capture`` captures every example, every target of ``benchmarks/everyday`` and 30 of ``benchmarks/unseen`` in workers on this
machine, or the targets that are named. Each target becomes ``GRAPHS/NAME.json``; ``GRAPHS/failed.json`` lists the targets that
cannot be captured.

``render`` runs the greedy search with the roofline planner, the built-in coder and a fake measurer on each graph, once per
policy, and writes ``OUT/NAME/POLICY/step_NN.py`` (the whole file after that step) and ``actions.jsonl`` (one step per line).
A policy is a device (``h200``: timed; ``interpreter``: not timed) and a rule (``all``: each step is correct and faster;
``alternate``: every other step is refused, in turn for its time and for its error). A run ends after 12 steps, or fewer on a
large graph (see ``OPERATIONS``), so that all runs take about four minutes of CPU time. The result depends on the code alone.

``compare`` says of each target whether both folders are equal, equal after normalising, or different. It normalises a file by
its syntax tree: comments and docstrings are dropped, and each name that the file defines is replaced by its number in order
of appearance within its scope. Strings, imports, attributes and the order of everything are kept. Of the actions, kinds,
regions, estimates, kernel launches and values of parameters must be equal; words and the names of parameters need not be. The
exit status is 1 where a target is different or missing.

A stored graph survives renames. Each file holds the dataclasses that it was written with, and their fields in order. When it is
read, a name that still exists stands for itself. The others are matched with the new names in order, if there are as many of
them; this holds for classes and for their fields. New fields need a default. Anything else goes into ``MOVED`` below: a field
that was split, removed, or renamed while another was added. Renamed values, such as those of an enum, go into ``VALUES``.
Paths below the repository are stored below ``/project``, so a graph holds for any checkout.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import re
import sys
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measure_examples import EXAMPLES

from mtmc_lsp.app.bench.suite import find_problems
from mtmc_lsp.app.pipeline import Pipeline, RunOptions
from mtmc_lsp.app.target_file import open_target, parse_request
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.loop import Loop
from mtmc_lsp.core.results import (
    BaselineTime,
    CompileReport,
    KernelReport,
    Ratio,
    Speed,
    Timing,
    Verdict,
    VerdictStatus,
)
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.device.choice import planning_model
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.process.fork_server import ForkServer, likely_variables
from mtmc_lsp.search.components import Events, Limits, SearchComponents
from mtmc_lsp.search.greedy import GreedySearch

CLASSES: dict[str, str] = {}
"""Stored class names to present ones. Needed if a class was renamed while another was added."""
MOVED: dict[str, str | None] = {}
"""``Class.field`` as stored to the present field, or None where the field is gone; both names of today's classes or then's."""
VALUES: dict[str, dict[str, str]] = {}
"""``Class.field`` as stored to the values of it that were renamed: then to now."""

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "/project"
UNSEEN = 30
PROCESSES = 2
STEPS = 12
OPERATIONS = 160
"""Most steps of a run times operations of its graph: planning a step of a large graph takes seconds."""
NO_LIMIT_SECONDS = 1e9
EAGER_US = 1000.0
FLOPS = {"bf16": 772e12, "fp16": 751e12, "fp32": 51.3e12, "tf32": 398e12, "fp16x3": 250e12}
H200 = planning_model(("sm_90",))
DEVICES = {
    "h200": dataclasses.replace(H200, bandwidth=4.25e12, flops=FLOPS),
    "interpreter": dataclasses.replace(H200, shared_bytes=65536, bandwidth=4.28e12, flops=FLOPS),
}
POLICIES = tuple((device, rule) for device in DEVICES for rule in ("all", "alternate"))


# Capture ---------------------------------------------------------------------------------------------------------


def targets() -> dict[str, str]:
    """Name to ``FILE::TARGET`` of everything that is captured."""
    collected = {f"examples.{name}": f"{ROOT / 'examples' / name}.py::{target}" for name, target in EXAMPLES.items()}
    for folder, step, most in (("everyday", 1, None), ("unseen", 2, UNSEEN)):
        problems = sorted(find_problems(ROOT / "benchmarks" / folder), key=lambda problem: problem.name)
        for problem in problems[::step][:most]:
            name = re.sub(r"[^\w.]+", ".", f"{folder}.{problem.name}")
            collected[name] = f"{problem.path}::{problem.target}"
    return collected


def capture_all(out: Path, todo: dict[str, str]) -> int:
    """Capture targets into ``out``; returns the exit status.

    Args:
        todo: name to ``FILE::TARGET``.
    """
    os.nice(10)
    out.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    fork_server = ForkServer(sys.executable, likely_variables(), preload=True)
    with fork_server, ThreadPoolExecutor(PROCESSES) as pool:

        def one(name: str) -> None:
            try:
                target = open_target(parse_request(todo[name], python=sys.executable))
                with Pipeline(target, RunOptions(fork_server=fork_server)) as pipeline:
                    captured = to_json(pipeline.capture())
            except Exception as error:  # one target that fails does not end the others
                failed[name] = f"{type(error).__name__}: {error}"
                print(f"{name}: {failed[name]}", flush=True)
                return
            stored = {"classes": classes(), "source": target.plain.decode(), "capture": captured}
            text = json.dumps(stored, indent=1).replace(str(ROOT), PROJECT)
            (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
            print(f"{name}: {len(captured['graph']['nodes'])} operations", flush=True)

        list(pool.map(one, todo))
    (out / "failed.json").write_text(json.dumps(failed, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{len(todo) - len(failed)} of {len(todo)} targets captured")
    return 0


# Stored graphs ---------------------------------------------------------------------------------------------------


def classes() -> dict[str, list[str]]:
    """Every dataclass that a capture is made of, in the order in which they are met, and its fields in order."""
    collected: dict[str, list[str]] = {}

    def meet(kind: Any) -> None:
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            if kind.__name__ in collected:
                return
            names = collected[kind.__name__] = [field.name for field in dataclasses.fields(kind)]
            hints = typing.get_type_hints(kind, localns={"Loop": Loop})
            for name in names:
                meet(hints[name])
        for argument in typing.get_args(kind):
            meet(argument)

    meet(Capture)
    return collected


def load(path: Path) -> tuple[Capture, str]:
    """The capture and the user's file of a stored graph, whatever was renamed since it was stored."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    now = classes()
    renamed = {}
    then = [CLASSES.get(name, name) for name in stored["classes"]]
    present = _matched("the classes", then, list(now))
    for then_class in stored["classes"]:
        now_class = present[CLASSES.get(then_class, then_class)]
        fields = stored["classes"][then_class]
        explicit = {name: MOVED[f"{then_class}.{name}"] for name in fields if f"{then_class}.{name}" in MOVED}
        left = [name for name in fields if name not in explicit]
        rest = [name for name in now[now_class] if name not in explicit.values()]
        key = frozenset(fields)
        assert key not in renamed, f"two classes have the fields {fields}"
        renamed[key] = then_class, {**explicit, **_matched(now_class, left, rest)}

    def adapted(data: Any) -> Any:
        if isinstance(data, list):
            return [adapted(item) for item in data]
        if not isinstance(data, dict):
            return data
        kind, names = renamed.get(frozenset(data), ("", dict(zip(data, data, strict=True))))
        values = {}
        for name, value in data.items():
            changed = VALUES.get(f"{kind}.{name}", {}).get(value, value) if isinstance(value, str) else value
            if (new := names[name]) is not None:
                values[new] = adapted(changed)
        return values

    return from_json(Capture, adapted(stored["capture"])), stored["source"]


def _matched(what: str, then: Sequence[str], now: Sequence[str]) -> dict[str, str]:
    """Names as stored to present ones: the same, else the next that is new."""
    old = [name for name in then if name not in now]
    new = [name for name in now if name not in then]
    if old and len(old) != len(new):
        raise SystemExit(f"{what}: cannot match {old} with {new}. Add the fields to MOVED in {Path(__file__).name}.")
    return {name: name for name in then if name in now} | dict(zip(old, new, strict=False))


# Render ----------------------------------------------------------------------------------------------------------


class FakeMeasurer:
    """Judges every candidate by its number alone: nothing is compiled, run or timed."""

    def __init__(self, device: DeviceModel, rule: str, *, measured: bool) -> None:
        self._device = device
        self._measured = measured
        self._alternates = rule == "alternate"
        self._number = 0
        self._accepted = 0

    def device(self) -> DeviceModel:
        return self._device

    def compile(self, candidate: Any) -> CompileReport:
        return CompileReport((KernelReport("kernel", "sm_90"),))

    def verify(self, candidate: Any, is_wanted: Any = None) -> Verdict:
        self._number += 1
        inexact = self._number % 4 == 0 if self._measured else self._number % 2 == 0
        if self._alternates and inexact:
            return Verdict(VerdictStatus.INCORRECT, (), "gpu", 1e-3, 1e-4, "values: relative error 0.001")
        return Verdict(VerdictStatus.CORRECT, (), "gpu", 1e-7, 1e-7)

    verifies_beside = False

    def time(self, candidate: Any, previous: Any) -> Timing | None:
        if not self._measured:
            return None
        faster = not self._alternates or self._number % 2 == 1
        self._accepted += faster
        us = EAGER_US * 0.9**self._accepted
        gain = 1.1 if faster else 0.5
        ratio = Ratio(gain, gain, gain)
        baselines = [BaselineTime("eager", EAGER_US, Ratio(EAGER_US / us, EAGER_US / us, EAGER_US / us), Speed.FASTER)]
        if previous is not None and previous.parent is not None:
            baselines.append(BaselineTime("previous", us * gain, ratio))
        elif not faster:
            baselines = [BaselineTime("eager", EAGER_US, ratio)]
        # A replay of the launches is offered late where each step is accepted: it would be the first step of every run.
        graph_us = us / 2 if self._alternates or self._number > 4 else None
        same = Ratio(1.0, 1.0, 1.0)
        return Timing(us, tuple(baselines), "eager", same, 50, "fake", 0.5, us, us, graph_us)

    def quick(self, candidates: Sequence[Any]) -> list[float | None]:
        # The first candidate is the present version.
        best = len(candidates) - 1 if self._alternates else len(candidates) // 2
        return [1.0 if i == best else 2.0 for i in range(len(candidates))]

    def close(self) -> None:
        """Nothing to end."""


def render_all(graphs: Path, out: Path, steps: int) -> int:
    """Render every stored graph into ``out``; returns the exit status."""
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} is not empty: name a new folder.")
    began, count = time.monotonic(), 0
    paths = [path for path in sorted(graphs.glob("*.json")) if path.name != "failed.json"]
    kinds: dict[str, int] = {}
    slowest: list[tuple[float, str]] = []
    for path in paths:
        captured, source = load(path)
        most = max(1, min(steps, OPERATIONS // max(1, len(captured.graph.nodes))))
        # The rules begin with the same step.
        for device, rule in (policy for policy in POLICIES if most > 1 or policy[1] == "all"):
            since = time.monotonic()
            folder = out / path.stem / f"{device}-{rule}"
            for row in render(captured, source, folder, device, rule, most):
                count += 1
                kinds[row["kind"]] = kinds.get(row["kind"], 0) + 1
            slowest.append((time.monotonic() - since, f"{path.stem} {device}-{rule}"))
    print(f"{len(paths)} targets, {count} steps in {time.monotonic() - began:.0f} s")
    print(", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items())))
    print("slowest: " + ", ".join(f"{name} {seconds:.1f} s" for seconds, name in sorted(slowest)[:-6:-1]))
    return 0


def render(captured: Capture, source: str, folder: Path, device: str, rule: str, steps: int) -> list[dict[str, Any]]:
    """Write the steps of one run into ``folder``; returns what is noted of each."""
    folder.mkdir(parents=True)
    measured = device == "h200"
    rows: list[dict[str, Any]] = []

    def on_step(step: Any) -> None:
        rows.append(noted(step))
        if step.candidate is not None:
            (folder / f"step_{step.index:02}.py").write_text(step.candidate.source, encoding="utf-8")

    search = GreedySearch(
        captured,
        source,
        SearchComponents(
            RooflinePlanner(),
            BuiltinCoder(DEVICES[device]),
            FakeMeasurer(DEVICES[device], rule, measured=measured),
            measured,
            Limits(NO_LIMIT_SECONDS, steps),
        ),
        Events(on_step=on_step),
    )
    try:
        search.run("snapshot", "")
    except Exception as error:  # a run that breaks off must break off after the change as well
        rows.append({"kind": "error", "status": type(error).__name__, "words": str(error)})
    text = "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows)
    (folder / "actions.jsonl").write_text(text, encoding="utf-8")
    return rows


def noted(step: Any) -> dict[str, Any]:
    """The stored properties of a step besides its source."""
    action = step.action
    return {
        "step": step.index,
        "status": step.status.value,
        "kind": action.kind.value,
        "region": list(action.region),
        "params": to_json(action.params),
        "saved_us": float(f"{action.expected.saved_us:.6g}"),
        "launches": [launch_facts(launch) for launch in (step.candidate.launches if step.candidate else ())],
        "words": [action.text, action.rationale, step.reason],
    }


def launch_facts(launch: Any) -> list[Any]:
    """A kernel launch without the names of the kernel and its parameters: these are numbered."""
    kernel, *rest = (getattr(launch, field.name) for field in dataclasses.fields(launch))
    names: dict[str, str] = {kernel: "#0"}
    facts: list[Any] = []
    for value in rest:
        if isinstance(value, dict):
            for name in value:
                names.setdefault(name, f"#{len(names)}")
            facts.append([[names[name], to_json(item)] for name, item in value.items()])
        elif isinstance(value, (list, tuple)):
            facts.append([names.get(item, item) for item in value])
        else:
            facts.append(to_json(value))
    return facts


# Compare ---------------------------------------------------------------------------------------------------------

EQUAL, NAMES, DIFFERENT, MISSING = "equal", "equal but for names and comments", "different", "missing"
RANK = (EQUAL, NAMES, DIFFERENT, MISSING)


def compare_all(before: Path, after: Path) -> int:
    """Print a table of all targets; returns the exit status."""
    names = sorted({item.name for folder in (before, after) for item in folder.iterdir() if item.is_dir()})
    if not names:
        raise SystemExit(f"{before} and {after}: there is no target in them.")
    counts = dict.fromkeys(RANK, 0)
    print(f"{'target':60} {'files':>5}  result")
    for name in names:
        files, result, where = compare(before / name, after / name)
        counts[result] += 1
        print(f"{name:60} {files:5}  {result}{': ' + where if where else ''}")
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    return 1 if counts[DIFFERENT] or counts[MISSING] else 0


def compare(before: Path, after: Path) -> tuple[int, str, str]:
    """How many files a target has, the worst of what is found, and the first file where that is."""
    if not (before.is_dir() and after.is_dir()):
        return 0, MISSING, str(before if not before.is_dir() else after)
    files = sorted({path.relative_to(folder) for folder in (before, after) for path in folder.rglob("*.*")})
    worst, where = EQUAL, ""
    for file in files:
        both = before / file, after / file
        result = _compare_files(*both) if all(path.is_file() for path in both) else DIFFERENT
        if RANK.index(result) > RANK.index(worst):
            worst, where = result, str(file)
    return len(files), worst, where


def _compare_files(before: Path, after: Path) -> str:
    texts = [path.read_text(encoding="utf-8") for path in (before, after)]
    if texts[0] == texts[1]:
        return EQUAL
    normal: Callable[[str], Any] = normalised if before.suffix == ".py" else without_words
    first, second = (normal(text) for text in texts)
    return NAMES if first == second else DIFFERENT


def without_words(text: str) -> list[Any]:
    """The lines of ``actions.jsonl`` without sentences and names of parameters."""
    rows = [json.loads(line) for line in text.splitlines()]
    return [{**row, "words": "", "params": sorted(_leaves(row.get("params")))} for row in rows]


def _leaves(data: Any) -> Iterator[str]:
    if isinstance(data, (dict, list)):
        for item in data.values() if isinstance(data, dict) else data:
            yield from _leaves(item)
    else:
        yield json.dumps(data)


def normalised(text: str) -> str:
    """The syntax tree of a file in words: without docstrings and comments, names that it defines numbered by scope.

    A text that is no Python stays as it is.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text
    return ast.dump(Numbering(tree).visit(tree), indent=0)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SCOPES = (*FUNCTIONS, *COMPREHENSIONS)


class Numbering(ast.NodeTransformer):
    """Replaces each name that is defined in the module by its number in order of appearance within its scope.

    Names of imports, attributes and class bodies stay: others refer to them by their text. So do keywords of calls, but for
    calls of the module's functions (also as ``f[grid](...)`` and ``wrap_triton(f)[grid](...)``), which follow the parameter.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._parameters = {
            node.name: {argument.arg: f"p{i}" for i, argument in enumerate(_arguments(node.args))}
            for node in tree.body
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        self._scopes: list[dict[str, str]] = [self._numbered("m", _bound(tree.body))]

    @staticmethod
    def _numbered(prefix: str, names: Sequence[str]) -> dict[str, str]:
        return {name: f"{prefix}{i}" for i, name in enumerate(names)}

    def _new(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), name)

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body
            is_text = body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
            if is_text and isinstance(body[0].value.value, str):  # type: ignore[attr-defined]
                node.body = body[1:]
        if isinstance(node, SCOPES):
            return self._visit_scope(node)
        if isinstance(node, ast.ClassDef):
            node.name = self._new(node.name)
            names = [*_bound(node.body), *(item.name for item in node.body if isinstance(item, ast.ClassDef))]
            return self._within(dict(zip(names, names, strict=True)), node)
        return super().visit(node)

    def _visit_scope(self, node: Any) -> ast.AST:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.name = self._new(node.name)
            node.decorator_list = [self.visit(item) for item in node.decorator_list]
        depth = len(self._scopes)
        scope: dict[str, str] = {}
        if isinstance(node, FUNCTIONS):
            scope = {argument.arg: f"s{depth}p{i}" for i, argument in enumerate(_arguments(node.args))}
            body = node.body if isinstance(node.body, list) else [node.body]
        else:
            body = [node]
        local = [name for name in _bound(body, root=node) if name not in scope]
        scope.update(self._numbered(f"s{depth}v", local))
        for item in ast.walk(node) if isinstance(node, FUNCTIONS) else ():
            if isinstance(item, (ast.Global, ast.Nonlocal)):
                scope = {name: new for name, new in scope.items() if name not in item.names}
        return self._within(scope, node)

    def _within(self, scope: dict[str, str], node: ast.AST) -> ast.AST:
        self._scopes.append(scope)
        self.generic_visit(node)
        self._scopes.pop()
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = self._new(node.arg)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._new(node.id)
        return node

    def visit_Global(self, node: ast.Global) -> ast.AST:
        node.names = [self._new(name) for name in node.names]
        return node

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        node.names = [self._new(name) for name in node.names]
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        node.name = self._new(node.name) if node.name else None
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        callee: ast.AST = node.func
        if isinstance(callee, ast.Subscript):
            callee = callee.value
        if isinstance(callee, ast.Call) and ast.unparse(callee.func).endswith("wrap_triton") and callee.args:
            callee = callee.args[0]
        parameters = self._parameters.get(callee.id, {}) if isinstance(callee, ast.Name) else {}
        for keyword in node.keywords:
            if keyword.arg is not None:
                keyword.arg = parameters.get(keyword.arg, keyword.arg)
        return self.generic_visit(node)


def _arguments(node: ast.arguments) -> list[ast.arg]:
    extra = [item for item in (node.vararg, node.kwarg) if item is not None]
    return [*node.posonlyargs, *node.args, *node.kwonlyargs, *extra]


def _bound(body: Sequence[ast.AST], root: ast.AST | None = None) -> list[str]:
    """The names that code binds in its own scope, in order of appearance; none that an import binds."""
    collected: dict[str, None] = {}
    imported: set[str] = set()

    def meet(node: ast.AST) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imported.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            collected.setdefault(node.name)
            return
        elif isinstance(node, SCOPES) and node is not root:
            return
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            collected.setdefault(node.id)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            collected.setdefault(node.name)
        for child in ast.iter_child_nodes(node):
            meet(child)

    for item in body:
        meet(item)
    return [name for name in collected if name not in imported]


def main() -> int:
    """Run one of the three stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(dest="stage", required=True)
    capturing = stages.add_parser("capture", help="capture the targets; needs torch")
    capturing.add_argument("graphs", type=Path)
    capturing.add_argument("targets", nargs="*", help="FILE::NAME; by default examples and benchmarks")
    rendering = stages.add_parser("render", help="write the code of each step; needs no torch")
    rendering.add_argument("graphs", type=Path)
    rendering.add_argument("out", type=Path)
    rendering.add_argument("--steps", type=int, default=STEPS, help="most steps of a run")
    comparing = stages.add_parser("compare", help="compare two rendered folders")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.stage == "capture":
        chosen = {f"{Path(text.split('::')[0]).stem}.{text.split('::')[1]}": text for text in options.targets}
        return capture_all(options.graphs, chosen or targets())
    if options.stage == "render":
        return render_all(options.graphs, options.out, options.steps)
    return compare_all(options.before, options.after)


if __name__ == "__main__":
    sys.exit(main())
