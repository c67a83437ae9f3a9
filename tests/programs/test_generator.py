"""The generator writes different, valid, readable programs, and the same ones for the same seed."""

from __future__ import annotations

import ast
import os
import random
import re
import subprocess
import sys

import pytest

from mtmc_lsp.capture.client import find_workload
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.workload import WorkloadSource
from mtmc_lsp.programs.draft import Draft
from mtmc_lsp.programs.family import FAMILIES
from mtmc_lsp.programs.generator import GeneratedProgram, family_names, generate, write_program
from mtmc_lsp.programs.rendering import DIRECTIVE_WIDTH
from mtmc_lsp.programs.sizes import CHANNELS, GROUPS, MAX_ELEMENTS
from mtmc_lsp.source.targets import find_target

PRINT_HASH = "import hashlib; from mtmc_lsp.programs.generator import generate; print(hashlib.sha256(''.join(p.source for p in generate(120, 7)).encode()).hexdigest())"


@pytest.fixture(scope="module")
def programs() -> list[GeneratedProgram]:
    return generate(700, 0)


def test_the_same_seed_gives_the_same_bytes_in_every_process() -> None:
    """Also with another order of sets and dictionaries of strings."""
    hashes = {
        subprocess.run(
            [sys.executable, "-c", PRINT_HASH],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(hashes) == 1


def test_another_seed_gives_other_programs() -> None:
    first, second = ({item.source for item in generate(100, seed)} for seed in (1, 2))
    # The smallest families agree now and then.
    assert len(first & second) <= 2


def test_a_longer_list_begins_with_the_shorter_one() -> None:
    assert generate(150, 3)[:60] == generate(60, 3)


def test_there_are_600_different_programs_of_at_least_40_families(programs: list[GeneratedProgram]) -> None:
    assert len({item.source for item in programs}) == len({item.name for item in programs}) == 700
    assert len({item.family for item in programs}) == len(family_names()) >= 40


def test_most_programs_differ_in_more_than_sizes(programs: list[GeneratedProgram]) -> None:
    forms = {re.sub(r"^# mtmc: .*\n", "", item.source, flags=re.MULTILINE) for item in programs}
    assert len(forms) >= 0.95 * len(programs)


def test_functions_and_modules_and_all_dtypes_occur_often(programs: list[GeneratedProgram]) -> None:
    modules = sum("nn.Module" in item.source for item in programs)
    assert 0.2 * len(programs) < modules < 0.7 * len(programs)
    for dtype in ("f32", "bf16", "f16"):
        assert sum(f"={dtype}[" in item.source for item in programs) > 60


def test_every_program_has_a_directive_that_describes_its_call(programs: list[GeneratedProgram]) -> None:
    for item in programs:
        text = item.source.encode()
        workload = find_workload("program.py", text, find_target(text, "program.py", item.target))
        assert workload.source is WorkloadSource.DIRECTIVE
        for name, tensor in workload.tensors.items():
            elements = 1
            for size in tensor.shape:
                elements *= size.value(workload.sizes)
            assert 0 < elements <= MAX_ELEMENTS, f"{name} of\n{item.source}"


def test_every_argument_and_variable_is_read(programs: list[GeneratedProgram]) -> None:
    for item in programs:
        for function in (node for node in ast.walk(ast.parse(item.source)) if isinstance(node, ast.FunctionDef)):
            body = [node for statement in function.body for node in ast.walk(statement) if isinstance(node, ast.Name)]
            read = {node.id for node in body if isinstance(node.ctx, ast.Load)}
            written = {node.id for node in body if isinstance(node.ctx, ast.Store)}
            unpacked = {
                name.id
                for node in ast.walk(function)
                if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Store)
                for name in node.elts
                if isinstance(name, ast.Name)
            }
            arguments = {argument.arg for argument in function.args.args} - {"self"}
            assert (arguments | written) - unpacked <= read, item.source


def test_lines_are_short_enough_to_read(programs: list[GeneratedProgram]) -> None:
    for item in programs:
        for line in item.source.splitlines():
            assert len(line) <= (DIRECTIVE_WIDTH + 8 if line.startswith("#") else 160), line


def test_every_number_of_groups_divides_every_number_of_channels() -> None:
    assert all(channels % groups == 0 for channels in CHANNELS for groups in GROUPS)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_writes_different_programs(name: str) -> None:
    source = random.Random("variety")
    texts = {write_program(FAMILIES[name], source).source for _ in range(40)}
    assert len({re.sub(r"^# mtmc: .*\n", "", text, flags=re.MULTILINE) for text in texts}) >= 8


def test_one_family_can_be_chosen() -> None:
    assert {item.family for item in generate(5, 0, "rotary")} == {"rotary"}


def test_an_unknown_family_is_an_error_that_names_all() -> None:
    with pytest.raises(RequestError, match="there is no family nope") as error:
        generate(5, 0, "nope")
    assert "rotary" in error.value.remedy


def test_sizes_are_halved_until_no_argument_is_too_large() -> None:
    draft = Draft(random.Random(0), is_module=False)
    draft.sizes.update(B=1024, D=4096, H=4096)
    x = draft.input("x", "B", "D", "H")
    draft.finish([x])
    assert draft.sizes == {"B": 4, "D": 4096, "H": 4096}


def test_what_no_statement_reads_is_left_out() -> None:
    draft = Draft(random.Random(0), is_module=True)
    x, _ = draft.input("x", draft.size("N", (8,))), draft.input("unread", draft.size("M", (8,)))
    draft.layer("unused", f"nn.Linear({draft.constructed('M')}, 4)")
    draft.finish([draft.let("y", f"{x} + 1.0", x)])
    assert (list(draft.arguments), draft.members, draft.sizes, draft.constructor_sizes) == (["x"], [], {"N": 8}, {})


def test_sizes_are_halved_until_no_computed_value_is_too_large() -> None:
    draft = Draft(random.Random(0), is_module=False)
    draft.sizes.update(B=64, S=2048, E=64)
    q = draft.input("q", "B", "16", "S", "E")
    draft.finish([draft.let("scores", f"{q} @ {q}.mT", q, dims=("B", "16", "S", "S"))])
    assert draft.sizes == {"B": 2, "S": 2048, "E": 64}
