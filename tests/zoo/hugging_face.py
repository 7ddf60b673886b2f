"""Architectures of the package transformers, from tiny configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.zoo.cases import Animal, Inputs
from x86quant.torchvision_import import import_torchvision

#: What most text models call their sizes.
_TEXT = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
_LENGTHS = (5, 12, 19)


def _made(kind: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    """A model of class ``kind`` from a ``config`` of ``sizes``."""

    def build() -> nn.Module:
        import_torchvision()  # transformers imports torchvision where that is installed
        import transformers

        model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
        for name, parameter in model.named_parameters():
            if name.endswith(("layer_scale_parameter", "lambda_1", "lambda_2")):
                nn.init.constant_(parameter, 0.3)  # fresh ones hide the block
        return model

    return build


def _ids(batch: int, size: int) -> Inputs:
    return {"input_ids": torch.randint(3, 60, (batch, _LENGTHS[size]))}


def _masked_ids(batch: int, size: int) -> Inputs:
    length = _LENGTHS[size]
    kept = torch.randint(2, length + 1, (batch, 1))
    mask = (torch.arange(length)[None] < kept).long()
    return {"input_ids": torch.randint(3, 60, (batch, length)), "attention_mask": mask}


def _pixels(*sizes: int) -> Callable[[int, int], Inputs]:
    return lambda batch, size: {
        "pixel_values": torch.randn(batch, 3, sizes[size % len(sizes)], sizes[size % len(sizes)])
    }


def _without_cache(make: Callable[[int, int], Inputs]) -> Callable[[int, int], Inputs]:
    def inputs(batch: int, size: int) -> Inputs:
        found = make(batch, size)
        assert isinstance(found, dict)
        return {**found, "use_cache": False}

    return inputs


def _pair(batch: int, size: int) -> Inputs:
    return {
        "input_ids": torch.randint(3, 60, (batch, _LENGTHS[size])),
        "decoder_input_ids": torch.randint(3, 60, (batch, 4)),
        "use_cache": False,
    }


def _speech(batch: int, size: int) -> Inputs:
    return {
        "input_features": torch.randn(batch, 16, 40),
        "decoder_input_ids": torch.randint(3, 60, (batch, _LENGTHS[size])),
        "use_cache": False,
    }


def _captioned(batch: int, size: int) -> Inputs:
    pixels = dict(_pixels(32)(batch, size))
    return {**pixels, "input_ids": torch.randint(3, 60, (batch, _LENGTHS[size]))}


_ONE = (1,)
_SAFE = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = {**_TEXT, **_SAFE, "num_key_value_heads": 2}
_WAVES = {
    "conv_dim": (16, 16),
    "conv_kernel": (4, 4),
    "conv_stride": (2, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 30,
}
_SHORT_TEXT = {key: value for key, value in _TEXT.items() if key != "max_position_embeddings"}
_EXPERTS = {**_LLAMA, "num_experts_per_tok": 2}
_SMALL_DECODER = {
    "vocab_size": 60,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    **_SAFE,
}


def _speech_to_text(batch: int, size: int) -> Inputs:
    return {
        "input_values": torch.randn(batch, (200, 320, 480)[size]),
        "decoder_input_ids": torch.randint(3, 60, (batch, 4)),
        "use_cache": False,
    }


def _animal(
    name: str,
    build: Callable[[], nn.Module],
    inputs: Callable[[int, int], Inputs],
    **more: Any,
) -> Animal:
    return Animal(f"hf_{name}", build, inputs, needs="transformers", **more)


HUGGING_FACE: tuple[Animal, ...] = (
    _animal("bert", _made("BertModel", "BertConfig", **_TEXT), _masked_ids),
    _animal("bert_classifier", _made("BertForSequenceClassification", "BertConfig", **_TEXT), _ids),
    _animal(
        "distilbert",
        _made(
            "DistilBertModel",
            "DistilBertConfig",
            vocab_size=60,
            dim=32,
            n_layers=2,
            n_heads=4,
            hidden_dim=64,
            max_position_embeddings=64,
        ),
        _masked_ids,
    ),
    _animal("roberta", _made("RobertaModel", "RobertaConfig", **_TEXT), _masked_ids),
    _animal(
        "electra", _made("ElectraModel", "ElectraConfig", embedding_size=16, **_TEXT), _masked_ids
    ),
    _animal(
        "albert", _made("AlbertModel", "AlbertConfig", embedding_size=16, **_TEXT), _masked_ids
    ),
    _animal(
        "gpt2",
        _made(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=60,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=2,
        ),
        _without_cache(_ids),
    ),
    _animal("llama", _made("LlamaForCausalLM", "LlamaConfig", **_LLAMA), _without_cache(_ids)),
    _animal(
        "mistral", _made("MistralForCausalLM", "MistralConfig", **_LLAMA), _without_cache(_ids)
    ),
    _animal("qwen2", _made("Qwen2ForCausalLM", "Qwen2Config", **_LLAMA), _without_cache(_ids)),
    _animal(
        "opt",
        _made(
            "OPTForCausalLM",
            "OPTConfig",
            ffn_dim=64,
            word_embed_proj_dim=32,
            **_SAFE,
            **{k: v for k, v in _TEXT.items() if k != "intermediate_size"},
        ),
        _without_cache(_ids),
    ),
    _animal(
        "t5",
        _made(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=60,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        _pair,
    ),
    _animal(
        "bart",
        _made(
            "BartModel",
            "BartConfig",
            vocab_size=60,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=64,
            **_SAFE,
        ),
        _pair,
    ),
    _animal(
        "whisper",
        _made(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=60,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_mel_bins=16,
            max_source_positions=20,
            max_target_positions=32,
            decoder_start_token_id=3,
            **_SAFE,
        ),
        _speech,
    ),
    _animal(
        "vit", _made("ViTForImageClassification", "ViTConfig", **_VISION), _pixels(32), sizes=_ONE
    ),
    _animal("deit", _made("DeiTModel", "DeiTConfig", **_VISION), _pixels(32), sizes=_ONE),
    _animal("dinov2", _made("Dinov2Model", "Dinov2Config", **_VISION), _pixels(24, 32, 40)),
    _animal(
        "clip",
        _made(
            "CLIPModel",
            "CLIPConfig",
            projection_dim=16,
            text_config={**_TEXT, **_SAFE},
            vision_config=_VISION,
        ),
        _captioned,
    ),
    _animal(
        "swin",
        _made(
            "SwinModel",
            "SwinConfig",
            image_size=32,
            patch_size=4,
            embed_dim=16,
            depths=[1, 2],
            num_heads=[2, 4],
            window_size=4,
        ),
        _pixels(32),
        sizes=_ONE,
    ),
    _animal(
        "segformer",
        _made(
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[16, 32],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=16,
        ),
        _pixels(32, 48, 64),
    ),
    _animal(
        "convnext",
        _made(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            hidden_sizes=[16, 32],
            depths=[1, 1],
            num_stages=2,
        ),
        _pixels(32, 48, 64),
        bound=18.0,
    ),
    _animal(
        "resnet",
        _made(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=16,
            hidden_sizes=[16, 32],
            depths=[1, 1],
            layer_type="basic",
        ),
        _pixels(32, 48, 64),
    ),
    _animal(
        "mobilenet_v2",
        _made("MobileNetV2Model", "MobileNetV2Config", depth_multiplier=0.25),
        _pixels(32, 48, 64),
        bound=3.0,  # with random weights it makes 13 dB of noise out of 40
        slow=True,
    ),
    _animal(
        "wav2vec2",
        _made("Wav2Vec2ForCTC", "Wav2Vec2Config", **{**_SHORT_TEXT, **_WAVES}),
        lambda batch, size: {"input_values": torch.randn(batch, (200, 320, 480)[size])},
    ),
    _animal(
        "deberta_v2",
        _made(
            "DebertaV2Model",
            "DebertaV2Config",
            relative_attention=True,
            position_buckets=8,
            pos_att_type=["p2c", "c2p"],
            **_TEXT,
        ),
        _masked_ids,
    ),
    _animal(
        "longformer",
        _made("LongformerModel", "LongformerConfig", attention_window=4, **_TEXT),
        _masked_ids,
    ),
    _animal(
        "xlnet",
        _made(
            "XLNetModel", "XLNetConfig", vocab_size=60, d_model=32, n_layer=2, n_head=4, d_inner=64
        ),
        _masked_ids,
    ),
    _animal(
        "funnel",
        _made(
            "FunnelModel",
            "FunnelConfig",
            vocab_size=60,
            block_sizes=[1, 1],
            num_decoder_layers=1,
            d_model=32,
            n_head=4,
            d_head=8,
            d_inner=64,
        ),
        _masked_ids,
    ),
    _animal(
        "gemma2",
        _made("Gemma2ForCausalLM", "Gemma2Config", head_dim=8, **_LLAMA),
        _without_cache(_ids),
    ),
    _animal("llama_with_cache", _made("LlamaForCausalLM", "LlamaConfig", **_LLAMA), _ids),
    _animal(
        "bloom",
        _made(
            "BloomForCausalLM",
            "BloomConfig",
            vocab_size=60,
            hidden_size=32,
            n_layer=2,
            n_head=4,
            **_SAFE,
        ),
        _without_cache(_ids),
    ),
    _animal(
        "falcon",
        _made(
            "FalconForCausalLM",
            "FalconConfig",
            vocab_size=60,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            **_SAFE,
        ),
        _without_cache(_ids),
    ),
    _animal(
        "mixtral",
        _made("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **_EXPERTS),
        _without_cache(_ids),
        bound=15.0,
    ),
    _animal(
        "rwkv",
        _made(
            "RwkvModel",
            "RwkvConfig",
            vocab_size=60,
            hidden_size=32,
            num_hidden_layers=2,
            context_length=32,
        ),
        _without_cache(_ids),
    ),
    _animal(
        "mamba",
        _made(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=60,
            hidden_size=32,
            num_hidden_layers=1,
            state_size=4,
        ),
        _without_cache(_ids),
        sizes=_ONE,
    ),
    _animal(
        "perceiver",
        _made(
            "PerceiverModel",
            "PerceiverConfig",
            num_latents=8,
            d_latents=32,
            d_model=16,
            num_blocks=1,
            num_self_attends_per_block=2,
            num_self_attention_heads=2,
            num_cross_attention_heads=2,
        ),
        lambda batch, size: {"inputs": torch.randn(batch, _LENGTHS[size], 16)},
    ),
    _animal(
        "speecht5",
        _made(
            "SpeechT5ForSpeechToText",
            "SpeechT5Config",
            hidden_size=32,
            **_SMALL_DECODER,
            **{k: v for k, v in _WAVES.items() if k != "vocab_size"},
        ),
        _speech_to_text,
    ),
    _animal(
        "convnextv2",
        _made(
            "ConvNextV2ForImageClassification",
            "ConvNextV2Config",
            hidden_sizes=[16, 32],
            depths=[1, 1],
            num_stages=2,
        ),
        _pixels(32),
        bound=12.0,
        sizes=_ONE,
        slow=True,
    ),
    _animal(
        "regnet",
        _made(
            "RegNetForImageClassification",
            "RegNetConfig",
            embedding_size=16,
            hidden_sizes=[16, 32],
            depths=[1, 1],
            groups_width=8,
        ),
        _pixels(32, 48, 64),
        slow=True,
    ),
)
