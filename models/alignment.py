"""Word alignments from attention: how much each target token looks at each source token.

Translation itself never stores attention weights, so they are computed here, for one layer and a given target.

Shapes: B sentences, T target time, S source time.
"""

from __future__ import annotations

from torch import Tensor

from models.ensemble import evaluating
from models.transformer import EncoderDecoder


def attention_weights(model: EncoderDecoder, src: Tensor, tgt: Tensor, layer: int | None = None) -> Tensor:
    """Compute the attention to the source in one decoder layer, averaged over its heads: (B, T, S).

    Row t belongs to the step that has read tgt[:, :t + 1] and predicts the next token. Each row sums to 1, and padding
    in src has no share. Rows for padding in tgt are meaningless.

    In an encoder-decoder it is the mean over heads of softmax(Q K^T / sqrt(d_k)), from which Garg et al. 2019 ("Jointly
    Learning to Align and Translate with Transformer Models") read alignments of a trained model; they too take the
    penultimate layer. A decoder-only model attends to source and target at once: the source's part of the mean is
    taken and divided by its sum.

    Args:
        model: runs in eval mode without gradients; its modes are restored afterwards.
        src, tgt: ids padded at the end, (B, S) and (B, T); tgt starts with the start symbol, as in training.
        layer: counted from 0; the default is the penultimate one, or the only one.

    Raises ValueError for a layer that the model does not have, and what the model's `forward` raises.
    """
    with evaluating(model):
        return model.source_attention(src, tgt, layer)
