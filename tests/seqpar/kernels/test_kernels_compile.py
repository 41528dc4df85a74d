"""The Triton kernels compile for real GPUs, where there is none to run them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("compile_kernel.py")
ROOT = PROGRAM.parents[3]


@pytest.fixture
def printed(tmp_path):
    """Run the program with an empty cache of its own: a kernel that is found in one has not been compiled."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def run(*arguments: str) -> str:
        command = [sys.executable, PROGRAM, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        assert any(tmp_path.iterdir())
        return done.stdout

    return run


@pytest.mark.parametrize(
    ("kernel", "target", "dtype"),
    [
        ("_whole_rows", "sm_90", "bfloat16"),
        ("_whole_rows", "sm_80", "float64"),
        ("_whole_rows", "gfx942", "bfloat16"),
        ("_part_sums", "sm_90", "bfloat16"),
        ("_part_gradient", "sm_90", "bfloat16"),
        ("_score_sums", "sm_90", "bfloat16"),
        ("_score_gradient", "sm_90", "bfloat16"),
    ],
)
def test_a_kernel_compiles_and_in_bfloat16_spills_nothing(printed, kernel: str, target: str, dtype: str) -> None:
    size, spilled = map(int, printed(kernel, target, dtype).split())
    assert size
    if dtype == "bfloat16" and target == "sm_90":
        assert spilled == 0
        assert size <= 80  # so that 24 warps share a multiprocessor, which has 65,536 registers


def test_no_warp_reads_a_products_row_where_another_may_overwrite_it_already(printed) -> None:
    """After the last barrier before the loop that stores the gradient, no number of the row is read out of turn."""
    lines = printed("_whole_rows", "sm_90", "bfloat16", "--ptx").splitlines()
    barrier = max(i for i, line in enumerate(lines) if "bar.sync" in line)
    second_pass = max(i for i, line in enumerate(lines) if "Inner Loop Header" in line)
    store = min(i for i, line in enumerate(lines) if "st.global.v4" in line)
    assert barrier < second_pass < store
    # The products are the only numbers of two bytes
    assert [line for line in lines[barrier:second_pass] if "ld.global.b16" in line] == []
