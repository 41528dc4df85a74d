"""R-Drop: its equation in plain PyTorch, value and every gradient, in chunks, over devices and over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import seqpar
from recipes.translation.data.corpus import load_corpus
from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.step_records import read_metrics
from recipes.translation.run_folder.translator import build_model, model_sizes
from recipes.translation.settings.config import RunConfig
from recipes.translation.text.subwords import PAD
from recipes.translation.train import dropout_seed, train
from recipes.translation.training.r_drop import BothLogits, RDrop, TwoPasses
from seqpar.testing.ranks import ranks
from tests.recipes.processes.layouts import LAYOUTS, assert_same_weights
from tests.recipes.tiny import tiny


def plain(logits: Tensor, other: Tensor, target: Tensor, alpha: float, smoothing: float) -> Tensor:
    """Half of equation 4 of the paper, summed over the tokens, from whole logits (N, V)."""
    kept = target != PAD
    logits, other, target = logits[kept], other[kept], target[kept]
    loss = sum(F.cross_entropy(each, target, reduction="sum", label_smoothing=smoothing) for each in (logits, other))
    log_p, log_q = logits.log_softmax(-1), other.log_softmax(-1)
    forward = F.kl_div(log_q, log_p, log_target=True, reduction="sum")  # KL(p || q)
    backward = F.kl_div(log_p, log_q, log_target=True, reduction="sum")
    return 0.5 * (loss + alpha * 0.5 * (forward + backward))


@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(2, 9),
    st.sampled_from([0.0, 0.3, 5.0]),
    st.sampled_from([0.0, 0.1]),
    st.integers(1, 20),
    st.integers(1, 3),
    st.integers(0, 2**16),
)
def test_value_and_every_gradient_are_those_of_plain_pytorch(
    sentences: int, time: int, vocab: int, alpha: float, smoothing: float, chunk: int, devices: int, seed: int
) -> None:
    torch.manual_seed(seed)
    generator = nn.Linear(3, vocab).double()
    hidden, other = (torch.randn(sentences, time, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    target = torch.randint(0, vocab, (sentences, time))  # 0 is padding
    criterion = RDrop(seqpar.LabelSmoothing(smoothing, "torch", ignore_index=PAD), alpha, PAD)
    engine = seqpar.LossCompute(BothLogits(generator), criterion, ["cpu"] * devices, chunk)
    # On its own too, where padding reaches it
    logits = BothLogits(generator)(hidden, other).flatten(0, 1)
    alone = plain(*logits.chunk(2, -1), target.flatten(), alpha, smoothing)
    torch.testing.assert_close(criterion(logits, target.flatten()), alone, rtol=1e-12, atol=1e-13)
    leaves = [hidden, other, *generator.parameters()]
    found = engine(hidden, target, other=other)
    assert int(found.tokens) == int((target != PAD).sum())
    expected = plain(*(generator(each).flatten(0, 1) for each in (hidden, other)), target.flatten(), alpha, smoothing)
    torch.testing.assert_close(found.total, expected, rtol=1e-12, atol=1e-13)
    for ours, theirs in zip(
        torch.autograd.grad(found.total, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        assert float((ours - theirs).abs().max()) <= 1e-12 * max(1.0, float(theirs.abs().max()))


CHANGES: dict[str, Any] = {
    "data.builtin_pairs": 120,
    "training.batch_tokens": 300,
    "training.chunk_tokens": 40,
    "training.precision": "float64",
    "training.r_drop": 5.0,
}


def test_a_step_follows_the_gradient_of_two_passes_with_dropout_of_their_own(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", {**CHANGES, "training.steps": 1, "training.clip": 0, "model.dropout": 0.3})
    train(config)
    corpus = load_corpus(config)
    torch.manual_seed(config.training.seed)
    model = build_model(model_sizes(config.model), corpus.source, corpus.target).double()
    batch = corpus.train.batch(corpus.train.epoch(0)[0])
    torch.manual_seed(dropout_seed(config.training.seed, 0, 0))
    first, second = model(batch.src.repeat(2, 1), batch.tgt_in.repeat(2, 1)).chunk(2)
    assert not torch.allclose(first, second)
    both = (model.generator(each).flatten(0, 1) for each in (first, second))
    loss = plain(*both, batch.tgt_out.flatten(), 5.0, 0.1) / batch.tokens
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert records[0]["loss"] == pytest.approx(loss.item(), rel=1e-10)
    assert records[0]["gradient_norm"] == pytest.approx(norm.item(), rel=1e-10)


def apart(passes: TwoPasses, src: Tensor, tgt: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Two passes that differ by no chance, which would be another in every layout."""
    first, second = passes.model(torch.cat([src, src]), torch.cat([tgt, tgt])).chunk(2)
    return first, {"other": 1.5 * second}


def trained(rank: int, world: int, config: RunConfig) -> int:
    with pytest.MonkeyPatch.context() as patch:  # undone, for ranks live on
        patch.setattr(TwoPasses, "forward", apart)
        return train(config).state.step


def test_every_layout_gives_the_weights_of_one_device(tmp_path: Path) -> None:
    changes = {**CHANGES, "training.accumulate": 2, "model.dropout": 1e-300, "training.steps": 3}
    trained(0, 1, tiny(tmp_path / "one", {**changes, "training.devices": "[cpu]"}))
    trained(0, 1, tiny(tmp_path / "three", {**changes, "training.devices": "[cpu, cpu, cpu]"}))
    assert_same_weights(tmp_path / "three", tmp_path / "one", 1e-10)
    for layout in ("data 2", "shard 2", "sequence 2"):
        world, sizes = LAYOUTS[layout]
        ranks(world, trained, tiny(tmp_path / layout, {**changes, **sizes, "training.devices": "auto"}))
        assert_same_weights(tmp_path / layout, tmp_path / "one", 1e-10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.dropout": 0}, r"^training\.r_drop is 5, but model\.dropout is 0: both passes would be the same"),
        ({"layout.vocab": 2}, r"^training\.r_drop is 5 and layout\.vocab 2: the two passes are compared over a whole"),
    ],
)
def test_what_r_drop_cannot_be_had_with_is_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(tmp_path, {"training.r_drop": 5, **changes})
