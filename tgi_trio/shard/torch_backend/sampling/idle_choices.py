"""A choice for an idle row, run by the warm-up so that serving compiles nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.loop.soundness import proof_plan
from tgi_trio.shard.torch_backend.sampling.choice_masks import ChoiceMasks
from tgi_trio.shard.torch_backend.sampling.choice_settings import Choosing
from tgi_trio.shard.torch_backend.sampling.device_sampler import DeviceSampler


def choose_idle(sampler: DeviceSampler, masks: ChoiceMasks, scores: torch.Tensor) -> None:
    """Choose for an idle row from `scores` [1, vocab], with and without masks."""
    for masked in (False, True):
        sampling = SamplingParameters(watermark=masked)
        row = ShardSequence(-1, np.zeros(1, np.int32), 1, 1, 0, [], 1, 0, sampling)
        choosing = Choosing.of(replace(proof_plan(), rows=[row]), np.arange(1))
        device_inputs = sampler.upload(sampler.make_inputs(choosing))
        here = sampler.upload_masks(masks.make(choosing)) if masked else None
        sampler.choose(scores, device_inputs, here)
