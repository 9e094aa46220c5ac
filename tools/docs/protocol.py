"""docs/protocol.md, from the table of frames."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields

from tgi_trio.cli.flags import list_flags
from tgi_trio.ipc.frames import (
    FRAMES,
    LAYOUT_HASH,
    VERSION,
    Finish,
    FrameKind,
    FrameSpec,
    Phase,
    RowFlag,
)
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.settings.records import ShardOptions
from tools.docs.markdown import table

# (TGI's RPC, what does its work here, remark)
RPCS: tuple[tuple[str, str, str], ...] = (
    (
        "ServiceDiscovery",
        "none needed",
        "the router creates each shard's segment and passes its descriptors at the spawn: there "
        "is nothing to discover. HELLO confirms rank, world size and layout",
    ),
    ("Info", "INFO -> INFO_REPLY", "asked once, answered when the weights are loaded"),
    (
        "Health",
        "words `heartbeat`, `phase`, `step` of the control page",
        "read from shared memory, costs the shard nothing; a step that does not advance while "
        "there is work is what makes health red. Death: robust mutex and pidfd",
    ),
    ("Warmup", "WARMUP -> WARMUP_REPLY", "largest step, then the KV cache is sized and allocated"),
    (
        "Prefill",
        "PREFILL",
        "no reply of its own: the sequences join the standing batch, and each STEP says how far "
        "their prefill has come. Later blocks come with EXTEND",
    ),
    (
        "Decode",
        "none needed",
        "standing orders: the shard decodes its batch step after step without being asked. Each "
        "step is reported by one STEP",
    ),
    (
        "FilterBatch",
        "FILTER",
        "names who leaves, not who stays; blocks are freed by the first STEP whose `acknowledged` "
        "reaches it. A sequence that ended by EOS or length is dropped by the shard itself",
    ),
    ("ClearCache", "none needed", "a new incarnation of the shard starts empty"),
    ("(process signal)", "SHUTDOWN", "the step in hand is finished, then the shard exits 0"),
    ("(no counterpart)", "LIMITS", "standing token budget of a step, so chunking needs no talk"),
    ("(whole batch fails)", "FAULT", "sequences that failed alone; the others go on"),
)

CALL_FLOW = """\
```
router                                   shard (rank 0)
  | spawn, pass descriptors                 |
  |---------------------------------------->|  attach, take the alive mutex
  | HELLO ---------------------------------->|
  |<---------------------------------- HELLO|  versions and layout hashes compared
  | INFO ----------------------------------->|
  |                                         |  load weights (phase LOADING)
  |<----------------------------- INFO_REPLY|
  | WARMUP --------------------------------->|
  |                                         |  largest step, KV cache (phase WARMING)
  |<--------------------------- WARMUP_REPLY|
  | RESTORE -------------------------------->|  with --prefix-cache-path, where there is a file
  |<--------------------------- PREFIX_REPLY|
  | LIMITS #1, PREFILL #2 (A) -------------->|
  |                                         |--+ step 1: prefill A
  |<---------- STEP 1 (ack 2): A 1 token    |<-+
  | PREFILL #3 (B) ------------------------->|--+ step 2: decode A      (B arrives meanwhile)
  |<---------- STEP 2 (ack 2): A 1 token    |<-+
  |                                         |--+ step 3: decode A, prefill B
  |<---------- STEP 3 (ack 3): A, B         |<-+
  | FILTER #4 (A: its client has left) ----->|--+ step 4: decode A, B
  |<---------- STEP 4 (ack 3): A ignored, B |<-+   A's blocks are not free yet
  |                                         |--+ step 5: decode B
  |<---------- STEP 5 (ack 4): B            |<-+   now they are
  | EXTEND #5 (B: more blocks) ------------->|  ...
  | KEEP ----------------------------------->|  with that flag, when no sequence is left
  |<--------------------------- PREFIX_REPLY|
  | SHUTDOWN ------------------------------->|  finish the step, exit 0
```
Neither side ever waits for the other: commands are drained between steps, steps are reported
whether or not the router is ready to read. The shard sleeps only when its batch is empty."""


def _frame(spec: FrameSpec) -> list[str]:
    lines = [f"### {spec.kind.name} ({spec.kind:d}, {spec.direction})", "", spec.meaning, ""]
    rows: list[tuple[str, ...]] = [
        (f"word {i}", f"`{name}`", "u64", meaning)
        for i, (name, meaning) in enumerate(spec.words, start=1)
    ]
    rows += [
        (f"word {i}", f"`{name}`", "u64", "count")
        for i, name in enumerate(spec.counts, start=len(spec.words) + 1)
    ]
    rows += [
        (f"column, per `{c.per}`", f"`{c.name}`", c.dtype.lstrip("<"), c.meaning)
        for c in spec.columns
    ]
    return [*lines, table(("where", "name", "type", "meaning"), rows)]


def _values(
    title: str, values: type[FrameKind] | type[RowFlag] | type[Phase] | type[Finish]
) -> list[str]:
    listed = ", ".join(f"`{member.name}` = {member.value}" for member in values)
    return [f"**{title}**: {listed}", ""]


def _command_line() -> str:
    """List what a shard is told before the first frame."""
    options = {each.name for each in fields(ShardOptions)}
    flags = {flag.field: f"`--{flag.name}`" for flag in list_flags() if flag.field in options}
    rows = [
        (
            f"`{each.name}`",
            str(each.type).replace(" | None", " or null"),
            "" if each.default is MISSING else f"`{json.dumps(each.default)}`",
            flags.get(each.name, ""),
        )
        for each in fields(ShardSettings)
    ]
    return table(("key", "type", "default", "flag"), rows)


def render() -> str:
    """Return the whole document."""
    lines = [
        "# The protocol between router and shard",
        "",
        "Generated from `tgi_trio/ipc/frames.py` and `shard_settings.py` beside it by",
        "`python -m tools.docs --write`; a test keeps it up to date. How the bytes travel (rings,",
        "doorbells, death) is in [ipc.md](ipc.md).",
        "",
        "<!-- generated: contents -->",
        "<!-- end -->",
        "",
        f"Version {VERSION}, layout hash `{LAYOUT_HASH:016x}`. Both ends compare the two in HELLO.",
        "",
        "## Call flow",
        "",
        CALL_FLOW,
        "",
        "## What does the work of TGI's RPCs",
        "",
        table(("TGI (gRPC)", "here", "remark"), RPCS),
        "## What a shard is told before the first frame",
        "",
        "`python -m tgi_trio.shard CHANNEL SETTINGS`: the descriptors of its channel, and",
        "`ShardSettings` as a JSON object. What has a flag is passed on as it was given; the rest",
        "is the router's decision, or the shard's place in its group. What is said next (HELLO,",
        "INFO, WARMUP) are the records of `tgi_trio/ipc/startup.py`, field by field.",
        "",
        _command_line(),
        "## Shape of a frame",
        "",
        "Word 0 is the kind; then the frame's words, then one word per count, all unsigned 64-bit",
        "little-endian; then the columns, each `count` items of its type, padded with zeros to a",
        "multiple of 8 bytes. A frame whose counts do not add up to its size is rejected.",
        "",
        "## Frames",
        "",
    ]
    for spec in FRAMES:
        lines += _frame(spec)
    lines += ["## Values", ""]
    lines += _values("PREFILL.flags", RowFlag) + _values("STEP.finish", Finish)
    lines += _values("`phase` word", Phase)
    return "\n".join(lines).rstrip() + "\n"
