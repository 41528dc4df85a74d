"""Model sizes: configurations that check themselves, and presets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Norm = Literal["pre", "post"]
Tie = Literal["none", "target", "all"]
Activation = Literal["relu", "gelu", "swish"]
Positions = Literal["pairs", "halves", "halves_from_2", "learned"]


class Embedded(NamedTuple):
    """What an architecture does to the vectors of tokens before the first layer."""

    positions: Positions
    """What is added: sines and cosines as pairs or as halves of the vector, or learned vectors."""
    norm: bool = False
    """Whether the sum passes through a layer norm of its own."""


ARCHITECTURES: dict[str, Embedded] = {
    "vaswani": Embedded("pairs"),
    "marian": Embedded("halves"),
    "m2m100": Embedded("halves_from_2"),
    "mbart": Embedded("learned", norm=True),
}
"""The Transformers that exist here. All of them have the same layers, which may be pre- or post-norm.

vaswani: the paper's own. marian: Marian and OPUS-MT (Junczys-Dowmunt et al. 2018; Tiedemann and Thottingal 2020).
m2m100: M2M-100 (Fan et al. 2020) and NLLB-200 (NLLB Team 2022). mbart: mBART and mBART-50 (Liu et al. 2020; Tang et al.
2020)."""


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and choices of a model; the defaults are those of table 3, base (Vaswani et al. 2017)."""

    d_model: int = 512
    """Width of hidden states; even, and divisible by heads."""
    d_ff: int = 2048
    """Width inside the position-wise feed-forward network."""
    heads: int = 8
    encoder_layers: int = 6
    decoder_layers: int = 6
    dropout: float = 0.1
    """Probability of dropping a value of each sublayer's output and of the embeddings (section 5.4)."""
    norm: Norm = "post"
    """post: the paper's LayerNorm(x + f(x)). pre: x + f(LayerNorm(x)), which needs less warm-up
    (Xiong et al. 2020)."""
    tie: Tie = "all"
    """none | target (target embedding = generator) | all (source embedding too; Press and Wolf 2017)."""
    activation: Activation = "relu"
    """relu | gelu | swish: the function between the two matrices of the feed-forward networks."""
    architecture: str = "vaswani"
    """A name in ARCHITECTURES."""
    max_positions: int = 1024
    """Tokens of the longest source or target if positions are learned; other positions have no limit."""

    def __post_init__(self) -> None:
        for name in ("d_model", "d_ff", "heads", "encoder_layers", "decoder_layers", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, below 1: choose 1 or more")
        if self.d_model % 2:
            raise ValueError(
                f"d_model {self.d_model} is odd, and positions are pairs of sine and cosine: "
                f"choose {self.d_model - 1 or 2} or {self.d_model + 1}"
            )
        if self.d_model % self.heads:
            # The multiples of heads on either side of d_model, if they are even
            lower = self.d_model // self.heads * self.heads
            near = [width for width in (lower, lower + self.heads) if width and width % 2 == 0]
            raise ValueError(
                f"d_model {self.d_model} is not divisible by heads {self.heads}: choose d_model "
                f"{' or '.join(map(str, near or [2 * self.heads]))}, or other heads"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}, outside [0, 1): choose, say, 0.1")
        check_choice("norm", self.norm, get_args(Norm))
        check_choice("tie", self.tie, get_args(Tie))
        check_choice("activation", self.activation, get_args(Activation))
        check_choice("architecture", self.architecture, tuple(ARCHITECTURES))
        computed = ARCHITECTURES[self.architecture].positions != "learned"
        if computed and self.max_positions != TransformerConfig.max_positions:
            raise ValueError(
                f"max_positions is {self.max_positions}, but the positions of {self.architecture} are computed, and "
                "have no limit: leave it out, or choose mbart"
            )
        if self.architecture == "m2m100" and self.d_model < 4:
            raise ValueError(
                f"d_model is {self.d_model}, and the positions of m2m100 need at least 4: choose 4 or more"
            )


@dataclass(frozen=True)
class DecoderOnlyConfig:
    """Sizes and choices of a decoder-only Transformer (`models.decoder_only`), as in `TransformerConfig`."""

    d_model: int = 128
    d_ff: int = 512
    heads: int = 4
    decoder_layers: int = 4
    dropout: float = 0.1
    norm: Norm = "pre"
    tie: Tie = "all"
    """none | all (generator = the one embedding); target means the same as all."""

    def __post_init__(self) -> None:
        self.layers()

    def layers(self) -> TransformerConfig:
        """Return the sizes of the layers; an encoder is not built."""
        return TransformerConfig(
            self.d_model, self.d_ff, self.heads, 1, self.decoder_layers, self.dropout, self.norm, self.tie
        )


Sizes = TransformerConfig | DecoderOnlyConfig


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError for a value that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: choose one of {', '.join(choices)}")


PRESETS: dict[str, Sizes] = {
    "tiny": TransformerConfig(128, 512, 4, 2, 2, dropout=0.1, norm="pre"),
    "multi30k": TransformerConfig(128, 256, 4, 4, 4, dropout=0.3, norm="pre"),
    "student": TransformerConfig(128, 512, 4, 6, 1, dropout=0.1, norm="pre"),
    "small": TransformerConfig(256, 512, 8, 3, 3, dropout=0.1, norm="pre"),
    "base": TransformerConfig(512, 2048, 8, 6, 6, dropout=0.1, norm="post"),
    "big": TransformerConfig(1024, 4096, 16, 6, 6, dropout=0.3, norm="post"),
    "decoder_only": DecoderOnlyConfig(),
    "opus_mt": TransformerConfig(512, 2048, 8, 6, 6, norm="post", activation="swish", architecture="marian"),
    "m2m100": TransformerConfig(1024, 4096, 16, 12, 12, norm="pre", architecture="m2m100"),
    "mbart": TransformerConfig(1024, 4096, 16, 12, 12, norm="pre", activation="gelu", architecture="mbart"),
}
"""tiny is for a demonstration on two CPU cores and multi30k for Multi30k's 29,000 pairs; base and big are those of
table 3. student is for distillation from a larger model: translation spends its time in the decoder, which computes one
token after another, so it has a single decoder layer (Kasai et al. 2021, "Deep encoder, shallow decoder"). The small
ones are pre-norm because their training has a warm-up of only a few hundred steps. decoder_only is a language model of
about tiny's size that translates by prompt. The last three are the sizes of published models: OPUS-MT, M2M-100 with 418
million parameters (NLLB-200 with 600 million has the same layers), and mBART."""
