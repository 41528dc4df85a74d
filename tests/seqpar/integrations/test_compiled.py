"""Under `torch.compile` a model with the loss is a few graphs, and has the same numbers."""

import pytest
import torch
import torch._dynamo.testing

from seqpar.integrations.transformers import apply_seqpar_loss
from tests.seqpar.integrations.tiny_models import assert_alike, batch_of, taken, tiny

pytestmark = pytest.mark.filterwarnings("ignore")


def test_three_graphs_have_the_numbers_of_none_and_are_not_made_again_for_other_labels():
    """Two on torch 2.11."""
    torch._dynamo.reset()
    model = tiny("llama")
    counter = torch._dynamo.testing.CompileCounter()
    batches = [batch_of(model, lengths, seed) for seed, lengths in enumerate([[7, 5], [7, 3], [7, 6]])]
    with apply_seqpar_loss(model, label_smoothing=0.1, chunk_tokens=4):
        compiled = torch.compile(model, backend=counter, dynamic=False)
        made = []
        for batch in batches:
            found, of_graphs = (taken(model, way(**batch, num_items_in_batch=9).loss) for way in (model, compiled))
            assert_alike(of_graphs, found)
            made.append(counter.frame_count)
    graphs = 2 if torch.__version__.startswith("2.11.") else 3
    assert made == [graphs] * 3


def test_the_whole_model_as_one_graph_is_refused_with_the_reason():
    torch._dynamo.reset()
    model = tiny("llama")
    with apply_seqpar_loss(model), pytest.raises(torch._dynamo.exc.Unsupported, match="leave out fullgraph=True"):
        torch.compile(model, backend="eager", fullgraph=True)(**batch_of(model, [7, 5]))
