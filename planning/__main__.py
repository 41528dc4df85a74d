"""Print the seconds of a training step in each layout, and the simplest of the fastest: `planning/step_plan.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from itertools import product
from typing import get_args

from planning.links import parse_link
from planning.step_plan import HELP, Layout, Training, advice, pays_from, rate_of, step_plan, table
from seqpar.core.checks import check_integer, check_number


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
            parser.add_argument(name, action="store_true", help=HELP[each.name])
            continue
        kind = kinds[str(each.type).removesuffix(" | None")]
        required = each.default is MISSING
        parser.add_argument(name, type=kind, default=each.default, required=required, help=HELP[each.name])
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
