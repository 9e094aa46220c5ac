"""Devices by name, without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tgi_trio.shard.torch_backend.torch_device import generation, resolve_device


@pytest.mark.parametrize(
    ("name", "device"),
    [("cpu", "cpu"), ("cuda:1", "cuda:1"), ("cuda", "cuda:3"), ("xpu", "xpu:3")],
)
def test_a_device_has_an_index(monkeypatch: pytest.MonkeyPatch, name: str, device: str) -> None:
    """torch tells nothing of the memory of a device without one."""
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert resolve_device(name) == torch.device(device)


@pytest.mark.parametrize(
    ("capability", "shared", "tiles"),
    [
        ((8, 0), 163, "ampere"),
        ((8, 6), 99, "ampere"),
        ((8, 9), 99, "ampere"),
        ((9, 0), 227, "hopper"),
        ((10, 0), 227, "hopper"),
        ((12, 0), 99, "ampere"),
        ((12, 1), 99, "ampere"),
    ],
    ids=str,
)
def test_tiles_fit_into_a_device_s_shared_memory(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], shared: int, tiles: str
) -> None:
    """KB a program may have, of NVIDIA's "Technical Specifications per Compute Capability"."""
    told = SimpleNamespace(major=capability[0], shared_memory_per_block_optin=shared << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
    monkeypatch.setattr(torch.version, "hip", None)
    assert generation(torch.device("cuda:0")) == tiles
