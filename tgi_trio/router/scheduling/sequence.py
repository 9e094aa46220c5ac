"""One sequence (a prompt and its generated tokens) as the scheduler sees it."""

from __future__ import annotations

import enum
from array import array
from dataclasses import replace

import numpy as np

from tgi_trio.ipc.images import ArenaPlace, SequenceImage
from tgi_trio.ipc.messages import IntArray, PrefillRow, SamplingParameters, StateGrant
from tgi_trio.router.request import Request
from tgi_trio.router.scheduling.block_digests import begin_digests, extend_digests
from tgi_trio.router.scheduling.lifecycle import SequenceEvent, SequenceState, next_state
from tgi_trio.router.scheduling.prefix_nodes import Namespace, Node
from tgi_trio.router.scheduling.state_memory import StateHold

NEVER = 1 << 62  # a token count no sequence reaches


class Rank(enum.IntEnum):
    """The order among waiting sequences of one priority."""

    OWED = 0  # has been passed as often as `patience` allows
    RETURNING = 1  # preempted, or lost with the shard: its client is reading a stream already
    IN_TIME = 2
    LATE = 3  # its first token cannot be in time any more


class Sequence:
    """A request in the queue or on the shard. Only the scheduler and its parts change it."""

    __slots__ = (
        "arrival",
        "blocks",
        "cached",
        "cached_at_start",
        "claim",
        "computed",
        "deadline",
        "deaths",
        "digests",
        "emitted",
        "emitted_at_death",
        "extend_at",
        "id",
        "image_numbers",
        "key",
        "need",
        "node",
        "order",
        "overtaken",
        "places",
        "priority",
        "prompt_length",
        "prompt_logprobs_delivered",
        "prompt_logprobs_reported",
        "queued",
        "rank",
        "request",
        "salt",
        "shared",
        "short_at",
        "skipped",
        "started",
        "state",
        "states",
        "target",
        "turn",
        "uncut",
    )

    def __init__(self, id: int, request: Request, arrival: int, now: float, speculate: int) -> None:
        self.id = id
        self.request = request
        self.state = SequenceState.WAITING
        self.priority = request.priority  # lower goes first; the queue lowers it
        self.arrival = arrival  # number in order of arrival
        self.order = 0  # number in order of first admission, from 1; kept when preempted
        self.deadline = request.deadline
        self.prompt_length = len(request.prompt_ids)
        # The last token's K and V are never computed: nothing attends to them.
        self.need = self.prompt_length + request.stopping.max_new_tokens - 1 + speculate
        self.emitted: list[int] = list(request.emitted)  # generated token ids
        self.queued = now
        self.started: float | None = None  # first sent to the shard
        self.cached = 0  # prompt tokens found in the prefix cache at the first admission
        # Set by ImagePrefixes.
        self.salt = request.cache_salt  # prefixes are shared only among sequences of equal salt
        self.image_numbers: tuple[int, ...] = ()  # of its images, in the prefix cache's keys
        self.uncut = 0  # longest run of prompt tokens that has to be computed in one step
        # Set by Isolation.
        self.deaths = 0  # deaths of the shard with it there, without progress in between
        self.emitted_at_death = 0  # generated tokens at the last of them
        # Set by the queue.
        self.rank = Rank.IN_TIME
        self.turn = 0  # admissions before its own in order of arrival, or of its return
        # Set by admission and growth.
        self.skipped = 0  # how often a later request was admitted before this one
        self.short_at = -1  # it did not fit: up to so many available blocks it is not tried again
        self.overtaken = 0  # tokens of shorter prompts that were sent before its own was computed
        self.extend_at = NEVER  # value of `computed` at which more blocks are granted
        # Set while the shard knows it.
        self.computed = 0  # tokens whose KV is in the blocks
        self.target = 0  # value of `computed` at which the next token is sampled
        self.prompt_logprobs_reported = 0  # by the shard since it was last admitted
        self.prompt_logprobs_delivered = 0  # to the client
        # Set by ImagePins.
        self.places: dict[int, ArenaPlace] = {}  # of its pinned images, by their number
        # Set by KvMemory.
        self.blocks: list[int] = []  # block table
        self.shared = 0  # leading blocks that belong to the prefix cache
        self.node: Node | None = None  # its pin: the cache's node at the end of the shared blocks
        self.key: bytes | None = None  # its tokens as bytes, while the prompt is being computed
        self.digests: list[bytes] = []  # of its full blocks, while it looks for them in the host
        self.claim: bytes | None = None  # tokens of the block that it has announced to compute
        self.cached_at_start = 0  # tokens found in the prefix cache at the last admission
        self.states: StateHold | None = None  # its slots, if the model has recurrent states

    @property
    def length(self) -> int:
        """Number of known tokens: prompt and generated."""
        return self.prompt_length + len(self.emitted)

    @property
    def namespace(self) -> Namespace:
        """Sequences share prefixes only within a namespace."""
        return (self.request.sampling.adapter, self.salt)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt has to be computed for its log-probabilities, cached or not."""
        wanted = self.request.sampling.prompt_logprobs
        return wanted and self.prompt_logprobs_delivered < self.prompt_length

    def token_ids(self) -> IntArray:
        """Return all known tokens, int32 [length]."""
        if not self.emitted:
            return self.request.prompt_ids
        return np.concatenate([self.request.prompt_ids, np.array(self.emitted, dtype=np.int32)])

    def token_bytes(self, first: int = 0) -> bytes:
        """Return the known tokens from the `first` on as int32 bytes: the key in the prefix cache.

        An image's feature tokens are replaced by the image's number, as a negative value.
        """
        ids = np.ascontiguousarray(self.request.prompt_ids, dtype=np.int32)
        if first >= self.prompt_length:
            return array("i", self.emitted[first - self.prompt_length :]).tobytes()
        if self.image_numbers:
            ids = ids.copy()
            for image, number in zip(self.request.images, self.image_numbers, strict=True):
                for offset, count in image.feature_places:
                    place = image.first + offset
                    ids[place : place + count] = -1 - number
        prompt = ids[first:].tobytes()
        return prompt + array("i", self.emitted).tobytes() if self.emitted else prompt

    def digest_blocks(self, block_bytes: int, most: int | None = None) -> list[bytes]:
        """Return the digests of the full blocks of `key`, of the first `most` if no more are known.

        `block_bytes`: of a block's tokens.
        """
        key, before = self.key or b"", begin_digests(self.namespace)
        extend_digests(self.digests, before, key, block_bytes, most)
        return self.digests

    def prefill_row(self) -> PrefillRow:
        """Return the row from which the shard computes this sequence, from `computed` on."""
        stopping, emitted = self.request.stopping, len(self.emitted)
        return PrefillRow(
            sequence=self.id,
            token_ids=self.token_ids(),
            prompt_length=self.prompt_length,
            cached_length=self.computed,
            block_ids=list(self.blocks),
            max_new_tokens=stopping.max_new_tokens - emitted,
            min_new_tokens=max(0, stopping.min_new_tokens - emitted),
            sampling=self._sampling(),
            states=self._state_grant(),
            images=tuple(
                SequenceImage(image.first, image.tokens, image.feature_places, image.key, place)
                for image, place in zip(self.request.images, self.places.values(), strict=True)
            ),
        )

    def _state_grant(self) -> StateGrant | None:
        """Return the slots that the shard uses for its states; None if the model has none."""
        if self.states is None:
            return None
        behind = self.computed < self.cached_at_start
        return self.states.grant(self.cached_at_start if behind else 0)

    def _sampling(self) -> SamplingParameters:
        sampling = self.request.sampling
        if sampling.prompt_logprobs and not self.wants_prompt_logprobs:
            return replace(sampling, prompt_logprobs=False)  # the client has them from before
        return sampling

    def new_prompt_logprobs(self, reported: list[float]) -> list[float]:
        """Return the part of `reported` that the client lacks: a replay reports all again."""
        known = self.prompt_logprobs_delivered - self.prompt_logprobs_reported
        self.prompt_logprobs_reported += len(reported)
        new = reported[max(0, known) :]
        self.prompt_logprobs_delivered += len(new)
        return new

    def advance(self, event: SequenceEvent) -> None:
        """Move to the next state. Raises IllegalSequenceEvent."""
        self.state = next_state(self.state, event)

    def forget_blocks(self) -> None:
        """Clear the block table: its blocks have been freed already."""
        self.blocks, self.shared = [], 0
        self.node = self.key = self.claim = self.states = None
        self.digests = []

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.id} {self.state.name} prompt={self.prompt_length} "
            f"emitted={len(self.emitted)} computed={self.computed} blocks={len(self.blocks)}>"
        )
