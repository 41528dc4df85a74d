"""The Triton kernels compile for real GPUs, where there is none to run them."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernels
PROGRAM = Path(__file__).with_name("compile_kernel.py")
ROOT = PROGRAM.parents[3]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What the program prints, with an empty cache of its own: a kernel that is found in one has not been compiled."""
    cache = tmp_path_factory.mktemp("triton")
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert any(cache.iterdir())
    return json.loads(done.stdout)


KERNELS = ["_row_loss", "_row_sums", "_row_before", "_row_gradient", "_count_targets", "_scaled_rows"]
OF_ROWS = ["_row_loss", "_row_sums", "_row_before", "_row_gradient"]


@pytest.mark.parametrize(("kernel", "what"), [*itertools.product(KERNELS, ["all", "plain"]), ("_row_loss", "large")])
@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        ("sm_100", "bfloat16"),
        ("sm_90", "bfloat16"),
        ("sm_80", "bfloat16"),
        ("sm_80", "float64"),
        ("gfx942", "bfloat16"),
    ],
)
def test_a_kernel_compiles_and_in_bfloat16_spills_nothing(
    compiled, kernel: str, target: str, dtype: str, what: str
) -> None:
    size, spilled = compiled[f"{kernel} {target} {dtype} {what}"]
    assert size
    if dtype == "bfloat16" and target != "gfx942":
        assert spilled == 0
        # 24 warps share a multiprocessor, which has 65,536 registers; 19 if everything is asked for at once
        assert size <= (104 if what == "all" else 80)


@pytest.mark.parametrize("kernel", OF_ROWS)
def test_where_a_row_begins_is_a_product_in_64_bits(compiled, kernel: str) -> None:
    """As an int32, row x stride overflows at 2^31 logits: 16,384 rows of 131,072 classes."""
    assert re.search(r"= arith\.muli .* : i64\b", compiled["ttir"][kernel])


def products_read_alone(assembly: str) -> list[int]:
    """The lines that read one product, the only numbers of two bytes, and not a whole vector of them."""
    return [i for i, line in enumerate(assembly.splitlines()) if "ld.global.b16" in line]


def test_the_gradient_reads_no_product_out_of_turn(compiled) -> None:
    """Each warp reads what it overwrites, whole vectors of it: no product of a class that another may have written."""
    assert "st.global.v4" in compiled["ptx"]["_row_gradient"]
    assert products_read_alone(compiled["ptx"]["_row_gradient"]) == []


def test_the_loss_reads_single_products_before_any_warp_may_overwrite_them(compiled) -> None:
    """The target's, and those of the vector that has the best class: the reductions after them wait for all warps."""
    lines = compiled["ptx"]["_row_loss"].splitlines()
    alone = products_read_alone(compiled["ptx"]["_row_loss"])
    barriers, written = barriers_in(lines), vectors_written_in(lines)
    assert len(alone) == 2
    assert any(alone[-1] < barrier < written[0] for barrier in barriers)


def test_the_targets_part_of_the_gradient_is_written_after_every_warp_has_written_its_vectors(compiled) -> None:
    lines = compiled["ptx"]["_row_loss"].splitlines()
    (alone,) = [i for i, line in enumerate(lines) if "st.global.b16" in line]
    assert any(vectors_written_in(lines)[-1] < barrier < alone for barrier in barriers_in(lines))


def barriers_in(lines: list[str]) -> list[int]:
    """The lines in which a warp waits for all others of its row."""
    return [i for i, line in enumerate(lines) if "bar.sync" in line or "barrier.sync" in line]


def vectors_written_in(lines: list[str]) -> list[int]:
    """The lines that write a vector of gradients."""
    return [i for i, line in enumerate(lines) if "st.global.v4" in line]
