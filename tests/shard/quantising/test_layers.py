"""What linears read while a model is quantised is what they read in transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.torch_backend.golden import Golden
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.shard.checkpoint.lookup import open_checkpoint
from tgi_trio.shard.quantising.layers import LayerWalk, Replaced

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")

# Where the linear layer that reads first is in the second layer of transformers' model.
FIRST_LINEARS = {
    "gpt2": "transformer.h.1.attn.c_attn",
    "openai-gpt": "transformer.h.1.attn.c_attn",
    "xglm": "model.layers.1.self_attn.q_proj",
}


@pytest.mark.parametrize("family", FIRST_LINEARS)
def test_inputs_of_the_second_layer(checkpoint: Checkpoint, family: str) -> None:
    """Learned and computed positions, and sums that are normalised."""
    folder = checkpoint(family)
    config = read_config(folder)
    spec = decoder_spec(config)
    assert spec is not None
    sample = np.arange(3, 43)
    with open_checkpoint(config, spec.names.base, writable=True) as weights, torch.inference_mode():
        walk = LayerWalk(spec, Replaced(weights), [sample], torch.float32)
        walk.advance(0)
        read = walk.watch(1)[0].gram.mean(spec.hidden_size)
    model, seen = Golden(folder).model, list[torch.Tensor]()

    def note(module: Any, given: tuple[torch.Tensor, ...]) -> None:
        seen.append(given[0][0])

    model.get_submodule(FIRST_LINEARS[family]).register_forward_pre_hook(note)
    with torch.inference_mode():
        model(input_ids=torch.from_numpy(sample)[None])
    (inputs,) = seen
    torch.testing.assert_close(read, inputs.T @ inputs / len(sample), atol=1e-4, rtol=1e-4)
