"""A kernel's configuration is typed and complete; errors name the field, the value and the legal values."""

from __future__ import annotations

import json

import pytest

from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.schedule.configs import (
    AttentionConfig,
    IllegalConfig,
    KernelConfig,
    LoopOrder,
    MatmulConfig,
    PrecisionMode,
    RecurrentConfig,
    SplitOnLoad,
    TileConfig,
)
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule

PRODUCT = MatmulConfig(64, 128, 32, 8, 4, 3, PrecisionMode.FP16X3_PROMOTED, split_on_load=SplitOnLoad.BOTH, split_k=4)
CONFIGS: tuple[KernelConfig, ...] = (
    TileConfig(4, 64, order=LoopOrder.COLUMNS),
    PRODUCT,
    AttentionConfig(64, 64, 4, 2),
    RecurrentConfig(16, 16, 32, 4, 1, PrecisionMode.TF32X3),
)


def test_a_stored_schedule_states_every_choice_and_is_read_as_the_same_configurations() -> None:
    schedule = Schedule(tuple(KernelPlan((f"node_{i}",), config) for i, config in enumerate(CONFIGS)))
    data = json.loads(json.dumps(to_json(schedule)))
    assert from_json(Schedule, data) == schedule
    assert [kernel["config"].pop("kind") for kernel in data["kernels"]] == ["tile", "matmul", "attention", "recurrent"]
    assert data["kernels"][0]["config"] == {
        "rows": 4, "block": 64, "loop": False, "warps": 4, "stages": 2, "split": 1, "persist": 0, "order": "columns",
    }  # fmt: skip


BASE = {
    "tile": {},
    "matmul": {
        "block_m": 64, "block_n": 64, "block_k": 32, "group_m": 8, "warps": 4, "stages": 3, "precision": "ieee",
    },
    "attention": {"block_m": 64, "block_n": 64, "warps": 4, "stages": 2},
    "recurrent": {"block_m": 16, "block_n": 16, "block_k": 32, "warps": 4, "stages": 1, "precision": "ieee"},
}  # fmt: skip
ILLEGAL = [
    ("tile", {"rows": 3}, "rows cannot be 3; it must be a power of two from 1 to 65536"),
    ("tile", {"rows": True}, "TileConfig.rows: expected an integer, got True"),
    ("tile", {"warps": "4"}, "TileConfig.warps: expected <class 'int'>, got '4'"),
    ("tile", {"rows": 128, "block": 1024}, "128 rows x 1024 columns: a tile has at most 65536 elements"),
    ("tile", {"order": "diagonal"}, "TileConfig.order: 'diagonal' is none of 'rows', 'columns'"),
    ("tile", {"persist": 4, "split": 2}, "persist cannot be 4: a split kernel has too few tiles"),
    (
        "tile",
        {"persist": 4, "order": "columns"},
        "persist cannot be 4: persistent programs cannot advance along columns first",
    ),
    ("tile", {"block_m": 16}, "unknown field 'block_m' for TileConfig"),
    ("matmul", {"block_k": 8}, "block_k cannot be 8; it must be a power of two from 16 to 256"),
    ("matmul", {"stages": 0}, "stages cannot be 0; it must be a whole number from 1 to 16"),
    ("matmul", {"precision": "fp8"}, "MatmulConfig.precision: 'fp8' is none of 'native', 'ieee'"),
    ("matmul", {"precision": "tf32x3"}, "precision cannot be 'tf32x3'"),
    ("matmul", {"split_on_load": "left"}, "split_on_load cannot be 'left': that needs the precision 'fp16x3-promoted'"),
    ("matmul", {"split_k": 2, "stream_k": 4}, "stream_k cannot be 4: the product is split into 2 parts of K"),
    ("matmul", {"persist": 4, "split_k": 2}, "persist cannot be 4: a split kernel has too few tiles"),
    ("matmul", {"persist": 4, "stream_k": 2}, "persist cannot be 4: the programs of stream-K are persistent already"),
    (
        "matmul",
        {"precision": "fp16x3-promoted", "split_on_load": "right", "split_k": 2},
        "split_k cannot be 2: a kernel that splits one operand on load sums all of K itself",
    ),
    ("attention", {"block_n": 512}, "block_n cannot be 512; it must be a power of two from 16 to 256"),
    ("recurrent", {"precision": "tf32"}, "precision cannot be 'tf32'; it must be 'tf32x3' or 'ieee'"),
]
TYPES = {config.json_tag: type(config) for config in CONFIGS}


@pytest.mark.parametrize(("kind", "changes", "reason"), ILLEGAL, ids=lambda item: str(item)[:40])
def test_an_illegal_choice_is_rejected_with_its_field_its_value_and_the_legal_values(
    kind: str, changes: dict[str, object], reason: str
) -> None:
    assert from_json(TYPES[kind], BASE[kind]), "without the change it is legal"
    with pytest.raises(TypeError) as caught:
        from_json(TYPES[kind], {**BASE[kind], **changes})
    assert reason in str(caught.value)


def test_a_configuration_of_another_kind_is_rejected() -> None:
    with pytest.raises(TypeError, match="expected 'matmul', got 'tile'"):
        from_json(MatmulConfig, to_json(TileConfig()))


def test_an_illegal_configuration_cannot_be_constructed() -> None:
    with pytest.raises(IllegalConfig, match="warps cannot be 3"):
        TileConfig(warps=3)
