"""Encodes a step's plan for the other ranks: what they need to compute their part.

They get no sequences, only what determines the step's tensors. So they hold no state that could
differ from rank 0's.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.frame_codec import Frame, encode
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.shard.contract import ShardSequence, StepPlan
from tgi_trio.shard.media.features import CrossStates, ImageFeatures
from tgi_trio.shard.media.held_image import HeldImage
from tgi_trio.shard.media.placed_features import PlacedFeatures


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
        columns["deep"] = np.array(list(plan.features.deep), np.uint32)
    if plan.rotary_positions is not None:
        columns["rotary"] = plan.rotary_positions.reshape(-1)
    if plan.visible is not None:
        columns["visible"] = plan.visible
    if plan.state_reads is not None and plan.state_writes is not None:
        columns |= {"state_reads": plan.state_reads, "state_writes": plan.state_writes}
    columns |= _image_columns(plan)
    words = {"width": plan.block_tables.shape[1], "transfers": plan.transfers}
    return encode(FrameKind.PLAN, words, columns)


def decode_plan(frame: Frame) -> StepPlan:
    """Return the plan of a PLAN frame; nothing in it aliases the ring.

    Its rows are stand-ins: they have lengths and what asks for logits, but no tokens. Features
    [N, 0] and images to which layers attend are stand-ins as well: rank 0 sends them during the
    step.
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
    deep = dict.fromkeys(frame.column("deep").tolist(), none)
    features = PlacedFeatures(places, none, deep)
    reads, writes = (frame.column(f"state_{which}").copy() for which in ("reads", "writes"))
    rows = [_shadow_row(*numbers) for numbers in prompts]
    _hold_images(rows, frame)
    return StepPlan(
        rows=rows,
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
        rotary_positions=rotary.reshape(-1, starts[-1]) if len(rotary) else None,
        visible=visible if len(visible) else None,
        state_reads=reads if len(reads) else None,
        state_writes=writes if len(writes) else None,
        transfers=frame.word("transfers"),
    )


def _image_columns(plan: StepPlan) -> dict[str, NDArray[Any]]:
    """Return the columns of images to which layers attend."""
    held = [
        (i, image, image.features.states)
        for i, row in enumerate(plan.rows)
        for image in row.images
        if image.features.states is not None
    ]
    if not held:
        return {}
    return {
        "image_row": np.array([i for i, _, _ in held], np.uint32),
        "image_at": np.array([image.positions[0] for _, image, _ in held], np.int64),
        "image_until": np.array(
            [-1 if image.until is None else image.until for _, image, _ in held], np.int64
        ),
        "image_number": np.array([states.number for _, _, states in held], np.uint64),
        "image_tokens": np.array([states.tokens for _, _, states in held], np.uint32),
        "image_visible": np.array([states.visible for _, _, states in held], np.uint32),
    }


def _hold_images(rows: list[ShardSequence], frame: Frame) -> None:
    """Set the images of rows from a frame's columns."""
    names = ("row", "at", "until", "number", "tokens", "visible")
    columns = (frame.column(f"image_{name}").tolist() for name in names)
    for row, at, until, number, tokens, visible in zip(*columns, strict=True):
        states = CrossStates((), (), tokens, visible, number)
        features = ImageFeatures(np.empty((0, 0), np.float32), states=states)
        place = np.array([at], np.int64)
        rows[row].images.append(HeldImage(place, features, None if until < 0 else until))


# Shared by all rows without prompt log-probabilities and adapter: making 512 of them for every step
# would delay a follower.
_NO_IDS: Final = np.zeros(0, np.int32)
_PLAIN: Final = SamplingParameters()


def _shadow_row(
    context: int, prompt_length: int, prompt_logprobs: int, adapter: int
) -> ShardSequence:
    if not prompt_logprobs and not adapter:
        return ShardSequence(0, _NO_IDS, context, prompt_length, 0, [], 0, 0, _PLAIN)
    # Every rank computes prompt log-probabilities, of any tokens: only their number matters.
    ids = np.zeros(context + 1, np.int32) if prompt_logprobs else _NO_IDS
    sampling = SamplingParameters(prompt_logprobs=bool(prompt_logprobs), adapter=adapter)
    return ShardSequence(0, ids, context, prompt_length, 0, [], 0, 0, sampling)
