"""Every decoder of the installed transformers under TRL: the scores of the model's own logits, or refused by name.

A class is refused for good reason (REFUSED); a new one is not in the table, and has to be exact.
"""

import re

import pytest
import torch
import transformers as hf
from trl.trainer.utils import add_fused_lm_head

from seqpar.integrations.trl import AppliedScores
from tests.seqpar.integrations.shrunk_models import working
from tests.seqpar.integrations.test_hf_models import CHANGES, CLASSES, NOT_TINY, by_name
from tests.seqpar.integrations.trl_runs import plain_outputs

DECODER = re.compile(r"\w+(ForCausalLM|LMHeadModel)")
# The logits of these two are not those of the text alone
OTHERS = ("CsmDepthDecoderForCausalLM", "GitForCausalLM")
NAMES = [name for name in CLASSES if DECODER.fullmatch(name) and name not in (*NOT_TINY, *OTHERS)]


REFUSED = by_name(
    {
        "it has layers between backbone and output embeddings, which TRL's own way leaves out": (
            "BertLMHeadModel BigBirdForCausalLM BlipTextLMHeadModel CamembertForCausalLM Data2VecTextForCausalLM "
            "ElectraForCausalLM ErnieForCausalLM InklingForCausalLM MegatronBertForCausalLM "
            "ModernBertDecoderForCausalLM RemBertForCausalLM RoCBertForCausalLM RoFormerForCausalLM "
            "RobertaForCausalLM RobertaPreLayerNormForCausalLM XLMRobertaForCausalLM XLMRobertaXLForCausalLM "
            "XmodForCausalLM"
        ),
        "it names no output embeddings": "ClvpForCausalLM",
        "its base_model is not the backbone, and TRL's own way raises an error": "Llama4ForCausalLM MllamaForCausalLM",
        "it scales its hidden states before the output embeddings": "MiniCPM3ForCausalLM",
        "it predicts several tokens at once": "ProphetNetForCausalLM",
        "made tiny, it takes only texts of certain lengths": "xLSTMForCausalLM",
    }
)
"""Classes whose scores cannot be computed from the backbone's last hidden states and the output embeddings, and why."""

pytestmark = pytest.mark.hf_models


def outcome(model, batch):
    """ "exact", "refused", or by how much the log-probabilities differ."""
    labels = batch.pop("labels")
    add_fused_lm_head(model)
    own = plain_outputs(model, 1.0, labels=labels, **batch).log_probs
    try:
        with AppliedScores([model], 5):
            scores = model(**batch, labels=labels, fused_lm_head=True).log_probs
    except (TypeError, RuntimeError) as error:
        text = str(error)
        if type(model).__name__ in text and "apply_seqpar_scores" in text and "\n" not in text:
            return "refused"
        return f"{type(error).__name__}: {text}"
    difference = float((scores - own).abs().max())
    return "exact" if difference < 1e-4 else f"differs by {difference:.2g}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_the_scores_are_those_of_the_models_own_logits_or_it_is_refused_by_name(name):
    model, batch = working(getattr(hf, name), CHANGES.get(name, {}))
    with torch.no_grad():
        assert outcome(model.eval(), batch) == ("refused" if name in REFUSED else "exact")


def test_the_table_names_no_class_that_does_not_exist():
    assert set(NAMES) >= REFUSED.keys()
