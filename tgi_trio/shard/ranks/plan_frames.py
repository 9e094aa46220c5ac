"""A step's plan on its way to the other ranks: as much of it as they need to compute their part.

They get no sequences, only what decides which tensors exist: so they hold no state that could
differ from rank 0's, and choose nothing.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.frame_codec import Frame, encode
from tgi_trio.ipc.frames import Kind
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.shard.contract import ShardSequence, StepPlan
from tgi_trio.shard.placed_features import PlacedFeatures


def encode_plan(plan: StepPlan) -> bytes:
    """Return the PLAN frame of a plan."""
    rows = len(plan.rows)
    columns: dict[str, NDArray[Any]] = {
        "query_length": np.diff(plan.query_starts),
        "context_length": plan.context_lengths,
        "prompt_length": np.array([row.prompt_length for row in plan.rows], np.uint32),
        "adapter": np.array([row.sampling.adapter for row in plan.rows], np.uint32),
        "samples": plan.samples,
        "drafts": np.zeros(rows, np.uint32) if plan.drafts is None else plan.drafts,
        "prompt_logprobs": np.array([row.sampling.prompt_logprobs for row in plan.rows], np.uint32),
        "token_ids": plan.token_ids,
        "positions": plan.positions,
        "kv_slots": plan.kv_slots,
        "block_tables": np.ascontiguousarray(plan.block_tables).reshape(-1),
    }
    if plan.inputs is not None:
        columns["inputs"] = plan.inputs
    if plan.features is not None:
        columns["features"] = plan.features.places
    if plan.rotary_positions is not None:
        columns["rotary"] = plan.rotary_positions.reshape(-1)
    if plan.visible is not None:
        columns["visible"] = plan.visible
    if plan.state_reads is not None and plan.state_writes is not None:
        columns |= {"state_reads": plan.state_reads, "state_writes": plan.state_writes}
    deep = 0 if plan.features is None else len(plan.features.deep)
    return encode(Kind.PLAN, {"width": plan.block_tables.shape[1], "deep": deep}, columns)


def decode_plan(frame: Frame) -> StepPlan:
    """Return the plan of a PLAN frame; nothing in it aliases the ring.

    Its rows are stand-ins: they have lengths and what asks for logits, but no tokens. So are the
    features [N, 0]: they come from rank 0 while the step is computed.
    """
    lengths = frame.column("query_length")
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    contexts = frame.column("context_length").astype(np.int32)
    prompts = zip(
        contexts.tolist(),
        frame.column("prompt_length").tolist(),
        frame.column("prompt_logprobs").tolist(),
        frame.column("adapter").tolist(),
        strict=True,
    )
    drafts = frame.column("drafts").astype(np.int32)
    inputs = frame.column("inputs").copy()
    places, rotary = frame.column("features").copy(), frame.column("rotary").copy()
    visible = frame.column("visible").copy()
    none = np.empty((len(places), 0), np.float32)
    features = PlacedFeatures(places, none, (none,) * frame.word("deep"))
    reads, writes = (frame.column(f"state_{which}").copy() for which in ("reads", "writes"))
    return StepPlan(
        rows=[_shadow_row(*numbers) for numbers in prompts],
        token_ids=frame.column("token_ids").copy(),
        positions=frame.column("positions").copy(),
        kv_slots=frame.column("kv_slots").copy(),
        query_starts=starts,
        context_lengths=contexts,
        block_tables=frame.column("block_tables").reshape(len(lengths), frame.word("width")).copy(),
        samples=frame.column("samples").astype(np.bool_),
        drafts=drafts if drafts.any() else None,
        inputs=inputs if len(inputs) else None,
        features=features if len(places) else None,
        rotary_positions=rotary.reshape(3, -1) if len(rotary) else None,
        visible=visible if len(visible) else None,
        state_reads=reads if len(reads) else None,
        state_writes=writes if len(writes) else None,
    )


# Of rows that want neither prompt log-probabilities nor an adapter: the same for all, since 512 of
# them in every step are what a follower has to make before it can compute.
_NO_IDS: Final = np.zeros(0, np.int32)
_PLAIN: Final = SamplingParameters()


def _shadow_row(
    context: int, prompt_length: int, prompt_logprobs: int, adapter: int
) -> ShardSequence:
    if not prompt_logprobs and not adapter:
        return ShardSequence(0, _NO_IDS, context, prompt_length, 0, [], 0, 0, _PLAIN)
    # Every rank works prompt log-probabilities out, of whatever tokens: their number counts.
    ids = np.zeros(context + 1, np.int32) if prompt_logprobs else _NO_IDS
    asked = SamplingParameters(prompt_logprobs=bool(prompt_logprobs), adapter=adapter)
    return ShardSequence(0, ids, context, prompt_length, 0, [], 0, 0, asked)
