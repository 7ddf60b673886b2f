"""Further transformers for ``benchmarks.transformers``, as functions of tensors alone.

Each function makes a float model with random weights, the same in every process; its result is one
tensor, so that every back end takes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from x86quant.torchvision_import import import_torchvision


class _State(nn.Module):
    """What a model of transformers makes of its only input: its states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.model(x).last_hidden_state
        return states


class _Prompt(nn.Module):
    """What a decoder makes of a prompt: its states, or that of the last token.

    The mask hides nothing. Without one, transformers looks for several texts in one row by an op
    (``diff``) that OpenVINO and ONNX cannot take.
    """

    def __init__(self, model: nn.Module, last: bool = False) -> None:
        super().__init__()
        self.model, self.last = model, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.model(
            x, attention_mask=torch.ones_like(x), use_cache=False
        ).last_hidden_state
        return states[:, -1] if self.last else states


def _transformers() -> Any:
    import_torchvision()
    import transformers

    torch.manual_seed(0)
    return transformers


def clip_text() -> nn.Module:
    """The text encoder of CLIP ViT-B/32."""
    t = _transformers()
    return _State(t.CLIPTextModel(t.CLIPTextConfig())).eval()


def clip_vision() -> nn.Module:
    """The image encoder of CLIP ViT-B/32."""
    t = _transformers()
    return _State(t.CLIPVisionModel(t.CLIPVisionConfig())).eval()


def t5_encoder() -> nn.Module:
    """The encoder of T5-small."""
    t = _transformers()
    return _State(t.T5EncoderModel(t.T5Config())).eval()


def whisper_encoder() -> nn.Module:
    """The encoder of Whisper-tiny."""
    t = _transformers()
    sizes = {"d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6}
    config = t.WhisperConfig(**sizes, encoder_ffn_dim=1536)
    encoder = t.models.whisper.modeling_whisper.WhisperEncoder(config)
    return _State(encoder).eval()


def gpt2() -> nn.Module:
    """GPT-2 with 124M parameters on a prompt, without its head."""
    t = _transformers()
    return _Prompt(t.GPT2Model(t.GPT2Config())).eval()


#: Of small decoders with grouped heads.
_SMALL = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1408,
}


def small_llama() -> nn.Module:
    """A Llama of 8 layers on a prompt, without its head."""
    t = _transformers()
    return _Prompt(t.LlamaModel(t.LlamaConfig(**_SMALL))).eval()


def qwen_embedder() -> nn.Module:
    """A Qwen3 of 8 layers whose last token's state stands for the text."""
    t = _transformers()
    model = t.Qwen3Model(t.Qwen3Config(**_SMALL, head_dim=64))
    return _Prompt(model, last=True).eval()
