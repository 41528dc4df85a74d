"""Print the seconds of a training step in each layout, and the simplest of the fastest: `planning/step_plan.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from itertools import product
from typing import get_args

from planning.links import parse_link
from planning.step_plan import Layout, StepPlan, Training, pays_from, rate_of, step_plan
from seqpar.core.checks import check_integer, check_number
from seqpar.markdown_table import markdown_table

HEADER = (
    "layout", "devices", "R x S x Q", "micro-batches", "step s", "compute", "exchange", "bubble", "exposed", "hidden",
    "tokens/s/device", "efficiency", "projection, loss", "state GiB",
)  # fmt: skip


def table(plans: Sequence[StepPlan]) -> str:
    """Return a Markdown table with a row per plan; times are the seconds of a step.

    Example:
        >>> from planning.__main__ import table
        >>> from planning.step_plan import Training, step_plan
        >>> training = Training(parameters=8_030_000_000, layers=32, d=4096, vocab=128256, length=8192, local_batch=2)
        >>> print(table([step_plan(training, 335e12, 4096, "hsdp")]))
        | layout | devices | R x S x Q | micro-batches | ...
    """
    rows = []
    for plan in plans:
        times = (plan.seconds, plan.compute, plan.exchange, plan.bubble, plan.exposed, plan.hidden)
        ranks = " x ".join(map(str, plan.ranks))
        shares = [f"{plan.tokens_per_second:,.0f}", f"{plan.efficiency:.1%}", f"{plan.projection:.1%}"]
        seconds = [f"{time:.3f}" for time in times]
        first = [plan.layout, str(plan.devices), ranks, str(plan.micro_batches)]
        rows.append([*first, *seconds, *shares, f"{plan.state / 2**30:.1f}"])
    return markdown_table(HEADER, rows)


def advice(plans: Sequence[StepPlan], memory: float) -> str:
    """Return a line that names the simplest layout within 5 % of the fastest whose state fits into `memory` GiB.

    Example:
        >>> from planning.__main__ import advice
        >>> from planning.step_plan import Training, step_plan
        >>> training = Training(parameters=8_030_000_000, layers=32, d=4096, vocab=128256, length=8192, local_batch=2)
        >>> advice([step_plan(training, 335e12, 4096, "hsdp")], memory=80)
        'Choose hsdp on 4096 devices: 2.867 s a step, ...'
    """
    fitting = [plan for plan in plans if plan.state <= memory * 2**30]
    if not fitting:
        least = min(plan.state for plan in plans) / 2**30
        on = f"on each of {plans[0].devices} devices"
        return (
            f"No layout fits: weights, gradients and moments need at least {least:.1f} GiB {on}, which has {memory:g}"
        )
    quickest = max(plan.tokens_per_second for plan in fitting)
    near = [plan for plan in fitting if plan.tokens_per_second >= 0.95 * quickest]
    best = min(near, key=lambda plan: get_args(Layout).index(plan.layout))
    return (
        f"Choose {best.layout} on {best.devices} devices: {best.seconds:.3f} s a step, {best.tokens_per_second:,.0f} "
        f"tokens/s per device, {best.efficiency:.1%} of one device alone; projection and loss are {best.projection:.1%}"
    )


def _count(text: str) -> int:
    """Return a whole number, which may be written as 8.03e9."""
    try:
        if (number := float(text)).is_integer():
            return int(number)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the options: one for each field of the training, the measured rate, and the devices."""
    parser = argparse.ArgumentParser(prog="python -m planning", description="Seconds of a training step.")
    kinds: dict[str, Callable[[str], object]] = {"int": _count, "float": float, "str": str, "Link": parse_link}
    for each in fields(Training):
        name = f"--{each.name.replace('_', '-')}"
        if each.type == "bool":
            parser.add_argument(name, action="store_true", help=each.metadata["help"])
            continue
        kind = kinds[str(each.type).removesuffix(" | None")]
        required = each.default is MISSING
        parser.add_argument(name, type=kind, default=each.default, required=required, help=each.metadata["help"])
    rate = parser.add_mutually_exclusive_group(required=True)
    rate.add_argument("--tokens-per-second", type=float, help="measured, per device")
    rate.add_argument("--flops-per-second", type=float, help="measured, per device, counted as in (1)")
    parser.add_argument(
        "--measured-on", type=_count, default=1, help="devices of that measurement, in the layout given"
    )
    parser.add_argument("--devices", type=_count, nargs="+", required=True, help="one or several numbers of devices")
    parser.add_argument("--layout", help=f"{', '.join(get_args(Layout))}; default: all that are possible")
    parser.add_argument("--memory", type=float, default=80.0, help="GiB of a device")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and the advice."""
    options = _parser().parse_args(arguments)
    try:
        training = Training(**{each.name: getattr(options, each.name) for each in fields(Training)})
        _print(training, options)
    except ValueError as error:
        sys.exit(f"planning: {error}")


def _rate(training: Training, options: argparse.Namespace) -> float:
    """Check the command's numbers, and return the measured rate."""
    for devices in [*options.devices, options.measured_on]:
        check_integer(devices, "devices", 1, wrong_kind=ValueError)
    check_number(options.memory, "memory", above=0)
    measured = options.tokens_per_second
    if measured is None:
        check_number(options.flops_per_second, "flops_per_second", above=0)
        measured = options.flops_per_second / training.flops
    if options.measured_on > 1 and options.layout is None:
        raise ValueError(
            f"measured_on is {options.measured_on}, but no layout is given; name the one it was measured in"
        )
    return rate_of(training, measured, options.measured_on, options.layout or "ddp")


def _print(training: Training, options: argparse.Namespace) -> None:
    """Print the table of every layout on every number of devices, and the advice."""
    rate = _rate(training, options)
    layouts = [options.layout]
    if layouts == [None]:
        layouts = [each for each in get_args(Layout) if each != "pipeline" or training.stages > 1]
    plans = []
    impossible = []
    for layout, devices in product(layouts, options.devices):
        try:
            plans.append(step_plan(training, rate, devices, layout))
        except ValueError as error:
            impossible.append(f"{layout} on {devices} devices: {error}")
    if not plans:
        raise ValueError(impossible[0])
    print(f"{training.flops / 1e9:,.2f} GFLOP a token, {rate / 1e12:,.4g} TFLOP/s of a device; seconds of a step\n")
    print(table(plans))
    for line in impossible:
        print(f"\nNot possible: {line}")
    for devices in options.devices:
        if here := [plan for plan in plans if plan.devices == devices]:
            print(f"\n{advice(here, options.memory)}")
    tokens, ahead = (pays_from(rate, training.within, prefetch=sent) for sent in (False, True))
    said = "Of one process, a second device makes the loss quicker from"
    print(f"\n{said} {tokens:,.0f} tokens on, {ahead:,.0f} with prefetch")


if __name__ == "__main__":
    main()
