"""Every bad input of an objective gets one line that names the argument."""

import pytest
import torch

import seqpar
from seqpar import objectives

ONE, TWO, PAIR = torch.zeros(1), torch.zeros(2), torch.zeros(2, 3)
INTS, MASK = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
CLIPS = {"eps_low": 0.2, "eps_high": 0.2}

CASES = {
    "dpo shapes": (lambda o: o.dpo(TWO, ONE, beta=1.0), ValueError, r"rejected_log_ratio has shape \(1,\)"),
    "dpo dtype": (lambda o: o.dpo(TWO, INTS, beta=1.0), TypeError, "rejected_log_ratio has dtype torch.int64"),
    "dpo no tensor": (lambda o: o.dpo([0.0], ONE, beta=1.0), TypeError, "chosen_log_ratio is a list of 1"),
    "dpo beta 0": (lambda o: o.dpo(ONE, ONE, beta=0.0), ValueError, "beta is 0.0; it must be a finite number above 0"),
    "dpo beta nan": (lambda o: o.dpo(ONE, ONE, beta=torch.nan), ValueError, "beta is nan"),
    "dpo beta text": (lambda o: o.dpo(ONE, ONE, beta="1"), TypeError, "beta is the text '1'"),
    "dpo variant": (
        lambda o: o.dpo(ONE, ONE, beta=1.0, variant="kto"),
        ValueError,
        "variant is 'kto'; it must be 'sigmoid', 'hinge', 'ipo' or 'robust'",
    ),
    "dpo smoothing": (
        lambda o: o.dpo(ONE, ONE, beta=1.0, label_smoothing=0.5),
        ValueError,
        "label_smoothing is 0.5; it must be a finite number at least 0 and below 0.5",
    ),
    "ipo smoothing": (
        lambda o: o.dpo(ONE, ONE, beta=1.0, variant="ipo", label_smoothing=0.1),
        ValueError,
        "label_smoothing is 0.1 and variant 'ipo', which has none; use 'sigmoid' or 'robust'",
    ),
    "dpo device": (
        lambda o: o.dpo(ONE, ONE.to("meta"), beta=1.0),
        TypeError,
        "rejected_log_ratio is on the meta device",
    ),
    "kto labels": (
        lambda o: o.kto(TWO, INTS, beta=1.0, reference_point=0.0),
        TypeError,
        r"desirable has dtype torch.int64; it must be bool.*desirable.bool\(\)",
    ),
    "kto label shape": (
        lambda o: o.kto(ONE, MASK, beta=1.0, reference_point=0.0),
        ValueError,
        r"desirable has shape \(2,\) and log_ratio \(1,\)",
    ),
    "kto point": (
        lambda o: o.kto(TWO, MASK, beta=1.0, reference_point=TWO),
        TypeError,
        r"reference_point has shape \(2,\) and dtype torch.float32; it must be a number, or a tensor of one",
    ),
    "kto point nan": (
        lambda o: o.kto(TWO, MASK, beta=1.0, reference_point=torch.nan),
        ValueError,
        "reference_point is nan",
    ),
    "kto beta": (lambda o: o.kto(TWO, MASK, beta=-1.0, reference_point=0.0), ValueError, "beta is -1.0"),
    "kto weight": (
        lambda o: o.kto(TWO, MASK, beta=1.0, reference_point=0.0, desirable_weight=-1.0),
        ValueError,
        "desirable_weight is -1.0",
    ),
    "kto other weight": (
        lambda o: o.kto(TWO, MASK, beta=1.0, reference_point=0.0, undesirable_weight=-1.0),
        ValueError,
        "undesirable_weight is -1.0",
    ),
    "orpo weight": (lambda o: o.orpo(ONE, ONE, weight=0.0), ValueError, "weight is 0.0"),
    "orpo nll_weight": (lambda o: o.orpo(ONE, ONE, weight=1.0, nll_weight=-1.0), ValueError, "nll_weight is -1.0"),
    "orpo chosen_nll": (
        lambda o: o.orpo(ONE, ONE, weight=1.0, chosen_nll=TWO),
        ValueError,
        r"chosen_nll has shape \(2,\)",
    ),
    "orpo shapes": (lambda o: o.orpo(ONE, TWO, weight=1.0), ValueError, r"rejected_mean has shape \(2,\)"),
    "simpo beta": (lambda o: o.simpo(ONE, ONE, beta=0, gamma=1.0), ValueError, "beta is 0"),
    "simpo gamma": (lambda o: o.simpo(ONE, ONE, beta=1.0, gamma=-1.0), ValueError, "gamma is -1.0"),
    "cpo beta": (lambda o: o.cpo(ONE, ONE, beta=0), ValueError, "beta is 0"),
    "cpo weight": (lambda o: o.cpo(ONE, ONE, beta=1.0, nll_weight=-1.0), ValueError, "nll_weight is -1.0"),
    "surrogate shapes": (
        lambda o: o.clipped_surrogate(PAIR, TWO, **CLIPS),
        ValueError,
        r"advantages has shape \(2,\) and log_ratio \(2, 3\)",
    ),
    "surrogate low": (
        lambda o: o.clipped_surrogate(TWO, TWO, eps_low=1.0, eps_high=0.2),
        ValueError,
        "eps_low is 1.0; it must be a finite number at least 0 and below 1",
    ),
    "surrogate high": (
        lambda o: o.clipped_surrogate(TWO, TWO, eps_low=0.2, eps_high=-0.1),
        ValueError,
        "eps_high is -0.1",
    ),
    "surrogate largest": (
        lambda o: o.clipped_surrogate(TWO, TWO, **CLIPS, max_ratio=1.1),
        ValueError,
        "max_ratio is 1.1; it must be a finite number above 1.2",
    ),
    "soft temperature": (lambda o: o.soft_surrogate(TWO, TWO, temperature=0.0), ValueError, "temperature is 0.0"),
    "soft negative": (
        lambda o: o.soft_surrogate(TWO, TWO, negative_temperature=0.0),
        ValueError,
        "negative_temperature is 0.0",
    ),
    "weighted shapes": (
        lambda o: o.weighted_policy_gradient(PAIR, TWO, PAIR),
        ValueError,
        r"weights has shape \(2,\) and log_prob \(2, 3\)",
    ),
    "gamma decay": (lambda o: o.gamma_weights(TWO, TWO, negative_decay=0.0), ValueError, "negative_decay is 0.0"),
    "an empty range": (
        lambda o: o.masked_weights(TWO, min_weight=2.0, max_weight=1.0),
        ValueError,
        "max_weight is 1.0; it must be a finite number at least 2",
    ),
    "estimator": (lambda o: o.kl_estimate(TWO, "k2"), ValueError, "estimator is 'k2'; it must be 'k1' or 'k3'"),
    "largest weight": (
        lambda o: o.truncated_weights(TWO, max_weight=0.0),
        ValueError,
        "max_weight is 0.0; it must be a finite number above 0",
    ),
    "group size": (
        lambda o: o.group_advantages(torch.zeros(5), 2),
        ValueError,
        r"rewards has shape \(5,\); it must be a vector of whole groups of group_size 2",
    ),
    "a group of one": (
        lambda o: o.group_advantages(TWO, 1),
        ValueError,
        "group_size is 1; it must be a whole number of at least 2",
    ),
    "group size dtype": (
        lambda o: o.group_advantages(TWO, 2.0),
        TypeError,
        "group_size is 2.0; it must be a whole number of at least 2",
    ),
    "rewards in rows": (
        lambda o: o.group_advantages(PAIR, 3),
        ValueError,
        r"rewards has shape \(2, 3\); it must be a vector of whole groups of group_size 3",
    ),
    "group eps": (lambda o: o.group_advantages(TWO, 2, eps=0.0), ValueError, "eps is 0.0"),
    "risk groups": (
        lambda o: o.minimum_risk(torch.zeros(5), torch.zeros(5), 3, alpha=1.0),
        ValueError,
        r"scores has shape \(5,\); it must be a vector of whole groups of group_size 3",
    ),
    "risk alpha": (lambda o: o.minimum_risk(TWO, TWO, 2, alpha=0.0), ValueError, "alpha is 0.0"),
    "risk costs": (lambda o: o.minimum_risk(TWO, ONE, 2, alpha=1.0), ValueError, r"costs has shape \(1,\)"),
    "risk candidates": (
        lambda o: o.minimum_risk(TWO, TWO, 2, alpha=1.0, candidates=INTS),
        TypeError,
        "candidates has dtype torch.int64; it must be bool",
    ),
    "ratio shapes": (
        lambda o: o.token_log_ratio(TWO, ONE, MASK),
        ValueError,
        r"other_log_prob has shape \(1,\) and log_prob \(2,\)",
    ),
    "ratio mask": (
        lambda o: o.token_log_ratio(PAIR, PAIR, MASK),
        ValueError,
        r"mask has shape \(2,\) and log_prob \(2, 3\)",
    ),
    "ratio of TokenScores": (
        lambda o: o.token_log_ratio((TWO, TWO), TWO, MASK),
        TypeError,
        "log_prob is a tuple of 2; it must be a tensor",
    ),
    "sequence ratio": (
        lambda o: o.sequence_log_ratio(TWO, TWO, MASK, 1),
        TypeError,
        "segment_ids has dtype torch.bool",
    ),
    "sequence ratio shape": (
        lambda o: o.sequence_log_ratio(PAIR, PAIR, INTS, 1),
        ValueError,
        r"segment_ids has shape \(2,\) and log_prob \(2, 3\)",
    ),
    "kto point meta": (
        lambda o: o.kto(TWO, MASK, beta=1.0, reference_point=ONE.to("meta")),
        TypeError,
        "reference_point is on the meta device",
    ),
    "mask list": (lambda o: o.per_token(TWO, [True, True]), TypeError, "mask is a list of 2; it must be a tensor"),
    "padded list": (lambda o: o.padded_segments([[True]]), TypeError, "mask is a list of 1; it must be a tensor"),
    "segment list": (lambda o: o.sequence_sums(TWO, [0, 0], 1), TypeError, "segment_ids is a list of 2"),
    "dft mask": (lambda o: o.dft(TWO, INTS), TypeError, "mask has dtype torch.int64; it must be bool"),
    "per token mask": (lambda o: o.per_token(TWO, INTS), TypeError, "mask has dtype torch.int64; it must be bool"),
    "per item": (
        lambda o: o.per_item(PAIR),
        ValueError,
        r"losses has shape \(2, 3\); it must be a vector, one loss per item",
    ),
    "per constant": (
        lambda o: o.per_constant(TWO, MASK, -1),
        ValueError,
        "constant is -1; it must be a whole number of at least 0",
    ),
    "per constant float": (
        lambda o: o.per_constant(TWO, MASK, 2.0),
        TypeError,
        "constant is 2.0; it must be a whole number",
    ),
    "segment range": (
        lambda o: o.per_sequence(TWO, torch.tensor([0, 3]), 3),
        IndexError,
        r"segment_ids has 3 at position \(1,\) and there are 3 sequences",
    ),
    "segment shape": (
        lambda o: o.sequence_sums(PAIR, INTS, 1),
        ValueError,
        r"segment_ids has shape \(2,\) and values \(2, 3\)",
    ),
    "segment dtype": (
        lambda o: o.sequence_lengths(TWO, 1),
        TypeError,
        r"segment_ids has dtype torch.float32; it must be int64: use segment_ids.long\(\)",
    ),
    "sequences": (
        lambda o: o.sequence_means(TWO, INTS, -1),
        ValueError,
        "sequences is -1; it must be a whole number of at least 0",
    ),
    "sequences tensor": (lambda o: o.sequence_sums(TWO, INTS, ONE), TypeError, "sequences is a Tensor"),
    "spread": (
        lambda o: o.spread_to_tokens(PAIR, INTS),
        ValueError,
        r"values has shape \(2, 3\); it must be \(sequences,\)",
    ),
    "spread range": (lambda o: o.spread_to_tokens(ONE, INTS + 1), IndexError, "segment_ids has 1 at position"),
    "padded mask": (
        lambda o: o.padded_segments(MASK),
        ValueError,
        r"mask has shape \(2,\); it must be \(batch, time\)",
    ),
    "padded dtype": (lambda o: o.padded_segments(PAIR), TypeError, "mask has dtype torch.float32; it must be bool"),
    "heads": (lambda o: o.head_targets(INTS, 0), ValueError, "heads is 0; .* of at least 1"),
    "heads float": (lambda o: o.head_targets(INTS, 2.0), TypeError, "heads is 2.0; it must be a whole number"),
    "head targets": (lambda o: o.head_targets(TWO, 1), TypeError, "target has dtype torch.float32"),
    "head target": (lambda o: o.head_targets(INTS[0], 1), ValueError, "target has no dimensions"),
    "head segments": (
        lambda o: o.head_targets(INTS, 1, segment_ids=torch.zeros(3, dtype=torch.int64)),
        ValueError,
        r"segment_ids has shape \(3,\) and target \(2,\)",
    ),
    "head ignore": (lambda o: o.head_targets(INTS, 1, ignore_index=None), TypeError, "ignore_index is None"),
}


@pytest.mark.unswitched
@pytest.mark.parametrize("name", CASES)
def test_a_bad_input_is_named_in_one_line(name):
    call, error, message = CASES[name]
    with pytest.raises(error, match=message) as caught:
        call(objectives)
    assert "\n" not in str(caught.value)


def test_every_objective_has_a_case():
    from_cases = {name for call, *_ in CASES.values() for name in call.__code__.co_names}
    assert set(objectives.__all__) <= from_cases


def test_the_room_is_reached_from_the_package():
    assert seqpar.objectives is objectives
    assert all(getattr(objectives, name).__doc__ for name in objectives.__all__)
