"""What a start prints: settings, memory and addresses, as tables or as JSON records."""

from __future__ import annotations

from collections.abc import Sequence

from tgi_trio.logs import say, say_record
from tgi_trio.router.shards.supervisor import Started
from tgi_trio.settings.records import Settings
from tgi_trio.settings.shown import as_json, as_rows


def print_start(settings: Settings, started: Started) -> None:
    """Print settings and memory, as tables or as JSON records."""
    if settings.json_output:
        say_record("settings", settings=as_json(settings))
        say_record("memory in bytes", memory=_memory_sizes(started))
    else:
        say(_settings_table(settings), _memory_table(started))


def print_addresses(settings: Settings, addresses: Sequence[str]) -> None:
    """Print where the server listens: the line that scripts wait for."""
    line = f"Serving {settings.model_id} at {' and '.join(addresses)}"
    if settings.json_output:
        say_record(line, addresses=list(addresses))
    else:
        say(line)


def _settings_table(settings: Settings) -> str:
    """Return every resolved setting and where it came from; the longest column comes last."""
    rows = "\n".join(f"  {name:<30} {why:<10} {value}" for name, value, why in as_rows(settings))
    return f"Settings\n{rows}"


def _memory_sizes(started: Started) -> dict[str, int]:
    """Return how many bytes each part takes, as the warm-up found it."""
    memory = started.memory
    return {
        "weights": memory.weight_bytes,
        "activations": memory.activation_bytes,
        "KV cache": memory.kv_bytes,
        **({"states": memory.state_bytes} if memory.state_slots else {}),
        "spare": memory.spare_bytes,
    }


def _memory_table(started: Started) -> str:
    """Return the memory that the warm-up found, as a table."""
    memory, info = started.memory, started.info
    sizes = _memory_sizes(started).items()
    rows = [f"  {name:<12} {size / 2**20:>10,.1f} MiB" for name, size in sizes]
    tokens = (memory.blocks - 1) * memory.block_size
    rows.append(f"  {memory.blocks - 1} KV blocks of {memory.block_size} = {tokens:,} tokens")
    if memory.state_slots:
        slots, each = memory.state_slots - 1, info.state_bytes / 2**10
        rows.append(f"  {slots} slots for states of {each:,.1f} KiB, two for a sequence")
    rows.append(f"  {info.dtype} on {info.device}, backend {info.backend}")
    return "\n".join(["Memory", *rows])
