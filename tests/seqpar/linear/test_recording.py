"""While a CUDA graph is captured no row can be left out: ignored ones count for nothing in every loss and score.

The real thing is in the tests of a GPU; here the question whether one is being captured is answered with yes.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import seqpar
from seqpar.testing import assert_same_results
from tests.seqpar.linear.distillation_cases import KINDS, Distillation
from tests.seqpar.linear.linear_loss import linear_cases
from tests.seqpar.linear.test_soft_targets import soft_target
from tests.seqpar.recording import recorded


def distillation(tensors, case):
    """Every kind of teacher in turn, without a number in ignored rows where the student has none."""
    kind = KINDS[case.seed % len(KINDS)]
    one = Distillation(case, "forward_kl" if case.coarse else "reverse_kl", None, kind, 3, case.vocab_size // 2, True)
    teacher = one.teacher()
    ignored = (tensors["target"] == case.padding) & tensors["hidden"].isnan().any()
    if kind == "hidden":
        teacher.hidden[ignored] = torch.nan
    elif kind == "log_probs":
        function = teacher.function
        teacher = seqpar.TeacherLogProbs(
            lambda rows: function(rows).masked_fill(ignored.flatten()[rows].unsqueeze(1), torch.nan)
        )
    else:
        teacher.log_probs[ignored] = torch.nan
        teacher.ids[ignored] = 99
    return seqpar.linear_distillation(**tensors, teacher=teacher, divergence=one.divergence, **of(case, "temperature"))


def soft(tensors, case):
    sparse, _ = soft_target(case, 2, True)
    ignored = (tensors["target"] == case.padding) & tensors["hidden"].isnan().any()
    sparse.probs[ignored] = torch.nan
    sparse.ids[ignored] = 99
    return seqpar.linear_cross_entropy(**tensors, soft_target=sparse, **of(case, "temperature", "softcap", "z_loss"))


def scores(tensors, case):
    random = torch.Generator().manual_seed(case.seed)
    ids = torch.randint(case.vocab_size, (*case.lead, 2), generator=random)
    ignored = tensors["target"] == case.padding
    temperature = torch.full(case.lead, case.options["temperature"], dtype=torch.float64)
    odd = ignored & tensors["hidden"].isnan().any()
    temperature[odd], ids[odd] = torch.nan, 99
    asked = {"entropy": case.weighted, "ids": ids if case.token_weighted else None, "top_k": 2, "rank": True}
    found = seqpar.token_scores(**tensors, **of(case, "softcap"), **asked, temperature=temperature)
    total = 0.0
    for score in (found.log_prob, found.entropy, found.log_probs_at):
        if score is not None:
            assert (score[ignored] == 0).all()
            factors = torch.linspace(-1, 2, score.numel(), dtype=torch.float64).reshape(score.shape)
            total = total + (score * factors).sum()
    assert (found.top_ids[ignored] == -1).all()
    assert ((found.rank == -1) == ignored).all()
    return seqpar.TokenLoss(total, (~ignored).sum())


def of(case, *names):
    return {name: case.options[name] for name in ("ignore_index", "chunk_tokens", *names)}


def result(loss, case, hidden_of_padding):
    """The loss and its gradients, where the hidden states of ignored rows are this."""
    drop = ("class_weight", "token_weight")
    tensors = {name: t for name, t in case.tensors().items() if name not in drop}
    with torch.no_grad():
        tensors["hidden"][tensors["target"] == case.padding] = hidden_of_padding
    found = loss(tensors, case)
    names = [name for name, t in tensors.items() if t.requires_grad]
    grads = torch.autograd.grad(found.total, [tensors[n] for n in names]) if names else ()
    return (found.total.detach(), dict(zip(names, grads, strict=True))), found


@pytest.mark.parametrize("loss", [distillation, soft, scores])
@settings(max_examples=15)
@given(linear_cases(), st.sampled_from([1.0, float("nan")]))
def test_ignored_rows_of_a_recorded_loss_count_for_nothing(loss, case, hidden_of_padding):
    """Not even where their hidden state is no number."""
    expected, plain = result(loss, case, 0.0)
    with recorded():
        got, found = result(loss, case, hidden_of_padding)
    assert_same_results(got, expected)
    assert found.tokens == plain.tokens
    if plain.nll is not None:
        assert float(found.nll) == pytest.approx(float(plain.nll), rel=1e-12, abs=1e-12)
        assert found.correct == plain.correct
