"""The loss in xtuner and prime-rl, of which no package is published, with stand-ins for the classes that they have."""

import sys
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH = 23, 8


@pytest.fixture
def stand_in(monkeypatch):
    """Return a function that puts names into a module that is not there, until the test ends."""
    for name in ("xtuner", "prime_rl"):
        monkeypatch.delitem(sys.modules, f"seqpar.integrations.{name}", raising=False)

    def put(path, **names):
        parts = path.split(".")
        for size in range(1, len(parts) + 1):
            whole = ".".join(parts[:size])
            monkeypatch.setitem(sys.modules, whole, sys.modules.get(whole) or ModuleType(whole))
        vars(sys.modules[path]).update(names)

    yield put
    for name in ("xtuner", "prime_rl"):
        sys.modules.pop(f"seqpar.integrations.{name}", None)


class Lines(list):
    def info(self, line):
        self.append(line)


def inputs():
    torch.manual_seed(0)
    hidden, weight = (torch.randn(*shape, dtype=torch.float64) for shape in ((1, 9, WIDTH), (VOCAB, WIDTH)))
    labels = torch.randint(VOCAB, (1, 9))
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def test_in_xtuner_the_loss_is_that_of_all_logits_with_a_weight_for_each_token(stand_in):
    @dataclass
    class CELossConfig:
        ignore_idx: int = -100
        mode: str = "eager"

        def __post_init__(self):
            self.model_post_init(None)

    lines = Lines()
    stand_in("xtuner.v1.loss.ce_loss", CELossConfig=CELossConfig, LMHeadLossContext=object)
    stand_in("xtuner.v1.utils", get_logger=lambda: lines)
    xtuner = import_module("seqpar.integrations.xtuner")
    config = xtuner.SeqparCrossEntropyConfig()
    config.label_smoothing, config.chunk_tokens = 0.1, 4
    context = config.loss_ctx_cls()
    context.loss_cfg = config
    hidden, weight, labels = inputs()
    labels[0, 3:5] = -100
    weights = (1 + torch.arange(9.0, dtype=torch.float64).view(1, 9) / 1000) * (labels != -100)
    loss, (logits, _) = context.eager_mode(
        hidden, weight, None, SimpleNamespace(shifted_labels=labels, loss_weight=weights)
    )
    assert logits is None
    plain = F.cross_entropy((hidden @ weight.T)[0], labels[0], label_smoothing=0.1, reduction="none")
    same(loss, (plain * weights[0]).sum(), hidden, weight)
    with pytest.raises(ValueError, match="mode is 'chunk', xtuner's own way to cut the loss"):
        xtuner.SeqparCrossEntropyConfig(mode="chunk")


def same(loss, plain, hidden, weight):
    """The values are equal, and the gradients by both tensors."""
    torch.testing.assert_close(loss, plain, rtol=1e-12, atol=0)
    for got, wanted in zip(*(torch.autograd.grad(total, (hidden, weight)) for total in (loss, plain)), strict=True):
        assert (got - wanted).norm() < 1e-12 * wanted.norm()


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_in_prime_rl_scores_are_those_of_all_logits_with_a_temperature_for_each_token(stand_in, softcap):
    @dataclass
    class Settings:
        kl_tau: float = 1e-3

    @dataclass
    class Inputs:
        trainer_logprobs: torch.Tensor = field(default=None)

    lines, layers = Lines(), "prime_rl.trainer.models.layers"
    names = ("FusedOutputLinear", "VanillaOutputLinear", "GemmaFusedOutputLinear", "GemmaVanillaOutputLinear")
    heads = {name: type(name, (nn.Linear,), {}) for name in names}
    stand_in(f"{layers}.lm_head", **{n: heads[n] for n in names[:2]}, PrimeLmOutput=dict)
    stand_in(f"{layers}.lm_head_gemma", **{n: heads[n] for n in names[2:]})
    stand_in("prime_rl.configs.trainer", DefaultLossConfig=Settings)
    own = {"default_loss_fn": lambda inputs, config: config.kl_tau * inputs.trainer_logprobs.sum()}
    stand_in("prime_rl.trainer.rl.loss", LossInputs=Inputs, LossOutputs=object, **own)
    stand_in("prime_rl.utils.logger", get_logger=lambda: lines)
    prime_rl = import_module("seqpar.integrations.prime_rl")
    hidden, weight, labels = inputs()
    head = heads["FusedOutputLinear" if softcap is None else "GemmaFusedOutputLinear"](WIDTH, VOCAB, bias=False)
    head.weight = nn.Parameter(weight.detach())
    head.softcap = softcap
    temperature = 0.5 + torch.rand(1, 9, dtype=torch.float64)
    scores = head(hidden, labels, temperature=temperature)
    logits = hidden @ head.weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature.unsqueeze(-1)).log_softmax(-1)
    log_prob = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(scores["entropy"], -(log_p.exp() * log_p).sum(-1).detach(), rtol=1e-12, atol=1e-12)
    assert not scores["entropy"].requires_grad
    loss = prime_rl.default_loss(Inputs(scores["logprobs"]), kl_tau=0.1)
    same(loss, 0.1 * log_prob.sum(), hidden, head.weight)
    for name in (names[1], names[3]):
        with pytest.raises(TypeError, match="fused_lm_head_token_chunk_size is disabled"):
            heads[name](WIDTH, VOCAB)(hidden)


def test_the_log_has_one_line_for_each_trainer_with_products_and_tokens(monkeypatch):
    from seqpar.integrations import say_once

    monkeypatch.setattr(say_once, "_said", set())
    lines, weight = [], torch.randn(VOCAB, WIDTH)
    for trained, trainer in ((True, "a"), (True, "a"), (False, "b")):
        say_once.say_once(trainer, lines.append, weight.clone().requires_grad_(trained), 1024)
    say_once.say_once("c", lines.append, weight.clone().requires_grad_(), 1024, scores=True)
    assert lines == [
        "seqpar computes the loss in a: 3 products, at most 1,024 tokens a chunk",
        "seqpar computes the loss in b: 2 products, at most 1,024 tokens a chunk",
        "seqpar computes the scores in c: 4 products, at most 1,024 tokens a chunk",
    ]
