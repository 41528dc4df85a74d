"""Model FLOPs utilisation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from recipes.translation.data.corpus import load_corpus
from recipes.translation.run_folder.checkpoint import TrainingState
from recipes.translation.run_folder.translator import build_model, model_sizes
from recipes.translation.settings.config import RunConfig
from recipes.translation.training.progress import Progress
from recipes.translation.training.utilization import PEAKS, flops_of_token, peak_of, share_of_peak
from tests.recipes.tiny import tiny, tiny_decoder_only

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
        progress.step_done(state, loss=2.0, tokens=100)
    assert progress.line(1) == "[train] step      1/10   loss 2.000   50 tokens/s (42% of the peak)   0:18 left"
