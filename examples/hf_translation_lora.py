"""Hugging Face with LoRA: teach a decoder-only model to translate, with packed rows and the loss of answers alone.

Run it with `python examples/hf_translation_lora.py`.

A pair is one sequence, prompt and answer, and the labels of its prompt are ignored. The collator puts the pairs of a
batch one behind the other into one row without padding, whose positions start again at 0 with every pair. That keeps
the pairs from attending to one another where a model gets no attention mask and keeps no cache: the Trainer turns the
cache off, and a loop of your own passes `use_cache=False`.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave a busy CPU alone

import random
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from seqpar.integrations.transformers import apply_seqpar_loss
from seqpar.testing import assert_same_gradients

ANSWER = "=>"
END = "</s>"

HOURS = "ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf"
ENGLISH_HOURS = "one two three four five six seven eight nine ten eleven twelve"
MINUTES = {"five": "fünf", "ten": "zehn", "a quarter": "viertel", "twenty": "zwanzig"}


class Pair(NamedTuple):
    """A time of day in English and German."""

    source: str
    target: str


def clock() -> Iterator[Pair]:
    """Yield all times in steps of five minutes, of which German counts those after the half from the next hour."""
    hours = list(zip(ENGLISH_HOURS.split(), HOURS.split(), strict=True))
    for prefix, praefix in (("", ""), ("at ", "um "), ("before ", "vor "), ("it is ", "es ist ")):
        for i, (english, german) in enumerate(hours):
            after, danach = hours[(i + 1) % 12]
            yield Pair(f"{prefix}half past {english}", f"{praefix}halb {danach}")
            for word, wort in MINUTES.items():
                yield Pair(f"{prefix}{word} past {english}", f"{praefix}{wort} nach {german}")
                yield Pair(f"{prefix}{word} to {after}", f"{praefix}{wort} vor {danach}")


pairs = list(clock())  # half past seven, halb acht
random.Random(0).shuffle(pairs)
held_out = pairs.pop()
words = [ANSWER, END, *sorted({word for pair in [*pairs, held_out] for word in " ".join(pair).split()})]
number_of = {word: number for number, word in enumerate(words)}

torch.manual_seed(0)
layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
config = LlamaConfig(vocab_size=len(words), hidden_size=64, initializer_range=0.1, pad_token_id=None, **layers)
lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(LlamaForCausalLM(config), lora)


def numbers(text: str) -> list[int]:
    """Return the numbers of a text's words."""
    return [number_of[word] for word in text.split()]


def example(source: str, target: str) -> dict[str, list[int]]:
    """Return prompt and answer as one sequence, and labels that ignore the prompt."""
    prompt = numbers(f"{source} {ANSWER}")
    answer = numbers(f"{target} {END}")
    return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}


def translated(source: str) -> str:
    """Return the answer, of the likeliest word at each place."""
    prompt = torch.tensor([numbers(f"{source} {ANSWER}")])
    end = number_of[END]
    row = model.generate(input_ids=prompt, max_new_tokens=12, do_sample=False, eos_token_id=end, pad_token_id=end)[0]
    return " ".join(words[token] for token in row[prompt.size(1) :] if token != end)


data = [example(*pair) for pair in pairs]
collate = DataCollatorWithFlattening()
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=2,
        max_steps=60,
        learning_rate=1e-2,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.accelerator.is_available(),
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, data_collator=collate)
    with apply_seqpar_loss(trainer):
        trainer.train()


def in_chunks() -> torch.Tensor:
    """Return the loss of eight pairs in one row, as trained."""
    with apply_seqpar_loss(model):
        loss: torch.Tensor = model(**collate(data[:8]), use_cache=False).loss
    return loss


def alone() -> torch.Tensor:
    """Return their loss by the logits of each pair alone, all of them."""
    losses, count = [], 0
    for pair in data[:8]:
        labels = torch.tensor(pair["labels"])[1:]
        logits = model(input_ids=torch.tensor([pair["input_ids"]])).logits[0, :-1]
        losses.append(F.cross_entropy(logits, labels, reduction="sum"))
        count += int((labels != -100).sum())
    return torch.stack(losses).sum() / count


losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.3f} at the start, loss {losses[-1]:.3f} at the end")
print(f"{held_out.source} {ANSWER} {translated(held_out.source)}")

model.to("cpu", torch.float64).train()
assert_same_gradients(in_chunks, alone, dict(model.named_parameters()))
adapted = sum(parameter.requires_grad for parameter in model.parameters())
print(f"in float64, the gradients of {adapted} matrices are those of the logits of each pair alone")
