"""The Transformer encoder-decoder (Vaswani et al. 2017), without its projection to the vocabulary.

`EncoderDecoder.forward` returns hidden states; `EncoderDecoder.generator` turns them into logits. This leaves it to the
code that computes the loss how many logits exist at once.

Shapes: B sentences, R rows (sentences x beams; R = B outside beam search), S source time, T target time,
D model width, V vocabulary. Sentences are padded at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import Attention, KeyValues, added_scores, check_mask, log_weights_of, padding_mask
from models.cache import DecoderCache, LayerCache
from models.dropout import Dropout
from models.embedding import Embedding
from models.presets import Activation, Tie, TransformerConfig

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "swish": F.silu}
"""The activations other than relu."""


class FeedForward(nn.Module):
    """max(0, x W_1 + b_1) W_2 + b_2 at each position (equation 2), or with another activation in place of the maximum.

    gelu is x Phi(x) (Hendrycks and Gimpel 2016), and swish x sigmoid(x) (Ramachandran et al. 2017).
    """

    def __init__(self, d_model: int, d_ff: int, activation: Activation = "relu") -> None:
        super().__init__()
        self.activation = activation
        self.inner = nn.Linear(d_model, d_ff)
        self.outer = nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of (B, T, D)."""
        inner: Tensor = self.inner(x)
        if self.activation != "relu":
            inner = ACTIVATIONS[self.activation](inner)
        else:
            # In place if no gradient needs the values before it, which saves one tensor (B, T, d_ff)
            inner = inner.relu() if inner.requires_grad else inner.relu_()
        y: Tensor = self.outer(inner)
        return y


class Residual(nn.Module):
    """A sublayer's residual connection, dropout and layer norm.

    post: LayerNorm(x + Dropout(f(x))), sections 3.1 and 5.4; pre: x + Dropout(f(LayerNorm(x))), Xiong et al.
    2020, figure 1b.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pre = config.norm == "pre"
        self.norm = nn.LayerNorm(config.d_model)
        self.enter: nn.Module = nn.Identity()
        """A module that the sublayer's input passes through; `models.sharding` communicates there."""
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Add the sublayer's output to x (B, T, D)."""
        if self.pre:
            x = x + self.dropout(sublayer(self.enter(self.norm(x))))
            return x
        x = self.norm(x + self.dropout(sublayer(self.enter(x))))
        return x


class Layer(nn.Module):
    """Self-attention, attention to the memory if there is one, feed-forward network (section 3.1).

    With a memory it is a layer of a decoder (figure 1 right). Without one it is a layer of a decoder-only model or, if
    it is not `causal`, of an encoder (figure 1 left).
    """

    def __init__(self, config: TransformerConfig, has_memory: bool, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.self_attention = Attention(config.d_model, config.heads)
        self.has_memory = has_memory
        if has_memory:
            self.memory_attention = Attention(config.d_model, config.heads)
        self.feed_forward = FeedForward(config.d_model, config.d_ff, config.activation)
        self.residuals = nn.ModuleList(Residual(config) for _ in range(2 + has_memory))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Transform the states x (R, T, D), given the memory (B, S, D), if there is one.

        Without `mask`, a causal layer attends to no later state, and any other layer to all states.
        """

        def attend_to_itself(y: Tensor) -> Tensor:
            lookup = keys_values_so_far(self.self_attention, y, memory, cache)
            # A single cached step attends to all steps so far, so there is nothing to mask
            causal = self.causal and mask is None and not (cache is not None and y.size(1) == 1)
            attended: Tensor = self.self_attention(y, lookup, mask, causal)
            return attended

        def attend_to_memory(y: Tensor) -> Tensor:
            assert memory is not None
            if cache is None:
                lookup = self.memory_attention.keys_values(memory)
            else:
                # The memory is the same at every step: project it once
                if cache.memory is None:
                    cache.memory = self.memory_attention.keys_values(memory).contiguous()
                lookup = cache.memory
            attended: Tensor = self.memory_attention(y, lookup, memory_mask)
            return attended

        x = self.residuals[0](x, attend_to_itself)
        # Not "if a memory was passed": a decoder that is called without one must fail rather than skip the sublayer
        if self.has_memory:
            x = self.residuals[1](x, attend_to_memory)
        x = self.residuals[-1](x, self.feed_forward)
        return x


def keys_values_so_far(attention: Attention, y: Tensor, memory: Tensor | None, cache: LayerCache | None) -> KeyValues:
    """Project the states y (R, T, D) of further steps; return them after those in the cache."""
    if cache is None:
        return attention.keys_values(y)
    sentences = y.size(0)
    if memory is not None:
        sentences = memory.size(0)
    elif cache.own is not None:
        sentences = cache.own.keys.size(0)
    # The beams of a sentence share its list of slots: (B x beams, T, D) -> (B, beams x T, D)
    steps = y.size(0) // max(1, sentences) * y.size(1)
    return cache.extend(attention.keys_values(y.reshape(sentences, steps, y.size(2))))


class Stack(nn.Module):
    """The layers of an encoder or a decoder (section 3.1)."""

    def __init__(self, config: TransformerConfig, layers: int, has_memory: bool = False, causal: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, has_memory, causal) for _ in range(layers))
        # Pre-norm layers leave their sum unnormalised (Xiong et al. 2020)
        self.norm: nn.Module = nn.Identity()
        if config.norm == "pre":
            self.norm = nn.LayerNorm(config.d_model)

    def empty_cache(self) -> DecoderCache:
        """Return a new cache for `EncoderDecoder.decode` to decode step by step."""
        return DecoderCache.empty(len(self.layers))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """Transform the states x (R, T, D) in every layer, with arguments as in `Layer`."""
        mask = added_scores(mask, x)
        memory_mask = added_scores(memory_mask, x)
        for index, layer in enumerate(self.layers):
            layer_cache = None
            if cache is not None:
                layer_cache = cache.layers[index]
            x = layer(x, mask, memory, memory_mask, layer_cache)
        x = self.norm(x)
        return x


class Generator(nn.Linear):
    """The projection of hidden states to logits over the vocabulary: (..., D) -> (..., V) (section 3.4).

    It returns logits, not log-probabilities: the criterion normalises them once, in its own precision. A log-softmax
    here would cost another tensor of tokens x V, and greedy search needs none at all.
    """


class EncoderDecoder(nn.Module):
    """A model of p(target | source) whose `forward` returns hidden states, before the generator (section 3.1)."""

    attention_read = "the mean over the heads of the penultimate decoder layer"
    """What `source_attention` returns by default, in words for users."""

    def __init__(
        self,
        encoder: Stack,
        decoder: Stack,
        src_embed: Embedding,
        tgt_embed: Embedding,
        generator: Generator,
        pad: int = 0,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.src_embed = src_embed
        self.tgt_embed = tgt_embed
        self.generator = generator
        self.pad = pad

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None
    ) -> Tensor:
        """Compute `decode(encode(src), src_mask, tgt)`: the decoder's hidden states, (B, T, D), for the generator.

        src (B, S) and tgt (B, T) are long ids padded at the end; tgt starts with the start symbol. Without src_mask,
        padding in src is masked. Without tgt_mask, the decoder is causal; padding needs no mask of its own, since it
        only follows real tokens. A mask replaces the default one.

        Raises TypeError or ValueError for ids or masks of the wrong dtype or shape.
        """
        check_pairs(src, tgt)
        if src_mask is None:
            src_mask = padding_mask(src, self.pad)
        return self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask)

    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """Compute the memory: (B, S) ids -> (B, S, D)."""
        check_tokens("src", src)
        check_mask("src_mask", src_mask)
        if src_mask is None:
            src_mask = padding_mask(src, self.pad)
        memory: Tensor = self.encoder(self.src_embed(src), src_mask)
        return memory

    def decode(
        self,
        memory: Tensor,
        src_mask: Tensor | None,
        tgt: Tensor,
        tgt_mask: Tensor | None = None,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """Compute the hidden states of a target prefix: memory (B, S, D), tgt (R, T) ids -> (R, T, D).

        R is B, or B x beams with the beams of a sentence next to each other. src_mask is `padding_mask(src, pad)`; with
        None, every query attends to the whole memory. With a cache (`decoder.empty_cache()`), tgt contains only the
        steps after the cached ones, the memory is projected in the first call only, and there must be no tgt_mask.
        """
        check_tokens("tgt", tgt)
        check_mask("src_mask", src_mask)
        check_mask("tgt_mask", tgt_mask)
        check_beams(memory, tgt)
        start = 0
        if cache is not None:
            if tgt_mask is not None:
                raise ValueError("tgt_mask was given with a cache, which knows what is visible: pass one of them")
            start = cache.length
            sentences = memory.size(0)
            tgt_mask = cache.grow(sentences, tgt.size(0) // max(1, sentences), tgt.size(1), tgt.device)
        hidden: Tensor = self.decoder(self.tgt_embed(tgt, start), tgt_mask, memory, src_mask, cache)
        return hidden

    def source_attention(self, src: Tensor, tgt: Tensor, layer: int | None = None) -> Tensor:
        """Compute the attention to the source in one decoder layer, averaged over its heads: (B, T, S).

        `models.alignment.attention_weights` describes the arguments, rows and errors; it calls this in eval mode.
        """
        attention = layer_of(self.decoder.layers, layer).memory_attention
        assert isinstance(attention, Attention)
        with log_weights_of(attention) as calls:
            self(src, tgt)
        (log_BHTS,) = calls
        mean_BTS: Tensor = log_BHTS.exp().mean(1)
        return mean_BTS


def check_tokens(name: str, tokens: Tensor) -> None:
    """Raise unless `tokens` is a (batch, time) tensor of ids."""
    if tokens.dtype not in (torch.long, torch.int):
        raise TypeError(f"{name} is {tokens.dtype}, not torch.long: pass token ids")
    if tokens.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(tokens.shape)}, {tokens.dim()} dims, not 2: pass (batch, time)")


def check_pairs(src: Tensor, tgt: Tensor) -> None:
    """Raise unless `src` and `tgt` are ids of equally many sentences."""
    check_tokens("src", src)
    check_tokens("tgt", tgt)
    if src.size(0) != tgt.size(0):
        raise ValueError(f"src has {src.size(0)} sentences, tgt {tgt.size(0)}: pair them row by row")


def layer_of(layers: nn.ModuleList, number: int | None) -> nn.Module:
    """Return the layer with this number, counted from 0; None means the penultimate one, or the only one."""
    if number is None:
        number = max(0, len(layers) - 2)
    if not 0 <= number < len(layers):
        raise ValueError(f"layer is {number}, outside [0, {len(layers) - 1}]: the decoder has {len(layers)} layers")
    return layers[number]


def check_beams(memory: Tensor, tgt: Tensor) -> None:
    """Raise unless the rows of `tgt` are as many as the sentences of `memory`, or a multiple of them."""
    if tgt.size(0) % max(1, memory.size(0)):
        raise ValueError(
            f"tgt has {tgt.size(0)} rows, not a multiple of memory's {memory.size(0)}: "
            "pass the same number of beams for each sentence"
        )


def make_transformer(config: TransformerConfig, src_vocab: int, tgt_vocab: int, pad: int = 0) -> EncoderDecoder:
    """Build a Transformer with random weights; `pad` is the padding id of both vocabularies.

    Raises ValueError for tie="all" with vocabularies of different sizes, and for a `pad` outside a vocabulary.
    """
    with torch.device("meta"):
        model = EncoderDecoder(
            Stack(config, config.encoder_layers, causal=False),
            Stack(config, config.decoder_layers, has_memory=True),
            Embedding(src_vocab, config),
            Embedding(tgt_vocab, config),
            Generator(config.d_model, tgt_vocab),
            pad,
        )
    tie_embeddings(model, config.tie)
    initialize(model)  # after tying, so that a shared matrix is drawn once, as an embedding
    return model


def tie_embeddings(model: EncoderDecoder, tie: Tie) -> None:
    """Make the generator, and with "all" also the source embedding, use the target embedding's matrix.

    Raises ValueError for tie="all" with vocabularies of different sizes, and for a `pad` outside a vocabulary.
    """
    src_vocab = model.src_embed.lookup.num_embeddings
    tgt_vocab = model.tgt_embed.lookup.num_embeddings
    if tie == "all" and src_vocab != tgt_vocab:
        raise ValueError(
            f"tie='all' shares one embedding, but src_vocab is {src_vocab} and tgt_vocab {tgt_vocab}: "
            "use a joint vocabulary, or tie='target'"
        )
    if not 0 <= model.pad < min(src_vocab, tgt_vocab):
        raise ValueError(
            f"pad is {model.pad}, outside [0, {min(src_vocab, tgt_vocab)}): choose an id both vocabularies have"
        )
    if tie != "none":
        model.generator.weight = model.tgt_embed.lookup.weight
    if tie == "all":
        model.src_embed.lookup.weight = model.tgt_embed.lookup.weight


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Allocate the weights of a model that is on "meta" on the default device, and draw them."""
    device = torch.get_default_device()
    if device.type == "meta":  # the caller wants no weights
        return
    allocate(model, device)
    for name, weight in first_weights(model):
        model.get_parameter(name).copy_(weight)


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give uninitialized memory to the parameters that are on "meta"; tied ones stay tied."""
    allocated: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta:
                if id(parameter) not in allocated:
                    # Not `empty_like`, for which torch imports sympy if the parameter is on "meta"
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                    allocated[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                setattr(owner, name, allocated[id(parameter)])


def first_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the random weights of a model by name, each drawn when it is asked for, so that one exists at a time.

    The model may be on "meta"; changing it later makes no difference. After `torch.manual_seed` the weights are those
    of a model that is built then. Until the last one is drawn, torch's generator must not be used for anything else.
    """
    found = []
    # LoRA's come last, as they are added to an existing model
    for name, weight in sorted(model.named_parameters(), key=lambda named: ".lora_" in named[0]):
        outer, _, own = name.rpartition(".")
        found.append((name, (model.get_submodule(outer), outer, own, weight.shape)))
    return ((name, first_weight(*what)) for name, what in found)


@torch.no_grad()
def first_weight(module: nn.Module, outer: str, own: str, shape: torch.Size) -> Tensor:
    """Draw the weight `own` of a module, whose full name is `outer`.

    Matrices are from Xavier's uniform distribution (Glorot and Bengio 2010) and embeddings from normal(0, D^-0.5):
    times sqrt(D) they are O(1) and, if tied, so are the first logits. The projections of keys and values, which are one
    matrix only for speed, are drawn as two. Biases are 0, and norms start as the identity. LoRA's A is uniform within
    1 / sqrt(D) of 0, and B is 0.
    """
    weight = torch.empty(shape, device="cpu")
    if isinstance(module, nn.Embedding):
        return weight.normal_(std=module.embedding_dim**-0.5)
    if own == "lora_A":
        return weight.uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5)
    if own == "lora_B" or weight.dim() == 1:
        return weight.fill_(isinstance(module, nn.LayerNorm) and own == "weight")
    for matrix in weight.chunk(2 if outer.endswith("key_value") else 1):
        nn.init.xavier_uniform_(matrix)
    return weight
