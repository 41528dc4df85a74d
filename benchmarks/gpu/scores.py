"""Time the scores of tokens, and the losses of other libraries that were not there the last time.

    python -m benchmarks.gpu.scores                    # 8,192 x 4,096 x 151,936 in bfloat16
    python -m benchmarks.gpu.scores --only quack       # or a way to compute scores
    python -m benchmarks.gpu.scores --dry-run          # small, on the CPU

Liger reads `LIGER_KERNEL_IMPL`; its CuTe kernel (cutedsl) refuses a GPU that is not of Blackwell's (sm_100) in 0.8.5.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from benchmarks.gpu.figures import options_of, peak_mib, tell, wall_milliseconds
from benchmarks.loss.implementations import known
from benchmarks.loss.problems import Inputs, Problem
from benchmarks.loss.timing import forward_and_backward
from benchmarks.scores.parts import ON_A_GPU, step_of
from benchmarks.scores.ways import CASES, OURS, SCORED, WAYS

SCORES = (OURS, SCORED)
PEERS = ("Liger", "quack")
LOSS = Problem(8192, 4096, 128_256, dtype=torch.bfloat16, bias=False)
SMALL = Problem(64, 8, 100, dtype=torch.bfloat16, bias=False)


def tell_run(what: str, way: str, run: Callable[[], None], x: Inputs) -> None:
    """Measure a run, or say why it fails."""

    def cleared() -> None:
        x.clear()
        run()

    device = torch.device(x.device).type
    try:
        ms = wall_milliseconds(cleared, device)
        x.clear()
        tell(what, way=way, ms=ms, mib=peak_mib(run, device))
    except Exception as error:  # of other people's code
        tell(what, way=way, failed=f"{type(error).__name__}: {error}".splitlines()[0][:200])


def main() -> None:
    """Tell the scores first, then the peers' losses."""
    options = options_of(__doc__)
    if options.only not in ("", *SCORES, *PEERS):
        raise SystemExit(f"--only {options.only}: there are {', '.join((*SCORES, *PEERS))}")
    device = "cpu" if options.dry_run else "cuda"
    x = Inputs.drawn(SMALL if options.dry_run else ON_A_GPU, device)
    for case in [case for case in CASES if case.entropy]:
        for name in SCORES:
            if options.only in ("", name) and WAYS[name].measured(case, x.problem):
                tell_run(str(case), name, step_of(x, WAYS[name], case), x)
    x = Inputs.drawn(SMALL if options.dry_run else LOSS, device)
    variant = os.environ.get("LIGER_KERNEL_IMPL", "its own choice")
    for name in PEERS:
        way = known()[name]
        title = f"{name}, {variant}" if name == "Liger" else name
        if options.only in ("", name) and way.missing:
            tell("a loss", way=title, failed=way.missing)
        elif options.only in ("", name):
            tell_run("a loss", title, forward_and_backward(way.prepare(x)), x)


if __name__ == "__main__":
    main()
