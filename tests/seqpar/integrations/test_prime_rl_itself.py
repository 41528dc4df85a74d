"""prime-rl's own output head and losses with the scores: those of its fused head and of all logits."""

import warnings

import pytest
import torch
from torch import nn

from tests.seqpar.integrations.tiny_models import relative_error

with warnings.catch_warnings(action="ignore"):
    from prime_rl.configs.trainer import CustomLossConfig
    from prime_rl.trainer.models.layers.lm_head import FusedOutputLinear, VanillaOutputLinear
    from prime_rl.trainer.models.layers.lm_head_gemma import GemmaFusedOutputLinear
    from prime_rl.trainer.rl.loss import LossInputs, setup_rl_loss_fn

pytestmark = pytest.mark.filterwarnings("ignore")

VOCAB, WIDTH = 23, 8
NAME = "seqpar.integrations.prime_rl.default_loss"


def stepped(head, hidden, labels, temperature, loss_of, logits_of=None):
    """Loss, entropy and gradients; with `logits_of` from all logits."""
    hidden = hidden.clone().requires_grad_()
    head.zero_grad()
    if logits_of is None:
        scores = head(hidden, labels, temperature)
        log_prob, entropy = scores["logprobs"], scores["entropy"]
    else:
        log_p = (logits_of(hidden @ head.weight.T) / temperature.unsqueeze(-1)).log_softmax(-1)
        log_prob = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
    loss = loss_of(log_prob[0])
    loss.backward()
    return loss.detach(), entropy.detach(), {"hidden": hidden.grad, "weight": head.weight.grad.clone()}


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_step_is_that_of_all_logits_with_a_temperature_for_each_token(softcap):
    rl_loss = setup_rl_loss_fn(CustomLossConfig(import_path=NAME, kwargs={"kl_tau": 0.1}))
    torch.manual_seed(0)
    hidden, labels = torch.randn(1, 9, WIDTH, dtype=torch.float64), torch.randint(VOCAB, (1, 9))
    temperature = 0.5 + torch.rand(1, 9, dtype=torch.float64)
    head, cap = FusedOutputLinear(WIDTH, VOCAB, 4), nn.Identity()
    if softcap is not None:
        head, cap = GemmaFusedOutputLinear(WIDTH, VOCAB, 4, softcap), lambda z: softcap * torch.tanh(z / softcap)
    head = head.double()
    numbers = torch.randn(2, 9, dtype=torch.float64)

    def loss_of(log_prob):
        return rl_loss(LossInputs(log_prob, numbers[0] - 3, None, numbers[1], torch.arange(9) != 4)).loss

    got, expected = (stepped(head, hidden, labels, temperature, loss_of, cap_) for cap_ in (None, cap))
    for ours, plain in zip(got[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    assert relative_error(got[2], expected[2]) < 1e-12


def test_a_head_that_returns_logits_is_refused():
    setup_rl_loss_fn(CustomLossConfig(import_path=NAME))
    with pytest.raises(TypeError, match="fused_lm_head_token_chunk_size is disabled"):
        VanillaOutputLinear(WIDTH, VOCAB)(torch.randn(1, 2, WIDTH))
