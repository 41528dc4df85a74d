"""Hugging Face: train a Marian model with the stock Seq2SeqTrainer, without full logits and with the exact gradient.

Run it with `python examples/hf_trainer.py`.

The stock Trainer's gradient of this model is too large by a factor of accumulation steps x ranks. With the seqpar loss
applied, it is the gradient of the whole batch on one device. The loss of an evaluation has the same smoothing, and
`generate` does not change.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave a busy CPU alone

import tempfile

import torch
from transformers import MarianConfig, MarianMTModel, Seq2SeqTrainer, Seq2SeqTrainingArguments

from seqpar.integrations.transformers import apply_seqpar_loss

PAD = 0
EOS = 1
VOCAB = 60

torch.manual_seed(0)
sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 64))}
heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
ids = {"vocab_size": VOCAB, "pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": PAD}
config = MarianConfig(
    d_model=64, max_position_embeddings=32, dropout=0.0, init_std=0.1, forced_eos_token_id=None, **sizes, **heads, **ids
)
model = MarianMTModel(config)


def sentence() -> dict[str, list[int]]:
    """Return a run of consecutive numbers as input, and each number plus one as labels."""
    first = int(torch.randint(2, VOCAB - 9, ()))
    count = int(torch.randint(2, 8, ()))
    return {"input_ids": [*range(first, first + count), EOS], "labels": [*range(first + 1, first + 1 + count), EOS]}


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad the rows to one batch; labels of -100 are ignored."""
    pad = torch.nn.utils.rnn.pad_sequence
    inputs = pad([torch.tensor(row["input_ids"]) for row in rows], batch_first=True, padding_value=PAD)
    labels = pad([torch.tensor(row["labels"]) for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": inputs, "attention_mask": (inputs != PAD).long(), "labels": labels}


with tempfile.TemporaryDirectory() as folder:
    arguments = Seq2SeqTrainingArguments(
        folder,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        max_steps=60,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [sentence() for _ in range(4096)]
    trainer = Seq2SeqTrainer(model, arguments, train_dataset=data, data_collator=collate)
    with apply_seqpar_loss(trainer, label_smoothing=0.1):
        trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.3f} at the start, loss {losses[-1]:.3f} at the end")
