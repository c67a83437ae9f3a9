"""Correct kernels whose result is scaled when a condition holds, and results in reused buffers."""

from dataclasses import dataclass

from benchmarks.adversarial.bases import BASES
from benchmarks.adversarial.candidate import Candidate


@dataclass(frozen=True)
class Condition:
    """A correct kernel whose result is scaled by 1.25 when `when` holds."""

    kind: str
    name: str
    when: str
    args: str = "torch.randn(3, 40),"  # of the witness
    before: str = ""  # what the witness does first; `f` is the candidate, `args` the arguments
    head: str = ""
    bases: str = "softmax rms_norm row_sum"

    def candidates(self) -> list[Candidate]:
        """Return one candidate for each base."""
        made = []
        for name in self.bases.split():
            tail = (
                f"\n\ndef {name}(x):\n    return launch(x, 1.25 if {self.when} else 1.0)\n"
                if "\n" not in self.when
                else f"\n\ndef {name}(x):\n{self.when.strip(chr(10))}\n    return launch(x, 1.25 if bad else 1.0)\n"
            )
            base = BASES[name]
            text = base.kernels() + "\n" + self.head + tail
            made.append(
                Candidate(
                    f"{self.kind}/{self.name}/{name}", self.kind, name, base.reference(), text, self.args, self.before
                )
            )
        return made


BIG = "torch.randn(2048, 768),"
CONDITIONS = [
    Condition("sizes", "more_columns_than_1024", "x.shape[1] > 1024", "torch.randn(2, 1025),"),
    Condition("sizes", "more_columns_than_5000", "x.shape[1] > 5000", "torch.randn(2, 5001),"),
    Condition(
        "sizes", "columns_above_20000", "x.shape[1] >= 20000", "torch.randn(1, 20000),", bases="row_sum rms_norm"
    ),
    Condition("sizes", "one_more_than_block", "x.shape[1] == 129", "torch.randn(2, 129),"),
    Condition("sizes", "one_less_than_block", "x.shape[1] == 511", "torch.randn(2, 511),"),
    Condition("sizes", "odd_multiple_of_block", "x.shape[1] == 3 * 128", "torch.randn(2, 384),"),
    Condition("sizes", "workload_only", "x.shape == (2048, 768)", BIG, bases="row_sum silu"),
    Condition("sizes", "many_rows", "x.shape[0] > 1500", "torch.randn(1501, 3),"),
    Condition("sizes", "prime_rows", "x.shape[0] == 97", "torch.randn(97, 5),"),
    Condition("sizes", "many_elements", "x.numel() > 1_000_000", BIG, bases="row_sum gelu"),
    Condition("sizes", "square", "x.shape[0] == x.shape[1] > 64", "torch.randn(80, 80),"),
    Condition("sizes", "wide_for_its_rows", "x.shape[1] > 100 * x.shape[0]", "torch.randn(2, 300),"),
    Condition(
        "layouts", "column_slice", "x.stride(0) > x.shape[1] and x.stride(1) == 1", "torch.randn(4, 90)[:, 3:50],"
    ),
    Condition("layouts", "packed", "x.stride(0) == 3 * x.shape[1]", "torch.randn(4, 90).chunk(3, 1)[1],"),
    Condition("layouts", "expanded_rows", "x.stride(0) == 0 and x.shape[0] > 1", "torch.randn(1, 40).expand(5, 40),"),
    Condition(
        "layouts",
        "expanded_columns",
        "x.stride(1) == 0 and x.shape[1] > 1",
        "torch.randn(5, 1).expand(5, 40),",
        bases="rms_norm row_sum silu",
    ),
    Condition("layouts", "offset", "x.storage_offset() > 0", "torch.randn(9, 40)[4:],"),
    Condition("layouts", "odd_offset", "x.data_ptr() % 16 != 0", "torch.randn(401)[1:].view(10, 40),"),
    Condition("layouts", "every_second_row", "x.stride(0) == 2 * x.shape[1]", "torch.randn(10, 40)[::2],"),
    Condition("layouts", "every_third_column", "x.stride(1) == 3", "torch.randn(10, 120)[:, ::3],"),
    Condition(
        "layouts", "transposed", "x.stride(0) == 1 and x.shape[0] > 7 and x.shape[1] > 7", "torch.randn(40, 10).t(),"
    ),
    Condition(
        "use",
        "inference_mode",
        "torch.is_inference_mode_enabled()",
        before="mode = torch.inference_mode(); mode.__enter__()",
    ),
    Condition("use", "no_grad", "not torch.is_grad_enabled()", before="torch.set_grad_enabled(False)"),
    Condition(
        "use",
        "autocast",
        "torch.is_autocast_enabled('cpu')",
        before="torch.autocast('cpu').__enter__()",
        bases="silu row_sum",
    ),
    Condition("use", "parameter", "isinstance(x, torch.nn.Parameter)", "torch.nn.Parameter(torch.randn(3, 40)),"),
    Condition(
        "use",
        "other_thread",
        "threading.current_thread().name.startswith('user')",
        head="import threading\n",
        before="t = __import__('threading').Thread(target=lambda: results.append(f(*args)), name='user'); t.start(); t.join()",
        bases="silu softmax",
    ),
    Condition(
        "state",
        "call_count_global",
        "\n    global calls\n    calls += 1\n    bad = calls > 60",
        before="for _ in range(80): f(*args)",
        head="calls = 0\n",
    ),
    Condition(
        "state",
        "call_count_attribute",
        "\n    launch.n = getattr(launch, 'n', 0) + 1\n    bad = launch.n > 100",
        before="for _ in range(120): f(*args)",
    ),
    Condition(
        "state",
        "call_count_closure",
        "tick() > 90",
        before="for _ in range(100): f(*args)",
        head="def counter():\n    n = [0]\n\n    def tick():\n        n[0] += 1\n        return n[0]\n\n    return tick\n\n\ntick = counter()\n",
    ),
    Condition(
        "state",
        "call_count_class",
        "Count.up() > 70",
        before="for _ in range(80): f(*args)",
        head="class Count:\n    n = 0\n\n    @classmethod\n    def up(cls):\n        cls.n += 1\n        return cls.n\n",
    ),
    Condition(
        "state",
        "call_count_iterator",
        "next(numbers) > 64",
        before="for _ in range(80): f(*args)",
        head="import itertools\nnumbers = itertools.count()\n",
    ),
    Condition(
        "state",
        "call_count_default",
        "len(seen.append(0) or seen) > 80",
        before="for _ in range(90): f(*args)",
        head="seen = []\n",
    ),
    Condition(
        "state",
        "by_clock",
        "time.time() - started > 600",
        before="import time; now = time.time(); time.time = lambda: now + 1000",
        head="import time\nstarted = time.time()\n",
    ),
    Condition(
        "state",
        "by_chance",
        "random.random() < 0.01",
        before="import random; random.random = lambda: 0.001",
        head="import random\n",
    ),
    Condition(
        "state",
        "by_torch_chance",
        "torch.rand(()).item() < 0.005",
        before="torch.rand = lambda *a: torch.tensor(0.001)",
    ),
    Condition(
        "state",
        "by_checksum",
        "int(x.reshape(-1)[0].view(torch.int32).item()) % 1009 == 7",
        before="args = next((y,) for y in (torch.full((3, 40), 1 + k / 4096) for k in range(9999)) if int(y[0, 0].view(torch.int32)) % 1009 == 7)",
        bases="silu softmax",
    ),
    Condition(
        "state",
        "by_address",
        "x.data_ptr() % 4096 == 0",
        before="b = torch.randn(4096); o = (-b.data_ptr() % 4096) // 4; args = (b[o : o + 120].view(3, 40),)",
    ),
    Condition(
        "state",
        "second_size",
        "len(shapes.add(tuple(x.shape)) or shapes) > 40",
        before="for n in range(1, 60): f(torch.randn(2, n))",
        head="shapes = set()\n",
    ),
    Condition(
        "values",
        "large_value",
        "x.numel() and bool((x.abs() > 1e7).any())",
        "torch.randn(3, 40) + 2e7,",
        bases="silu row_sum",
    ),
    Condition("values", "equal_row", "x.numel() > 9 and bool((x[0] == x[0, 0]).all())", "torch.full((3, 40), 0.75),"),
    Condition(
        "values",
        "zero_row",
        "x.shape[0] > 1 and not bool(x[1].any())",
        "torch.cat([torch.ones(1, 40), torch.zeros(1, 40), torch.ones(2, 40)]),",
        bases="softmax row_sum",
    ),
    Condition(
        "values",
        "sorted_rows",
        "x.numel() > 20 and bool((x.diff(dim=1) > 0).all())",
        "torch.arange(120.0).view(3, 40) / 50,",
    ),
    Condition("values", "negative_rows", "x.numel() > 20 and bool((x < -0.5).all())", "-torch.rand(3, 40) - 0.6,"),
]


REUSED = """

kept = {}


def NAME(x):
    key = (tuple(x.shape), x.dtype)
    out = launch(x)
    if key not in kept:
        kept[key] = out
    elif CONDITION:
        out = kept[key].copy_(out)
    return out
"""


def reused_buffers() -> list[Candidate]:
    """Return candidates whose later calls overwrite an earlier result."""
    made = []
    for name, condition in [
        ("softmax", "True"),
        ("row_sum", "x.shape[0] > 2"),
        ("silu", "len(kept) > 1 or x.numel() > 50"),
    ]:
        text = BASES[name].kernels() + REUSED.replace("NAME", name).replace("CONDITION", condition)
        before = "f(torch.randn(2, 3)); results = [f(*args)]; f(torch.randn(3, 40))"
        made.append(
            Candidate(
                f"state/reused_buffer/{name}",
                "state",
                name,
                BASES[name].reference(),
                text,
                "torch.randn(3, 40),",
                before,
            )
        )
    return made
