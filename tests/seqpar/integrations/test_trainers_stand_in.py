"""The loss in other projects' trainers, without them: stand-ins for the few names of theirs that a file of ours uses.

Where the projects are installed, the tests `test_*_itself.py` run the same files in them.
"""

import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from itertools import accumulate
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GraniteConfig

from seqpar.integrations import say_once
from seqpar.integrations.trl import has_scores
from tests.seqpar.integrations.tiny_models import batch_of, plain_loss, predicted, relative_error, taken, tiny
from tests.seqpar.integrations.trainer_runs import Gradients, made, micro_batches
from tests.seqpar.integrations.trl_runs import Run
from tests.seqpar.integrations.trl_runs import made as made_by_trl

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

VOCAB, WIDTH = 23, 8
LOSS = "seqpar computes the loss in {}: 3 products, at most 4 tokens a chunk"


class ChunkedCrossEntropy(nn.Module):
    def __init__(self, compile, ignore_index):
        super().__init__()
        self.ignore_index = ignore_index

    def materialize_lm_weight(self, weight, grad_reduce_group):
        return weight

    def validate_lm_head(self, lm_head):
        return lm_head


class SwiftLoss:
    is_megatron = False

    def __init__(self, args, trainer):
        self.args, self.trainer = args, trainer


class TitanLoss:
    @dataclass(kw_only=True, slots=True)
    class Config:
        pass


@dataclass
class CELossConfig:
    ignore_idx: int = -100
    mode: str = "eager"

    def __post_init__(self):
        self.model_post_init(None)


@dataclass
class PrimeSettings:
    kl_tau: float = 1e-3


@dataclass
class PrimeInputs:
    trainer_logprobs: torch.Tensor = field(default=None)


def heads(prefix):
    return {
        name: type(name, (nn.Linear,), {}) for name in (f"{prefix}FusedOutputLinear", f"{prefix}VanillaOutputLinear")
    }


def prime_loss(inputs, config):
    return config.kl_tau * inputs.trainer_logprobs.sum()


def stand_ins(log):
    """For each of our files the names that it imports, by module."""
    logger, layers = {"get_logger": lambda *_: log}, "prime_rl.trainer.models.layers"
    nemo = "nemo_automodel.components.loss.chunked_ce"
    prime_losses = {"LossInputs": PrimeInputs, "LossOutputs": object, "default_loss_fn": prime_loss}
    titan_losses = {"IGNORE_INDEX": -100, "BaseLoss": TitanLoss, "ChunkedLossWrapper": TitanLoss}
    titan_meshes = {"current_spmd_mesh": None, "spmd_mesh_size": lambda axis: 1}
    xtuner_losses = {"CELossConfig": CELossConfig, "LMHeadLossContext": object}
    return {
        "axolotl": {"axolotl.integrations.base": {"BasePlugin": object}, "axolotl.utils.logging": logger},
        "ms_swift": {"swift.loss": {"BaseLoss": SwiftLoss, "loss_map": {}}, "swift.utils": logger},
        "nemo_automodel": {nemo: {"ChunkedCrossEntropy": ChunkedCrossEntropy}},
        "prime_rl": {
            f"{layers}.lm_head": heads("") | {"PrimeLmOutput": dict},
            f"{layers}.lm_head_gemma": heads("Gemma"),
            "prime_rl.configs.trainer": {"DefaultLossConfig": PrimeSettings},
            "prime_rl.trainer.rl.loss": prime_losses,
            "prime_rl.utils.logger": logger,
        },
        "torchtitan": {
            "spmd_types": {"no_typecheck": nullcontext},
            "torchtitan.components.loss": titan_losses,
            "torchtitan.distributed.spmd_types": titan_meshes,
            "torchtitan.tools.logging": {"logger": log},
        },
        "xtuner": {"xtuner.v1.loss.ce_loss": xtuner_losses, "xtuner.v1.utils": logger},
    }


@pytest.fixture
def log():
    """What the trainer's log was told."""
    lines = []
    return SimpleNamespace(lines=lines, info=lines.append)


@pytest.fixture
def ours(request, monkeypatch, log):
    """One of our files, imported among stand-ins, which are gone when the test ends."""
    modules = {}
    for path, names in stand_ins(log)[request.param].items():
        for package in accumulate(path.split("."), "{}.{}".format):
            modules.setdefault(package, ModuleType(package))
        vars(modules[path]).update(names)
    for path, module in modules.items():
        monkeypatch.setitem(sys.modules, path, module)
    name = f"seqpar.integrations.{request.param}"
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]
    monkeypatch.setattr(say_once, "_said", set())
    return import_module(name)


def in_file(name):
    return pytest.mark.parametrize("ours", [name], indirect=True)


def inputs():
    torch.manual_seed(0)
    hidden, weight = (torch.randn(*shape, dtype=torch.float64) for shape in ((1, 9, WIDTH), (VOCAB, WIDTH)))
    labels = torch.randint(VOCAB, (1, 9))
    labels[0, 3:5] = -100
    return hidden.requires_grad_(), nn.Parameter(weight), labels


def weights_of(labels):
    return (1 + torch.arange(9.0, dtype=torch.float64).view(1, 9) / 1000) * (labels != -100)


def plain(hidden, weight, labels):
    """The smoothed loss of each token."""
    return F.cross_entropy((hidden @ weight.T)[0], labels[0], label_smoothing=0.1, reduction="none")


def same(loss, expected, hidden, weight):
    """The values are equal, and the gradients by both tensors."""
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for got, wanted in zip(*(torch.autograd.grad(total, (hidden, weight)) for total in (loss, expected)), strict=True):
        assert (got - wanted).norm() < 1e-12 * wanted.norm()


def whole_step(model, batches):
    """The gradient of the smoothed loss of all labels."""
    count = sum(predicted(model, batch["labels"]) for batch in batches)
    return taken(model, sum(plain_loss(model, batch, 0.1) for batch in batches) / count)[1]


@in_file("axolotl")
def test_in_axolotl_a_step_of_a_trainer_has_the_gradient_of_the_whole_batch(ours, log, tmp_path):
    model = tiny("llama")
    batches = micro_batches(batch_of(model, [7, 5]))
    expected, kept = whole_step(model, batches), Gradients()
    trainer = made(model, batches, str(tmp_path), callbacks=[kept])
    trainer.model_accepts_loss_kwargs = False  # as axolotl sets it
    options = {"seqpar_label_smoothing": 0.1, "seqpar_chunk_tokens": 4}
    ours.SeqparPlugin().post_trainer_create(SimpleNamespace(rl=None, **options), trainer)
    trainer.train()
    assert relative_error(kept.seen, expected) < 1e-12
    assert log.lines == [LOSS.format("axolotl")]


@in_file("axolotl")
def test_in_axolotl_a_reinforcement_objective_gets_the_scores(ours, log, tmp_path):
    trainer = made_by_trl(Run("dpo", "stock"), str(tmp_path))
    ours.SeqparPlugin().post_trainer_create(SimpleNamespace(rl="dpo", seqpar_chunk_tokens=4), trainer)
    assert has_scores(trainer.model)
    assert log.lines == ["seqpar computes the scores in axolotl: 4 products, at most 4 tokens a chunk"]


@in_file("axolotl")
def test_in_axolotl_a_second_loss_and_smoothing_without_a_cross_entropy_are_refused(ours):
    assert ours.SeqparPlugin().get_input_args() == "seqpar.integrations.axolotl.SeqparArgs"
    assert ours.SeqparArgs(rl="dpo", cut_cross_entropy=False).seqpar_label_smoothing == 0
    with pytest.raises(ValueError, match="liger_cross_entropy replaces the loss, as the plugin SeqparPlugin does"):
        ours.SeqparArgs(liger_cross_entropy=True)
    with pytest.raises(ValueError, match="seqpar_label_smoothing is for a cross-entropy; rl: dpo has none"):
        ours.SeqparArgs(rl="dpo", seqpar_label_smoothing=0.1)


def swift_trainer(model, /, **template):
    settings = {"model": model, "sequence_parallel_size": 1, "loss_scale": SimpleNamespace(is_binary_loss_scale=True)}
    return SimpleNamespace(template=SimpleNamespace(**settings | template))


@in_file("ms_swift")
def test_in_ms_swift_a_step_of_a_trainer_has_the_gradient_of_the_whole_batch(ours, log, tmp_path):
    model = tiny("llama")
    batches = micro_batches(batch_of(model, [7, 5]))
    expected, kept = whole_step(model, batches), Gradients()
    function = ours.loss_map["seqpar"](SimpleNamespace(label_smoothing_factor=0.1), swift_trainer(model))
    made(model, batches, str(tmp_path), callbacks=[kept], compute_loss_func=function).train()
    assert relative_error(kept.seen, expected) < 1e-12
    assert [line.partition(",")[0] for line in log.lines] == ["seqpar computes the loss in ms-swift: 3 products"]


@in_file("ms_swift")
@pytest.mark.parametrize(
    ("args", "template", "message"),
    [
        ({"enable_dft_loss": True}, {}, "does not support enable_dft_loss; leave it out, or the loss_type"),
        ({"enable_channel_loss": True}, {}, "does not support enable_channel_loss"),
        ({}, {"sequence_parallel_size": 2}, "does not support sequence_parallel_size=2"),
        (
            {},
            {"loss_scale": SimpleNamespace(is_binary_loss_scale=False)},
            "a loss_scale with weights other than 0 and 1",
        ),
        ({}, {"model": None}, "template.model is None"),
    ],
)
def test_in_ms_swift_what_is_computed_from_logits_is_refused(ours, args, template, message):
    trainer = swift_trainer(tiny("llama"), **template)
    with pytest.raises(ValueError, match=message):
        ours.SeqparLoss(SimpleNamespace(label_smoothing_factor=0.1, **args), trainer)


@in_file("nemo_automodel")
def test_in_nemo_automodel_the_loss_is_that_of_all_logits_with_a_weight_for_each_token(ours, caplog):
    hidden, weight, labels = inputs()
    loss_fn, weights = ours.SeqparCrossEntropy(0.1, 4), weights_of(labels)
    with caplog.at_level("INFO", ours.__name__):
        loss = loss_fn(hidden, labels, weight, num_label_tokens=7, loss_weights=weights, logits_dtype=torch.float64)
    same(loss, (plain(hidden, weight, labels) * weights[0]).sum() / 7, hidden, weight)
    assert caplog.messages == [LOSS.format("NeMo AutoModel")]
    same(loss_fn(hidden, labels, weight), plain(hidden, weight, labels).sum(), hidden, weight)
    assert loss_fn.validate_lm_head("head", model_config=GraniteConfig(logits_scaling=1.0)) == "head"
    with pytest.raises(ValueError, match=r"logits_scaling is 8.0, and the loss is given only lm_head.weight"):
        loss_fn.validate_lm_head("head", model_config=GraniteConfig(logits_scaling=8.0))


@in_file("torchtitan")
def test_in_torchtitan_the_loss_is_that_of_all_logits(ours, log):
    hidden, weight, labels = inputs()
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    head.weight = weight
    loss = ours.SeqparCrossEntropy(ours.SeqparCrossEntropy.Config(label_smoothing=0.1, chunk_tokens=4))
    loss.set_lm_head(head)
    divided = loss(hidden, labels, torch.tensor(7), positions=None)[0]
    same(divided, plain(hidden, weight, labels).sum() / 7, hidden, weight)
    same(loss(hidden, labels)[0], plain(hidden, weight, labels).sum(), hidden, weight)
    assert log.lines == [LOSS.format("torchtitan")]
    with pytest.raises(TypeError, match=r"lm_head is a torch.nn.modules.linear.Linear, not an nn.Linear without bias"):
        loss.set_lm_head(nn.Linear(WIDTH, VOCAB))


@in_file("xtuner")
def test_in_xtuner_the_loss_is_that_of_all_logits_with_a_weight_for_each_token(ours, log):
    config = ours.SeqparCrossEntropyConfig()
    config.label_smoothing, config.chunk_tokens = 0.1, 4
    context = config.loss_ctx_cls()
    context.loss_cfg = config
    hidden, weight, labels = inputs()
    weights = weights_of(labels)
    given = SimpleNamespace(shifted_labels=labels, loss_weight=weights)
    loss, (logits, _) = context.eager_mode(hidden, weight, None, given)
    assert logits is None
    same(loss, (plain(hidden, weight, labels) * weights[0]).sum(), hidden, weight)
    assert log.lines == [LOSS.format("xtuner")]
    with pytest.raises(ValueError, match="mode is 'chunk', xtuner's own way to cut the loss"):
        ours.SeqparCrossEntropyConfig(mode="chunk")


@in_file("prime_rl")
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_in_prime_rl_scores_are_those_of_all_logits_with_a_temperature_for_each_token(ours, softcap):
    hidden, weight, labels = inputs()
    labels = labels.clamp(min=0)
    head = (ours.FusedOutputLinear if softcap is None else ours.GemmaFusedOutputLinear)(WIDTH, VOCAB, bias=False)
    head.weight, head.softcap = weight, softcap
    temperature = 0.5 + torch.rand(1, 9, dtype=torch.float64)
    scores = head(hidden, labels, temperature=temperature)
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature.unsqueeze(-1)).log_softmax(-1)
    log_prob = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(scores["entropy"], -(log_p.exp() * log_p).sum(-1).detach(), rtol=1e-12, atol=1e-12)
    assert not scores["entropy"].requires_grad
    loss = ours.default_loss(PrimeInputs(scores["logprobs"]), kl_tau=0.1)
    same(loss, 0.1 * log_prob.sum(), hidden, weight)
    for vanilla in (ours.VanillaOutputLinear, ours.GemmaVanillaOutputLinear):
        with pytest.raises(TypeError, match="fused_lm_head_token_chunk_size is disabled"):
            vanilla(WIDTH, VOCAB)(hidden)


def test_the_log_has_one_line_for_each_trainer_with_products_and_tokens(monkeypatch):
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
