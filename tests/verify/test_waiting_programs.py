"""Programs of a launch that wait for each other take turns, so that a lock that opens too early shows."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest

from mtmc_lsp.core.results import Verdict, VerdictStatus
from mtmc_lsp.verify.messages import GridOrder
from mtmc_lsp.verify.worker.interpreter import grids
from mtmc_lsp.verify.worker.interpreter.turns import DEADLOCK, Turns, has_while

Judge = Callable[..., Verdict]
ORDER = "depend on the order in which the programs of a launch run"
SUMMED = "import torch\n\n\n# mtmc: x=f32[N,D] N=40 D=24\ndef summed(x):\n    return x.sum(0)\n"
HEAD = "import torch\nimport triton\nimport triton.language as tl\n\n\n@triton.jit\n"
LOADED = """    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row[:, None] * columns + at, mask=(row[:, None] < rows) & (at < columns), other=0.0)
    part = tl.sum(x, axis=0)
"""
TICKETS = f"""{HEAD}def kernel(x_ptr, out_ptr, lock_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
{LOADED}    ticket = tl.atomic_add(lock_ptr, 1)
    while tl.atomic_add(lock_ptr + 1, 0) != ticket:
        pass
    total = tl.load(out_ptr + at, mask=at < columns)
    CRITICAL


def fast(x):
    x = x.contiguous()
    out = torch.zeros(x.shape[1], dtype=x.dtype, device=x.device)
    if x.numel():
        lock = torch.zeros(2, dtype=torch.int32, device=x.device)
        block = triton.next_power_of_2(x.shape[1])
        kernel[(triton.cdiv(x.shape[0], 4),)](x, out, lock, x.shape[0], x.shape[1], ROWS=4, BLOCK=block)
    return out
"""
LAST_ADDS = f"""{HEAD}def kernel(x_ptr, part_ptr, out_ptr, count_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
{LOADED}    CRITICAL
    if count == tl.num_programs(0) - 1:
        total = tl.zeros((BLOCK,), tl.float32)
        for i in range(tl.num_programs(0)):
            total += tl.load(part_ptr + i * columns + at, mask=at < columns)
        tl.store(out_ptr + at, total, mask=at < columns)


def fast(x):
    x = x.contiguous()
    out = torch.zeros(x.shape[1], dtype=x.dtype, device=x.device)
    if x.numel():
        count = torch.zeros(1, dtype=torch.int32, device=x.device)
        programs, block = triton.cdiv(x.shape[0], 4), triton.next_power_of_2(x.shape[1])
        part = torch.zeros(programs, x.shape[1], dtype=x.dtype, device=x.device)
        kernel[(programs,)](x, part, out, count, x.shape[0], x.shape[1], ROWS=4, BLOCK=block)
    return out
"""
STORED = "tl.store(out_ptr + at, total + part, mask=at < columns)"
OPENED = "tl.atomic_add(lock_ptr + 1, 1)"
KEPT = "tl.store(part_ptr + tl.program_id(0) * columns + at, part, mask=at < columns)"
COUNTED = "count = tl.atomic_add(count_ptr, 1)"


@pytest.mark.parametrize(("text", "first", "then"), [(TICKETS, STORED, OPENED), (LAST_ADDS, KEPT, COUNTED)])
def test_a_flag_that_is_set_before_the_store_is_found(judge: Judge, text: str, first: str, then: str) -> None:
    honest = judge(SUMMED, "summed", text.replace("CRITICAL", f"{first}\n    {then}"), "fast")
    assert honest.is_correct, honest.reason
    # Only tickets make programs wait.
    notes = [note for note in honest.notes if "may wait for each other" in note]
    assert [note.split(" may")[0] for note in notes] == (["programs of kernel"] if text == TICKETS else [])
    wrong = judge(SUMMED, "summed", text.replace("CRITICAL", f"{then}\n    {first}"), "fast")
    assert wrong.status is VerdictStatus.INCORRECT
    assert ORDER in wrong.reason


COUNT = "import torch\n\n\n# mtmc: x=bf16[N,D] N=20 D=16\ndef nonzero(x):\n    return x.sign().abs().sum(0)\n"
ADDED = f"""{HEAD}def kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * columns + at, mask=at < columns, other=0.0)
    one = ((x > 0) | (x < 0)).to(tl.bfloat16)
    tl.atomic_add(out_ptr + at, one, mask=at < columns)


def fast(x):
    x = x.contiguous()
    out = torch.zeros(x.shape[1], dtype=x.dtype, device=x.device)
    if x.numel():
        kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
"""


def test_an_atomic_addition_of_bfloat16_is_one_step(judge: Judge) -> None:
    verdict = judge(COUNT, "nonzero", ADDED, "fast")
    assert verdict.is_correct, verdict.reason


def far_loop(count: int, *, waits: bool) -> Callable[..., None]:
    """A function with a loop that is too long for a short jump."""
    head = "while x:" if waits else "for y in x:"
    text = f"def loop(x, y=0):\n    {head}\n" + "        y = x + y * 2\n" * count
    names: dict[str, Callable[..., None]] = {}
    exec(text, names)
    return names["loop"]


@pytest.mark.parametrize("count", [1, 400])
def test_only_while_loops_can_wait(count: int) -> None:
    assert has_while(far_loop(count, waits=True).__code__)
    assert not has_while(far_loop(count, waits=False).__code__)


@pytest.mark.parametrize("order", list(GridOrder))
def test_programs_continue_while_others_wait(order: GridOrder) -> None:
    """Each program waits for the one before it, and only some of them are under way."""
    turns, done = Turns(3, order), [True, *[False] * 8]

    def program(number: int) -> None:
        while not done[number]:
            turns.pause()
        done[number + 1] = True
        turns.note_progress()

    turns.run([lambda number=number: program(number) for number in range(8)])  # type: ignore[misc]
    assert all(done)


@pytest.mark.parametrize("must_compare", [True, False])
def test_programs_take_turns_only_in_samples_that_must_be_compared(must_compare: bool) -> None:
    """At the workload's sizes, they run one after the other, as long as there is time."""
    took_turns = []

    def kernel() -> None:
        took_turns.append(grids.current.turns is not None)

    builder = Mock(grid_dim=(20, 1, 1))
    with (
        grids.in_order(GridOrder.REVERSED, 0),
        grids.sampled(0.5, 1.0, must_compare=must_compare) as stores,
    ):
        grids.Launch(kernel, builder, {}, waits=True).run({})
    assert took_turns == [must_compare] * 20
    assert stores.launches == [("kernel", 20, 20)]


def test_programs_that_all_wait_are_a_deadlock() -> None:
    turns, ended = Turns(4), []

    def program() -> None:
        try:
            while True:
                turns.pause()
        finally:
            ended.append(True)

    with pytest.raises(RuntimeError, match=DEADLOCK):
        turns.run([program] * 4)
    assert len(ended) == 4
