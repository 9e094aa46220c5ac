"""The device on which a rank computes, and its share of it. Devices have torch's names.

torch is imported only if there may be a device: without one the CPU kernels do not need it.
"""

from __future__ import annotations

from tgi_trio.devices import check_device_flags, has_driver
from tgi_trio.errors import ConfigurationError

CPU = "cpu"

# Decodes are padded to the next of these: multiples of eight, then at most a tenth is wasted.
_GRAPH_SIZES = (1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, 513, 32))


def choose_device(wanted: str, rank: int = 0, world_size: int = 1) -> str:
    """Return the device of a rank: "auto" is what torch sees, the CPU where it sees none.

    `wanted` may also be "cpu", or a kind of device as torch names them. Each rank has a device of
    its own. Raises ConfigurationError where there is none of the kind, or too few.
    """
    if wanted == CPU or (wanted == "auto" and not has_driver()):
        return CPU
    from tgi_trio.shard.machine import accelerator

    kind = accelerator.current_kind()
    seen = accelerator.count_devices() if kind else 0
    if wanted == "auto" and not seen:
        return CPU
    if wanted not in ("auto", kind):
        if not accelerator.is_kind(wanted):
            raise ConfigurationError(
                f"--device {wanted}: torch knows no such kind of device; allowed are auto, cpu, "
                "and what torch calls devices, such as cuda or xpu."
            )
        others = f"a device of {kind}" if seen else "no device at all"
        raise ConfigurationError(
            f"--device {wanted} was asked for, and torch sees {others}; leave it out to use what "
            "there is."
        )
    if seen < world_size:
        raise ConfigurationError(
            f"--num-shard {world_size} takes as many {kind.upper()} devices, and torch sees "
            f"{seen}; lower it, or use --device cpu."
        )
    if world_size > 1 and kind != "cuda":
        raise ConfigurationError(
            f"--num-shard is for CUDA devices or the CPU, and torch sees {kind} here; leave it out."
        )
    return f"{kind}:{rank}"


def name_device(device: str) -> str:
    """Return a device's product name, such as "NVIDIA A10G"; empty for a CPU."""
    if device == CPU:
        return ""
    import torch

    from tgi_trio.shard.machine import accelerator

    return accelerator.find_name(torch.device(device))


def limit_memory(device: str, share: float) -> None:
    """Limit this process to `share` of a device's memory (see `device_memory.free_bytes`).

    Raises ConfigurationError if that is not possible and the share is not 1.
    """
    if device == CPU:
        check_device_flags(None, share)
        return
    import torch

    from tgi_trio.shard.machine import accelerator

    accelerator.limit_memory(torch.device(device), share)


def graph_sizes(device: str, sizes: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the batch sizes to record as CUDA graphs; `sizes` None: all that a step may have.

    Those above the largest batch are left out at the warm-up. Raises ConfigurationError where none
    can be and some were asked for.
    """
    if device.startswith("cuda"):
        return _GRAPH_SIZES if sizes is None else sizes
    check_device_flags(sizes, 1.0)
    return ()
