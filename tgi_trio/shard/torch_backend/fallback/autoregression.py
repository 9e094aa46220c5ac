"""Tests whether a transformers model generates from the logits of plain forward passes.

Every way of running one is compared with a plain pass over the tokens so far. Some types generate
otherwise: tokens of an encoder see those after them (BERT, unless config.json calls it a decoder,
and XLNet), and XLM is given a mask token to predict, which only `generate` adds. We would serve
other tokens than their authors', so such models are refused.

`generate` is compared without its cache and before its logits processors: a cache that loses
something is found by `probe.py`, and is no reason to refuse a model.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from tgi_trio.model.unserved_types import FED_OTHERWISE, SAY_DECODER, SEES_ON
from tgi_trio.shard.torch_backend.fallback.twin import FIRST_PLAIN_TOKEN

# Most differences of logits, in parts of the largest logit. In an autoregressive model other later
# tokens change nothing, except by the order in which experts round.
_SEEN: Final = 1e-3
_SEEN_IN_HALF: Final = 2e-2
_FED: Final = 2e-2  # `generate` and plain passes, for the same tokens
_FED_IN_HALF: Final = 2e-1
_PROMPT: Final = 12  # tokens
_WRITTEN: Final = 4
_ERRORS: Final = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    RuntimeError,
    NotImplementedError,
    AssertionError,
)


@torch.inference_mode()
def find_other_writing(model: Any) -> str | None:
    """Return why plain forward passes are not how this model generates; None if they are.

    `model`: a small twin, or the model itself. Also None if its code fails.
    """
    try:
        return _compare(model)
    except _ERRORS:
        return None


def _compare(model: Any) -> str | None:
    exact = model.dtype == torch.float32
    steps = torch.arange(_PROMPT, device=model.device)
    prompt = (FIRST_PLAIN_TOKEN + 7 * steps % 64)[None]
    half, other = _PROMPT // 2, prompt.clone()
    other[:, half:] += 1
    seen = _distance(_plain(model, other)[:half], _plain(model, prompt)[:half])
    if seen > (_SEEN if exact else _SEEN_IN_HALF):
        turned_off = getattr(model.config, "is_decoder", None) is False
        return SEES_ON + SAY_DECODER if turned_off else SEES_ON
    tokens, theirs = _generate(model, prompt)
    each = [_plain(model, tokens[:, : _PROMPT + i])[-1] for i in range(len(theirs))]
    if _distance(torch.stack(each), theirs) > (_FED if exact else _FED_IN_HALF):
        return FED_OTHERWISE
    return None


def _plain(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return logits [T, vocabulary] of tokens [1, T]."""
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False, return_dict=True).logits[0]
    return logits.float()


def _generate(model: Any, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `generate` writes: all tokens [1, T], and new ones' logits [n, vocabulary]."""
    from transformers import GenerationConfig

    plainly: Any = GenerationConfig(
        max_new_tokens=_WRITTEN,
        do_sample=False,
        use_cache=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    before = model.generation_config
    model.generation_config = plainly  # `generate` would take unset options from the model's own
    try:
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt))
    finally:
        model.generation_config = before
    return out.sequences, torch.cat([each[:1] for each in out.logits]).float()


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference between logits, in parts of the largest logit of `theirs`."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))
