"""Ultravox's tower and projector, of which transformers has no class.

The tower is Whisper's encoder (`ultravox.py` says what it hears). The projector stacks rows of it;
v0.7 has layers of a transformer there. Sources: fixie-ai's model, and of v0.7 vLLM's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel, WhisperConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.whisper.modeling_whisper import (
    WhisperEncoder,
    WhisperEncoderLayer,
    sinusoids,
)

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import read_json

_SWIGLU: Final = "swiglu"
_EPSILON: Final = 1e-6  # of all norms of the projector
_POSITIONS: Final = "audio_tower.embed_positions.weight"


class Gated(nn.Module):
    """SwiGLU, whose second half is the gate."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [N, width / 2] of `rows` [N, width]."""
        values, gate = rows.chunk(2, dim=-1)
        return functional.silu(gate) * values


class FeedForwardProjector(nn.Module):
    """Two linears; a norm between them (v0.5 and later), or behind them."""

    def __init__(
        self, stacked: int, hidden: int, text: int, activation: str, *, norm_between: bool
    ) -> None:
        super().__init__()
        self.ln_pre = LlamaRMSNorm(stacked, eps=_EPSILON)
        self.linear_1 = nn.Linear(stacked, hidden, bias=False)
        self.act = Gated() if activation == _SWIGLU else ACT2FN[activation]
        inner = hidden // 2 if activation == _SWIGLU else hidden
        self.linear_2 = nn.Linear(inner, text, bias=False)
        self.ln_mid = LlamaRMSNorm(inner, eps=_EPSILON) if norm_between else nn.Identity()
        self.ln_post = nn.Identity() if norm_between else LlamaRMSNorm(text, eps=_EPSILON)

    def forward(self, stacked: torch.Tensor) -> torch.Tensor:
        """Return features [1, N, text] of stacked rows [1, N, stacked]."""
        inner = self.ln_mid(self.act(self.linear_1(self.ln_pre(stacked))))
        found: torch.Tensor = self.ln_post(self.linear_2(inner))
        return found


class TransformerProjector(nn.Module):
    """Layers like the tower's over the stacked rows (v0.7)."""

    def __init__(self, stacked: int, tower: WhisperConfig, text: int, layers: int) -> None:
        super().__init__()
        width = tower.d_model
        self.ln_pre = LlamaRMSNorm(stacked, eps=_EPSILON)
        self.linear_in = nn.Linear(stacked, width)
        self.embed_positions = nn.Embedding(tower.max_source_positions, width)
        self.layers = nn.ModuleList([WhisperEncoderLayer(tower) for _ in range(layers)])
        self.ln_post = LlamaRMSNorm(width, eps=_EPSILON)
        self.linear_out = nn.Linear(width, text)

    def forward(self, stacked: torch.Tensor) -> torch.Tensor:
        """Return features [1, N, text] of stacked rows [1, N, stacked]."""
        rows = self.linear_in(self.ln_pre(stacked))
        rows = rows + self.embed_positions.weight[: rows.shape[1]]
        for layer in self.layers:
            rows = layer(rows, None)
        found: torch.Tensor = self.linear_out(self.ln_post(rows))
        return found


class UltravoxTower(PreTrainedModel):
    """What hears, with the names that checkpoints have."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        tower, text = config.audio_config, int(config.text_config.hidden_size)
        self.stack = int(config.stack_factor)
        self.audio_tower = WhisperEncoder(tower)
        stacked = tower.d_model * self.stack
        layers = int(config.num_projector_layers)
        self.multi_modal_projector: nn.Module
        if layers:
            # The layers' attention is chosen by what the tower has written into its config.
            self.multi_modal_projector = TransformerProjector(stacked, tower, text, layers)
        else:
            self.multi_modal_projector = FeedForwardProjector(
                stacked,
                int(config.hidden_size),
                text,
                config.projector_act,
                norm_between=bool(config.projector_ln_mid),
            )
        self.post_init()  # type: ignore[no-untyped-call]

    def compute_missing(self, name: str) -> torch.Tensor | None:
        """Return a parameter that files may lack, as Whisper begins with it and never trains it."""
        if name != _POSITIONS:
            return None
        with torch.device("cpu"):
            found: torch.Tensor = sinusoids(*self.audio_tower.embed_positions.weight.shape)
        return found


def build_ultravox(folder: Path) -> UltravoxTower:
    """Return a model's tower and projector, without weights; raises ModelLoadError."""
    said = read_json(folder / "config.json") or {}  # whose text says nothing of this here
    text, tower = said.get("text_config"), said.get("audio_config")
    if not isinstance(text, dict) or not isinstance(tower, dict):
        raise ModelLoadError(f"{folder} does not say what its text and its tower are")
    made: Any = PreTrainedConfig  # whose types know nothing of others' settings
    config = made(
        audio_config=WhisperConfig(**tower),
        text_config=made(
            hidden_size=text.get("hidden_size", 4096),
            embedding_multiplier=text.get("embedding_multiplier", 1.0),
        ),
        hidden_size=said.get("hidden_size", 4096),
        stack_factor=said.get("stack_factor", 8),
        projector_act=said.get("projector_act", _SWIGLU),
        projector_ln_mid=said.get("projector_ln_mid", False),
        num_projector_layers=said.get("num_projector_layers", 0) or 0,
    )
    return UltravoxTower(config)
