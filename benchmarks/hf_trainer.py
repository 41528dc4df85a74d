"""Print how much too large the stock Seq2SeqTrainer's gradient is at four accumulation steps, and its memory; and ours.

    python -m benchmarks.hf_trainer

The gradients are compared with that of the whole step's own loss. The peaks are of one batch on the CPU, in float32,
with a vocabulary of 50,000. The models are tiny, with random weights.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from conformance.peak_memory import peak_bytes
from seqpar.integrations.transformers import apply_seqpar_loss

STEPS = 4
SIZES = {"vocab_size": 60, "d_model": 32, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
LAYERS = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 1), ("attention_heads", 2))}
BART = SIZES | LAYERS | {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "dropout": 0.0}
BART |= {"attention_dropout": 0.0, "activation_dropout": 0.0}
T5 = SIZES | {"d_ff": 64, "d_kv": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
MODELS = {
    "Marian": lambda: hf.MarianMTModel(hf.MarianConfig(**BART)),
    "M2M-100": lambda: hf.M2M100ForConditionalGeneration(
        hf.M2M100Config(**BART, encoder_layerdrop=0, decoder_layerdrop=0)
    ),
    "T5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
}


class Gradients(hf.TrainerCallback):
    """Keeps the gradients of a step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Keep them as one vector."""
        self.seen = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def sentences() -> list[dict[str, Tensor]]:
    """Return one batch of two for each accumulation step, of different numbers of labels."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for step in range(STEPS):
        labels = torch.randint(2, 60, (2, 12), generator=generator)
        labels[0, 3 + 2 * step :] = -100
        batches.append({"input_ids": torch.randint(2, 60, (2, 10), generator=generator), "labels": labels})
    return batches


def gradient(model: Any, ours: bool) -> Tensor:
    """Return the gradient of one step of the Trainer."""
    kept = Gradients()
    with tempfile.TemporaryDirectory() as folder:
        arguments = hf.Seq2SeqTrainingArguments(
            folder, max_steps=1, gradient_accumulation_steps=STEPS, per_device_train_batch_size=1, max_grad_norm=0.0,
            use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=0.0, logging_strategy="no",
        )  # fmt: skip
        collate = lambda rows: rows[0]  # noqa: E731
        given: dict[str, Any] = {"train_dataset": sentences(), "data_collator": collate, "callbacks": [kept]}
        trainer = hf.Seq2SeqTrainer(model, arguments, **given)
        with apply_seqpar_loss(trainer) if ours else nullcontext():
            trainer.train()
    model.zero_grad()
    return kept.seen


def print_peaks() -> None:
    """Print the memory of an evaluation and of a training step."""
    config = hf.LlamaConfig(
        vocab_size=50_000, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    tokens = torch.randint(50_000, (8, 250))
    batch = {"input_ids": tokens, "labels": tokens}
    for ours in (False, True):
        model = hf.LlamaForCausalLM(config)
        with tempfile.TemporaryDirectory() as folder:
            arguments = hf.TrainingArguments(folder, use_cpu=True, report_to=[], disable_tqdm=True)
            trainer = hf.Trainer(model, arguments, eval_dataset=[batch], data_collator=lambda rows: rows[0])
            with apply_seqpar_loss(trainer) if ours else nullcontext():
                trainer.evaluate()
                evaluation = peak_bytes(trainer.evaluate)
                model.train()
                model(**batch).loss.backward()
                step = peak_bytes(lambda model=model: model(**batch).loss.backward())
        name = "ours" if ours else "stock"
        print(
            f"{name}: peak of an evaluation {evaluation / 2**20:,.0f} MiB, of a training step {step / 2**20:,.0f} MiB"
        )


def main() -> None:
    """Print a line for each model, and the peaks."""
    print(f"transformers {hf.__version__}, torch {torch.__version__}, {STEPS} accumulation steps")
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make().train()
        counts = [int((batch["labels"] != -100).sum()) for batch in sentences()]
        for batch, count in zip(sentences(), counts, strict=True):
            (model(**batch).loss * count / sum(counts)).backward()
        exact = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        stock, ours = (gradient(model, way) / exact.norm() for way in (False, True))
        error = float((ours - exact / exact.norm()).norm())
        print(f"{name}: stock gradient {float(stock.norm()):.2f} times the exact one, ours off by {error:.1e}")
    print_peaks()


if __name__ == "__main__":
    main()
