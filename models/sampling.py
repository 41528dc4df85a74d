"""Sampling of translations: by temperature, from the most probable tokens, or from the nucleus.

Shapes: B sentences, N samples of each, R = rows still being sampled (B x N at first), C tokens to draw from, T target
time so far, W blocks of the vocabulary, M tokens of a block, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from models.candidates import Beams, logits_blocks
from models.decoding import check_alive
from models.decoding_rules import Forbidden, Rule, Task
from models.ensemble import Batch, Models, Start, check_finite, evaluating, members
from models.hypotheses import Hypothesis


def sample(
    model: Models,
    src: Tensor,
    *,
    bos: Start,
    eos: int,
    seeds: Sequence[int],
    samples: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    rules: Sequence[Rule] = (),
    max_length: int | Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """Draw translations token by token: src (B, S) ids -> `samples` for each sentence, in the order drawn.

    At each step the token is drawn from softmax(logits / `temperature`) over the tokens that `rules` allow; with
    `top_k`, from the k most probable of them (Fan et al. 2018). With `top_p`, the probabilities of those that remain
    are renormalised to sum to 1, and the token is drawn from the smallest set of the most probable ones that reaches p
    (the nucleus of Holtzman et al. 2020, section 3.1). A translation ends at `eos` or after `max_length` steps, as for
    `greedy`.

    `seeds` has one entry for each sentence. A sentence's samples depend on its seed and on nothing else in the batch;
    with more `samples`, the first ones stay the same. Both the score and the log-probability of a hypothesis are its
    log-probability under the model, at temperature 1 and over the whole vocabulary.

    Raises ValueError for a temperature not above 0, a top_k below 1, a top_p outside (0, 1], less than one sample,
    a number of seeds other than that of the sentences, and whatever `greedy` refuses; DeadEndError if the rules forbid
    every next token; FloatingPointError if the model's logits are nan or inf.
    """
    check_sampling(temperature, top_k, top_p, samples)
    if len(seeds) != src.size(0):
        raise ValueError(f"{len(seeds)} seeds were given for {src.size(0)} sentences: give one for each")
    models = members(model)
    found: dict[tuple[int, int], Hypothesis] = {}
    with evaluating(models):
        batch = Batch.encode(models, src, max_length, bos)
        forbidden = Task.of(batch, eos).forbidden(rules)
        # Each sample is a sentence of its own, which leaves when it ends
        batch.keep([sentence for sentence in range(src.size(0)) for _ in range(samples)])
        numbers = list(range(samples)) * src.size(0)
        # Python's generator takes text as a seed, so sentence and sample need not be mixed into one number
        streams = [random.Random(f"{seed} {number}") for seed in seeds for number in range(samples)]
        beams = Beams.first(batch.memories[0], batch.bos)
        while batch.sentences:
            uniform_R = torch.tensor([stream.random() for stream in streams], dtype=torch.float64, device=src.device)
            beams = extend_samples(batch, beams, forbidden, uniform_R, temperature, top_k, top_p)
            going = []
            for row, token in enumerate(beams.prefixes[:, 0, -1].tolist()):
                if token == eos or batch.step == batch.limits[row]:
                    tokens = beams.prefixes[row, 0, 1:].tolist()
                    score = beams.scores[row, 0].item()
                    ended = len(tokens) - (token == eos)
                    found[batch.sentences[row], numbers[row]] = Hypothesis(tokens[:ended], score, score)
                else:
                    going.append(row)
            if len(going) < len(numbers):
                batch.keep(going)
                beams = Beams(beams.prefixes[going], beams.scores[going])
                numbers = [numbers[row] for row in going]
                streams = [streams[row] for row in going]
    return [[found[sentence, number] for number in range(samples)] for sentence in range(src.size(0))]


def check_sampling(temperature: float, top_k: int | None, top_p: float, samples: int) -> None:
    """Raise ValueError for invalid settings."""
    if not temperature > 0:
        raise ValueError(
            f"temperature is {temperature}, not above 0: 1 samples from the model, greedy search is near 0"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}, below 1: 1 is greedy search, None considers all tokens")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}, outside (0, 1]: 1 considers all tokens")
    if samples < 1:
        raise ValueError(f"samples is {samples}, below 1: draw at least one")


def extend_samples(
    batch: Batch,
    beams: Beams,
    forbidden: Forbidden,
    uniform_R: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float,
) -> Beams:
    """Return the samples with one more token each, and its log-probability added to the scores."""
    hiddens = batch.next_hidden(beams.prefixes[:, 0, -1])
    tokens: list[Tensor] = []
    scores = []
    start = 0
    for block in logits_blocks(batch, beams, hiddens):
        logits_RV = block.logits
        end = start + len(logits_RV)
        # Before anything is forbidden: log p = z - log sum exp z over the whole vocabulary
        total_R = logits_RV.logsumexp(-1)
        check_finite(total_R, block.sentences)
        forbidden.mask(logits_RV, block.prefixes, block.sentences)
        if forbidden.rules or batch.step == 1:  # tokens that the model itself never outputs are the same at every step
            check_alive(logits_RV.amax(-1), block.sentences)
        token_R = draw(logits_RV, uniform_R[start:end], temperature, top_k, top_p)
        tokens.append(token_R)
        scores.append(logits_RV.gather(1, token_R[:, None])[:, 0] - total_R)
        start = end
    prefixes_R1T = torch.cat((beams.prefixes, torch.cat(tokens)[:, None, None]), dim=2)
    return Beams(prefixes_R1T, beams.scores + torch.cat(scores)[:, None])


def draw(logits_RV: Tensor, uniform_R: Tensor, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    """Return the token at which the cumulative probability exceeds a uniform number from [0, 1): (R,).

    The probabilities have the precision of the logits; their cumulative sums are in float64, since the rounding error
    of a float32 sum over a large vocabulary exceeds many of its probabilities.
    """
    found = [
        draw_from_rows(rows_RV, uniform, temperature, top_k, top_p)
        for rows_RV, uniform in zip(logits_RV.split(ROWS), uniform_R.split(ROWS), strict=True)
    ]
    return torch.cat(found)


ROWS = 64
"""Rows whose tokens are drawn at a time: few enough that their probabilities fit into a cache."""


def draw_from_rows(logits_RV: Tensor, uniform_R: Tensor, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    """Return the token drawn in each of a few rows, (R,)."""
    scaled_RV = logits_RV
    if temperature != 1:
        # Shift the largest to 0 first, so that no quotient overflows
        scaled_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)) / min(max(temperature, COLDEST), HOTTEST)
    if top_k is None and top_p == 1:
        return first_exceeding(scaled_RV.softmax(-1), uniform_R)
    p_RC, tokens_RC = most_probable(scaled_RV, top_k, top_p)
    if top_p < 1:
        # A token belongs to the nucleus if the more probable ones do not reach p without it
        p_RC = p_RC.masked_fill(p_RC.cumsum(-1) - p_RC >= top_p, 0)
    drawn_R = first_exceeding(p_RC, uniform_R)
    return tokens_RC.gather(1, drawn_R[:, None])[:, 0]


COLDEST = 1e-30
"""A lower temperature has the same effect, but might be 0 as a float32."""

HOTTEST = 1e30
"""A higher temperature has the same effect, but might be inf as a float32, and a forbidden token's logit nan."""


def first_exceeding(p_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Compute `torch.searchsorted(c, u * c[:, -1:], right=True)` with `c = p_RV.double().cumsum(-1)`: (R,).

    Blocks of the vocabulary are added up first. A cumulative sum over the blocks' probabilities finds the block, and
    how far into it u falls; a cumulative sum within the block then finds the token at that fraction. Each token is thus
    drawn with its probability, to the relative precision of p, however improbable it is, and never if that is 0.
    """
    rows, vocab = p_RV.shape
    whole = vocab // BLOCK * BLOCK
    sums_RW = p_RV[:, :whole].reshape(rows, -1, BLOCK).sum(-1)
    if whole < vocab:
        sums_RW = torch.cat((sums_RW, p_RV[:, whole:].sum(-1, keepdim=True)), 1)
    block_R1, rest_R1 = find_quantile(sums_RW, uniform_R[:, None])
    inside_RM = block_R1 * BLOCK + torch.arange(min(BLOCK, vocab), device=p_RV.device)
    # The last block may be shorter; what is read beyond its end counts as 0
    inside_p_RM = p_RV.gather(1, inside_RM.clamp(max=vocab - 1)).masked_fill(inside_RM >= vocab, 0)
    token_R1, _ = find_quantile(inside_p_RM, rest_R1)
    return (block_R1 * BLOCK + token_R1)[:, 0]


BLOCK = 64
"""Number of tokens whose probabilities are added up first."""

BELOW_ONE = 1 - 2**-53
"""The largest float64 below 1."""


def find_quantile(p_RC: Tensor, uniform_R1: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the cumulative sum first exceeds the share u of the total, and which part of that entry lies below.

    Both are (R, 1). The part is in [0, 1). The entry found is never 0, since the sum must grow to exceed the share.
    """
    cumulative_RC = p_RC.cumsum(-1, dtype=torch.float64)
    target_R1 = uniform_R1 * cumulative_RC[:, -1:]
    index_R1 = torch.searchsorted(cumulative_RC, target_R1, right=True)
    end_R1 = cumulative_RC.gather(1, index_R1)
    start_R1 = cumulative_RC.gather(1, (index_R1 - 1).clamp(min=0)).masked_fill(index_R1 == 0, 0)
    # The target is below the end, but both differences may round to the same number
    return index_R1, ((target_R1 - start_R1) / (end_R1 - start_R1)).clamp(max=BELOW_ONE)


def most_probable(scaled_RV: Tensor, top_k: int | None, top_p: float) -> tuple[Tensor, Tensor]:
    """Return the probabilities of the most probable tokens in float64, best first, and the tokens: two (R, C).

    With `top_k` there are that many, and their probabilities sum to 1. Otherwise there are enough to reach p.
    """
    vocab = scaled_RV.size(1)
    count = NUCLEUS
    if top_k is not None:
        count = top_k
    best_RC, tokens_RC = scaled_RV.topk(min(count, vocab))
    if top_k is not None:
        return best_RC.double().softmax(-1), tokens_RC
    p_RC = (best_RC.double() - scaled_RV.logsumexp(-1, keepdim=True)).exp()
    if bool((p_RC.sum(-1) < top_p).any()):
        best_RC, tokens_RC = scaled_RV.sort(-1, descending=True)
        return best_RC.double().softmax(-1), tokens_RC
    return p_RC, tokens_RC


NUCLEUS = 64
"""Number of tokens in which a nucleus is sought before the whole vocabulary is sorted."""
