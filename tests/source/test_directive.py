"""Workloads from directives above a target, and errors for invalid ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmc_lsp.core.errors import MtmcError, RequestError, TargetUnsupported
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import (
    ArgumentSpec,
    Container,
    ContainerKind,
    ModuleForm,
    TensorSpec,
    Workload,
    WorkloadSource,
    leaves_of,
)
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.source.workload.directive import parse_directive
from mtmc_lsp.source.workload.suggestion import suggest_directive

FUNCTION = "def f(x, w=None, eps=1e-6, mode='sum', flag=False, sizes=(1,)):\n    return x\n"
MODULE = "class M(nn.Module):\n    def __init__(self, dim, heads=8):\n        pass\n\n    def forward(self, x):\n        return x\n"


def read(directive: str, code: str = FUNCTION, name: str = "f") -> Workload:
    """Parse the workload of code with a directive above it."""
    comment = "".join(f"# mtmc: {line}\n" for line in directive.split("\n"))
    text = f"import torch\n{comment}{code}".encode()
    workload = parse_directive(text, find_target(text, "m.py", name), "m.py")
    assert workload is not None
    return workload


def tensor(workload: Workload, name: str) -> TensorSpec:
    found = next(a.tensor for a in workload.arguments if a.name == name)
    assert found is not None
    return found


def shape(workload: Workload, name: str) -> list[str | int]:
    return [size.to_json() for size in tensor(workload, name).shape]


def test_shapes_consist_of_numbers_named_sizes_and_expressions() -> None:
    workload = read("x=f32[B,2*D] w=bf16[64,D//4,B+1] B=8 D=64")
    assert shape(workload, "x") == ["B", "2 * D"]
    assert [s.value(workload.sizes) for s in tensor(workload, "w").shape] == [64, 16, 9]
    assert workload.sizes == {"B": 8, "D": 64}
    assert (workload.source, workload.line, workload.device) == (WorkloadSource.DIRECTIVE, 2, "cuda")


def test_a_tensor_without_sizes_is_a_scalar() -> None:
    assert shape(read("x=f32[]"), "x") == []


@pytest.mark.parametrize(
    ("written", "dtype"),
    [
        ("f64", "float64"), ("f32", "float32"), ("f16", "float16"), ("bf16", "bfloat16"), ("f8e4m3", "float8_e4m3fn"),
        ("i64", "int64"), ("i32", "int32"), ("u8", "uint8"), ("bool", "bool"),
        ("Float32", "float32"), ("BFloat16", "bfloat16"), ("Int64", "int64"), ("Bool", "bool"),
    ],
)  # fmt: skip
def test_dtypes_are_short_names_or_jaxtyping_names(written: str, dtype: str) -> None:
    assert tensor(read(f"x={written}[4]"), "x").dtype == dtype


def test_strides_and_ranges_follow_the_sizes() -> None:
    workload = read("x=f32[B,64]{1,B}@-1.5..2 w=i64[B]@0..V-1 B=8 V=100")
    x, w = tensor(workload, "x"), tensor(workload, "w")
    assert x.stride is not None
    assert [s.value(workload.sizes) for s in x.stride] == [1, 8]
    assert (x.low, x.high, x.high_size) == (-1.5, 2.0, None)
    assert (w.low, w.high, str(w.high_size)) == (0.0, 99.0, "V - 1")


def test_constants_are_numbers_strings_none_and_lists() -> None:
    workload = read("x=f32[4] w=None eps=-1e-5 mode='a b [c' flag=True sizes=[1, 2.5, 'z']")
    constants = {a.name: a.constant for a in workload.arguments if a.tensor is None}
    assert constants == {"w": None, "eps": -1e-5, "mode": "a b [c", "flag": True, "sizes": [1, 2.5, "z"]}


def test_arguments_are_in_parameter_order_without_defaults() -> None:
    assert [a.name for a in read("eps=1.0 w=f32[4] x=f32[4]").arguments] == ["x", "w", "eps"]


def test_a_size_that_is_also_an_argument_becomes_a_fixed_number() -> None:
    workload = read("x=f32[B,n] n=16 B=4", "def f(x, n):\n    return x.view(n)\n")
    assert shape(workload, "x") == ["B", 16]
    assert workload.arguments[1] == ArgumentSpec("n", None, 16)
    assert workload.sizes == {"B": 4}


def test_constructor_arguments_follow_init_and_fix_the_sizes_they_use() -> None:
    workload = read("x=f32[B,D] init: dim=2*D heads=4\nB=4 D=32", MODULE, "M")
    assert [(a.name, a.constant) for a in workload.init_arguments] == [("dim", 64), ("heads", 4)]
    assert shape(workload, "x") == ["B", 32]
    assert workload.sizes == {"B": 4}


def test_a_shape_may_use_a_constructor_argument() -> None:
    assert shape(read("x=f32[4,dim] init: dim=32", MODULE, "M"), "x") == [4, 32]


def test_sizes_may_depend_on_each_other_in_any_order() -> None:
    assert read("x=f32[H,D] H=2*D D=8").sizes == {"H": 16, "D": 8}


def test_device_and_gradients_are_options() -> None:
    workload = read("x=f32[4] w=f32[4] device=cpu grad=x,w")
    assert workload.device == "cpu"
    assert [a.tensor.requires_grad for a in workload.arguments if a.tensor] == [True, True]


@pytest.mark.parametrize(("word", "constant"), [("grad=f32[4]", None), ("grad=None", None), ("grad=0.5", 0.5)])
def test_an_argument_may_be_called_grad(word: str, constant: object) -> None:
    workload = read(f"x=f32[4] {word}", "def f(x, grad):\n    return x\n")
    assert [a.name for a in workload.arguments] == ["x", "grad"]
    assert (workload.arguments[1].tensor is not None) == ("f32" in word)
    assert workload.arguments[1].constant == constant
    asking = read("x=f32[4] grad=x", "def f(x, grad=None):\n    return x\n")
    assert tensor(asking, "x").requires_grad


@pytest.mark.parametrize(
    ("words", "form"),
    [
        ("module=bf16,eval", ModuleForm("bfloat16", False)),
        ("module=train", ModuleForm("", True)),
        ("module=float16", ModuleForm("float16")),
        ("", ModuleForm()),
    ],
)
@pytest.mark.parametrize("name", ["M", "M.forward", "M.helper"])
def test_a_word_gives_the_module_its_dtype_and_mode(words: str, form: ModuleForm, name: str) -> None:
    helper = "\n    # mtmc: y=f32[8]\n    def helper(self, y):\n        return y\n"
    text = f"# mtmc: {words} x=f32[4] init: dim=3\n{MODULE}{helper}".encode()
    workload = parse_directive(text, find_target(text, "m.py", name), "m.py")
    assert workload is not None and workload.module == form


@pytest.mark.parametrize(("word", "dtype"), [("autocast=bf16", "bfloat16"), ("autocast=f16", "float16"), ("", "")])
def test_a_word_gives_the_callers_autocast(word: str, dtype: str) -> None:
    assert read(f"x=f32[4] {word}", "def f(x):\n    return x\n").autocast == dtype
    asking = read("x=f32[4] autocast=True", "def f(x, autocast):\n    return x\n")
    assert asking.autocast == "" and [a.name for a in asking.arguments] == ["x", "autocast"]


def test_a_tensor_may_be_called_module() -> None:
    workload = read("x=f32[4] module=f32[4]", "def f(x, module):\n    return x\n")
    assert [a.name for a in workload.arguments] == ["x", "module"]


def test_a_quoted_device_is_the_argument_of_that_name() -> None:
    workload = read("x=f32[4] device='cuda'", "def f(x, device):\n    return x\n")
    assert workload.arguments[1].constant == "cuda"


def test_directive_lines_may_be_mixed_with_other_comments_above_decorators() -> None:
    text = b"# mtmc: x=f32[B]\n# a note\n#mtmc: B=8\n@deco(\n    1\n)\ndef f(x):\n    return x\n"
    workload = parse_directive(text, find_target(text, "m.py", "f"), "m.py")
    assert workload is not None
    assert workload.sizes == {"B": 8}


def test_a_comment_separated_from_the_target_is_not_its_directive() -> None:
    text = b"# mtmc: x=f32[4]\n\ndef f(x):\n    return x\n"
    assert parse_directive(text, find_target(text, "m.py", "f"), "m.py") is None


def test_a_directive_inside_a_string_is_ignored() -> None:
    text = b'a = """\n# mtmc: x=f32[4]"""\ndef f(x):\n    return x\n'
    assert parse_directive(text, find_target(text, "m.py", "f"), "m.py") is None


@pytest.mark.parametrize("name", ["M", "M.forward"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("place", ["class M", "    def __init__", "    def forward"])
def test_a_directive_above_the_class_or_above_one_of_its_two_methods_serves_both(
    place: str, newline: str, name: str
) -> None:
    indent = place[: -len(place.lstrip())]
    code = MODULE.replace(place, f"{indent}# mtmc: x=f32[4] init: dim=3\n{place}")
    text = ("\ufeff" + code).replace("\n", newline).encode()
    workload = parse_directive(text, find_target(text, "m.py", name), "m.py")
    assert workload is not None
    assert [a.constant for a in workload.init_arguments] == [3]


def test_another_method_has_its_own_inputs_and_the_constructor_arguments_of_the_class() -> None:
    helper = "\n    # mtmc: y=f32[8]\n    def helper(self, y):\n        return y\n\n    def bare(self, z):\n        return z\n"
    text = f"# mtmc: x=f32[4] init: dim=3\n{MODULE}{helper}".encode()
    workload = parse_directive(text, find_target(text, "m.py", "M.helper"), "m.py")
    assert workload is not None
    assert [a.name for a in (*workload.arguments, *workload.init_arguments)] == ["y", "dim"]
    assert parse_directive(text, find_target(text, "m.py", "M.bare"), "m.py") is None


def test_constructor_and_forward_of_a_base_class_in_the_file_are_used() -> None:
    code = f"{MODULE}\n\n# mtmc: x=f32[4] init: dim=3\nclass Sub(M):\n    pass\n".encode()
    workload = parse_directive(code, find_target(code, "m.py", "Sub"), "m.py")
    assert workload is not None
    assert [a.name for a in workload.arguments] == ["x"]


def test_a_class_without_forward_in_the_file_is_refused_with_its_line() -> None:
    text = b"# mtmc: x=f32[4]\nclass Sub(lib.Module):\n    pass\n"
    with pytest.raises(TargetUnsupported, match="does not define forward in this file") as caught:
        parse_directive(text, find_target(text, "m.py", "Sub"), "m.py")
    assert str(caught.value).startswith("m.py:2: ")


def test_an_annotation_completes_a_directive() -> None:
    workload = read("x=f32[B,4] B=8", 'def f(x, w: BFloat16[Tensor, "B 4"]):\n    return x\n')
    assert tensor(workload, "w").dtype == "bfloat16"
    assert shape(workload, "w") == ["B", 4]


@pytest.mark.parametrize(
    ("directive", "message", "remedy"),
    [
        ("x=f33[4]", "unknown dtype 'f33'", "bf16"),
        ("x=f32[B]", "size 'B' has no value", "Add B=64"),
        ("x", "cannot read 'x'", "# mtmc: x=f32[64,1024]"),
        ("x=", "cannot read 'x='", "# mtmc: x=f32[64,1024]"),
        ("x.y=f32[4]", "cannot read 'x.y=f32[4]'", "# mtmc:"),
        ("x=f32[4 w=f32[4]", "'x=f32[4' is not closed", "missing ]"),
        ("x=f32[4] mode='sum", "is not closed", "missing '"),
        ("x=f32[4]junk", "cannot read the tensor x=f32[4]junk", "{1,64}"),
        ("x=f32[4,%]", "cannot read the sizes [4,%]", "separated by commas"),
        ("x=f32[4,]", "cannot read the sizes [4,]", "separated by commas"),
        ("x=f32[4.5]", "cannot read the sizes [4.5]", "separated by commas"),
        ("x=f32[4,8]{1}", "2 sizes and 1 strides", "one stride per size"),
        ("x=f32[4]{-1}", "negative", "Change it"),
        ("x=f32[4-8]", "negative", "Change it"),
        ("x=f32[B//(B-B)] B=2", "divides by zero", "Change a size"),
        ("x=i64[4]@5..1", "is empty", "Swap"),
        ("x=i64[4]@0..V", "cannot read the range 0..V", "@0..V-1"),
        ("x=f32[4] z=f32[4]", "no parameter 'z'", "x, w, eps"),
        ("x=f32[4] esp=1", "no parameter 'esp'", "x, w, eps"),
        ("x=f32[4] esp=1.5", "no parameter 'esp'", "x, w, eps"),
        ("w=f32[4]", "parameter 'x' has no value", "Add x=f32"),
        ("x=f32[4] x=f32[8]", "'x' is set twice", "Remove one"),
        ("x=f32[4] device=tpu", "device must be cuda or cpu", "device=cpu"),
        ("x=f32[4] autocast=f32", "autocast must be bf16 or f16, not 'f32'", "Write autocast=bf16 or autocast=f16"),
        ("x=f32[4] grad=w", "w is not a tensor argument", "Possible arguments: x"),
        ("x=i64[4] grad=x", "has no gradient", "Possible arguments: none"),
        ("x=f32[4] mode=sum", "cannot read the value 'sum'", "mode='sum'"),
        ("x=f32[4] module=bf16", "f has no module", "Remove module=bf16"),
        (
            "x=f32[4] mode={1.5:2}",
            "cannot read mode={1.5:2}: '1.5:2' is not a key with a value",
            'x={"a":f32[N],"n":2}',
        ),
        ("x=f32[4] mode={1:2,1:3}", "has a key twice", "a dictionary as"),
        ("x=f32[4] w=(f32[4],,2)", "an item of (f32[4],,2) is empty", "a tuple as"),
        ("x=f32[4] w=Config(f32[4])", "'f32[4]' is not a field with a value", "x=Config(w=f32[N],n=2)"),
        ("x=f32[4] w=(f32[4],f33[4])", "unknown dtype 'f33'", "bf16"),
        ("x=f32[4] w=(f32[4],f32[B])", "size 'B' has no value", "Add B=64"),
        ("x=f32[4] w={'a':sum}", "cannot read the value 'sum'", "w['a']='sum'"),
        ("x=f32[4] w=(f32[4],2) grad=w[1]", "w[1] is not a tensor argument", "Possible arguments: x, w[0]"),
        ("x=f32[4] init: dim=4", "f is a function", "Remove `init:`"),
    ],
)
def test_an_invalid_directive_is_reported_with_file_line_and_remedy(directive: str, message: str, remedy: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(directive)
    assert message in caught.value.message
    assert remedy in caught.value.remedy
    assert str(caught.value).startswith("m.py:2: in the mtmc directive: ")


@pytest.mark.parametrize(
    ("directive", "message", "remedy"),
    [
        ("x=f32[4]", "M() needs a value for 'dim'", "init: dim=..."),
        ("x=f32[4] init: dim=4 depth=2", "M() has no parameter 'depth'", "dim, heads"),
        ("x=f32[4] init: dim=big", "cannot read the value 'big'", "dim='big'"),
        ("module=fp8 x=f32[4] init: dim=4", "unknown word 'fp8' in module=fp8", "module=bf16,eval"),
        ("module=i64 x=f32[4] init: dim=4", "unknown word 'int64' in module=i64", "module=bf16,eval"),
        ("module=eval,train x=f32[4] init: dim=4", "module=eval,train contradicts itself", "module=bf16,eval"),
    ],
)
def test_invalid_constructor_arguments_are_reported(directive: str, message: str, remedy: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(directive, MODULE, "M")
    assert message in caught.value.message
    assert remedy in caught.value.remedy


def test_an_error_has_the_line_of_its_entry() -> None:
    with pytest.raises(RequestError) as caught:
        read("x=f32[4]\nw=f99[4]")
    assert str(caught.value).startswith("m.py:3: ")


@settings(max_examples=300, deadline=None)
@given(st.text("xwBD=f32[],{}@.-+*/0149 '\"()\\_n:eé", max_size=40))
def test_any_text_gives_a_workload_or_a_user_error(directive: str) -> None:
    text = f"import torch\n# mtmc: x=f32[4] {directive}\n{FUNCTION}".encode()
    error = None
    try:
        assert parse_directive(text, find_target(text, "m.py", "f"), "m.py") is not None
    except MtmcError as raised:
        error = raised
    assert error is None or (error.where is not None and error.remedy)


# Containers ----------------------------------------------------------------------------------------------------------

ATTENTION = "def f(x, rope, batch=None, cfg=None, *more, scale=1.0, **named):\n    return x\n"


def described(workload: Workload, name: str) -> ArgumentSpec:
    return next(argument for argument in workload.arguments if argument.name == name)


def test_tuples_lists_dictionaries_and_classes_contain_tensors_and_constants() -> None:
    workload = read(
        'x=f32[B,S] rope=(f32[B,S], f32[S]{0}) batch={"x": bf16[B]@0..1, "n": [i64[S], 2*S]} '
        "cfg=pkg.Config(w=f32[S], eps=1e-5, inner=(3,)) B=2 S=8",
        ATTENTION,
    )
    assert list(workload.tensors) == ["x", "rope[0]", "rope[1]", "batch['x']", "batch['n'][0]", "cfg.w"]
    assert [(leaf.name, leaf.constant) for leaf in leaves_of(workload.arguments) if leaf.tensor is None] == [
        ("batch['n'][1]", 16),
        ("cfg.eps", 1e-5),
        ("cfg.inner[0]", 3),
    ]
    kinds = [item.container.kind for item in workload.arguments if item.container is not None]
    assert kinds == [ContainerKind.TUPLE, ContainerKind.DICT, ContainerKind.FIELDS]
    assert described(workload, "cfg").container.class_name == "pkg.Config"
    assert (workload.tensors["batch['x']"].high, workload.tensors["rope[1]"].stride) == (1.0, (Size.of(0),))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_directive_may_be_above_between_or_below_the_decorators(place: int) -> None:
    lines = ["@torch.no_grad()", "@functools.cache", "def f(x):", "    return x"]
    lines.insert(place, "# mtmc: x=f32[B,4] B=2")
    text = "\n".join(lines).encode()
    workload = parse_directive(text, find_target(text, "m.py", "f"), "m.py")
    assert workload is not None and shape(workload, "x") == ["B", 4]


def test_a_range_after_a_container_is_for_each_tensor_without_one() -> None:
    workload = read("x=f32[B] rope=[f32[B],(f32[S]@-1..1,i64[S])]@0..S-1 B=2 S=8", ATTENTION)
    ranges = {name: (tensor.low, tensor.high) for name, tensor in workload.tensors.items()}
    assert ranges == {"x": (None, None), "rope[0]": (0, 7), "rope[1][0]": (-1, 1), "rope[1][1]": (0, 7)}


def test_a_size_used_by_a_constant_in_a_container_is_fixed() -> None:
    workload = read("x=f32[B,S] rope=(f32[B], 2*S) B=2 S=8", ATTENTION)
    assert shape(workload, "x") == ["B", 8]
    assert workload.sizes == {"B": 2}


def test_parentheses_around_arithmetic_are_no_tuple_and_lists_of_numbers_are_one_constant() -> None:
    workload = read("x=f32[4] rope=(2*3) batch=[[1,2],[3]] cfg=(4,5)", ATTENTION)
    assert [described(workload, name).constant for name in ("rope", "batch")] == [6, [[1, 2], [3]]]
    assert described(workload, "cfg").container == Container(ContainerKind.TUPLE, (0, 1))


def test_further_arguments_are_a_tuple_and_a_dictionary() -> None:
    workload = read('x=f32[4] rope=1 more=(f32[4],) named={"gain": f32[4]}', ATTENTION)
    assert described(workload, "more").container.kind is ContainerKind.POSITIONAL
    assert described(workload, "named").container.kind is ContainerKind.KEYWORDS
    with pytest.raises(RequestError, match=r"more must be a tuple, since it is \*more"):
        read("x=f32[4] rope=1 more=f32[4]", ATTENTION)


def test_gradients_may_be_asked_for_a_tensor_in_a_container() -> None:
    workload = read("x=f32[4] rope=(f32[4],f32[4]) grad=rope[1]", ATTENTION)
    assert [path for path, spec in workload.tensors.items() if spec.requires_grad] == ["rope[1]"]


def test_a_workload_with_containers_survives_json() -> None:
    workload = read('x=f32[B] rope=(f32[B],{"a":2}) B=2', ATTENTION)
    assert from_json(Workload, to_json(workload)) == workload


SUGGESTED = """class Rope(NamedTuple):
    cos: torch.Tensor
    sin: torch.Tensor
    step: int = 0

def f(x, cache, batch, rope: Rope, pair: tuple[torch.Tensor, torch.Tensor]):
    k, v = cache
    return batch["x"] + batch['mask'] + batch["x"]
"""


def test_the_suggested_directive_has_the_containers_that_the_code_takes_apart() -> None:
    text = SUGGESTED.encode()
    suggestion = suggest_directive(text, find_target(text, "m.py", "f"))
    t = "f32[64,1024]"
    assert suggestion == (
        f'# mtmc: x={t} cache=({t},{t}) batch={{"x":{t},"mask":{t}}} rope=Rope(cos={t},sin={t}) pair=({t},{t})'
    )
    workload = parse_directive(
        SUGGESTED.replace("def f", f"{suggestion}\ndef f").encode(), find_target(text, "m.py", "f"), "m.py"
    )
    assert workload is not None
    assert len(workload.tensors) == 9


@pytest.mark.parametrize(
    ("fields", "suggested"),
    [("    size: int = 8", "Settings()"), ("    size: int\n    rate: float = 0.1", "Settings(size=1)")],
)
def test_the_suggestion_constructs_a_module_with_its_dataclass_of_settings(fields: str, suggested: str) -> None:
    settings = f"@dataclass\nclass Settings:\n{fields}\n\n\n"
    text = (settings + MODULE.replace("dim, heads=8", "config: Settings")).encode()
    assert suggest_directive(text, find_target(text, "m.py", "M")) == f"# mtmc: x=f32[64,1024] init: config={suggested}"
