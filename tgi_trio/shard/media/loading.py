"""Loads a model's towers, on the model's device and in a suitable dtype.

torch and transformers are imported only for models with images, whichever backend runs the text.
"""

from __future__ import annotations

import os
from collections.abc import Set
from functools import partial
from pathlib import Path

from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.shard_output import warn
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.audio_families import is_audio_only
from tgi_trio.model.config import read_config
from tgi_trio.model.image_families import find_family
from tgi_trio.shard.machine.cores import running_on, usable_cores
from tgi_trio.shard.machine.device import CPU, choose_device
from tgi_trio.shard.machine.dtypes import compute_dtype
from tgi_trio.shard.media.features import ImageEncoder

_CPU_INFO = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def load_encoder(settings: ShardSettings, cores: Set[int]) -> ImageEncoder:
    """Load the tower of the model in `settings.model_path`.

    `cores`: where it may compute on a CPU, even if this thread has been pinned by then. Raises
    ModelLoadError as `find_family` and `load_tower` do.
    """
    config = read_config(settings.model_path)
    alone = is_audio_only(config.values)
    if not alone:
        find_family(config.values)
    device = choose_device(settings.device, *settings.place_on_machine)
    on_cpu = device == CPU
    dtype = text_dtype = compute_dtype(settings.dtype, config, on_cpu=on_cpu)
    if on_cpu and not has_bfloat16(_CPU_INFO.read_text("utf-8", "replace")):
        dtype = "float32"  # without bfloat16 instructions, bfloat16 takes six times as long
    bound = os.sched_getaffinity(0) != cores  # pinned to a core of the kernels' threads
    import torch

    from tgi_trio.shard.media.tower import load_tower

    if bound:
        with running_on(cores):
            torch.set_num_threads(settings.cpu_threads or len(usable_cores()))
    where, numbers = torch.device(device), getattr(torch, dtype)
    free = cores if bound else frozenset[int]()
    text_numbers = getattr(torch, text_dtype)
    load = partial(
        load_tower,
        settings.model_path,
        config.model_type,
        where,
        numbers,
        free,
        text_numbers,
    )
    if alone:
        return load(hears=True)
    if settings.longest_sound:
        try:
            return load(hears=True)
        except ModelLoadError as error:  # images are served all the same
            warn(f"audio is not served: {error}")
    return load()


def has_bfloat16(cpu_info: str) -> bool:
    """Return whether a processor has bfloat16 products, according to /proc/cpuinfo."""
    flags = (line for line in cpu_info.splitlines() if line.startswith(("flags", "Features")))
    return any(_BFLOAT16_FLAGS & set(line.split()) for line in flags)
