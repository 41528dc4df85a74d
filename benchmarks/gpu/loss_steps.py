"""Time a step of the loss by the rows of a chunk, with and without bias and smoothing, with its peak of memory.

    python -m benchmarks.gpu.loss_steps
    python -m benchmarks.gpu.loss_steps --only LossCompute     # or: least memory, plain, torch.compile
    python -m benchmarks.gpu.loss_steps --dry-run              # small, on the CPU

Milliseconds of forward and backward, from the call to the end of the device's work, and the peak above the inputs in
MiB. `LossCompute` comes first at every shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import seqpar
from benchmarks.gpu.figures import options_of, peak_mib, tell, wall_milliseconds
from benchmarks.loss.implementations import COMPILED, ENGINE, PLAIN, known
from benchmarks.loss.problems import Inputs, Problem
from benchmarks.loss.timing import forward_and_backward

LEAST = "least memory"
NAMES = (ENGINE, LEAST, PLAIN, COMPILED)
SIZES = [(8192, 512, 32_768), (16_384, 1024, 37_000), (8192, 4096, 128_256)]
VARIANTS = ((False, 0.0), (False, 0.1), (True, 0.1))
"""Whether there is a bias, and the smoothing."""
ROWS = (None, 2048, 4096, 8192, 16_384)
"""Rows of a chunk; None is the library's own choice."""
Step = Callable[[], object]


def problems(dry_run: bool) -> list[Problem]:
    """Return the shapes with each variant, the shapes without any first; of the largest, unsmoothed alone."""
    if dry_run:
        return [Problem(64, 8, 100, dtype=torch.bfloat16)]
    return [
        Problem(*size, smoothing=smoothing, bias=bias, dtype=torch.bfloat16)
        for bias, smoothing in VARIANTS
        for size in SIZES
        if size != SIZES[-1] or not smoothing
    ]


def ours(x: Inputs, rows: int | None) -> Step:
    """Return a step of the engine with so many rows of a chunk."""
    criterion = seqpar.LabelSmoothing(x.problem.smoothing, "torch")
    engine = seqpar.LossCompute(x.generator, criterion, chunk_tokens=rows)
    return lambda: engine(x.hidden, x.target).total / x.tokens


def least(x: Inputs) -> Step:
    """Return a step that keeps as little as it can."""
    return lambda: (
        seqpar.linear_cross_entropy(
            x.hidden, x.weight, x.target, bias=x.bias, label_smoothing=x.problem.smoothing, memory="least"
        ).total
        / x.tokens
    )


def steps(x: Inputs, only: str) -> Iterator[tuple[str, Step]]:
    """Yield every step of a problem by its name."""
    if only in ("", ENGINE):
        for rows in ROWS:
            if rows is None or rows <= x.problem.rows:
                yield f"{ENGINE}, {rows or 'own'} rows", ours(x, rows)
    if only in ("", LEAST):
        yield LEAST, least(x)
    for name in (PLAIN, COMPILED):
        if only in ("", name):
            yield name, known()[name].prepare(x)


def tell_steps(problem: Problem, device: str, only: str) -> None:
    """Measure the steps of one problem."""
    x = Inputs.drawn(problem, device)
    bias = "with" if problem.bias else "no"
    what = f"{problem.shape_title}, {bias} bias, smoothing {problem.smoothing:g}"
    for name, step in steps(x, only):
        run = forward_and_backward(step)  # type: ignore[arg-type]

        def cleared(run: Step = run) -> None:
            x.clear()
            run()

        ms = wall_milliseconds(cleared, device)
        x.clear()
        tell(what, way=name, ms=ms, mib=peak_mib(run, device))


def main() -> None:
    """Tell each problem's steps."""
    options = options_of(__doc__)
    if options.only not in ("", *NAMES):
        raise SystemExit(f"--only {options.only}: there are {', '.join(NAMES)}")
    for problem in problems(options.dry_run):
        tell_steps(problem, "cpu" if options.dry_run else "cuda", options.only)


if __name__ == "__main__":
    main()
