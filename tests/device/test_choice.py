"""The selection of the device model for a plan."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.settings import Settings
from mtmc_lsp.device.choice import model_of_arch, model_of_gpu, planning_model


@pytest.mark.parametrize(
    ("gpu", "arch", "sm_count", "terabytes"),
    [
        ("NVIDIA H100 80GB HBM3", "sm_90", 132, 3.35),
        ("NVIDIA H200", "sm_90", 132, 4.8),
        ("NVIDIA L4", "sm_89", 58, 0.3),
        ("NVIDIA L40S", "sm_89", 142, 0.864),
        ("NVIDIA A100-SXM4-80GB", "sm_80", 108, 2.039),
        ("NVIDIA A10G", "sm_86", 72, 0.6),
    ],
)
def test_a_gpu_is_identified_by_the_drivers_name(gpu: str, arch: str, sm_count: int, terabytes: float) -> None:
    model = model_of_gpu(gpu, arch)
    assert (model.name, model.sm_count, model.peak_bandwidth / 1e12) == (gpu, sm_count, terabytes)
    assert not model.note


def test_an_unknown_gpu_is_planned_as_its_architecture_and_says_so() -> None:
    model = model_of_gpu("NVIDIA RTX 6000 Ada Generation", "sm_89")
    assert model.sm_count == 142
    assert "NVIDIA RTX 6000 Ada Generation" in model.note
    assert "L40S" in model.note


@pytest.mark.parametrize(
    ("arch", "nearest"),
    [
        ("sm_103", "B200"),
        ("sm_121", "RTX 5090"),
        ("sm_87", "A10"),
        ("sm_75", "A100"),
        ("gfx950", "MI300X"),
        ("gfx90a", "MI300X"),
    ],
)
def test_an_architecture_without_a_file_is_planned_as_the_nearest_and_says_so(arch: str, nearest: str) -> None:
    model = model_of_arch(arch)
    assert model.arch == arch
    assert nearest in model.name
    assert f"no data file describes {arch}" in model.note
    assert "mtmc calibrate" in model.note


def test_an_architecture_older_than_all_files_gets_the_least_shared_memory() -> None:
    assert model_of_arch("sm_75").shared_bytes == 65536
    assert not model_of_arch("sm_75").has_tma


def test_an_architecture_with_its_specific_features_is_the_same_device() -> None:
    assert model_of_arch("sm_90a") == model_of_arch("sm_90")
    assert not model_of_arch("sm_90a").note


def test_without_a_gpu_the_default_is_an_h200_with_the_shared_memory_of_all_architectures() -> None:
    model = planning_model(Settings().archs)
    assert model.name == "NVIDIA H200"
    assert model.title == "NVIDIA H200 (data sheet)"
    assert model.shared_bytes == 65536
    assert planning_model(("sm_86", "sm_80")).name == "NVIDIA A10"
