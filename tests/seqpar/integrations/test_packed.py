"""Rows of sequences that transformers' own collator packs have the loss and the gradients of each sequence alone."""

import tempfile

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from seqpar.integrations.transformers import apply_seqpar_loss
from tests.seqpar.integrations.tiny_models import VOCAB, assert_alike, relative_error, taken, tiny
from tests.seqpar.integrations.trainer_runs import ONE_STEP, Gradients

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

PROMPTS_AND_ANSWERS = [(3, 2), (1, 4), (5, 1), (2, 2), (1, 1), (4, 3), (2, 5), (3, 1)]
"""Their numbers of tokens."""


def adapted(name):
    """A model in float64 whose adapters are not at their start, where half of their gradients are 0."""
    targets = ["c_attn"] if name == "gpt2" else ["q_proj", "up_proj"]
    model = tiny(name)
    torch.manual_seed(1)
    lora = LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(model, lora).double().train()


def sequences():
    """Prompts, whose labels are ignored, and answers."""
    random = torch.Generator().manual_seed(2)
    found = []
    for prompt, answer in PROMPTS_AND_ANSWERS:
        ids = torch.randint(2, VOCAB, (prompt + answer,), generator=random).tolist()
        found.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return found


def each_alone(model):
    """The mean loss by the logits of each sequence alone, all of them, and its gradients."""
    losses = []
    for sequence in sequences():
        logits = model(input_ids=torch.tensor([sequence["input_ids"]])).logits[0, :-1]
        losses.append(F.cross_entropy(logits, torch.tensor(sequence["labels"][1:]), reduction="none"))
    return taken(model, torch.cat(losses).sum() / sum(answer for _, answer in PROMPTS_AND_ANSWERS))


def packed(model, **options):
    """The loss of all sequences in one row, and its gradients."""
    with apply_seqpar_loss(model, chunk_tokens=3):
        return taken(model, model(**DataCollatorWithFlattening()(sequences()), **options).loss)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "gpt2"])
def test_a_packed_row_has_the_loss_and_the_gradients_of_each_sequence_alone(name):
    model = adapted(name)
    expected = each_alone(model)
    assert_alike(packed(model, use_cache=False), expected)


def test_where_a_model_keeps_a_cache_transformers_lets_packed_sequences_attend_to_one_another():
    model = adapted("llama")
    expected, _ = each_alone(model)
    loss, _ = packed(model, use_cache=True)
    assert abs(loss - expected) > 1e-3 * expected


def test_the_trainer_keeps_none_and_a_step_of_two_packed_rows_has_the_gradients_of_each_sequence_alone():
    model = adapted("llama")
    _, expected = each_alone(model)
    kept = Gradients()
    with tempfile.TemporaryDirectory() as folder, apply_seqpar_loss(model, chunk_tokens=3):
        given = ONE_STEP | {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        collator = DataCollatorWithFlattening()
        Trainer(
            model, TrainingArguments(folder, **given), collator, train_dataset=sequences(), callbacks=[kept]
        ).train()
    assert relative_error(kept.seen, expected) < 1e-12
