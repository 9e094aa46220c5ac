"""Counts the devices that shards may use without torch: from /dev and environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from tgi_trio.devices import torch_is_for_cpus
from tgi_trio.errors import ConfigurationError
from tgi_trio.settings.records import Options

# The first one that is set is used, TGI's before AMD's; each lists indices or names, separated by
# commas.
VARIABLES: Final = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)
_NO_LIST: Final = frozenset(("all", "void", ""))  # other values for NVIDIA's container runtime


def count_devices(dev: Path = Path("/dev")) -> int:
    """Return how many devices of this machine or container torch could use."""
    nvidia = [path for path in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if nvidia or not (dev / "kfd").exists():
        return len(nvidia)
    return len(list(dev.glob("dri/renderD*")))


def count_visible_devices(environ: Mapping[str, str], present: int) -> tuple[int, str]:
    """Return how many of the devices may be used, and the source of that number."""
    for name in VARIABLES:
        text = environ.get(name)
        if text is None or (name == "NVIDIA_VISIBLE_DEVICES" and text.strip() in _NO_LIST):
            continue
        listed = 0
        for entry in map(str.strip, text.split(",")):
            if entry in ("", "none", "NoDevFiles") or entry.startswith("-"):
                break  # as drivers read them: entries after an invalid one are hidden
            listed += 1
        return (listed if "MIG-" in text else min(listed, present)), f"{name}={text}"
    return present, "/dev"


def choose_num_shard(
    options: Options, environ: Mapping[str, str], present: int | None = None
) -> Options:
    """Return the options with `num_shard` from the number of devices, if `sharded` asks for it.

    Raises ConfigurationError for more ranks than devices. Nothing changes without a device, with a
    CPU build of torch, or with `device` cpu: then ranks share the processor.
    """
    here = (options.num_shard or 1) - options.ranks_elsewhere
    if options.device == "cpu" or (not options.sharded and here <= 1):
        return options
    present = count_devices() if present is None else present
    if not present or torch_is_for_cpus():
        return options
    count, source = count_visible_devices(environ, present)
    if options.num_shard is None:
        if count <= 1:
            raise ConfigurationError(
                f"not enough cuda devices: `sharded` is true but only found {count} CUDA devices "
                f"({source})"
            )
        return replace(options, num_shard=count)
    if 0 < count < here:
        raise ConfigurationError(
            f"not enough cuda devices: `num_shard` is {here} but only found {count} "
            f"CUDA devices ({source}), and each rank has one of its own"
        )
    return options
