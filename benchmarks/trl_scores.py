"""Measure the memory of one step's log-probabilities in TRL: all logits, TRL's own function, `apply_seqpar_scores`.

    python -m benchmarks.trl_scores

A Llama of one layer, trained whole or with a LoRA adapter on its output embeddings, makes one forward and backward of
what a trainer asks for. Memory is the peak above the model and its gradients, in a process of its own; time is CPU time
on one thread, the lower of two.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from typing import Any

import torch
from torch import Tensor

from benchmarks.loss.results import hardware
from seqpar.testing.markdown_table import markdown_row, markdown_table
from seqpar.testing.peak_memory import peak_bytes, run_in_fresh_process

WIDTH = 512
BATCH = 2
SHAPES = ((1024, 32_000), (1024, 128_000))
"""Pairs of tokens and classes."""
ASKS = {
    "SFT": ("log_probs", "entropy", "is_top1"),
    "DPO": ("log_probs", "entropy", "mean_logits", "is_top1"),
    "GRPO with an entropy bonus": ("log_probs", "entropy"),
    "SFT, LoRA on the projection": ("log_probs", "entropy", "is_top1"),
}
WAYS = ("logits", "trl", "seqpar")
REPEATS = 2


def step_of(way: str, ask: str, tokens: int, vocab_size: int) -> Callable[[], None]:
    """Return one forward and backward."""
    import transformers
    from peft import LoraConfig, get_peft_model
    from trl.trainer.utils import add_fused_lm_head

    from seqpar.integrations.trl import AppliedScores

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=8,
        max_position_embeddings=tokens,
    )
    base: Any = transformers.LlamaForCausalLM(config).train()
    model = base
    if "LoRA" in ask:
        model = get_peft_model(base, LoraConfig(r=16, target_modules=["lm_head"]))
    add_fused_lm_head(base, outputs=ASKS[ask])
    ids = torch.randint(vocab_size, (BATCH, tokens // BATCH))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        applied = AppliedScores([base], None) if way == "seqpar" else nullcontext()
        with applied:
            if way == "logits":
                log_prob, entropy = scores_of_logits(model(input_ids=ids).logits[:, :-1], ids[:, 1:])
            else:
                outputs = model(input_ids=ids, labels=ids, fused_lm_head=True)
                log_prob, entropy = outputs.log_probs, outputs.entropy
        loss = -log_prob.sum()
        if "bonus" in ask:
            loss = loss - entropy.sum()
        loss.backward()

    return step


def scores_of_logits(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies by TRL's functions of logits."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    return selective_log_softmax(logits, target), entropy_from_logits(logits)


def measure(way: str, ask: str, tokens: int, vocab_size: int) -> None:
    """Print the peak in bytes and the CPU seconds of one step."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    step = step_of(way, ask, tokens, vocab_size)
    step()  # what is loaded at first use does not count
    peak = peak_bytes(step)
    seconds = []
    for _ in range(REPEATS):
        before = time.process_time()
        step()
        seconds.append(time.process_time() - before)
    print(peak, min(seconds))


def main() -> None:
    """Print the table, row by row as it is measured, then what it was measured on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)  # what the processes are started with
    options = parser.parse_args()
    if options.measure:
        way, ask, tokens, vocab_size = options.measure
        measure(way, ask, int(tokens), int(vocab_size))
        return
    header = ["step", "tokens x vocabulary", "one copy of the logits, MiB"]
    print(markdown_table([*header, *(f"{way}, MiB" for way in WAYS), *(f"{way}, s" for way in WAYS)], []), flush=True)
    for tokens, vocab_size in SHAPES:
        for ask in ASKS:
            cells = [ask, f"{tokens:,} x {vocab_size:,}", f"{tokens * vocab_size * 4 / 2**20:,.0f}"]
            found = {way: measured(way, ask, tokens, vocab_size) for way in WAYS}
            cells += [peak for peak, _ in found.values()]
            print(markdown_row([*cells, *(seconds for _, seconds in found.values())]), flush=True)
    print(f"\n{date.today()}, torch {torch.__version__}, {hardware('cpu')}, 1 thread, float32, hidden size {WIDTH}")


def measured(way: str, ask: str, tokens: int, vocab_size: int) -> tuple[str, str]:
    """Return peak and time as text; dashes for what TRL refuses, an adapter on the output embeddings."""
    if way == "trl" and "LoRA" in ask:
        return "-", "-"
    words = ["--measure", way, ask, str(tokens), str(vocab_size)]
    done = run_in_fresh_process("-m", "benchmarks.trl_scores", *words, threads=1)
    if done.returncode:
        raise RuntimeError(done.stderr)
    peak, seconds = done.stdout.split()[-2:]
    return f"{int(peak) / 2**20:,.0f}", f"{float(seconds):.1f}"


if __name__ == "__main__":
    main()
