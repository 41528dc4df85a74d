"""Weight decay and eps of the optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from recipes.translation.settings.config import TrainingConfig
from recipes.translation.train import train
from recipes.translation.training.optimizer import make_optimizer, update
from tests.recipes.saved import saved_file
from tests.recipes.tiny import tiny, tiny_decoder_only

RATE = 0.01
ONE_STEP = {
    "training.steps": 1,
    "training.schedule": "constant",
    "training.warmup": 0,
    "training.learning_rate": RATE,
    "training.precision": "float64",
}


def models() -> list[nn.Module]:
    torch.manual_seed(3)
    first = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))
    second = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))
    second.load_state_dict(first.state_dict())
    return [first, second]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(5)
    for step in range(steps):
        model(torch.randn(4, 5, generator=generator)).square().sum().backward()
        update(optimizer, RATE / (step + 1))


@pytest.mark.parametrize("eps", [1e-9, 1e-3])
def test_without_weight_decay_every_step_is_adam_s_bit_for_bit(eps: float) -> None:
    ours, plain = models()
    settings = TrainingConfig(betas=(0.8, 0.9), adam_eps=eps)
    trained(ours, make_optimizer(ours, settings), 20)
    trained(plain, torch.optim.Adam(plain.parameters(), betas=(0.8, 0.9), eps=eps, fused=True), 20)
    for own, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("made", [tiny, tiny_decoder_only])
def test_a_step_takes_its_share_of_matrices_and_embeddings_and_nothing_of_norms_and_biases(
    made: type, tmp_path: Path
) -> None:
    found = {}
    for name, changes in (
        ("first", {"training.learning_rate": 0.0}),
        ("plain", {}),
        ("decayed", {"training.weight_decay": 0.5}),
    ):
        train(made(tmp_path / name, {**ONE_STEP, **changes}))
        found[name] = load_file(saved_file(tmp_path / name, "last", "model.safetensors"))
    counts = {True: 0, False: 0}
    for name, first in found["first"].items():
        counts[first.dim() > 1] += 1
        taken = found["plain"][name] - found["decayed"][name]
        expected = RATE * 0.5 * first if first.dim() > 1 else torch.zeros_like(first)
        torch.testing.assert_close(taken, expected, rtol=1e-9, atol=1e-15)
    assert min(counts.values()) > 3


def test_eps_is_added_to_the_root_of_the_second_moment(tmp_path: Path) -> None:
    """With eps far above all gradients the first step is rate * gradient / eps."""
    eps = 0.999
    for name, changes in (("first", {"training.learning_rate": 0.0}), ("run", {})):
        train(tiny(tmp_path / name, {**ONE_STEP, "training.adam_eps": eps, "training.clip": 1e-6, **changes}))
    first, after = (load_file(saved_file(tmp_path / name, "last", "model.safetensors")) for name in ("first", "run"))
    moments = load_file(saved_file(tmp_path / "run", "last", "training.safetensors"))
    for name, weight in after.items():
        gradient = moments[f"optimizer/{name}/exp_avg"] / (1 - 0.9)
        torch.testing.assert_close(first[name] - weight, RATE * gradient / eps, rtol=1e-5, atol=1e-15)
