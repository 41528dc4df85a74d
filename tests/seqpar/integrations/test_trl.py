"""TRL's SFTTrainer takes its loss in chunks of its own: it is refused, or asks for ours by its compute_loss_func."""

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from seqpar.integrations.transformers import apply_seqpar_loss, compute_loss_func
from tests.seqpar.integrations.tiny_models import relative_error, tiny
from tests.seqpar.integrations.trainer_runs import ONE_STEP, Gradients

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def trained(way, folder):
    """The gradients of one step of two micro-batches."""
    torch.manual_seed(2)
    model, kept = tiny("llama", torch.float32), Gradients()
    applied = None if way == "stock" else apply_seqpar_loss(model)
    words = models.WordLevel({f"w{i}": i for i in range(37)}, unk_token="w0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="w1", eos_token="w3")
    sentences = [{"input_ids": torch.randint(4, 37, (n,)).tolist()} for n in (5, 9, 7, 3)]
    arguments = SFTConfig(
        str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        bf16=False,
        gradient_checkpointing=False,
        **ONE_STEP,
    )
    SFTTrainer(
        model,
        arguments,
        train_dataset=datasets.Dataset.from_list(sentences),
        processing_class=tokenizer,
        compute_loss_func=compute_loss_func(applied) if way == "function" else None,
        callbacks=[kept],
    ).train()
    return kept.seen


def test_with_compute_loss_func_the_gradient_is_the_trainers_own(tmp_path):
    assert relative_error(trained("function", tmp_path), trained("stock", tmp_path)) < 1e-5


def test_the_loss_in_the_model_alone_is_refused_in_one_line(tmp_path):
    with pytest.raises(
        TypeError, match=r"TRL's trainer computes the loss of LlamaForCausalLM.*compute_loss_func"
    ) as raised:
        trained("applied", tmp_path)
    assert "\n" not in str(raised.value)
