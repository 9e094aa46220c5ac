"""Which device a rank computes on, and how much of it."""

from __future__ import annotations

import torch

from tgi_trio.errors import ConfigurationError


def choose_device(wanted: str, rank: int = 0, world_size: int = 1) -> torch.device:
    """Return the device of a rank: "auto" is CUDA where torch sees a device, else the CPU.

    Each rank has a CUDA device of its own. Raises ConfigurationError where there are too few.
    """
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        wanted = "cuda" if seen else "cpu"
    if wanted != "cuda":
        return torch.device(wanted)
    if seen < world_size:
        raise ConfigurationError(
            f"--num-shard {world_size} takes as many CUDA devices, and torch sees {seen}."
        )
    return torch.device("cuda", rank)


def limit_memory(device: torch.device, share: float) -> None:
    """Let this process have `share` of a CUDA device's memory; `memory.free_bytes` heeds it.

    Raises ConfigurationError on a CPU unless the share is 1.
    """
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share, device)
    elif share != 1.0:
        raise ConfigurationError(_no_device("--cuda-memory-fraction", "leave it out"))


def graph_sizes(device: torch.device, asked: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the batch sizes to record as CUDA graphs; `asked` None: TGI's.

    Raises ConfigurationError on a CPU when some were asked for.
    """
    if device.type == "cuda":
        return (1, 2, 4, 8, 16, 32) if asked is None else asked
    if asked:
        raise ConfigurationError(_no_device("--cuda-graphs", "leave it out or give 0"))
    return ()


def _no_device(flag: str, cure: str) -> str:
    return f"{flag} needs a CUDA device, and torch sees none here; {cure}."
