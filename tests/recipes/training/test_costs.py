"""What a training costs: said before it, by a dry run, and measured in it."""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from recipes.translation.commands import main
from recipes.translation.data.corpus import load_corpus
from recipes.translation.run_folder.checkpoint import TrainingState
from recipes.translation.run_folder.translator import build_model, model_sizes
from recipes.translation.settings.config import RunConfig, TrainingConfig
from recipes.translation.train import train
from recipes.translation.training import costs, machine
from recipes.translation.training.costs import PEAKS, flops_of_token, in_lines, peak_of, share_of_peak
from recipes.translation.training.machine import return_free_memory
from recipes.translation.training.parts import Axes
from recipes.translation.training.progress import Progress
from recipes.translation.training.summary import update_of
from seqpar.memory_plan import memory_plan
from tests.recipes.run_folder.made import contents
from tests.recipes.tiny import options, tiny, tiny_decoder_only

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        (H100, H100),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100"),
        ("NVIDIA L40S", "NVIDIA L40S"),
        ("NVIDIA L4", "NVIDIA L4"),
        ("Tesla T4", "Tesla T4"),
        ("Tesla V100-SXM2-16GB", "Tesla V100-SXM2"),
        ("NVIDIA GeForce RTX 1080", None),
    ],
)
def test_the_peak_is_that_of_the_device_s_name(name: str, known: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    for precision in ("float32", "bf16", "fp16", "float64"):
        assert peak_of(GPU, precision) == PEAKS.get(str(known), {}).get(precision, 0.0)
        assert peak_of(CPU, precision) == 0


@pytest.mark.parametrize("made", [tiny, tiny_decoder_only])
def test_the_operations_are_those_that_torch_counts_but_for_attention(
    made: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Without padding, forward and backward of the model and of its generator, with sentences of two lengths."""
    config = made(tmp_path, {"model.d_model": 64, "model.d_ff": 256, "model.dropout": 0.0})
    corpus = load_corpus(config)
    model = build_model(model_sizes(config.model), corpus.source, corpus.target)
    source, target = torch.randint(5, 50, (2, 6)), torch.randint(5, 50, (2, 12))
    with FlopCounterMode(display=False) as counted:
        model.generator(model(source, target)).sum().backward()
    assert counted.get_total_flops() / target.numel() == pytest.approx(flops_of_token(model, 6 / 12), rel=0.12)


def test_the_encoder_alone_reads_the_source() -> None:
    model: Any = torch.nn.Module()
    model.encoder, model.decoder, model.generator = (torch.nn.Linear(*each) for each in ((10, 3), (7, 2), (5, 11)))
    assert flops_of_token(model, 2.0) == 6 * (2 * 30 + 14 + 55)


def test_the_share_is_of_all_devices_and_of_a_model_that_is_trained_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: H100)
    config = tiny(tmp_path)
    corpus = load_corpus(config)
    model = build_model(model_sizes(config.model), corpus.source, corpus.target)
    share = share_of_peak(model, corpus, "bf16", [GPU], 1)
    assert share > 0
    assert share_of_peak(model, corpus, "bf16", [GPU] * 2, 3) == pytest.approx(share / 6)
    assert share_of_peak(model, corpus, "float32", [GPU], 1) == pytest.approx(share * 989 / 67)
    assert share_of_peak(model, corpus, "bf16", [CPU], 1) == 0
    model.decoder.requires_grad_(False)
    assert share_of_peak(model, corpus, "bf16", [GPU], 1) == 0


def test_the_progress_line_says_the_share_where_it_is_known(clock: list[float]) -> None:
    state = TrainingState()
    with Progress(state, steps=10, share_of_peak=0.42 / 50) as progress:
        clock[0] += 2.0
        state.step += 1
        progress.show_step(state, loss=2.0, tokens=100)
    assert progress.line(1) == "[train] step      1/10   loss 2.000   50 tokens/s (42% of the peak)   0:18 left"


BYTES = 64 * 1024
"""Of a tensor: small enough for the heap, which keeps what was freed."""


def resident_set() -> int:
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmRSS")]
    return 1024 * int(line.split()[1])


def test_the_versions_are_those_that_are_imported() -> None:
    found = machine.software()
    assert found["python"] == platform.python_version()
    assert found["torch"] == torch.__version__  # with the build
    assert list(found) == ["python", *machine.PACKAGES]


def test_freed_memory_between_tensors_that_live_on_is_returned() -> None:
    tensors = [torch.zeros(BYTES // 4) for _ in range(3_000)]
    kept = tensors[::100]
    del tensors
    before = resident_set()
    return_free_memory()
    assert before - resident_set() > 2_000 * BYTES
    assert len(kept) == 30


def test_without_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    return_free_memory()


def test_training_returns_memory_after_each_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr("recipes.translation.training.training.return_free_memory", lambda: calls.append(1))
    train(tiny(tmp_path / "run", {"data.builtin_pairs": 60, "training.steps": 5, "training.validate_every": 2}))
    assert len(calls) == 3


STARTED = {"training.accumulate": 2, "training.steps": 5}


def test_a_dry_run_says_what_it_will_cost_and_leaves_only_data_and_subwords(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *options(run, {**STARTED, "model.d_model": 256}), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"data\.train: .*: 250 pairs, [1-9][\d,]+ and [1-9][\d,]+ subwords\n", told)
    parameters = float(re.search(r"([\d.]+) M parameters", told)[1])  # type: ignore[index]
    found = re.search(r"MB: weights ([\d.]+), gradients ([\d.]+), Adam's moments ([\d.]+), the loss", told)
    assert found
    weights, gradients, moments = map(float, found.groups())
    assert gradients == pytest.approx(4 * parameters, abs=0.25)
    assert moments == pytest.approx(2 * gradients, abs=0.15)
    assert weights >= gradients
    loss = re.search(
        r"\(seqpar\.memory_plan\) ([\d.]+), in all, measured in a forward and backward pass ([\d.,]+)", told
    )
    assert loss
    assert 0 < float(loss[1]) < float(loss[2].replace(",", ""))
    assert re.search(r"took [\d.]+ s for [1-9][\d,]* target tokens", told)
    assert "[dry-run] 5 steps will take about" in told
    assert sorted(path.name for path in run.iterdir()) == ["data", "subwords", "train.log"]
    assert "[dry-run] 5 steps" in (run / "train.log").read_text()


def test_the_training_after_a_dry_run_is_the_one_without_it_and_finds_its_subwords(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny(tmp_path / "plain", STARTED))
    train(tiny(tmp_path / "run", STARTED), dry_run=True)
    capsys.readouterr()
    train(tiny(tmp_path / "run", STARTED))
    assert re.search(r"subword models of .* reused", capsys.readouterr().out)
    dry, plain = (contents(tmp_path / name) for name in ("run", "plain"))
    models = [name for name in plain if name.endswith(".safetensors")]
    assert models
    assert all(dry[name] == plain[name] for name in models)


def test_a_dry_run_of_a_run_that_has_begun_counts_the_steps_that_are_left_and_changes_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(tiny(run, {**STARTED, "training.steps": 2}))
    before = contents(run)
    capsys.readouterr()
    train(tiny(run, {**STARTED, "training.steps": 9}), dry_run=True)
    assert contents(run) == before
    told = capsys.readouterr().out
    assert (
        "each update has training.accumulate 2 x training.batch_tokens 900 on any number of processes, as before\n"
        in told
    )
    assert "7 steps will take" in (run / "train.log").read_text()


def test_a_dry_run_shows_the_largest_process_and_the_time_of_all_steps() -> None:
    everyone = [{"weights": 3_400_000, "the loss": 71_000_000}, {"weights": 1_265_400_000, "the loss": 2_000_000}]
    assert in_lines(everyone, seconds=2.5, tokens=1_310, steps=1_296).splitlines() == [
        "[dry-run] memory per process, MB: weights 1,265.4, the loss 71.0",
        "[dry-run] a forward and backward pass of the first step took 2.50 s for 1,310 target tokens, 524 a second",
        "[dry-run] 1,296 steps will take about 54 minutes, not counting updates, validations and saving",
        "[dry-run] nothing was trained; the subwords and ids are kept for the training",
    ]


def test_adams_moments_are_added_to_the_peak_that_a_dry_run_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "peak_memory", lambda devices: {"cpu": 50_000_000})
    told = str(train(tiny(tmp_path / "run", {**STARTED, "model.d_model": 256}), dry_run=True))
    found = re.search(r"Adam's moments ([\d.]+), the loss .*backward pass ([\d.]+)\n", told)
    assert found
    assert float(found[2]) == pytest.approx(50 + float(found[1]), abs=0.11)


@pytest.mark.parametrize(
    ("axes", "devices", "accumulate", "planned"),
    [
        # Of the 900 tokens of a micro-batch a rank has all, where there is a micro-batch for each rank
        (Axes(4, 1, 1), 1, 4, {"tokens": 3600, "devices": 4, "layout": "ddp"}),
        (Axes(4, 1, 1), 1, 3, {"tokens": 900, "devices": 4, "layout": "ddp"}),
        (Axes(1, 1, 1), 2, 1, {"tokens": 900, "devices": 2, "layout": "ddp"}),
        (Axes(1, 2, 1), 1, 2, {"tokens": 1800, "devices": 2, "layout": "fsdp"}),
        (Axes(2, 1, 3), 1, 2, {"tokens": 900, "devices": 3, "layout": "vocab"}),
    ],
)
def test_a_dry_run_plans_the_loss_of_the_tokens_that_a_device_has(
    axes: Axes, devices: int, accumulate: int, planned: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def plan(**arguments: Any) -> Any:
        asked.update(arguments)
        return memory_plan(**arguments)

    monkeypatch.setattr(costs, "memory_plan", plan)
    layout: Any = SimpleNamespace(
        axes=axes,
        data_ranks=axes.data * axes.shard,
        devices=[CPU] * devices,
        device=CPU,
        model=SimpleNamespace(generator=torch.nn.Linear(48, 7)),
    )
    settings = replace(TrainingConfig(), batch_tokens=900, accumulate=accumulate, chunk_tokens=64)
    own = costs._loss_bytes(layout, settings, 1000)
    assert asked == {**planned, "d": 48, "vocab": 1000, "dtype": "float32", "chunk_tokens": 64, "device": "cpu"}
    assert own == memory_plan(**asked).of("linear_cross_entropy").peak


def test_a_dry_run_that_would_remove_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", *options(tmp_path / "run"), "--dry-run", "--fresh"])
    assert "--fresh: not allowed with argument --dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("accumulate", "size", "ranks", "ending"),
    [
        (4, 1000, 4, "processes: each of the 4 data ranks gets whole batches"),
        (6, 1000, 3, "processes: each of the 3 data ranks gets whole batches"),
        (1, 4096, 4, "training.accumulate 4 and training.batch_tokens 1,024 would give each of them whole batches"),
        (
            5,
            1000,
            2,
            "processes: the 2 data ranks share the last 1 of its batches; training.accumulate 6 and "
            "training.batch_tokens 833 would give each of them whole batches",
        ),
    ],
)
def test_the_settings_that_are_offered_keep_the_tokens_of_an_update_in_whole_batches(
    accumulate: int, size: int, ranks: int, ending: str
) -> None:
    settings = replace(TrainingConfig(), accumulate=accumulate, batch_tokens=size)
    line = update_of(settings, ranks, resumed=False)
    assert line.startswith(f"each update has training.accumulate {accumulate} x training.batch_tokens {size:,} on any")
    assert line.endswith(ending)
    assert "give each" not in update_of(settings, ranks, resumed=True), "batch_tokens cannot change in a run"
