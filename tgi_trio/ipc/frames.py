"""The wire: every frame that crosses between router and shard, as one literal table.

A frame is a run of 8-byte words followed by columns::

    word 0        kind
    word 1..      the frame's words, in table order (unsigned, little-endian)
    then          one word per count, in table order
    then          the columns, in table order; each is `counts[column.per]` items of its dtype,
                  padded with zeros to a multiple of 8 bytes

Nothing else is on the wire: no pickle, no JSON, no lengths that are not counts. Both ends compare
`VERSION` and `LAYOUT_HASH` in their first frame (HELLO), so a router never talks to a shard that
reads the table differently. `docs/protocol.md` is generated from this file.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

VERSION = 20

WORD = 8


class FrameKind(enum.IntEnum):
    """Frame kinds. Commands flow router -> shard, replies shard -> router, HELLO both ways."""

    HELLO = 1
    INFO = 2
    INFO_REPLY = 3
    WARMUP = 4
    WARMUP_REPLY = 5
    LIMITS = 6
    PREFILL = 7
    EXTEND = 8
    FILTER = 9
    SHUTDOWN = 11
    STEP = 12
    FAULT = 13
    PLAN = 14
    LOAD_ADAPTER = 15
    ADAPTER_REPLY = 16
    DROP_ADAPTER = 17
    KEEP = 18
    RESTORE = 19
    PREFIX_REPLY = 20
    TRANSFER = 21


class Finish(enum.IntEnum):
    """Why the shard ended a sequence (STEP.finish). Stop strings are the router's decision."""

    NONE = 0
    LENGTH = 1
    EOS = 2


class RowFlag(enum.IntFlag):
    """Per-sequence switches of a PREFILL row."""

    SAMPLE = 1  # draw from the distribution; otherwise greedy
    IGNORE_EOS = 2
    WATERMARK = 4
    PROMPT_LOGPROBS = 8  # report a log-probability for every prompt position
    ABSOLUTE_PENALTIES = 16  # OpenAI's formula: counts of generated tokens; otherwise TGI's


class Phase(enum.IntEnum):
    """What a shard is doing, as its phase word in shared memory says it."""

    STARTING = 0
    LOADING = 1
    WARMING = 2
    IDLE = 3
    PREFILL = 4
    DECODE = 5
    REPLYING = 6
    STOPPING = 7


@dataclass(frozen=True)
class Column:
    """One column: `per` names the count that gives its number of items."""

    name: str
    dtype: str
    per: str
    meaning: str


@dataclass(frozen=True)
class FrameSpec:
    """One row of the wire table."""

    kind: FrameKind
    direction: str
    meaning: str
    words: tuple[tuple[str, str], ...] = ()  # (name, meaning)
    counts: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()

    @cached_property
    def word_index(self) -> dict[str, int]:
        """Position of every word and count in the frame, counted in 8-byte words."""
        names = [name for name, _ in self.words] + list(self.counts)
        return {name: i for i, name in enumerate(names, start=1)}

    @cached_property
    def header_bytes(self) -> int:
        return WORD * (1 + len(self.words) + len(self.counts))

    @cached_property
    def header(self) -> struct.Struct:
        """Packs kind, words and counts."""
        return struct.Struct(f"<{self.header_bytes // WORD}Q")

    @cached_property
    def plan(self) -> tuple[tuple[str, np.dtype[Any], int], ...]:
        """(column name, dtype, word index of its count) for every column, in wire order."""
        return tuple((c.name, np.dtype(c.dtype), self.word_index[c.per]) for c in self.columns)


_COMMAND = ("command", "sequence number of this command; STEP.acknowledged answers it")

_ROW_PARAMETERS = (
    Column("sequence", "<u8", "rows", "sequence id, chosen by the router, never reused"),
    Column("seed", "<u8", "rows", "key of the counter-based random numbers"),
    Column("token_count", "<u4", "rows", "token ids given: prompt and anything emitted before"),
    Column("prompt_length", "<u4", "rows", "how many of them are the client's prompt"),
    Column("cached_length", "<u4", "rows", "leading tokens whose KV is already in the blocks"),
    Column("block_count", "<u4", "rows", "KV blocks granted here, cached ones included"),
    Column("max_new_tokens", "<u4", "rows", "tokens still to generate at most"),
    Column("min_new_tokens", "<u4", "rows", "tokens still to generate before EOS is allowed"),
    Column("flags", "<u4", "rows", "RowFlag bits"),
    Column("top_n", "<u4", "rows", "alternatives to report per generated token"),
    Column("prompt_top_n", "<u4", "rows", "and per prompt position, with PROMPT_LOGPROBS"),
    Column("top_k", "<u4", "rows", "0 = off"),
    Column("temperature", "<f4", "rows", "1.0 = off"),
    Column("top_p", "<f4", "rows", "1.0 = off"),
    Column("typical_p", "<f4", "rows", "1.0 = off"),
    Column("min_p", "<f4", "rows", "0.0 = off"),
    Column("repetition_penalty", "<f4", "rows", "1.0 = off"),
    Column("frequency_penalty", "<f4", "rows", "0.0 = off"),
    Column("presence_penalty", "<f4", "rows", "0.0 = off"),
    Column("bias_count", "<u4", "rows", "logit biases of this row"),
    Column(
        "no_repeat_size", "<u4", "rows", "n-grams of so many tokens may not come again, 0 = off"
    ),
    Column("no_repeat_window", "<u4", "rows", "tokens among which they are looked for, 0 = all"),
    Column("spared_count", "<u4", "rows", "tokens that are never barred for it"),
    Column("gap_end_count", "<u4", "rows", "tokens that end the gap it fills; 0 = it fills none"),
    Column("grammar_length", "<u4", "rows", "bytes of this row's grammar; 0 = none"),
    Column("tokenizer_length", "<u4", "rows", "bytes of its tokenizer's path; 0 = the model's"),
    Column("end_count", "<u4", "rows", "tokens that end this row as the model's EOS do"),
    Column("adapter", "<u4", "rows", "0 = base model"),
    Column("state_slot", "<u4", "rows", "slot of its states, 0 = the model keeps none"),
    Column("spare_slot", "<u4", "rows", "the other: a step reads one and writes the other"),
    Column("source_slot", "<u4", "rows", "slot that its first step reads, 0 = it starts from 0"),
    Column("held_length", "<u4", "rows", "leading tokens whose KV is not to be written, or 0"),
    Column("save_count", "<u4", "rows", "snapshots to take of its states"),
)

# Images of the rows, row by row and in the order of their tokens.
_IMAGES = (
    Column("image_row", "<u4", "images", "row that the image belongs to, rising"),
    Column("image_first", "<u4", "images", "position of its first token"),
    Column("image_tokens", "<u4", "images", "tokens that it takes, features and what is between"),
    Column("image_offset", "<u8", "images", "where its bundle is in the arena"),
    Column("image_bytes", "<u8", "images", "and how long that is"),
    Column("image_key_0", "<u8", "images", "its key, a sha256: the first 8 bytes"),
    Column("image_key_1", "<u8", "images", "the next 8"),
    Column("image_key_2", "<u8", "images", "the next 8"),
    Column("image_key_3", "<u8", "images", "the last 8"),
    Column("image_run_count", "<u4", "images", "runs of neighbouring feature tokens in it"),
    Column("run_offset", "<u4", "image_runs", "images' runs, concatenated: from `image_first`"),
    Column("run_length", "<u4", "image_runs", "feature tokens in the run"),
)

FRAMES: tuple[FrameSpec, ...] = (
    FrameSpec(
        FrameKind.HELLO,
        "both",
        "First frame each way; a mismatch ends the connection.",
        words=(
            ("version", "VERSION of the sender"),
            ("layout_hash", "LAYOUT_HASH of the sender"),
            ("rank", "rank of the shard"),
            ("world_size", "number of ranks in the group"),
            ("pid", "process id of the sender"),
            ("incarnation", "how many times this group has been started"),
        ),
    ),
    FrameSpec(FrameKind.INFO, "router->shard", "Ask for the static facts.", words=(_COMMAND,)),
    FrameSpec(
        FrameKind.INFO_REPLY,
        "shard->router",
        "Static facts of the loaded model.",
        words=(
            _COMMAND,
            ("vocab_size", "rows of the output head"),
            ("block_size", "tokens per KV block"),
            ("layers", "layers that hold KV"),
            ("kv_bytes_per_token", "bytes of K and V per token, all layers, this rank"),
            ("state_bytes", "bytes of a slot of states, all layers, this rank; 0: it keeps none"),
            ("max_positions", "longest sequence the model accepts; 0 = unbounded"),
            ("prefix_reuse", "1: blocks computed for one sequence serve another, same tokens"),
            ("draft_budget", "query tokens up to which drafts fill a step; 0: it may hold none"),
            ("load_ns", "nanoseconds spent loading weights"),
        ),
        counts=("eos", "name_chars"),
        columns=(
            Column("eos_ids", "<i4", "eos", "token ids that end a sequence"),
            Column(
                "names",
                "u1",
                "name_chars",
                "UTF-8 lines: dtype, device, backend, device name, why ranks cannot divide it",
            ),
        ),
    ),
    FrameSpec(
        FrameKind.WARMUP,
        "router->shard",
        "Run the largest step the limits allow, then size and allocate the KV cache.",
        words=(
            _COMMAND,
            ("max_prefill_tokens", "token budget of the largest step"),
            ("max_total_tokens", "longest sequence that may be served; 0 = the model's"),
            ("max_batch_size", "most sequences in a batch"),
            ("max_batch_total_tokens", "KV tokens wanted; 0 = as many as memory allows"),
            ("adapters_to_come", "LoRA adapters that may be loaded later"),
            ("max_images", "most images of a sequence"),
            ("tower_bytes", "of a device, for the largest image: rank 0 tells the other ranks"),
            ("blocks", "as WARMUP_REPLY had them of the first shard; 0 = this is the first"),
            ("state_slots", "likewise"),
        ),
    ),
    FrameSpec(
        FrameKind.WARMUP_REPLY,
        "shard->router",
        "What the warm-up found. Block ids are 0 .. blocks-1; block 0 is never handed out.",
        words=(
            _COMMAND,
            ("blocks", "KV blocks allocated, block 0 included"),
            ("block_size", "tokens per KV block"),
            ("weight_bytes", "memory held by weights"),
            ("activation_bytes", "peak of the warm-up step"),
            ("kv_bytes", "memory held by the KV cache"),
            ("state_slots", "slots for states, slot 0 included, which is never handed out; or 0"),
            ("state_bytes", "memory held by states"),
            ("host_blocks", "blocks of cached prefixes that the host's memory holds besides; or 0"),
            ("host_slots", "likewise, slots of states"),
            ("host_bytes", "the host's memory held for both, this rank"),
            ("spare_bytes", "memory left free"),
            ("warmup_ns", "nanoseconds the warm-up took"),
        ),
    ),
    FrameSpec(
        FrameKind.LIMITS,
        "router->shard",
        "Standing limits; they hold until the next LIMITS.",
        words=(
            _COMMAND,
            (
                "token_budget",
                "tokens a step may compute: decode rows first, then prefill chunks, shortest first",
            ),
        ),
    ),
    FrameSpec(
        FrameKind.PREFILL,
        "router->shard",
        "New sequences. They join the batch at the next step.",
        words=(_COMMAND,),
        counts=(
            *("rows", "tokens", "blocks", "biases", "spared", "gap_ends", "saves", "grammar_chars"),
            *("ends", "tokenizer_chars", "images", "image_runs"),
        ),
        columns=(
            *_ROW_PARAMETERS,
            Column("token_ids", "<i4", "tokens", "rows' ids, concatenated"),
            Column("block_ids", "<i4", "blocks", "rows' block tables, concatenated"),
            Column("bias_ids", "<i4", "biases", "rows' biased token ids, concatenated"),
            Column("bias_values", "<f4", "biases", "rows' biases, concatenated"),
            Column(
                "spared_ids", "<i4", "spared", "rows' tokens that are never barred, concatenated"
            ),
            Column("gap_ends", "<i4", "gap_ends", "rows' ends of gaps, concatenated"),
            Column("save_positions", "<u4", "saves", "tokens behind which, rising in each row"),
            Column("save_slots", "<u4", "saves", "where: its states are not in another slot then"),
            Column("end_ids", "<i4", "ends", "rows' own ends, concatenated"),
            Column("grammars", "u1", "grammar_chars", "rows' grammars in UTF-8, concatenated"),
            Column("tokenizers", "u1", "tokenizer_chars", "paths of rows' tokenizers, likewise"),
            *_IMAGES,
        ),
    ),
    FrameSpec(
        FrameKind.EXTEND,
        "router->shard",
        "More KV blocks for running sequences. Unknown sequences are skipped: they have ended.",
        words=(_COMMAND,),
        counts=("rows", "blocks"),
        columns=(
            Column("sequence", "<u8", "rows", "sequence id"),
            Column("block_count", "<u4", "rows", "blocks granted to it"),
            Column("block_ids", "<i4", "blocks", "rows' new blocks, concatenated"),
        ),
    ),
    FrameSpec(
        FrameKind.FILTER,
        "router->shard",
        "Drop sequences. Their blocks are free once a STEP acknowledges this command.",
        words=(_COMMAND,),
        counts=("rows",),
        columns=(Column("sequence", "<u8", "rows", "sequence id; unknown ones are skipped"),),
    ),
    FrameSpec(
        FrameKind.LOAD_ADAPTER,
        "router->shard",
        "Load a LoRA adapter, beside the steps; ADAPTER_REPLY says what came of it.",
        words=(_COMMAND, ("adapter", "its number, chosen by the router, never reused")),
        counts=("folder_bytes", "digest"),
        columns=(
            Column("folder", "u1", "folder_bytes", "path of its folder"),
            Column("sha256", "u1", "digest", "32 bytes, of the files loaded before; none: any"),
        ),
    ),
    FrameSpec(
        FrameKind.ADAPTER_REPLY,
        "shard->router",
        "An adapter is loaded, or why it is not.",
        words=(
            ("adapter", "its number"),
            ("bytes", "memory it takes, this rank"),
            ("rank", "the largest of its modules"),
        ),
        counts=("digest", "error_chars"),
        columns=(
            Column("sha256", "u1", "digest", "32 bytes, of its files; none where it is not loaded"),
            Column("error", "u1", "error_chars", "UTF-8; empty: it is loaded"),
        ),
    ),
    FrameSpec(
        FrameKind.DROP_ADAPTER,
        "router->shard",
        "Forget an adapter that no sequence has any more.",
        words=(_COMMAND, ("adapter", "its number; unknown ones are skipped")),
    ),
    FrameSpec(
        FrameKind.KEEP,
        "router->shard",
        "Write computed blocks and states to a file, or a part of them, when no sequence is left; "
        "PREFIX_REPLY answers.",
        words=(
            _COMMAND,
            (
                "blocks_before",
                "how many of the file's blocks earlier KEEPs have written; 0: make it",
            ),
            ("slots_before", "likewise, of its slots"),
            ("blocks_behind", "how many later ones will"),
            ("slots_behind", "likewise"),
        ),
        counts=("folder_bytes", "key_bytes", "blocks", "slots"),
        columns=(
            Column("folder", "u1", "folder_bytes", "path of the folder, which has a file per rank"),
            Column("key", "u1", "key_bytes", "16 bytes, new in every order: which files match"),
            Column(
                "block_ids",
                "<i4",
                "blocks",
                "KV blocks, in the file's order; -n: the host's place n",
            ),
            Column("slot_ids", "<i4", "slots", "slots of states, likewise"),
        ),
    ),
    FrameSpec(
        FrameKind.RESTORE,
        "router->shard",
        "Read a kept file into the first blocks and slots, and what follows there into the host's "
        "memory, before any sequence; PREFIX_REPLY answers.",
        words=(
            _COMMAND,
            ("blocks", "how many of the file's blocks to read, into the blocks 1 .. this"),
            ("slots", "how many of its slots, into the slots 1 .. this"),
            ("host_blocks", "how many of the blocks behind those, into the places 1 .. this"),
            ("host_slots", "how many of the slots behind those, likewise"),
        ),
        counts=("folder_bytes", "key_bytes"),
        columns=(
            Column("folder", "u1", "folder_bytes", "as in KEEP"),
            Column("key", "u1", "key_bytes", "the KEEP's by which the file was written"),
        ),
    ),
    FrameSpec(
        FrameKind.PREFIX_REPLY,
        "shard->router",
        "What came of a KEEP or a RESTORE.",
        words=(("bytes", "written or read, this rank"),),
        counts=("error_chars",),
        columns=(Column("error", "u1", "error_chars", "UTF-8; empty: all ranks have done it"),),
    ),
    FrameSpec(
        FrameKind.TRANSFER,
        "router->shard",
        "Copy blocks of cached prefixes, and snapshots of states behind them, out to the host's "
        "memory and back, in this order, after the steps so far. What is granted one of them later "
        "sits out steps until that is done.",
        words=(_COMMAND,),
        counts=("transfers",),
        columns=(
            Column("items", "<i4", "transfers", "KV block, or slot of states"),
            Column("places", "<i4", "transfers", "where the host's memory has it, from 1 on"),
            Column("back", "u1", "transfers", "1: copy it back; 0: copy it out"),
            Column("states", "u1", "transfers", "1: it is a slot; 0: a block"),
        ),
    ),
    FrameSpec(
        FrameKind.SHUTDOWN,
        "router->shard",
        "Finish the step in hand and exit 0.",
        words=(_COMMAND,),
    ),
    FrameSpec(
        FrameKind.STEP,
        "shard->router",
        "What one step did. A step without rows only acknowledges commands.",
        words=(
            ("step", "number of this step, from 1"),
            ("acknowledged", "number of the last command applied before this step"),
            ("gap_ns", "end of the previous step's compute to the start of this one's"),
            ("forward_ns", "time of the forward pass"),
            ("sample_ns", "time of choosing tokens"),
            ("held", "sequences the shard holds after this step"),
            ("prefill_tokens", "prompt tokens computed in this step"),
            ("decode_rows", "sequences that decoded in this step"),
            ("stalled_rows", "sequences that sat out for want of a KV block"),
            ("draft_tokens", "tokens drafted ahead and computed in this step"),
            ("recovered", "1: the step raised, and computed again in parts it did not"),
            ("copied", "copies that TRANSFERs have ordered since the warm-up and that are over"),
        ),
        counts=("rows", "tokens", "tops", "prompts", "prompt_tops", "seen_images"),
        columns=(
            Column("sequence", "<u8", "rows", "sequence id of every row that moved"),
            Column("computed", "<u4", "rows", "tokens whose KV is in the blocks now"),
            Column("token_count", "<u4", "rows", "tokens generated: none, one or several"),
            Column("prompt_count", "<u4", "rows", "prompt log-probabilities reported"),
            Column("finish", "<u4", "rows", "Finish; the shard has dropped a finished sequence"),
            Column("token_ids", "<i4", "tokens", "rows' tokens, concatenated"),
            Column("logprobs", "<f4", "tokens", "their log-probabilities"),
            Column("top_count", "<u4", "tokens", "alternatives reported for each token"),
            Column("top_ids", "<i4", "tops", "alternatives, best first"),
            Column("top_logprobs", "<f4", "tops", "their log-probabilities"),
            Column("prompt_logprobs", "<f4", "prompts", "NaN for the first prompt token"),
            Column("prompt_top_count", "<u4", "prompts", "alternatives reported for each of them"),
            Column("prompt_top_ids", "<i4", "prompt_tops", "alternatives, best first"),
            Column("prompt_top_logprobs", "<f4", "prompt_tops", "their log-probabilities"),
            Column("seen_sequence", "<u8", "seen_images", "sequence with an image whose bundle"),
            Column("seen_image", "<u4", "seen_images", "is not needed any more, and which one"),
            Column("seen_ns", "<u8", "seen_images", "time its tower took; 0: it was not run"),
        ),
    ),
    FrameSpec(
        FrameKind.FAULT,
        "shard->router",
        "Sequences that failed alone; the shard has dropped them and goes on.",
        words=(("acknowledged", "number of the last command applied"),),
        counts=("rows", "chars"),
        columns=(
            Column("sequence", "<u8", "rows", "sequence id"),
            Column("message_length", "<u4", "rows", "bytes of its message"),
            Column("messages", "u1", "chars", "messages in UTF-8, concatenated"),
        ),
    ),
    FrameSpec(
        FrameKind.PLAN,
        "rank 0->other ranks",
        "Compute a step. WARMUP, LOAD_ADAPTER, DROP_ADAPTER, KEEP, RESTORE, TRANSFER and SHUTDOWN "
        "go the same way; only HELLO is answered.",
        words=(
            ("width", "block table entries per row"),
            ("transfers", "how many TRANSFERs, of those sent this way, are done before it"),
        ),
        counts=(
            *("rows", "tokens", "entries", "unknown", "features", "layers", "rotary", "limits"),
            *("states", "images"),
        ),
        columns=(
            Column("query_length", "<u4", "rows", "tokens of this row in the step"),
            Column("context_length", "<u4", "rows", "KV tokens it sees, those included"),
            Column("prompt_length", "<u4", "rows", "how many of them are the client's prompt"),
            Column("adapter", "<u4", "rows", "0 = base model"),
            Column("samples", "<u4", "rows", "1: logits are wanted of its last token"),
            Column("drafts", "<u4", "rows", "and of so many before that one"),
            Column("prompt_logprobs", "<u4", "rows", "1: and of its prompt tokens"),
            Column("token_ids", "<i8", "tokens", "rows' tokens, concatenated"),
            Column("positions", "<i8", "tokens", "position of each in its sequence"),
            Column("kv_slots", "<i8", "tokens", "where its K and V go: block * size + offset"),
            Column("block_tables", "<i4", "entries", "rows' block tables, `width` entries each"),
            Column(
                "inputs",
                "<i4",
                "unknown",
                "which row of the step before chooses each token, -1: it is known; or none",
            ),
            Column("features", "<i8", "features", "tokens whose embeddings rank 0 hands around"),
            Column("deep", "<u4", "layers", "after which layers it hands others around"),
            Column(
                "rotary", "<i8", "rotary", "a part of all tokens' positions after another; or none"
            ),
            Column("visible", "<i8", "limits", "last position that each token sees; or none"),
            Column("state_reads", "<i8", "states", "slot of each row's states before; or none"),
            Column("state_writes", "<i8", "states", "and of those behind its last token"),
            Column("image_row", "<u4", "images", "row with an image that layers attend to"),
            Column("image_at", "<i8", "images", "its position there"),
            Column("image_until", "<i8", "images", "position it is not seen from, -1: it is"),
            Column("image_number", "<u8", "images", "which image; rank 0 hands new ones around"),
            Column("image_tokens", "<u4", "images", "keys that a layer has of it"),
            Column("image_visible", "<u4", "images", "and how many are of the image itself"),
        ),
    ),
)

SPECS: Mapping[FrameKind, FrameSpec] = {spec.kind: spec for spec in FRAMES}


def layout_text() -> str:
    """Return the canonical text of the table: what `LAYOUT_HASH` covers."""
    lines = [f"version {VERSION}"]
    for spec in FRAMES:
        words = " ".join(name for name, _ in spec.words)
        columns = " ".join(f"{c.name}:{c.dtype}:{c.per}" for c in spec.columns)
        lines.append(
            f"{spec.kind:d} {spec.kind.name} [{words}] [{' '.join(spec.counts)}] {columns}"
        )
    return "\n".join(lines)


LAYOUT_HASH: int = int.from_bytes(hashlib.sha256(layout_text().encode()).digest()[:8], "little")
