"""Forwards of TRL's fused head on tiny models, and the comparison of all their fields with the model's own logits."""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from trl.trainer.utils import add_fused_lm_head

from seqpar.integrations.peft_adapters import base_of
from seqpar.integrations.trl import AppliedScores
from tests.seqpar.integrations.tiny_models import DECODER, VOCAB, gradients, relative_error, tiny
from tests.seqpar.integrations.trl_runs import plain_outputs

FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def fused(model, temperature=1.0):
    add_fused_lm_head(base_of(model), temperature, outputs=FIELDS)
    return model


def adapted(name="llama", **settings):
    model = tiny(name)
    torch.manual_seed(1)
    defaults = {"r": 2, "lora_alpha": 3, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**(defaults | settings)), autocast_adapter_dtype=False)


def batch(rows=2, time=5, seed=0, ignored=0.3, model=None):
    """Texts, and labels of which some are what the model would predict."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCAB, (rows, time), generator=g)
    labels = ids.clone()
    if model is not None:
        with torch.no_grad():
            predicted = model(input_ids=ids).logits.argmax(-1)
        labels[:, 1:] = predicted[:, :-1].where(torch.rand(rows, time - 1, generator=g) < 0.5, labels[:, 1:])
    return ids, labels.masked_fill(torch.rand(rows, time, generator=g) < ignored, -100)


def compared(model, ids, labels, temperature=1.0, chunk_tokens=None):
    """Assert that all fields, and the gradients of log-probabilities and entropies, are those of the logits."""
    base = base_of(model)
    g = torch.Generator().manual_seed(3)
    up = torch.randn(2, len(ids), ids.size(1) - 1, dtype=torch.float64, generator=g)
    results = []
    for plain in (True, False):
        model.zero_grad()
        if plain:
            outputs = plain_outputs(model, temperature, input_ids=ids, labels=labels)
        else:
            with AppliedScores([base], chunk_tokens):
                outputs = model(input_ids=ids, labels=labels, fused_lm_head=True)
        (up[0] * outputs.log_probs + up[1] * outputs.entropy).sum().backward()
        results.append((outputs, gradients(model)))
    (expected, expected_grads), (got, got_grads) = results
    for field in FIELDS:
        torch.testing.assert_close(got[field], expected[field], rtol=1e-12, atol=1e-12)
    assert torch.equal(got.label_mask, expected.label_mask)
    if (labels[:, 1:] != -100).any():
        assert relative_error(got_grads, expected_grads) < 1e-11
    else:
        assert all(not grad.any() for grad in got_grads.values())
    return got


def biased(name):
    """A model whose projection has a bias, as Phi's."""
    model = tiny(name, tie_word_embeddings=False)
    torch.manual_seed(2)
    head = nn.Linear(DECODER["hidden_size"], VOCAB).double()
    nn.init.normal_(head.bias)
    model.set_output_embeddings(head)
    return model
