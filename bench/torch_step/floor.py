"""The least that torch can do for one decode step of one model shape; nothing of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional

from tgi_trio.shard.torch_backend.layers.linears.linear import Linear


class Floor:
    """The shapes of `harness/checkpoints.py`, decoding `batch` sequences at position `context`."""

    def __init__(self, folder: Path, config: dict[str, Any], batch: int, context: int) -> None:
        self.hidden, self.eps = config["hidden_size"], config["rms_norm_eps"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim", self.hidden // self.heads)
        self.context = context
        biased = config["model_type"] == "qwen2"
        tensors = load_file(folder / "model.safetensors")
        self.embedding = tensors["model.embed_tokens.weight"]
        self.final = tensors["model.norm.weight"]
        self.layers = []
        for index in range(config["num_hidden_layers"]):
            at = f"model.layers.{index}."
            qkv = [tensors[f"{at}self_attn.{n}_proj.weight"] for n in "qkv"]
            bias = [tensors[f"{at}self_attn.{n}_proj.bias"] for n in "qkv" if biased]
            up = [tensors[f"{at}mlp.{n}_proj.weight"] for n in ("gate", "up")]
            self.layers.append(
                (
                    tensors[f"{at}input_layernorm.weight"],
                    _linear(torch.cat(qkv), torch.cat(bias) if bias else None),
                    _linear(tensors[f"{at}self_attn.o_proj.weight"]),
                    tensors[f"{at}post_attention_layernorm.weight"],
                    _linear(torch.cat(up)),
                    _linear(tensors[f"{at}mlp.down_proj.weight"]),
                )
            )
        self.head = _linear(self.embedding)
        shape = (len(self.layers), batch, self.kv_heads, context + 1, self.dim)
        self.keys = torch.zeros(shape, dtype=torch.bfloat16)
        self.values = torch.zeros(shape, dtype=torch.bfloat16)
        exponents = torch.arange(0, self.dim, 2).float() / self.dim
        angles = context / config["rope_theta"] ** exponents
        self.cos = torch.cat((angles.cos(), angles.cos())).to(torch.bfloat16)
        self.sin = torch.cat((-angles.sin(), angles.sin())).to(torch.bfloat16)

    @torch.inference_mode()
    def step(self, token_ids: torch.Tensor) -> list[int]:
        """Decode one token of every sequence: int64 [B] in, the best next ones out."""
        batch, shape = len(token_ids), (self.hidden,)
        heads, kv_heads, half = self.heads, self.kv_heads, self.dim // 2
        x = functional.embedding(token_ids, self.embedding)
        for index, (norm, qkv, output, mlp_norm, up, down) in enumerate(self.layers):
            y = functional.rms_norm(x, shape, norm, self.eps)
            rows = qkv(y).view(batch, heads + 2 * kv_heads, self.dim)
            turned, value = rows.split((heads + kv_heads, kv_heads), dim=1)
            swapped = torch.cat((turned[..., half:], turned[..., :half]), dim=-1)
            turned = turned * self.cos + swapped * self.sin
            self.keys[index, :, :, self.context] = turned[:, heads:]
            self.values[index, :, :, self.context] = value
            query = turned[:, :heads].view(batch, kv_heads, heads // kv_heads, self.dim)
            out = functional.scaled_dot_product_attention(
                query, self.keys[index], self.values[index]
            )
            x = x + output(out.reshape(batch, -1))
            y = functional.rms_norm(x, shape, mlp_norm, self.eps)
            gate, inner = up(y).chunk(2, dim=-1)
            x = x + down(functional.silu(gate) * inner)
        logits = self.head(functional.rms_norm(x, shape, self.final, self.eps))
        best: list[int] = logits.argmax(dim=-1).tolist()
        return best


def _linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Return a product with packed weights, or with plain ones where the processor has no other."""
    linear = Linear(weight, bias)
    linear.pack()
    return linear
