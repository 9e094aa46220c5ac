"""Drives a decoder with states as a runner does, with nothing but a cache and a pool of slots."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.shard.torch_backend.models_support import GreedyRecorder
from tgi_trio.model.checkpoint_tensors import read_tensors
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.spec import DecoderSpec
from tgi_trio.model.tensors import decoder_claims
from tgi_trio.shard.checkpoint.lookup import open_checkpoint
from tgi_trio.shard.contract import RowResult, StepPlan, StepResult
from tgi_trio.shard.torch_backend.attention.reference import ReferenceAttention
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.models.decoder import Ranks
from tgi_trio.shard.torch_backend.models.decoder_loading import load_decoder
from tgi_trio.shard.torch_backend.states.pool import StatePool
from tgi_trio.shard.torch_backend.states.steps import StateSteps, StepStates
from tgi_trio.shard.torch_backend.weights import WeightSource

CPU = torch.device("cpu")


def read_spec(folder: Path) -> DecoderSpec:
    """Return the spec of a folder, whose tensors are those that it names, in its shapes."""
    config = read_config(folder)
    spec = decoder_spec(config)
    assert spec is not None
    claims = decoder_claims(spec)
    stored = {name: tensor.shape for name, tensor in read_tensors(config).items()}
    assert stored == claims.needed
    return spec


class StatefulDecoder:
    """A runner of greedy steps, each of which is computed twice.

    Every row has two slots, one of which a step reads, one it writes. Slots hold NaN before they
    are written.
    """

    def __init__(
        self, folder: Path, spec: DecoderSpec, *, ranks: Ranks | None = None, rows: int = 16
    ) -> None:
        with open_checkpoint(read_config(folder), spec.names.base, writable=True) as weights:
            rank, size = (ranks.rank, ranks.size) if ranks else (0, 1)
            source = WeightSource(weights, dtype=torch.float32, rank=rank, world_size=size)
            self.decoder = load_decoder(spec, source, ranks)
        self.cache = KVCache(self.decoder.kv_shape, 160, torch.float32, CPU)
        self.pool = StatePool(self.decoder.state_shapes, 2 * rows, torch.float32, CPU)
        for layer in self.pool.layers.values():
            for states in layer.values():
                states.fill_(torch.nan)
        self.attention = ReferenceAttention()
        self.current: dict[int, int] = {}  # slot by sequence
        self.recorder = GreedyRecorder()

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        computed = [int(plan.positions[start]) for start in plan.query_starts[:-1]]
        reads = [self.current.get(row.id, 2 * row.id) for row in plan.rows]
        writes = [slot ^ 1 for slot in reads]
        steps = StateSteps(
            starts=plan.query_starts.tolist(),
            reads=torch.tensor(reads),
            writes=torch.tensor(writes),
            fresh=torch.tensor([done == 0 for done in computed]),
        )
        states = StepStates(self.pool.layers, steps)
        lengths = np.repeat(plan.context_lengths, np.diff(plan.query_starts)).astype(np.int64)
        batch = self.attention.prepare(plan, self.cache)
        ids, positions, every = map(torch.from_numpy, (plan.token_ids, plan.positions, lengths))
        hidden, repeated = (
            self.decoder.forward(ids, positions, every, self.attention, batch, states)
            for _ in range(2)
        )
        assert torch.equal(hidden, repeated)
        self.current.update(zip((row.id for row in plan.rows), writes, strict=True))
        sampled = np.flatnonzero(plan.samples)
        logits = self.decoder.logits(hidden[plan.query_starts[1:][sampled] - 1])
        chosen = iter(self.recorder.choose(logits, [plan.rows[i] for i in sampled]).rows)
        results = [next(chosen) if due else RowResult() for due in plan.samples]
        return StepResult.of(results, 0, 0)
