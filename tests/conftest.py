"""Shared helpers: write a user's file, capture it, render and check candidates."""

from __future__ import annotations

import compileall
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mtmc_lsp.capture.client import find_workload, run_capture
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.source.targets import find_target

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    """Have our modules compiled once, as they are where they were installed: tests start hundreds of processes that import them."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(ROOT / "mtmc_lsp", quiet=2)


SLOW_MODULES = frozenset(
    f"tests/{name}.py"
    for name in """
    capture/test_einsum cli/test_bad_input codegen/test_accuracy codegen/test_image_sizes codegen/test_run_time_numbers cli/test_crashes cli/test_train cli/test_dependencies cli/test_hostile_project cli/test_interpreters
    cli/test_record cli/test_regions codegen/test_attention_masks codegen/test_families codegen/test_large_tensors
    codegen/test_masked_operands codegen/test_moments codegen/test_random_chains codegen/test_recurrent_kernels
    codegen/test_running_products codegen/test_special_values_of_functions codegen/test_special_values_of_losses
    codegen/test_stream_k core/test_fork_server core/test_protocol core/test_worker device/test_plans
    evolve/test_evolve_command examples/test_optimised llm/test_editor llm/test_run planning/test_actions planning/test_convolutions
    planning/test_costs planning/test_few_channels planning/test_im2win planning/test_long_graphs planning/test_networks
    planning/test_pooling planning/test_precisions planning/test_recurrence planning/test_sequences
    planning/test_side_by_side planning/test_split programs/test_captures server/test_cancel server/test_fuzz server/test_hostile_folders
    server/test_hostile_workspaces
    policies/test_training policies_lm/test_new_model policies_lm/test_ppo policies_lm/test_scoring policies_lm/test_train_command policies_lm/test_training
    training/test_autocast training/test_batch_norm training/test_compiled_programs training/test_planted_faults training/test_second_derivatives
    training/test_targets training/test_timing training/test_training_programs training/test_user_losses
    loops/test_blocks loops/test_chunk_values loops/test_chunks loops/test_scan_values loops/test_scans loops/test_sequences loops/test_training
    search/test_public_suite verify/test_choices verify/test_faults verify/test_left_out_elements verify/test_pair_cheats verify/test_pairs
    cli/test_search_option cli/test_sibling cluster/test_conversation core/test_branches loops/test_cells loops/test_kernels
    training/test_attention training/test_linear_losses verify/test_programs_at_once verify/test_streams verify/test_use
    verify/test_network_faults verify/test_real_sizes verify/test_state verify/test_surroundings verify/test_timer_commands
    """.split()
)
"""Modules that take more than 12 s each and that other fast tests cover in part. They get the mark ``slow``."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow modules before pytest selects by mark."""
    for item in items:
        if item.path.relative_to(ROOT).as_posix() in SLOW_MODULES:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random inputs of a test are the same in each run, whichever tests ran before."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture
def user_file(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a user's file into a project of its own."""

    def write(text: str, name: str = "model.py") -> Path:
        (tmp_path / "pyproject.toml").write_text("[project]\nname = 'user'\n")
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture(scope="session")
def interpreter_worker(tmp_path_factory: pytest.TempPathFactory):
    """One worker under Triton's interpreter for all captures of a test process."""
    env = {} if os.environ.get("MTMC_TEST_GPU") else {"TRITON_INTERPRET": "1"}
    worker = Worker(sys.executable, cwd=str(tmp_path_factory.mktemp("cwd")), env=env)
    yield worker
    worker.close()


@pytest.fixture
def captured(user_file, interpreter_worker) -> Callable[[str, str], Capture]:
    """Captures a target of a user's text."""

    def capture(text: str, name: str) -> Capture:
        path = user_file(text)
        source = path.read_bytes()
        target = find_target(source, str(path), name)
        return run_capture(find_workload(str(path), source, target), source, interpreter_worker, 120)

    return capture
