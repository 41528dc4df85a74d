"""Every language model class of the installed package: its own loss and gradient, or refused by name.

A class is refused for good reason (REFUSED), or is no language model of tokens that can be made tiny (NOT_TINY); a new
one is in neither table, and has to be exact.
"""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import transformers as hf

from seqpar.integrations.transformers import remove_seqpar_loss
from tests.seqpar.integrations.own_loss import REFUSALS, WAYS, outcome
from tests.seqpar.integrations.shrunk_models import SHAPES, NotTinyError, working
from tests.seqpar.integrations.tiny_models import relative_error
from tests.seqpar.integrations.trainer_runs import (
    micro_batches,
    model_first,
    trained_in_order,
    trainer_first,
    whole_step,
)

KIND = re.compile(r"(?!Auto)\w+(ForCausalLM|ForConditionalGeneration|LMHeadModel|ForMaskedLM)")
CLASSES = [name for name in dir(hf) if KIND.fullmatch(name)]

MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
ROPES = {"full_attention": ROPE, "sliding_attention": ROPE}
MROPE = ROPE | {"mrope_section": [1, 1, 2]}
LATENT = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "qk_head_dim": 16}
CODES = {"<image>": 8, "<|extra_200|>": 9, "<|image token|>": 8}
INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
CHANGES: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": MAMBA,
    "BltForCausalLM": {
        "encoder_hash_byte_group_vocab": 50,
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "ChameleonForConditionalGeneration": {"vocabulary_map": CODES},
    "CodeGenForCausalLM": {"rotary_dim": 4},
    "CohereCompassForCausalLM": {"rope_parameters": ROPES},
    "CohereCompassForConditionalGeneration": {"text_config": {"rope_parameters": ROPES}},
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "DeepseekOcr2ForConditionalGeneration": {"text_config": {"mlp_layer_types": ["dense", "dense"]}},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1},
    "Dots1ForCausalLM": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "Emu3ForConditionalGeneration": {"vocabulary_map": CODES},
    "Ernie4_5_VLMoeForConditionalGeneration": {"text_config": {"rope_parameters": MROPE}},
    "Ernie4_5_VL_MoeForConditionalGeneration": {"text_config": {"rope_parameters": MROPE}},
    "FalconH1ForCausalLM": MAMBA,
    "Florence2ForConditionalGeneration": {
        "vision_config": {"embed_dim": [8] * 4, "num_heads": [1] * 4, "num_groups": [1] * 4, "depths": [1] * 4}
    },
    "FunAsrNanoForConditionalGeneration": {"adaptor_config": {"intermediate_size": 8}},
    "GPTJForCausalLM": {"rotary_dim": 4},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0},
    "Gemma4AssistantForCausalLM": {"text_config": {"hidden_size_per_layer_input": 0}},
    "Gemma4UnifiedAssistantForCausalLM": {"text_config": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}},
    "Granite4VisionForConditionalGeneration": {"deepstack_layer_map": [], "downsample_rate": "4/8"},
    "GraniteMoeHybridForCausalLM": MAMBA,
    "HrmTextForCausalLM": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 8},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 8},
    "HunYuanVLForConditionalGeneration": {"text_config": {"head_dim": 8, "rope_parameters": MROPE}},
    "Blip2ForConditionalGeneration": {"image_token_index": 5},
    "InstructBlipForConditionalGeneration": {"image_token_index": 5},
    "Dots3NoteForCausalLM": LATENT | {"head_dim": 16},
    "Dots3NoteForConditionalGeneration": {"text_config": LATENT | {"head_dim": 16}},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "KimiLinearForCausalLM": {"num_experts_per_token": 2, "num_experts_per_tok": 2, "moe_topk": 2},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "LongcatFlashForCausalLM": LATENT,
    "LEDForConditionalGeneration": {"attention_window": 8},  # a text is filled up to whole windows
    "LongformerForMaskedLM": {"attention_window": 8},
    "Mamba2ForCausalLM": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "MinistralForCausalLM": {"head_dim": 8},
    "Mistral4ForCausalLM": LATENT | {"head_dim": 16},
    "Molmo2ForConditionalGeneration": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "MoonshineStreamingForConditionalGeneration": {"num_key_value_heads": 4},
    "Nemotron3_5TranscribeForConditionalGeneration": {"text_config": {"n_groups": 1}},
    "NemotronForCausalLM": {"num_key_value_heads": 4},
    "NemotronHForCausalLM": {"n_groups": 1},
    "PegasusXForConditionalGeneration": {"block_size": 8},
    "Qwen2_5OmniThinkerForConditionalGeneration": {"vision_start_token_id": 7},
    "Qwen4ExpForCausalLM": INDEXER,
    "Qwen4ExpForConditionalGeneration": {"text_config": INDEXER},
    "Step3p7ForConditionalGeneration": {"text_config": {"sliding_window": 8}},
    "ReformerForMaskedLM": {"axial_pos_embds": False, "is_decoder": False},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "xLSTMForCausalLM": {"mode": "train", "chunk_size": 7},
}
"""What the general rules leave of a default configuration that does not fit together."""


def by_name(classes: dict[str, str]) -> dict[str, str]:
    """The reason of each class, of names by their reason."""
    return {name: reason for reason, names in classes.items() for name in names.split()}


NOT_TINY = by_name(
    {
        "its audio tokenizer's sizes are checked against each other one by one": "Apertus1p5ForConditionalGeneration",
        "the layers of its three parts are checked against their sum": "DoryForCausalLM",
        "its loss is contrastive, between speech and text": "ClvpModelForConditionalGeneration",
        "its labels have a dimension of codebooks": (
            "CsmForConditionalGeneration DiaForConditionalGeneration HiggsAudioV2ForConditionalGeneration "
            "KyutaiSpeechToTextForConditionalGeneration MoshiForConditionalGeneration MusicgenForCausalLM "
            "MusicgenForConditionalGeneration MusicgenMelodyForCausalLM MusicgenMelodyForConditionalGeneration "
            "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration"
        ),
        "its vision tower's sizes are checked against its text's one by one": "Dots3NoteForConditionalGeneration",
        "its image tokenizer stays at 240 million parameters": "Emu3ForConditionalGeneration",
        "its default configuration has no vocabulary": "EsmForMaskedLM",
        "its vocabulary is of amino acids": "EsmcForMaskedLM",
        "its vision tower is timm's, which is not installed": (
            "FastVlmForConditionalGeneration Gemma3nForConditionalGeneration PerceptionLMForConditionalGeneration"
        ),
        "it drafts from another model's keys and values": (
            "Gemma4AssistantForCausalLM Gemma4UnifiedAssistantForCausalLM"
        ),
        "its labels are not tokens but latents": (
            "GradiumPhononTTSForConditionalGeneration PocketTTSForConditionalGeneration"
        ),
        "it needs scipy, which is not installed": "InklingForConditionalGeneration",
        "its inputs are videos; InstructBlip is the same for images": "InstructBlipVideoForConditionalGeneration",
        "its vision tower stays at 400 million parameters": "Kosmos2ForConditionalGeneration",
        "its vision tower stays at 240 million parameters": "Kosmos2_5ForConditionalGeneration",
        "its own forward fails in 5.24: it reads an output that its text does not have": (
            "Llama4ForConditionalGeneration"
        ),
        "its outputs are a robot's actions": "PI0ForConditionalGeneration",
        "its towers stay at 260 million parameters": "PerceiverForMaskedLM",
        "it has no forward of its own; its parts are tried": (
            "Qwen2_5OmniForConditionalGeneration Qwen2_5OmniPreTrainedModelForConditionalGeneration "
            "Qwen3OmniMoeForConditionalGeneration Qwen3OmniMoePreTrainedModelForConditionalGeneration"
        ),
        "its inputs are another model's hidden states": (
            "Qwen2_5OmniTalkerForConditionalGeneration Qwen3OmniMoeTalkerForConditionalGeneration "
            "SeamlessM4TTextToUnitForConditionalGeneration"
        ),
        "its audio tower stays at 700 million parameters": "VibeVoiceAsrForConditionalGeneration",
        "its audio tower stays at 1 billion parameters": "VibeVoiceForConditionalGeneration",
        "its text is tied to the length of its audio": "VoxtralRealtimeForConditionalGeneration",
        "its layers are tied by number, over more layers than two": "Zamba2ForCausalLM ZambaForCausalLM",
    }
)
"""Classes that are not tried, and why."""

REFUSED = by_name(
    {
        "it does not shift its labels": (
            "BartForCausalLM BigBirdPegasusForCausalLM BlenderbotForCausalLM BlenderbotSmallForCausalLM "
            "CpmAntForCausalLM FlaubertWithLMHeadModel MBartForCausalLM MarianForCausalLM MvpForCausalLM "
            "PLBartForCausalLM PegasusForCausalLM TrOCRForCausalLM WhisperForCausalLM XLMWithLMHeadModel "
            "XLNetLMHeadModel"
        ),
        "it names no output embeddings": "BlipForConditionalGeneration ClvpForCausalLM CsmDepthDecoderForCausalLM",
        "it adds a bias of its own behind the output embeddings": "BridgeTowerForMaskedLM",
        "its output embeddings are an nn.Embedding": "FSMTForConditionalGeneration",
        "it takes the logits of its image away by their position": "GitForCausalLM",
        "its loss leaves labels out by the attention mask": (
            "GraniteSpeechForConditionalGeneration GraniteSpeechPlusForConditionalGeneration "
            "Qwen2AudioForConditionalGeneration"
        ),
        "its logits are not hidden x output embeddings": "MobileBertForMaskedLM",
        "its factor comes before its soft cap": "MuseGlimmerForConditionalGeneration MuseSparkForConditionalGeneration",
        "it has no function that shifts labels to the right": (
            "Pix2StructForConditionalGeneration UdopForConditionalGeneration"
        ),
        "it predicts several tokens at once": "ProphetNetForCausalLM ProphetNetForConditionalGeneration",
    }
)
"""Classes that have another loss than the chunked one, and why."""

IN_EITHER_ORDER = (trainer_first, model_first)

pytestmark = pytest.mark.hf_models


@pytest.fixture(scope="module", params=CLASSES)
def tiny_class(request):
    """The name of a class, a model of it and a batch, which are made once for all tests of the class."""
    name = request.param
    model_class = getattr(hf, name)
    # The class before is garbage, and the imports of this one are not: the Trainer looks through what is not frozen
    gc.collect()
    gc.freeze()
    if name in NOT_TINY:
        with pytest.raises(NotTinyError):
            working(model_class, CHANGES.get(name, {}), SHAPES[:1])  # at the others it fails alike
        return name, None, None
    return name, *working(model_class, CHANGES.get(name, {}))


@pytest.mark.filterwarnings("ignore")
def test_the_loss_and_every_gradient_are_the_models_own_or_it_is_refused_by_name(tiny_class):
    name, model, batch = tiny_class
    if model is None:
        return
    outcomes = {way: outcome(model, batch, way).partition(":")[0] for way in WAYS}
    assert set(outcomes.values()) == {"refused" if name in REFUSED else "exact"}, outcomes


@pytest.mark.filterwarnings("ignore")
def test_under_a_trainer_made_before_or_inside_the_gradient_is_that_of_the_whole_step_or_it_is_refused(tiny_class):
    name, model, batch = tiny_class
    if model is None:
        return
    batches = micro_batches(batch)
    if name in REFUSED:
        for order in IN_EITHER_ORDER:
            with pytest.raises(REFUSALS, match="apply_seqpar_loss"):
                trained_in_order(model, batches, order)
            remove_seqpar_loss(model)
        return
    expected = whole_step(model, batches)
    errors = {
        order.__name__: relative_error(trained_in_order(model, batches, order), expected) for order in IN_EITHER_ORDER
    }
    assert max(errors.values()) < 1e-3, errors


def test_the_tables_name_no_class_that_does_not_exist():
    assert (NOT_TINY.keys() | REFUSED.keys() | CHANGES.keys()) <= set(CLASSES)
