"""How many devices there are, by /dev and the usual variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tgi_trio.cli import device_count
from tgi_trio.cli.device_count import choose_num_shard, count_devices, count_visible_devices
from tgi_trio.errors import ConfigurationError
from tgi_trio.settings.records import Options


@pytest.fixture(autouse=True)
def torch_for_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_count, "torch_is_for_cpus", lambda: False)


def test_devices_that_are_present(tmp_path: Path) -> None:
    assert count_devices(tmp_path) == 0
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1", "nvidia11"):
        (tmp_path / name).touch()
    assert count_devices(tmp_path) == 3


def test_devices_of_amd_that_are_present(tmp_path: Path) -> None:
    (tmp_path / "dri").mkdir()
    for name in ("renderD128", "renderD129", "card0"):
        (tmp_path / "dri" / name).touch()
    assert count_devices(tmp_path) == 0  # any graphics card has those
    (tmp_path / "kfd").touch()
    assert count_devices(tmp_path) == 2


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 8),
        ({"CUDA_VISIBLE_DEVICES": "0,3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0, 3", "NVIDIA_VISIBLE_DEVICES": "1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,2"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7,8,9"}, 8),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, 8),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, 8),
        ({"NVIDIA_VISIBLE_DEVICES": "none"}, 0),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}, 3),
        ({"NVIDIA_VISIBLE_DEVICES": "all", "ZE_AFFINITY_MASK": "0,1"}, 2),
        ({"HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "1,2"}, 2),
    ],
)
def test_devices_that_may_be_used(environ: dict[str, str], count: int) -> None:
    assert count_visible_devices(environ, 8)[0] == count


def test_parts_of_a_device_are_counted_as_listed() -> None:
    assert count_visible_devices({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, 1)[0] == 2


def test_sharded_without_a_number_takes_every_device() -> None:
    options = Options(sharded=True)
    assert choose_num_shard(options, {}, 4).num_shard == 4
    assert choose_num_shard(options, {"CUDA_VISIBLE_DEVICES": "0,1"}, 4).num_shard == 2
    with pytest.raises(ConfigurationError, match=r"only found 1 CUDA devices \(CUDA_VISIB"):
        choose_num_shard(options, {"CUDA_VISIBLE_DEVICES": "0"}, 4)
    with pytest.raises(ConfigurationError, match=r"only found 1 CUDA devices \(/dev\)"):
        choose_num_shard(options, {}, 1)


def test_more_ranks_than_devices_are_refused_where_devices_are() -> None:
    assert choose_num_shard(Options(num_shard=2), {}, 2) == Options(num_shard=2)
    with pytest.raises(ConfigurationError, match="`num_shard` is 3 but only found 2 CUDA devices"):
        choose_num_shard(Options(num_shard=3), {}, 2)
    # hidden or absent: the ranks share the processor
    for environ, present in ({"CUDA_VISIBLE_DEVICES": ""}, 2), ({}, 0):
        assert choose_num_shard(Options(num_shard=3), environ, present) == Options(num_shard=3)
    assert choose_num_shard(Options(sharded=True), {}, 0) == Options(sharded=True)
    assert choose_num_shard(Options(), {}, 2) == Options()


def test_a_torch_for_cpus_sees_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_count, "torch_is_for_cpus", lambda: True)
    assert choose_num_shard(Options(num_shard=3), {}, 2) == Options(num_shard=3)
