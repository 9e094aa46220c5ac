"""What a served checkpoint must say, by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.threads import one_torch_thread
from tests.system.client import post
from tests.system.server import ServerProcess


def reference(
    folder: Path, ids: list[list[int]], new_tokens: int, **options: Any
) -> list[list[int]]:
    """Return transformers' greedy continuation of each prompt, one at a time, in float32.

    `options`: further ones of its `generate`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    two_stacks = AutoConfig.from_pretrained(folder).is_encoder_decoder
    kind = AutoModelForSeq2SeqLM if two_stacks else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in ids:
        with torch.inference_mode(), one_torch_thread():
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=new_tokens,
                do_sample=False,
                **options,
            )
        skipped = 1 if two_stacks else len(prompt)  # a decoder's start token, or the prompt
        answers.append(out[0, skipped:].tolist())
    return answers


def tokenize(server: ServerProcess, text: str) -> list[int]:
    """Return the ids that a served model's tokenizer gives a text."""
    reply = post(f"{server.url}/tokenize", json={"inputs": text})
    return [token["id"] for token in reply.json()]
