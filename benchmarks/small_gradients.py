"""Measure what is lost when small entries of the logits' gradient are dropped, on a trained translation model.

    python -m benchmarks.small_gradients RUN     # the folder of a run of the translation recipe

The gradient of a token's logits is softmax minus target distribution. Entries below a threshold in size are dropped:
one by one, or where a whole block is that small. `cut_cross_entropy` skips such blocks (Wijmans et al. 2025), with the
classes sorted by their mean logit. Errors are ||g - exact|| / ||exact||, with g the gradient of hidden or of the
projection's weight, beside those of `linear_cross_entropy` in bfloat16. Tokens are of the validation sentences.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import seqpar
from recipes.translation.data.batches import TokenBatches
from recipes.translation.data.sentence_pairs import load_pairs
from recipes.translation.run_folder.checkpoint import Translator, load_facts, load_translator
from recipes.translation.text.subwords import PAD
from seqpar.testing.markdown_table import markdown_table

EXPONENTS = (-16, -12)
BLOCK_ROWS = 512
BLOCK_CLASSES = 64
BATCH_TOKENS = 2048


def inputs_of(translator: Translator, tokens: int) -> tuple[Tensor, Tensor]:
    """Return hidden states (N, D) and targets (N,) of validation sentences, about so many tokens."""
    pairs = load_pairs(translator.config.data, "valid", lowercase=translator.config.subwords.lowercase)
    sources = translator.source.encode([pair.source for pair in pairs])
    targets = translator.target.encode([pair.target for pair in pairs])
    made = TokenBatches(sources, targets, batch_tokens=BATCH_TOKENS)
    hidden = []
    wanted = []
    with torch.no_grad():
        for indices in itertools.islice(made.epoch(0), max(1, tokens // BATCH_TOKENS)):
            batch = made.batch(indices)
            counted = batch.tgt_out != PAD
            hidden.append(translator.model(batch.src, batch.tgt_in)[counted])
            wanted.append(batch.tgt_out[counted])
    return torch.cat(hidden), torch.cat(wanted)


def logits_gradient(hidden_ND: Tensor, linear: torch.nn.Linear, target_N: Tensor, smoothing: float) -> Tensor:
    """Return softmax minus smoothed target (N, V), in float32."""
    logits_NV = F.linear(hidden_ND, linear.weight.detach(), linear.bias.detach())
    q_NV = torch.full_like(logits_NV, smoothing / logits_NV.size(1))
    q_NV.scatter_add_(1, target_N[:, None], torch.full_like(q_NV[:, :1], 1 - smoothing).expand(len(q_NV), 1))
    return logits_NV.softmax(-1) - q_NV


def blocks(large_NV: Tensor) -> Tensor:
    """Return for each block whether any of its entries is large."""
    rows = len(large_NV) // BLOCK_ROWS * BLOCK_ROWS
    classes = large_NV.size(1) // BLOCK_CLASSES * BLOCK_CLASSES
    cut = large_NV[:rows, :classes].view(rows // BLOCK_ROWS, BLOCK_ROWS, classes // BLOCK_CLASSES, BLOCK_CLASSES)
    return cut.any(3).any(1)


def in_large_blocks(large_NV: Tensor) -> Tensor:
    """Return which entries are in a block with a large one; what is left over by the blocks counts as large."""
    kept_NV = torch.ones_like(large_NV)
    expanded = blocks(large_NV).repeat_interleave(BLOCK_ROWS, 0).repeat_interleave(BLOCK_CLASSES, 1)
    kept_NV[: expanded.size(0), : expanded.size(1)] = expanded
    return kept_NV


def sorted_classes(hidden_ND: Tensor, linear: torch.nn.Linear) -> Tensor:
    """Return the classes in the order of their mean logit, so that small entries are next to each other."""
    return F.linear(hidden_ND, linear.weight.detach(), linear.bias.detach()).mean(0).argsort(descending=True)


def errors(gradients: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> list[str]:
    """Return the relative errors of hidden's and the weight's gradient."""
    pairs = zip(gradients, exact, strict=True)
    return [f"{float((g.double() - e.double()).norm() / e.double().norm()):.2%}" for g, e in pairs]


def measure(hidden_ND: Tensor, linear: torch.nn.Linear, target_N: Tensor, smoothing: float) -> list[list[str]]:
    """Return the rows of the table for one label smoothing."""
    G_NV = logits_gradient(hidden_ND, linear, target_N, smoothing)
    weight_VD = linear.weight.detach()

    def products(kept_NV: Tensor) -> tuple[Tensor, Tensor]:
        g_NV = G_NV.where(kept_NV, 0)
        return g_NV @ weight_VD, g_NV.T @ hidden_ND

    exact = products(torch.ones_like(G_NV, dtype=torch.bool))
    hidden = hidden_ND.bfloat16().requires_grad_()
    weight = weight_VD.bfloat16().requires_grad_()
    seqpar.linear_cross_entropy(
        hidden, weight, target_N, bias=linear.bias.detach().bfloat16(), label_smoothing=smoothing
    ).total.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    order_V = sorted_classes(hidden_ND, linear)
    place_V = order_V.argsort()
    rows = [[f"{smoothing:g}", "bfloat16, nothing dropped", "", "", *errors((hidden.grad, weight.grad), exact)]]
    for exponent in EXPONENTS:
        large_NV = G_NV.abs() >= 2.0**exponent
        entries = f"{float(large_NV.sum(1).float().mean()):,.0f} of {G_NV.size(1):,}"
        large_sorted_NV = large_NV[:, order_V]
        full = f"{float(blocks(large_NV).float().mean()):.1%}"
        full_sorted = f"{float(blocks(large_sorted_NV).float().mean()):.1%}"
        one_by_one = errors(products(large_NV), exact)
        by_block = errors(products(in_large_blocks(large_NV)), exact)
        by_sorted_block = errors(products(in_large_blocks(large_sorted_NV)[:, place_V]), exact)
        rows.append([f"{smoothing:g}", f"below 2^{exponent}, one by one", entries, "", *one_by_one])
        rows.append([f"{smoothing:g}", f"below 2^{exponent}, by blocks", "", full, *by_block])
        rows.append(
            [f"{smoothing:g}", f"below 2^{exponent}, by blocks, classes sorted", "", full_sorted, *by_sorted_block]
        )
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder; its checkpoint `last` is read")
    parser.add_argument("--tokens", type=int, default=4096, help="about so many tokens of the validation sentences")
    options = parser.parse_args()
    folder = options.run / "last"
    translator = load_translator(folder)
    with torch.no_grad():
        hidden_ND, target_N = inputs_of(translator, options.tokens)
    rows = []
    for smoothing in (0.1, 0.0):
        rows += measure(hidden_ND, translator.model.generator, target_N, smoothing)
    block = f"blocks of {BLOCK_ROWS} x {BLOCK_CLASSES} not empty"
    print(
        markdown_table(["smoothing", "dropped", "entries left a row", block, "hidden's error", "weight's error"], rows)
    )
    config = translator.model.generator
    step = load_facts(folder)["step"]
    print(f"\n{len(target_N):,} tokens, D={config.in_features}, V={config.out_features:,}, step {step:,}")


if __name__ == "__main__":
    main()
