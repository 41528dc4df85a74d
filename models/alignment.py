"""Word alignments from attention: how much each target token looks at each source token.

Translation itself never stores attention weights, so they are computed here, for one layer and a given target.

Shapes: B sentences, T target time, S source time, D model width, H heads, K width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.attention import Attention, padding_mask
from models.ensemble import evaluating
from models.transformer import Decoder, EncoderDecoder


def attention_weights(model: EncoderDecoder, src: Tensor, tgt: Tensor, layer: int | None = None) -> Tensor:
    """Compute the attention to the source in one decoder layer, averaged over its heads: (B, T, S).

    Row t belongs to the step that has read tgt[:, :t + 1] and predicts the next token. Each row sums to 1, and padding
    of src has no share. Rows of padding in tgt mean nothing.

    Mean over heads of softmax(Q K^T / sqrt(d_k)), as Garg et al. 2019 ("Jointly Learning to Align and Translate with
    Transformer Models") read alignments from a trained Transformer; the penultimate layer is theirs.

    Args:
        model: in eval mode within the call, without gradients; its modes are restored afterwards.
        src, tgt: ids padded at the end, (B, S) and (B, T); tgt starts with the start symbol, as in training.
        layer: counted from 0; the default is the penultimate one, or the only one.

    Raises ValueError for a model without such layers, a layer that the model does not have, and what
    `EncoderDecoder.forward` raises.
    """
    if not isinstance(model.decoder, Decoder):
        raise ValueError(
            f"alignments are read from a Transformer's decoder, and the model has a {type(model.decoder).__name__}"
        )
    layers = len(model.decoder.layers)
    if layer is None:
        layer = max(0, layers - 2)
    if not 0 <= layer < layers:
        raise ValueError(f"layer is {layer}, outside [0, {layers - 1}]: the decoder has {layers} layers")
    attention = model.decoder.layers[layer].memory_attention
    assert isinstance(attention, Attention)
    inputs: list[tuple[Tensor, ...]] = []
    hook = attention.register_forward_pre_hook(lambda _, given: inputs.append(given))
    try:
        with evaluating(model):
            model(src, tgt)
            ((x_BTD, lookup, *_),) = inputs
            query_BHTK = attention.query(x_BTD).unflatten(-1, (attention.heads, -1)).transpose(1, 2)
            scores_BHTS = query_BHTK @ lookup.keys.mT / query_BHTK.size(-1) ** 0.5  # type: ignore[attr-defined]
            scores_BHTS.masked_fill_(~padding_mask(src, model.pad), -torch.inf)
            mean_BTS: Tensor = scores_BHTS.softmax(-1).mean(1)
    finally:
        hook.remove()
    return mean_BTS
