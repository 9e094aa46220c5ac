"""Measures a vision tower's memory for the largest allowed image, with a black one."""

from __future__ import annotations

import json

import numpy as np
import torch

from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.ipc.images import bundle_bytes, read_bundle, write_bundle
from tgi_trio.ipc.shard_output import warn
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.media.feature_extractors import FeatureExtractor
from tgi_trio.media.processors import PixelProcessor
from tgi_trio.shard.machine.accelerator import synchronize
from tgi_trio.shard.machine.device import CPU, choose_device
from tgi_trio.shard.machine.device_memory import peak_bytes, reset_peak
from tgi_trio.shard.media.features import Bundle, ImageEncoder


def make_largest(text: str) -> Bundle:
    """Return the bundle of a black image of the size in `ShardSettings.largest_image`.

    It has the dtypes of one that comes through the arena. Raises ModelLoadError as `PixelProcessor`
    does, and ValueError.
    """
    told = json.loads(text)
    processor = PixelProcessor(told["family"], told["settings"], told["given"])
    arrays = processor.process(np.zeros((told["height"], told["width"], 3), np.uint8))
    memory = memoryview(bytearray(bundle_bytes(arrays)))
    write_bundle(memory, arrays)
    return read_bundle(memory)


def make_longest(text: str) -> Bundle:
    """Return the bundle of silence as long as `ShardSettings.longest_sound` says; likewise."""
    told = json.loads(text)
    extractor = FeatureExtractor(told["family"], told["settings"])
    return extractor.extract(np.zeros(told["samples"], np.float32))


def measure_largest(encoder: ImageEncoder, settings: ShardSettings) -> int:
    """Return the bytes that a tower takes for the largest image or sound; 0 on a CPU.

    On a CPU, memory is not budgeted so exactly. Raises ConfigurationError if the device has too
    little.
    """
    name = choose_device(settings.device, *settings.place_on_machine)
    if name == CPU:
        return 0
    device = torch.device(name)
    told = ((make_largest, settings.largest_image), (make_longest, settings.longest_sound))
    try:
        bundles = [make(text) for make, text in told if text]
    except (ModelLoadError, ValueError) as error:
        warn(f"what images take of the device is not counted: {error}")
        return 0
    before = reset_peak(device)
    try:
        for bundle in bundles:
            encoder.encode(bundle)
        synchronize(device)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            "The largest image or sound that may come takes more memory than the device has left; "
            "lower --max-image-pixels or --max-input-tokens, or --max-audio-seconds."
        ) from error
    return max(0, peak_bytes(device) - before)
