"""A Hugging Face model that computes something different after its check is refused; the check leaves no trace."""

import copy
import dataclasses

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn.modules.module import register_module_full_backward_hook, register_module_full_backward_pre_hook
from transformers.loss import loss_utils

from seqpar.integrations import transformers_loss
from seqpar.integrations.transformers import apply_seqpar_loss
from seqpar.integrations.transformers_check import RefusedModelError
from tests.seqpar.integrations.tiny_models import DECODER, VOCAB, assert_alike, batch_of, model_of, taken, tiny


class WithCriterion(hf.LlamaForCausalLM):
    """Whose loss is that of a module of its own, and a term that may begin later."""

    z_factor = 0.0

    def __init__(self, config):
        super().__init__(config)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, input_ids=None, attention_mask=None, labels=None, **_):
        out = super().forward(input_ids=input_ids, attention_mask=attention_mask)
        if labels is not None:
            loss = self.criterion(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            out.loss = loss + self.z_factor * out.logits.logsumexp(-1).square().mean()
        return out


class Scaling:
    """A hook on the output embeddings."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, module, args, output):
        return None if self.factor == 1 else output * self.factor


def made(kind=WithCriterion, **settings):
    torch.manual_seed(0)
    return kind(hf.LlamaConfig(**DECODER, **settings)).double().train()


def doubled_forward(model, monkeypatch):
    own = WithCriterion.forward

    def forward(self, **given):
        out = own(self, **given)
        if out.loss is not None:
            out.loss = 2 * out.loss
        return out

    monkeypatch.setattr(WithCriterion, "forward", forward)


def scaled_head(model, monkeypatch):
    (hook,) = (hook for hook in model.lm_head._forward_hooks.values() if isinstance(hook, Scaling))
    hook.factor = 1.5


CHANGES = {
    "a term begins": lambda model, _: setattr(model, "z_factor", 0.1),
    "a term that hardly shows": lambda model, _: setattr(model, "z_factor", 1e-4),
    "a term that hardly shows in bfloat16": lambda model, _: setattr(model, "z_factor", 1e-4),
    "smoothing": lambda model, _: setattr(model.criterion, "label_smoothing", 0.3),
    "class weights": lambda model, _: setattr(model.criterion, "weight", torch.linspace(0.1, 5, VOCAB).double()),
    "a sum": lambda model, _: setattr(model.criterion, "reduction", "sum"),
    "the forward of the class": doubled_forward,
    "a hook on the logits": scaled_head,
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("lengths", [[7, 5], [7]])
def test_a_model_that_computes_another_loss_than_when_it_was_checked_is_refused(name, lengths, monkeypatch):
    model = made().bfloat16() if name.endswith("bfloat16") else made()
    model.lm_head.register_forward_hook(Scaling(1))
    batch = batch_of(model, lengths)
    with apply_seqpar_loss(model):
        for _ in range(2):
            model(**batch).loss.backward()
        CHANGES[name](model, monkeypatch)
        with pytest.raises(
            RuntimeError, match=r"no longer computes logits and loss as it did|own loss of a few tokens"
        ):
            model(**batch)


def doubled(function):
    return lambda *args, **given: 2 * function(*args, **given)


def doubled_of_its_type(model, monkeypatch):
    monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", doubled(loss_utils.LOSS_MAPPING["ForCausalLM"]))


def forward_with_doubled_loss(model, monkeypatch):
    forward = model.forward

    def twice(**given):
        outputs = forward(**given)
        outputs.loss = 2 * outputs.loss
        return outputs

    model.forward = twice


class ScaledLinear(nn.Linear):
    def forward(self, hidden):
        return 1.5 * super().forward(hidden)


def add_bias(model, monkeypatch):
    bias = model.final_logits_bias
    model.lm_head.register_forward_hook(lambda module, args, output: output + bias)


def scale_logits(model, monkeypatch):
    model.lm_head.register_forward_hook(Scaling(1.5))


def scale_gradients(model, monkeypatch):
    model.lm_head.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 0.1,))


def scale_gradients_before(model, monkeypatch):
    model.lm_head.register_full_backward_pre_hook(lambda module, grad_output: (grad_output[0] * 0.1,))


def another_head(model, monkeypatch):
    model.lm_head = nn.Linear(16, 37, bias=False, dtype=torch.float64)


LOSS = "own loss of a few tokens is"
LOGITS = "own logits of a few tokens differ by up to"
BACKWARD = r"output embeddings of LlamaForCausalLM have backward hooks, .*hidden"
AFTER_A_STEP = [
    ("llama", lambda model, _: setattr(model, "loss_function", doubled(model.loss_function)), LOSS),
    ("llama", doubled_of_its_type, LOSS),
    ("llama", lambda model, _: setattr(model, "loss_type", "ForMaskedLM"), LOSS),
    ("llama", forward_with_doubled_loss, LOSS),
    (
        "llama",
        lambda model, _: setattr(model.lm_head, "forward", doubled(model.lm_head.forward)),
        "do more than multiply",
    ),
    ("llama", lambda model, _: setattr(model.lm_head, "__class__", ScaledLinear), r"are a \S+\.ScaledLinear;"),
    ("llama", scale_gradients, BACKWARD),
    ("llama", scale_gradients_before, BACKWARD),
    ("marian", add_bias, LOGITS),
    ("marian", another_head, "output embeddings were replaced"),
    ("gemma2", scale_logits, LOGITS),
    ("granite", scale_logits, LOGITS),
    ("cohere", scale_logits, LOGITS),
    ("cohere", lambda model, _: setattr(model, "logit_scale", 2 * model.logit_scale), LOGITS),
]


@pytest.mark.parametrize(("name", "change", "message"), AFTER_A_STEP)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_change_after_the_first_step_is_refused_with_the_reason(name, change, message, monkeypatch):
    model = copy.deepcopy(model_of(name))
    batch = batch_of(model, [7, 5])
    with apply_seqpar_loss(model):
        model(**batch)
        change(model, monkeypatch)
        with pytest.raises((RuntimeError, TypeError), match=message):
            model(**batch)


def test_on_an_accelerator_which_is_not_waited_for_the_next_forward_refuses_it(monkeypatch):
    monkeypatch.setattr(transformers_loss, "is_on_host", lambda _: False)
    model = made()
    batch = batch_of(model, [7, 5])
    with apply_seqpar_loss(model):
        model(**batch)
        model.z_factor = 0.1
        model(**batch)
        with pytest.raises(RuntimeError, match="no longer computes logits and loss as it did"):
            model(**batch)
        # It is said once
        model.z_factor = 0.0
        model(**batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "marian", "gpt2"])
def test_rounding_of_a_models_own_loss_is_no_change(name, dtype):
    model = copy.deepcopy(tiny(name, dtype))
    with apply_seqpar_loss(model):
        for lengths in ([7, 5], [7], [30, 12, 9]):
            model(**batch_of(model, lengths)).loss.backward()


@pytest.mark.parametrize("register", [register_module_full_backward_hook, register_module_full_backward_pre_hook])
def test_backward_hooks_of_all_modules_are_refused(register):
    model = copy.deepcopy(tiny("llama"))
    handle = register(lambda *_: None)
    try:
        with apply_seqpar_loss(model), pytest.raises(TypeError, match=r"output embeddings .* have backward hooks"):
            model(**batch_of(model, [7, 5]))
    finally:
        handle.remove()


class Initialised(nn.Module):
    """Takes its shift from the first batch, as ActNorm and the codes of a VQ do."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("shift", torch.zeros(width))
        self.is_made = False

    def forward(self, x):
        if not self.is_made:
            self.shift.copy_(x.detach().flatten(0, -2).mean(0))
            self.is_made = True
        return x - self.shift


class Renewed(nn.Module):
    """Its running mean is a new tensor each time."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().flatten(0, -2).mean(0)
        return x - self.mean


class Counting(nn.Module):
    """Counts in a tensor, a number, a list and a dict that are not registered."""

    def __init__(self, width):
        super().__init__()
        self.seen = torch.zeros(())
        self.rows = 0
        self.log = []
        self.by_length = {"": 0}

    def forward(self, x):
        self.seen += len(x)
        self.rows += len(x)
        self.log.append(len(x))
        self.by_length[""] += 1
        return x + 0.01 * self.seen + 0.02 * len(self.log)


class WithExtra(hf.LlamaForCausalLM):
    def __init__(self, config, kind):
        super().__init__(config)
        self.extra = kind(config.hidden_size)

    def forward(self, input_ids=None, **given):
        return super().forward(inputs_embeds=self.extra(self.get_input_embeddings()(input_ids)), **given)


def with_extra(kind):
    return made(lambda config: WithExtra(config, kind))


def state_of(model):
    extra = model.extra
    return {**{name: str(value) for name, value in vars(extra).items() if name[0] != "_"}, **extra.state_dict()}


@pytest.mark.parametrize("kind", [Initialised, Renewed, Counting])
def test_the_check_leaves_the_state_of_a_model_as_it_was(kind):
    losses, states, grads = [], [], []
    for applied in (False, True):
        model = with_extra(kind)
        if applied:
            apply_seqpar_loss(model)
        batches = [batch_of(model, [7, 5], seed) for seed in range(3)]
        losses.append(torch.stack([model(**batch).loss for batch in batches]).double())
        grads.append(taken(model, losses[-1].sum())[1])
        states.append(state_of(model))
    assert_alike((losses[1], grads[1]), (losses[0], grads[0]), 1e-6, of_gradients=1e-5)
    for name, value in states[0].items():
        same = torch.equal(value, states[1][name]) if isinstance(value, torch.Tensor) else value == states[1][name]
        assert same, name


class TakesParameter(nn.Module):
    """Sets a parameter from the first batch."""

    def __init__(self, width):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))
        self.is_made = False

    def forward(self, x):
        if not self.is_made:
            with torch.no_grad():
                self.shift.copy_(x.detach().flatten(0, -2).mean(0))
            self.is_made = True
        return x - self.shift


def test_a_parameter_that_the_forward_changes_is_named_unless_a_batch_has_been_seen():
    model = with_extra(TakesParameter)
    batch = batch_of(model, [7, 5])
    with apply_seqpar_loss(model), pytest.raises(RefusedModelError, match=r"has changed its parameter extra\.shift"):
        model(**batch)
    model = with_extra(TakesParameter)
    own = model(**batch).loss
    with apply_seqpar_loss(model):
        torch.testing.assert_close(model(**batch).loss, own, rtol=1e-6, atol=0, check_dtype=False)


class Star(hf.LlamaForCausalLM):
    def forward(self, *args, **given):
        return super().forward(*args, **given)


class ByName(hf.LlamaForCausalLM):
    """Calls its output embeddings with the argument's name."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **_):
        logits = self.lm_head(input=self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state)
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=VOCAB)
        return hf.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


@dataclasses.dataclass
class Loss:
    """A loss function without a hash."""

    own: object

    def __call__(self, *args, **given):
        return self.own(*args, **given)


@dataclasses.dataclass
class Before:
    """A hook without a hash."""

    factor: float

    def __call__(self, module, args):
        return (args[0] * self.factor,)


def with_loss_object():
    model = made(hf.LlamaForCausalLM)
    model.loss_function = Loss(model.loss_function)
    return model


def with_hook_object():
    model = made(hf.LlamaForCausalLM)
    model.lm_head.register_forward_pre_hook(Before(1.5))
    return model


FORMS = {
    "*args": lambda: made(Star),
    "an argument's name": lambda: made(ByName),
    "a loss without a hash": with_loss_object,
    "a hook without a hash": with_hook_object,
}


@pytest.mark.parametrize("name", FORMS)
def test_usual_forms_of_a_model_have_their_own_loss(name):
    model = FORMS[name]()
    batch = batch_of(model, [7, 5])
    given = (batch["input_ids"], batch["attention_mask"]) if name == "*args" else ()
    keywords = {"labels": batch["labels"]} if given else batch
    own = taken(model, model(*given, **keywords).loss.double())
    calls = []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    with apply_seqpar_loss(model):
        for _ in range(3):
            found = taken(model, model(*given, **keywords).loss.double())
    assert_alike(found, own, 1e-6, of_gradients=1e-5)
    # The first call checks once
    assert len(calls) == 4
