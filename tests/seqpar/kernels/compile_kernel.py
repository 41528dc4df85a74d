"""Compile the Triton kernels for GPUs that are not there: the compilers come with Triton.

`PYTHONPATH=. python tests/seqpar/kernels/compile_kernel.py` prints, as JSON by kernel, target, dtype and what is asked
for ("all"; "plain", which is a cross-entropy without bias, class weights and entropy; "large", the same with a large
vocabulary), the registers that a thread takes and the bytes it spills (NVIDIA), or the size of the code; NVIDIA's
assembly of the plain gradients; and Triton's own code of the plain kernels. It is a program outside the package of
tests, which imports Triton for its interpreter: a process in which that has happened compiles nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from seqpar.kernels.row_kernel import CLASSES_A_THREAD, LARGEST_BLOCK, align

VOCAB = 50_257
SETTINGS = {
    "excluded": 7, "softcap": None, "temperature": 1.0, "V": VOCAB, "WIDTH": align(VOCAB), "BLOCK": LARGEST_BLOCK,
    "PICKS": 3, "ENTROPY": True, "ARGBEST": True, "WEIGHTED": True, "ignored": -100, "SMOOTH": True, "Z_LOSS": True,
    "KL": True, "GRADIENT": True, "D": 512,
}  # fmt: skip
"""Everything at once."""
PLAIN = {
    "PICKS": 1, "ENTROPY": False, "excluded": None, "bias_ptr": None, "temperature_ptr": None, "weight_ptr": None,
    "mean_ptr": None, "entropy_ptr": None, "ignored": None, "Z_LOSS": False, "KL": False, "token_ptr": None,
    "total_ptr": None, "scale_ptr": None, "beside_ptr": None,
}  # fmt: skip
"""A plain cross-entropy with smoothing: no bias, no class weights, no entropy."""
INTEGERS = ("before_ptr", "index_ptr", "target_ptr", "count_ptr")
KERNELS = ("_row_loss", "_row_sums", "_row_before", "_row_gradient", "_count_targets", "_scaled_rows")
TARGETS = {
    "sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32), "gfx942": ("hip", "gfx942", 64),
}  # fmt: skip
BUILDS = [
    ("sm_100", "bfloat16"), ("sm_90", "bfloat16"), ("sm_80", "bfloat16"), ("sm_80", "float64"), ("gfx942", "bfloat16"),
]  # fmt: skip
LARGE = {"V": 128_256, "WIDTH": 128_256, "BLOCK": 4 * LARGEST_BLOCK}
"""A vocabulary with larger blocks."""


def compiled(kernel: Any, target: str, dtype: str, changed: dict[str, Any]) -> Any:
    """As a launch with such arguments would compile it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    narrow, wide = {"bfloat16": ("*bf16", "*fp32"), "float64": ("*fp64", "*fp64")}[dtype]
    settings = SETTINGS | changed
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in settings:
            signature[name], constants[(i,)] = "constexpr", settings[name]
            continue
        pointers = dict.fromkeys(("x_ptr", "grad_ptr", "bias_ptr"), narrow) | dict.fromkeys(INTEGERS, "*i64")
        number = "fp32" if name.endswith(("_high", "_low")) else "i32"
        signature[name] = pointers.get(name, wide if name.endswith("_ptr") else number)
        if signature[name].startswith("*") or name == "x_stride":
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    warps = settings["BLOCK"] // (32 * CLASSES_A_THREAD)
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options={"num_warps": warps})


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread, as NVIDIA's own tool reads them."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", said)[0]
    return int(registers), int(stack)


def main() -> None:
    """Compile all and print what the docstring of this file says."""
    from seqpar.kernels import triton_rows

    found: dict[str, Any] = {}
    ttir: dict[str, str] = {}
    for kernel in KERNELS:
        for target, dtype in BUILDS:
            for what, changed in (("all", {}), ("plain", PLAIN), ("large", PLAIN | LARGE)):
                if what == "large" and kernel != "_row_loss":
                    continue
                made = compiled(vars(triton_rows)[kernel], target, dtype, changed)
                size = resources(made.asm["cubin"]) if "cubin" in made.asm else (len(made.asm["hsaco"]), 0)
                found[f"{kernel} {target} {dtype} {what}"] = size
                ttir[kernel] = made.asm["ttir"]
    ptx = {
        kernel: compiled(vars(triton_rows)[kernel], "sm_90", "bfloat16", PLAIN).asm["ptx"]
        for kernel in ("_row_gradient", "_row_loss")
    }
    print(json.dumps({**found, "ptx": ptx, "ttir": ttir}))


if __name__ == "__main__":
    main()
