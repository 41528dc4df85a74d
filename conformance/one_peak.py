"""Print the peak memory of one forward and backward, in bytes above the inputs, in the process that this file starts.

`python -m conformance.one_peak PART NAME ROWS`
"""

from __future__ import annotations

import sys

from conformance.adapter import DEVICE, quietly
from conformance.checks import MEASURED
from conformance.parts import adapter_of
from conformance.peak_memory import peak_bytes
from conformance.problem import asked


def main(part: str, name: str, rows: str) -> None:
    """Print this process's peak in the second of two runs; code loaded or compiled in the first does not count."""
    step = asked(adapter_of(part, name), **MEASURED | {"rows": int(rows)}).answer
    quietly(step)
    print(peak_bytes(lambda: quietly(step), DEVICE))


if __name__ == "__main__":
    main(*sys.argv[1:])
