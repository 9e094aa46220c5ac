"""Which device a rank computes on, and how much of it. Devices are named as torch names them.

torch is imported only where it may see a device: without one the CPU kernels do not need it.
"""

from __future__ import annotations

from tgi_trio.devices import check_device_flags, has_driver
from tgi_trio.errors import ConfigurationError

CPU = "cpu"

# Decodes are padded up to the next one: in steps of eight, then so that a tenth is wasted at most.
_GRAPH_SIZES = (1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, 513, 32))


def choose_device(wanted: str, rank: int = 0, world_size: int = 1) -> str:
    """Return the device of a rank: "auto" is CUDA where torch sees a device, else the CPU.

    Each rank has a CUDA device of its own. Raises ConfigurationError where there are too few.
    """
    if wanted == CPU:
        return CPU
    seen = _devices() if wanted == "cuda" or has_driver() else 0
    if wanted == "auto" and not seen:
        return CPU
    if seen < world_size:
        raise ConfigurationError(
            f"--num-shard {world_size} takes as many CUDA devices, and torch sees {seen}."
        )
    return f"cuda:{rank}"


def name_device(device: str) -> str:
    """Return what a device's maker calls it, such as "NVIDIA A10G"; empty for a CPU."""
    if device == CPU:
        return ""
    import torch

    return str(torch.cuda.get_device_name(device))


def _devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def limit_memory(device: str, share: float) -> None:
    """Let this process have `share` of a device's memory; `device_memory.free_bytes` heeds it.

    Raises ConfigurationError on a CPU unless the share is 1.
    """
    if device != CPU:
        import torch

        torch.cuda.set_per_process_memory_fraction(share, device)
    else:
        check_device_flags(None, share)


def graph_sizes(device: str, asked: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the batch sizes to record as CUDA graphs; `asked` None: all that a step may have.

    Those above the largest batch are left out at the warm-up. Raises ConfigurationError on a CPU
    when some were asked for.
    """
    if device != CPU:
        return _GRAPH_SIZES if asked is None else asked
    check_device_flags(asked, 1.0)
    return ()
