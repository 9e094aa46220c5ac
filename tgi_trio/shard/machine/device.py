"""Which device a rank computes on, and how much of it. Devices are named as torch names them.

torch is imported only where it may see a device: without one the CPU kernels do not need it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from tgi_trio.errors import ConfigurationError

CPU = "cpu"
_CUDA_DRIVER = "libcuda.so.1"
_ROCM_DRIVER = Path("/dev/kfd")  # torch calls AMD's devices CUDA, too


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


def has_driver() -> bool:
    """Return whether a driver is installed through which torch could see a device."""
    try:
        ctypes.CDLL(_CUDA_DRIVER)
    except OSError:
        return _ROCM_DRIVER.exists()
    return True


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
    elif share != 1.0:
        raise ConfigurationError(_no_device("--cuda-memory-fraction", "leave it out"))


def graph_sizes(device: str, asked: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the batch sizes to record as CUDA graphs; `asked` None: TGI's.

    Raises ConfigurationError on a CPU when some were asked for.
    """
    if device != CPU:
        return (1, 2, 4, 8, 16, 32) if asked is None else asked
    if asked:
        raise ConfigurationError(_no_device("--cuda-graphs", "leave it out or give 0"))
    return ()


def _no_device(flag: str, cure: str) -> str:
    return f"{flag} needs a CUDA device, and torch sees none here; {cure}."
