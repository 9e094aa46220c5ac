"""`python -m tgi_trio.shard <channel spec> <settings as JSON>`: one shard process.

Started by the router; the channel spec is `ipc.channel.ChannelSpec.text()`, its descriptors are
inherited. With `--wait` both come later, see `ipc/waiting.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Set
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tgi_trio.devices import hide_devices
from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.ipc.images import ImageArena
from tgi_trio.ipc.shard_output import warn
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.waiting import WAIT, wait_for_words
from tgi_trio.model.audio_families import is_audio_only
from tgi_trio.model.config import read_config
from tgi_trio.model.image_rules import image_rules
from tgi_trio.shard import process
from tgi_trio.shard.checkpoint.readahead import reading_ahead
from tgi_trio.shard.early_imports import tasks_ahead
from tgi_trio.shard.loop.image_queue import ImageQueue, ImageSource
from tgi_trio.shard.machine.cores import sensible_threads, usable_cores
from tgi_trio.shard.machine.garbage import pause_collection
from tgi_trio.shard.machine.openmp import openmp_settings
from tgi_trio.shard.ranks.leader import Followers, GroupRunner
from tgi_trio.shard.ranks.pipeline import PipelineRunner
from tgi_trio.shard.runner import Runner

if TYPE_CHECKING:
    from tgi_trio.shard.torch_backend.models.decoder import Ranks


def main(argv: list[str]) -> int:
    """Run the shard; returns the process's exit code."""
    if argv[:1] == [WAIT] and len(argv) == 4:
        with pause_collection():
            words = wait_for_words(int(argv[1]), int(argv[2]), tasks_ahead(argv[3]))
        if words is None:
            return 0  # nobody is left to tell
        argv = words
    if len(argv) != 2:
        print("usage: python -m tgi_trio.shard <channel spec> <settings JSON>", file=sys.stderr)
        return 2
    try:
        settings = ShardSettings.parse(argv[1])
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2

    if settings.world_size > 1:
        return _serve_rank(argv[0], settings)
    with ExitStack() as at_end:
        return process.serve(
            argv[0],
            lambda: load_to_serve(settings, at_end),
            settings,
            images=find_image_source(settings),
            frames=settings.frames,
        )


def load_to_serve(
    settings: ShardSettings, at_end: ExitStack, connect: Callable[[str], Ranks] | None = None
) -> Runner:
    """Do what `load` does, in the thread that will serve: it keeps no gradients until `at_end`."""
    runner = load(settings, connect)
    if (torch := sys.modules.get("torch")) is not None:  # once: entered here it costs steps nothing
        at_end.enter_context(torch.inference_mode())
    return runner


def load(settings: ShardSettings, connect: Callable[[str], Ranks] | None = None) -> Runner:
    """Return the model, or this rank's part of it; raises as `load_runner` and `choose_device` do.

    `connect` meets the other ranks.
    """
    # Rank 0 reads the files for all. Heavy imports come here, beside the reading, and after the
    # router has been told that this process is alive.
    none = nullcontext(frozenset[Path]())
    ahead = reading_ahead(settings.model_path) if settings.rank == 0 else none
    with pause_collection(), ahead as fresh_files:
        from tgi_trio.shard.backend import load_runner
        from tgi_trio.shard.machine.device import CPU, choose_device

        hide_devices(os.environ)
        device = choose_device(settings.device, *settings.place_on_machine)
        if device == CPU and settings.world_size == 1:  # ranks would be bound to the same cores
            _settle_threads(settings)
        ranks = None if connect is None else connect(device)
        return load_runner(settings, device=device, ranks=ranks, fresh_files=fresh_files)


def _settle_threads(settings: ShardSettings) -> None:
    """Set how many threads torch has, how they wait and where they run."""
    cores = usable_cores()
    count = settings.cpu_threads or sensible_threads(settings.model_path, len(cores))
    os.environ.update(openmp_settings(count, cores, os.environ))


def _serve_rank(spec: str, settings: ShardSettings) -> int:
    """Serve as one of several ranks; rank 0 leads the others, and dismisses them at its end."""

    def connect(device: str) -> Ranks:
        import torch

        from tgi_trio.shard.ranks.distributed import Meeting, ProcessGroup

        where = torch.device(device)
        meeting = Meeting(settings.rendezvous, settings.meeting)
        size, stages = settings.world_size, settings.pipeline_stages
        alike = settings.batch_invariant
        return ProcessGroup.connect(meeting, settings.rank, size, where, stages, in_order=alike)

    with ExitStack() as at_end:

        def factory() -> Runner:
            followers = None
            if settings.rank == 0:
                followers = Followers.attach(settings.followers)
                followers.greet()
                at_end.callback(followers.dismiss)
            runner = load_to_serve(settings, at_end, connect)
            if followers is None:
                return runner
            leads = PipelineRunner if settings.pipeline_stages > 1 else GroupRunner
            return leads(runner, followers)

        images = find_image_source(settings) if settings.rank == 0 else None
        size = settings.world_size
        return process.serve(
            spec,
            factory,
            settings,
            world_size=size,
            images=images,
            frames=settings.frames,
            dismiss=at_end.close,
        )


def find_image_source(settings: ShardSettings) -> ImageSource | None:
    """Return what will compute images, None where the model takes none."""
    if settings.image_arena < 0:
        return None

    def load_queue(cores: Set[int]) -> ImageQueue:
        from tgi_trio.shard.media.largest import measure_largest
        from tgi_trio.shard.media.loading import load_encoder

        config = read_config(settings.model_path)
        try:
            encoder = load_encoder(settings, cores)
        except ModelLoadError as error:  # its text is served all the same
            what = "audio parts" if is_audio_only(config.values) else "images"
            warn(f"{what} are not served: {error}")
            return ImageQueue(None, None, 0, refusal=f"its {what} are not served: {error}")
        arena = ImageArena.open(settings.image_arena)
        rules = image_rules(config)
        peak = partial(measure_largest, encoder, settings)
        return ImageQueue(encoder, arena, settings.feature_memory, rules, peak=peak)

    return load_queue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
