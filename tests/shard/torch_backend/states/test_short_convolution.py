"""The short convolution against transformers' own, over rows cut anywhere."""

from __future__ import annotations

import pytest
import torch
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.states.convolution import CausalConvolution
from tgi_trio.shard.torch_backend.states.short_convolution import ShortConvolutionLayer
from tgi_trio.shard.torch_backend.states.steps import StateSteps

HIDDEN = 8
LENGTHS = (7, 1, 12, 3)  # of four sequences

# Where the pieces of each sequence end, step by step: (sequence, tokens).
PIECES = {
    "whole": [[(0, 7), (1, 1), (2, 12), (3, 3)]],
    "pieces": [[(0, 2), (2, 5)], [(1, 1), (2, 1), (0, 4)], [(2, 6), (3, 1), (0, 1)], [(3, 2)]],
    "decodes": [
        [(sequence, 1) for sequence, length in enumerate(LENGTHS) if at < length]
        for at in range(max(LENGTHS))
    ],
}


@pytest.mark.parametrize("taps", [2, 3, 7])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("pieces", PIECES)
def test_pieces_give_what_transformers_gives_for_the_whole(
    taps: int, biased: bool, pieces: str
) -> None:
    torch.manual_seed(taps)
    config = Lfm2Config(
        hidden_size=HIDDEN,
        conv_L_cache=taps,
        conv_bias=biased,
        layer_types=["conv"],
        num_hidden_layers=1,
    )
    theirs = Lfm2ShortConv(config, 0).eval()
    layer = ShortConvolutionLayer(
        Linear(theirs.in_proj.weight, theirs.in_proj.bias),
        CausalConvolution(theirs.conv.weight.squeeze(1), theirs.conv.bias),
        Linear(theirs.out_proj.weight, theirs.out_proj.bias),
    )
    texts = [torch.randn(length, HIDDEN) for length in LENGTHS]
    # Two slots for each, written in turn; whatever they held before must not be seen.
    states = {"tail": torch.full((2 * len(texts), taps - 1, HIDDEN), torch.nan)}
    done, current = [0] * len(texts), [0] * len(texts)
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    with torch.inference_mode():
        for step in PIECES[pieces]:
            starts = [0]
            for _, count in step:
                starts.append(starts[-1] + count)
            rows = [sequence for sequence, _ in step]
            steps = StateSteps(
                starts=starts,
                reads=torch.tensor([2 * row + current[row] for row in rows]),
                writes=torch.tensor([2 * row + 1 - current[row] for row in rows]),
                fresh=torch.tensor([done[row] == 0 for row in rows]),
            )
            own = [texts[row][done[row] : done[row] + count] for row, count in step]
            mixed = layer.mix(layer.inner(torch.cat(own)), states, steps)
            for (row, count), part in zip(step, mixed.split([n for _, n in step]), strict=True):
                found[row].append(part)
                done[row] += count
                current[row] = 1 - current[row]
        assert tuple(done) == LENGTHS
        for text, parts in zip(texts, found, strict=True):
            wanted = theirs(text.unsqueeze(0)).squeeze(0)
            torch.testing.assert_close(torch.cat(parts), wanted, rtol=1e-5, atol=1e-6)
