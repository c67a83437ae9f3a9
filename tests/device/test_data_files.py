"""Data files: complete, with provenance, and consistent with the compiler's limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtmc_lsp.compile.occupancy import CDNA_LDS, SHARED_LIMIT, SHARED_PER_SM, WARPS_PER_SM
from mtmc_lsp.core.device_model import DeviceModel, Origin
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.device.data_files import FIGURES, FOLDER, DataFile, data_files, read_data_file

FILES = {file.model.name: file for file in data_files()}
MODES = ("fp32", "tf32", "fp16", "bf16", "fp16x3")


def test_there_is_a_file_for_each_gpu_that_the_readme_names() -> None:
    wanted = ("A10", "A100", "L4", "L40S", "H100", "H200", "B200", "RTX 5090", "MI300X")
    assert [word for word in wanted if not any(word in file.gpus for file in FILES.values())] == []
    assert len(FILES) == len(list(FOLDER.glob("*.toml"))) == len(wanted)


@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
def test_each_number_of_a_file_states_how_it_was_obtained(file: DataFile) -> None:
    model = file.model
    assert set(model.provenance) == {*FIGURES, *(f"flops.{mode}" for mode in MODES)}
    assert all(len(each.how) > 5 for each in model.provenance.values())
    assert set(model.flops) == set(MODES)
    peak = model.provenance["peak_bandwidth"]
    assert peak.origin is Origin.DATA_SHEET
    assert model.bandwidth < model.peak_bandwidth < model.l2_bandwidth


@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
def test_a_model_survives_a_json_round_trip(file: DataFile) -> None:
    assert from_json(DeviceModel, to_json(file.model)) == file.model


def test_one_file_represents_each_architecture() -> None:
    archs = [file.model.arch for file in FILES.values()]
    chosen = [file.model.arch for file in FILES.values() if file.represents_arch]
    assert sorted(chosen) == sorted(set(archs))


@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
def test_limits_agree_with_those_of_the_occupancy_calculation(file: DataFile) -> None:
    model = file.model
    assert model.shared_bytes == SHARED_LIMIT[model.arch]
    assert model.shared_bytes_per_sm == SHARED_PER_SM.get(model.arch, CDNA_LDS)
    assert model.max_warps_per_sm == WARPS_PER_SM.get(model.arch, 32)
    assert model.max_warps_per_sm * model.warp_size in (1536, 2048)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('launch_us = { value = 4, origin = "interpolated", how = "that of an H200" }\n', "", "launch_us missing"),
        ('how = "that of an H200"', 'how = ""', "launch_us: how it was obtained is empty"),
        ('value = 4, origin = "interpolated", ', "value = 4, ", "launch_us: expected value, origin and how"),
        ("value = 72,", "value = 72.5,", "sm_count is 72.5, expected int"),
        ("launch_us =", "lunch_us =", "lunch_us is not a figure of a device model"),
        (
            'origin = "interpolated", how = "that of an H200"',
            'origin = "guess", how = "x"',
            "'guess' is not a valid Origin",
        ),
    ],
)
def test_a_faulty_file_is_rejected_with_the_faulty_number(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (FOLDER / "a10.toml").read_text()
    assert old in text
    file = tmp_path / "a10.toml"
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        read_data_file(file)


def test_the_rates_of_the_h200_do_not_change() -> None:
    model = FILES["NVIDIA H200"].model
    assert (model.sm_count, model.shared_bytes, model.l2_bytes) == (132, 232448, 60 << 20)
    assert model.bandwidth == 4.28e12
    assert model.launch_us == 4.0
    assert model.flops == {"fp32": 51e12, "tf32": 400e12, "fp16": 780e12, "bf16": 780e12, "fp16x3": 220e12}
