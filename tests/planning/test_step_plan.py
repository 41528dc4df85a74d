"""The plan of a step: its equations on their own, one option at a time, and against operations that torch counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from planning.__main__ import advice, main, table
from planning.links import LINKS, Link
from planning.step_plan import (
    Layout,
    StepPlan,
    Training,
    gather_exposed,
    rate_of,
    reduce_exposed,
    step_plan,
)

LLAMA: dict[str, Any] = {
    "parameters": 8_030_261_248,
    "layers": 32,
    "d": 4096,
    "vocab": 128_256,
    "length": 8192,
    "local_batch": 2,
}
RATE = 400e12
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


def planned(devices: int, layout: Layout, rate: float = RATE, **changed: Any) -> StepPlan:
    return step_plan(Training(**(LLAMA | changed)), rate, devices, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_device_computes_all_the_time_and_communicates_nothing(layout: Layout) -> None:
    plan = planned(1, layout)
    assert (plan.exchange, plan.bubble, plan.exposed, plan.hidden) == (0, 0, 0, 0)
    assert plan.efficiency == pytest.approx(1)
    assert plan.seconds == pytest.approx(2 * 8192 * Training(**LLAMA).flops / RATE)


class Decoder(nn.Module):
    """An embedding, layers and a projection without biases."""

    def __init__(self, layers: int, d: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.0, bias=False, batch_first=True) for _ in range(layers)
        )
        self.projection = nn.Linear(d, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.projection(x)


@pytest.mark.unswitched
def test_the_operations_of_a_token_are_those_that_torch_counts() -> None:
    model, length = Decoder(3, 64, 1000), 48
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        model(torch.randint(1000, (2, length))).sum().backward()
    parameters = sum(each.numel() for each in model.parameters())
    training = Training(parameters=parameters, layers=3, d=64, vocab=1000, length=length, batch=2)
    # Torch counts no norms, which are among the parameters
    assert training.flops * 2 * length == pytest.approx(counted.get_total_flops(), rel=0.01)
    assert training.projection_flops == 6 * model.projection.weight.numel()


UNITS = st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=9)


@given(UNITS)
def test_reductions_hide_behind_what_is_still_to_be_computed_and_nothing_else(units: list[tuple[float, float]]) -> None:
    backward, transfers = map(list, zip(*units, strict=True))
    exposed = reduce_exposed(backward, transfers)
    # Some unit's transfer finds the line free, and all later ones follow it without a gap
    longest = max(sum(transfers[i:]) - sum(backward[i + 1 :]) for i in range(len(units)))
    assert exposed == pytest.approx(longest)
    assert transfers[-1] <= exposed + 1e-9 <= sum(transfers) + 2e-9


def test_a_gather_hides_behind_the_unit_before_and_a_reduce_behind_the_unit_after() -> None:
    # Forward: 5 waits for nothing to hide behind; 2 is hidden by 3, and 4 half by 2
    assert gather_exposed([3, 2, 1], [5, 2, 4], [0, 0, 0]) == 5 + 0 + 2
    # Backward: the first unit's reduce shares the second one's computation with the third one's gather
    assert gather_exposed([1, 4, 1], [1, 1, 2], [3, 1, 1]) == 1 + 0 + (2 + 3 - 4) + 0 + 1


@given(UNITS)
def test_no_more_is_exposed_than_is_communicated(units: list[tuple[float, float]]) -> None:
    compute, transfers = map(list, zip(*units, strict=True))
    exposed = gather_exposed(compute, transfers, transfers)
    assert 2 * sum(transfers) - sum(compute) <= exposed + 1e-9
    assert exposed <= 2 * sum(transfers) + 1e-9


def test_ddp_reduces_every_weight_once_however_many_micro_batches_and_fsdp_gathers_in_each_of_them() -> None:
    # A byte takes a second, so the seconds are the bytes: 4 of a gradient, 2 of a weight
    units: dict[str, Any] = {"within": Link.of(0, 1e-9), "start": 0, "overlap": "none"}
    weights = LLAMA["parameters"]
    for micro_batches in (1, 2):
        sizes: dict[str, Any] = units | {"micro_batch": 2 // micro_batches}
        assert planned(8, "ddp", **sizes).exposed == pytest.approx(2 * 7 / 8 * 4 * weights)
        both = 7 / 8 * (2 * micro_batches * 2 + 4) * weights
        assert planned(8, "fsdp", **sizes).exposed == pytest.approx(both)


def test_a_tied_projection_is_reduced_once_and_after_everything_else() -> None:
    tied = LLAMA | {"parameters": LLAMA["parameters"] - 128_256 * 4096, "tied": True}
    ones: dict[str, Any] = {"within": Link.of(0, 1e-9), "start": 0, "micro_batch": 2}
    plan = step_plan(Training(**tied | ones | {"overlap": "none"}), RATE, 8, "ddp")
    assert plan.exposed == pytest.approx(2 * 7 / 8 * 4 * tied["parameters"])
    # When backward ends, the embedding's gradient is there at last, and that of the first layer has only just come
    quick: dict[str, Any] = {"within": Link.of(0, 370.8), "start": 0, "micro_batch": 2}
    plan = step_plan(Training(**tied | quick), RATE, 8, "ddp")
    layer = (tied["parameters"] - 128_256 * 4096) / 32
    assert plan.exposed == pytest.approx(2 * 7 / 8 * 4 * (128_256 * 4096 + layer) / 370.8e9)


def test_a_pipeline_waits_for_all_stages_but_one_and_less_if_its_pieces_take_turns() -> None:
    sizes: dict[str, Any] = {"stages": 4, "vocab_ranks": 1, "micro_batch": 1, "local_batch": None, "batch": 16}
    plan = planned(4, "pipeline", **sizes)
    assert plan.bubble / plan.compute == pytest.approx(3 / 16)
    turns = planned(4, "pipeline", **sizes, interleave=2)
    assert turns.bubble / turns.compute == pytest.approx(3 / 32)
    # The last stage has the projection on top of its layers
    training = Training(**LLAMA)
    assert plan.compute == pytest.approx(16 * 8192 * (8 * training.layer_flops + training.projection_flops) / RATE)


def test_the_vocabulary_is_split_inside_a_host_and_weights_between_hosts() -> None:
    plan = planned(64, "data-vocab")
    assert plan.ranks == (8, 8, 1)
    assert planned(64, "data-vocab", host=4).ranks == (16, 4, 1)
    assert planned(64, "data-vocab", vocab_ranks=2).ranks == (32, 2, 1)
    assert planned(64, "vocab").ranks == (1, 64, 1)


def test_the_fewer_ranks_of_a_data_group_are_on_a_host_the_fewer_adapters_it_has() -> None:
    # A byte between hosts takes a second for each adapter, everything else nothing
    links: dict[str, Any] = {"within": Link.of(0, 1e30), "between": Link.of(0, 1e-9), "start": 0, "overlap": "none"}
    for split, adapters in ((8, 1), (4, 2), (2, 4), (1, 8)):
        data = 64 // split
        moved = 2 * (data - 1) / data * 4 * LLAMA["parameters"] / split
        assert planned(64, "data-vocab", vocab_ranks=split, **links).exposed == pytest.approx(moved / adapters), split


def test_the_share_of_projection_and_loss_is_that_of_its_operations_and_grows_with_the_vocabulary() -> None:
    training = Training(**LLAMA)
    assert planned(1, "ddp").projection == pytest.approx(training.projection_flops / training.flops)
    larger = LLAMA["parameters"] + 2 * 128_256 * 4096
    assert planned(1, "ddp", vocab=2 * 128_256, parameters=larger).projection > 1.8 * planned(1, "ddp").projection


CHANGES: list[tuple[Layout, dict[str, Any], str, int]] = [
    # layout, option, what changes, and in which direction
    ("ddp", {"micro_batch": 2}, "micro_batches", -1),
    ("ddp", {"reduce_dtype": "bfloat16"}, "exposed", -1),
    ("ddp", {"overlap": "none"}, "exposed", 1),
    ("ddp", {"start": 1e4}, "seconds", 1),
    ("ddp", {"bucket": 1.0, "start": 1e3}, "seconds", 1),
    ("ddp", {"between": LINKS["tcp100"]}, "seconds", 1),
    ("ddp", {"within": LINKS["nvlink3"]}, "seconds", 1),
    ("ddp", {"host": 1, "between": LINKS["rdma200"]}, "seconds", 1),
    ("ddp", {"length": 4096}, "compute", -1),
    ("ddp", {"d": 2048}, "projection", -1),
    ("ddp", {"layers": 64}, "compute", 1),
    ("ddp", {"parameters": 9 * 10**9}, "compute", 1),
    ("ddp", {"local_batch": 4}, "compute", 1),
    ("ddp", {"local_batch": None, "batch": 64}, "compute", -1),
    ("ddp", {"tied": True}, "compute", 1),
    ("fsdp", {"dtype": "float32"}, "hidden", 1),
    ("fsdp", {"between": LINKS["tcp100"]}, "seconds", 1),
    ("hsdp", {"host": 4}, "state", 1),
    ("data-vocab", {"vocab_ranks": 2}, "exchange", -1),
    ("data-vocab", {"within": LINKS["nvlink3"]}, "exchange", 1),
    ("vocab", {"between": LINKS["rdma200"]}, "exchange", 1),
    ("pipeline", {"stages": 4}, "bubble", 1),
    ("pipeline", {"vocab": 256_512, "parameters": 9_100_000_000}, "projection", 1),
]


@pytest.mark.parametrize(("layout", "changed", "name", "direction"), CHANGES, ids=str)
def test_each_option_has_its_effect(layout: Layout, changed: dict[str, Any], name: str, direction: int) -> None:
    base: dict[str, Any] = {"bucket": 25.0, "start": changed.get("start", 8.4) if "bucket" in changed else 8.4}
    before = getattr(planned(64, layout, **base), name)
    after = getattr(planned(64, layout, **(base | changed)), name)
    assert (after - before) * direction > 1e-9 * abs(before)


def test_taking_turns_shortens_the_bubble() -> None:
    assert planned(64, "pipeline", stages=4, interleave=2).bubble == planned(64, "pipeline", stages=4).bubble / 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("devices", [1, 8, 64])
def test_the_rate_of_a_measurement_gives_that_measurement(layout: Layout, devices: int) -> None:
    training = Training(**LLAMA)
    speed = step_plan(training, RATE, devices, layout).tokens_per_second
    assert rate_of(training, speed, devices, layout) == pytest.approx(RATE, rel=1e-9)


def test_a_measurement_that_the_links_do_not_allow_is_refused() -> None:
    slow = Training(**(LLAMA | {"between": LINKS["tcp100"]}))
    with pytest.raises(ValueError, match=r"tokens_per_second is 9e\+09 on 64 devices, but communication alone allows"):
        rate_of(slow, 9e9, 64, "fsdp")


@given(st.sampled_from(LAYOUTS), st.sampled_from([1, 2, 8, 16, 64, 512, 4096]), st.floats(1e9, 1e18))
def test_a_step_takes_as_long_as_its_parts_and_no_device_is_faster_than_alone(
    layout: Layout, devices: int, rate: float
) -> None:
    plan = planned(devices, layout, rate)
    assert plan.efficiency <= 1 + 1e-9
    assert min(plan.exchange, plan.bubble, plan.exposed) >= 0
    assert plan.hidden >= -1e-9 * plan.seconds
    assert plan.tokens_per_second * devices * plan.seconds == pytest.approx(2 * 8192 * devices)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"layers": 0}, "layers is 0; it must be a whole number of at least 1"),
        ({"vocab": True}, "vocab is True"),
        ({"d": 1.5}, "d is 1.5"),
        ({"micro_batch": 0}, "micro_batch is 0"),
        ({"local_batch": 0}, "local_batch is 0"),
        ({"batch": 64}, r"both of batch \(over all devices\) and local_batch \(per device\) given; give one of them"),
        ({"local_batch": None}, "neither of batch"),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be 'float32', 'bfloat16' or 'float16'"),
        ({"reduce_dtype": "fp32"}, "reduce_dtype is 'fp32'"),
        ({"overlap": "all"}, "overlap is 'all'; it must be 'layers' or 'none'"),
        ({"bucket": 0}, "bucket is 0"),
        ({"start": -1.0}, "start is -1.0"),
        ({"parameters": 10**9}, "parameters is 1000000000, but embedding and projection alone have 1050673152"),
        ({"parameters": 1050673152}, "parameters is 1050673152, but embedding and projection alone have 1050673152"),
    ],
)
def test_bad_input_is_one_clear_line(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        Training(**(LLAMA | wrong))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("devices", "layout", "changed", "said"),
    [
        (0, "ddp", {}, "devices is 0; it must be a whole number of at least 1"),
        (8, "fsdp2", {}, "layout is 'fsdp2'; it must be 'ddp', 'fsdp', 'hsdp', 'data-vocab', 'vocab' or 'pipeline'"),
        (12, "data-vocab", {}, "devices is 12, which vocab_ranks x stages = 8 does not divide"),
        (12, "hsdp", {}, "devices is 12, which host = 8 does not divide"),
        (64, "ddp", {"local_batch": None, "batch": 96}, "batch is 96, which data ranks x micro_batch = 64 does not"),
        (64, "pipeline", {"stages": 5}, "layers is 32, which stages x interleave = 5 does not divide"),
        (64, "pipeline", {"stages": 8, "interleave": 2, "micro_batch": 32}, "the number of micro-batches is 4, which"),
    ],
)
def test_what_does_not_divide_is_one_clear_line(devices: int, layout: Any, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        planned(devices, layout, **changed)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="rate is 0"):
        planned(8, "ddp", 0)


MODEL = {"parameters": 8.03e9, "layers": 32, "d": 4096, "vocab": 128_256, "length": 8192, "local-batch": 2}
COMMAND = [*(word for name, size in MODEL.items() for word in (f"--{name}", str(size))), "--tokens-per-second", "5789"]


def test_the_command_prints_every_layout_that_is_possible_and_what_to_choose(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main([*COMMAND, "--devices", "8", "12"])
    printed = capsys.readouterr().out
    training = Training(**(LLAMA | {"parameters": 8_030_000_000}))
    rate = rate_of(training, 5789)
    plans = [step_plan(training, rate, 8, x) for x in LAYOUTS if x != "pipeline"]
    for row in table(plans).splitlines():
        assert row in printed
    assert f"\n{advice(plans, 80)}\n" in printed
    assert "Not possible: hsdp on 12 devices: devices is 12, which host = 8 does not divide; change one" in printed
    assert "pipeline" not in printed
    main([*COMMAND, "--devices", "8", "--layout", "fsdp", "--measured-on", "8", "--between", "14:25"])
    assert "| fsdp | 8 | 8 x 1 x 1 | 2 |" in (printed := capsys.readouterr().out)
    assert "| 5,789 |" in printed


def test_operations_per_second_are_tokens_per_second_times_the_operations_of_a_token(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flops = Training(**(LLAMA | {"parameters": 8_030_000_000})).flops
    main([*COMMAND, "--devices", "64"])
    first = capsys.readouterr().out
    main([*COMMAND[:-2], "--flops-per-second", str(5789 * flops), "--devices", "64"])
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--devices", "0"], "planning: devices is 0; it must be a whole number of at least 1"),
        (["--devices", "8", "--layout", "zero"], "planning: layout is 'zero'; it must be 'ddp', "),
        (["--devices", "8", "--layers", "0"], "planning: layers is 0"),
        (["--devices", "8", "--measured-on", "8"], "planning: measured_on is 8, but no layout is given"),
        (["--devices", "8", "--tokens-per-second", "-3"], "planning: tokens_per_second is -3"),
        (["--devices", "8", "--memory", "-3"], "planning: memory is -3"),
    ],
)
def test_the_command_refuses_in_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main([*COMMAND, *words])
    assert str(raised.value.code).startswith(said)
    assert "\n" not in str(raised.value.code)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("words", [["--devices", "8.5"], ["--devices", "8", "--within", "fast"], ["--devices", "many"]])
def test_what_is_no_number_and_no_link_is_refused_by_name(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*COMMAND, *words])
    assert f"argument {words[-2]}: " in capsys.readouterr().err


@pytest.mark.parametrize("word", ["8.5", "many", "inf", "nan"])
def test_what_is_no_whole_number_is_said_to_be_none(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*COMMAND, "--devices", word])
    assert f"argument --devices: {word!r} is not a whole number\n" in capsys.readouterr().err


def test_operations_per_second_are_refused_by_their_own_name() -> None:
    with pytest.raises(SystemExit, match=r"planning: flops_per_second is -3"):
        main([*COMMAND[:-2], "--flops-per-second", "-3", "--devices", "8"])


def test_a_state_that_fills_the_memory_fits() -> None:
    plan = planned(8, "fsdp")
    assert advice([plan], plan.state / 2**30).startswith("Choose fsdp")
    assert not advice([plan], plan.state / 2**30 * (1 - 1e-9)).startswith("Choose")


def test_each_number_stands_in_its_column_in_its_unit() -> None:
    """Counted by hand from numbers that differ: seconds are 1.25 + 0.5 + 0.128 + 0.064, a GiB is 2^30 bytes."""
    plan = StepPlan(
        "hsdp", 24, ranks=(3, 4, 2), micro_batches=5, compute=1.25, exchange=0.5, bubble=0.128, exposed=0.064,
        hidden=0.75, projection=0.137, tokens_per_second=4321.4, efficiency=0.618, state=7 * 2.0**30,
    )  # fmt: skip
    header, _, row = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table([plan]).splitlines())
    assert dict(zip(header, row, strict=True)) == {
        "layout": "hsdp",
        "devices": "24",
        "R x S x Q": "3 x 4 x 2",
        "micro-batches": "5",
        "step s": "1.942",
        "compute": "1.250",
        "exchange": "0.500",
        "bubble": "0.128",
        "exposed": "0.064",
        "hidden": "0.750",
        "tokens/s/device": "4,321",
        "efficiency": "61.8%",
        "projection, loss": "13.7%",
        "state GiB": "7.0",
    }


def test_the_advice_is_the_simplest_layout_within_a_twentieth_of_the_quickest_that_fits() -> None:
    def said(devices: int, memory: float, **changed: Any) -> str:
        plans = [planned(devices, x, **changed) for x in LAYOUTS if x != "pipeline"]
        return advice(plans, memory)

    assert said(8, 1000).startswith("Choose ddp on 8 devices: ")
    assert said(8, 80).startswith("Choose fsdp on 8 devices: ")
    assert said(4096, 80).startswith("Choose hsdp on 4096 devices: ")
    assert said(1, 80).startswith("No layout fits: weights, gradients and moments need at least 134.6 GiB on each of 1")
    slow = replace(Training(**LLAMA), between=LINKS["tcp100"])
    plans = [step_plan(slow, RATE, 64, x) for x in ("fsdp", "data-vocab")]
    assert advice(plans, 80).startswith("Choose data-vocab")
