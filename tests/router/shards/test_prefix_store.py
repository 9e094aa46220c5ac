"""The folder of prefixes: one server at a time, one model, and always a whole set of files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.endpoints import DEFAULT_RING_BYTES
from tgi_trio.ipc.frame_codec import frame_bytes
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.prefixes import KeepOrder
from tgi_trio.ipc.startup import ShardInfo, WarmupResult
from tgi_trio.model.facts import ModelFacts
from tgi_trio.router.scheduling.kept_prefixes import (
    MOST_BLOCKS,
    Collected,
    KeptPrefixes,
    KeptRun,
)
from tgi_trio.router.shards import prefix_store
from tgi_trio.router.shards.prefix_store import PrefixStore
from tgi_trio.settings.records import Options, Settings
from tgi_trio.settings.resolve import resolve

INFO = ShardInfo(
    vocab_size=100,
    block_size=4,
    layers=2,
    kv_bytes_per_token=64,
    max_positions=0,
    eos_ids=(1,),
    dtype="float32",
    device="cpu",
    backend="kernels (avx2)",
    load_ns=0,
)
MEMORY = WarmupResult(65, 4, 0, 0, 0, 0, 0)
KEPT = KeptPrefixes(4, (KeptRun("", -1, bytes(64)), KeptRun("salt", -1, bytes(16))))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    facts = ModelFacts(path=model, model_type="llama", max_positions=2048)
    return resolve(Options(prefix_cache_path=tmp_path / "kept" / "here"), facts)


def opened(settings: Settings) -> PrefixStore:
    with PrefixStore.open(settings) as store:
        assert store is not None
        return store


def save(store: PrefixStore, ranks: int = 1) -> list[Path]:
    """Save as a shard of so many ranks does; returns what they have written."""
    order = store.order(Collected(KEPT, [9, 8, 7, 6, 5], []))
    files = [order.folder / f"{order.key.hex()}-{rank}.prefixes" for rank in range(ranks)]
    for file in files:
        file.write_bytes(b"numbers")
    store.save(INFO, order, KEPT)
    return files


def test_what_is_saved_is_loaded(settings: Settings) -> None:
    store = opened(settings)
    assert store.load(INFO, MEMORY) is None
    (file,) = save(store)
    found = store.load(INFO, MEMORY)
    assert found is not None and found.prefixes == KEPT
    assert (found.order.blocks, found.order.slots) == (5, 0)
    assert file.name.startswith(found.order.key.hex())
    less = store.load(INFO, replace(MEMORY, blocks=5))  # block 0 included
    assert less is not None and less.order.blocks == 4


def test_the_folder_is_the_owners_alone(settings: Settings) -> None:
    store = opened(settings)
    save(store)
    assert store.folder.stat().st_mode & 0o077 == 0
    assert (store.folder / "index.prefixes").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("place", ["middle", "end"])
def test_an_end_that_is_cut_off_leaves_what_there_was(settings: Settings, place: str) -> None:
    store = opened(settings)
    (file,) = save(store)
    order = store.order(Collected(KEPT, [1, 2, 3, 4, 5], []))
    part = order.folder / f"{order.key.hex()}-0.prefixes"
    part.write_bytes(b"num")
    if place == "end":
        (order.folder / "index.prefixes.partial").write_bytes(b"half")
    again = opened(settings)
    found = again.load(INFO, MEMORY)
    assert found is not None and file.name.startswith(found.order.key.hex())
    assert {path.name for path in again.folder.iterdir()} == {"index.prefixes", file.name, "lock"}


def test_files_of_others_are_left_alone(settings: Settings) -> None:
    assert settings.prefix_cache_path is not None
    settings.prefix_cache_path.mkdir(parents=True)
    names = ("notes.prefixes", "old.prefixes-backup", "0123-0.prefixes", "index.prefixes.txt")
    for name in names:
        (settings.prefix_cache_path / name).write_text("mine")
    save(opened(settings))
    opened(settings)
    assert all((settings.prefix_cache_path / name).exists() for name in names)


def test_an_index_of_another_user_is_not_used(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who can write there could have this server say anything."""
    store = opened(settings)
    save(store)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert store.load(INFO, MEMORY) is None
    assert f"belongs to another user ({os.getuid()})" in caplog.text


def test_newer_files_take_the_place_of_older_ones(settings: Settings) -> None:
    store = opened(settings)
    old = save(store, 2)
    new = save(store, 2)
    assert not any(path.exists() for path in old) and all(path.exists() for path in new)


# Whatever K and V depend on, with another value.
OTHER_SETTINGS: dict[str, Any] = {
    "num_shard": 2,
    "pipeline_stages": 2,
    "dtype": "bfloat16",
    "quantize": "q4_k",
    "kv_cache_dtype": "fp8_e5m2",
    "activations": 16,
    "batch_invariant": True,
    "rope_scaling": "yarn",
    "rope_factor": 2.0,
    "speculate": 3,
    "drafter": "mtp",
    "draft_model": Path("drafter"),
}
OTHER_FACTS: dict[str, Any] = {
    "backend": "kernels (avx512)",
    "dtype": "bfloat16",
    "device": "cuda",
    "block_size": 8,
    "kv_bytes_per_token": 128,
    "state_bytes": 512,
}
OF_ANOTHER = "of another model, other flags or another version"


@pytest.mark.parametrize(
    ("of_settings", "name"),
    [*((True, name) for name in OTHER_SETTINGS), *((False, name) for name in OTHER_FACTS)],
)
def test_another_flag_is_not_mixed_up(
    settings: Settings, of_settings: bool, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(settings)
    (file,) = save(store)
    own, info = settings, INFO
    if of_settings:
        own = replace(settings, **{name: OTHER_SETTINGS[name]})
    else:
        info = replace(INFO, **{name: OTHER_FACTS[name]})
    assert opened(own).load(info, MEMORY) is None
    assert OF_ANOTHER in caplog.text
    assert store.load(INFO, MEMORY) is not None
    assert file.exists()  # until this server has something better


def test_another_model_or_version_is_not_mixed_up(
    settings: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, config = opened(settings), settings.model_path / "config.json"
    save(store)
    before = config.stat()
    config.write_text("{ }")
    os.utime(config, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert store.load(INFO, MEMORY) is None  # of another size
    config.write_text("{}")
    os.utime(config, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert store.load(INFO, MEMORY) is not None
    os.utime(config, (1, 1))  # as one that has been downloaded anew
    assert store.load(INFO, MEMORY) is None
    os.utime(config, ns=(before.st_mtime_ns, before.st_mtime_ns))
    monkeypatch.setattr(prefix_store, "__version__", "0.0")
    assert store.load(INFO, MEMORY) is None
    assert caplog.text.count(OF_ANOTHER) == 3


def test_what_may_be_kept_is_that_of_all_ranks(settings: Settings) -> None:
    own = replace(settings, prefix_cache_bytes=10 * 2 * 4 * 64 + 2 * 100, num_shard=2)
    info = replace(INFO, state_bytes=100)
    budget = opened(own).budget(info, MEMORY)
    assert budget.take_slot()
    assert budget.take_blocks(100) == 10  # of 4 tokens, on 2 ranks
    assert not budget.take_slot()
    beside = replace(MEMORY, kv_bytes=MEMORY.blocks * 4 * (64 + 16))  # what drafts keeps some, too
    assert opened(own).budget(info, beside).take_blocks(100) == 10 * 64 // 80


def test_slots_of_less_memory(settings: Settings) -> None:
    store = opened(settings)
    runs = (KeptRun("", -1, bytes(64), (1,)), KeptRun("salt", -1, bytes(16), (0,)))
    order = store.order(Collected(KeptPrefixes(4, runs), [9, 8, 7, 6, 5], [2, 3]))
    store.save(INFO, order, KeptPrefixes(4, runs))
    for slots, kept in ((3, 2), (2, 1)):  # slot 0 included
        found = store.load(INFO, replace(MEMORY, state_slots=slots))
        assert found is not None and found.order.slots == kept
    assert store.load(INFO, replace(MEMORY, state_slots=1)) is None
    assert store.load(INFO, replace(MEMORY, state_slots=0)) is None


def test_an_index_that_is_no_tree_is_not_used(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """As it may come from whoever can write there."""
    store = opened(settings)
    runs = (KeptRun("", 0, bytes(64)), KeptRun("", -1, bytes(15)))
    for bad in (*(KeptPrefixes(4, (run,)) for run in runs), KeptPrefixes(0, KEPT.runs)):
        order = store.order(Collected(KEPT, [9, 8, 7, 6, 5], []))
        store.save(INFO, order, bad)
        assert store.load(INFO, MEMORY) is None
        assert "does not belong to a tree" in caplog.text
        caplog.clear()
    order = KeepOrder(store.folder, b"short", (9, 8, 7, 6, 5))
    store.save(INFO, order, KEPT)
    assert store.load(INFO, MEMORY) is None


def test_an_index_is_on_the_disk_before_it_takes_the_place_of_another(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, events = opened(settings), list[str]()
    sync, rename = os.fsync, Path.rename

    def note_sync(file: int) -> None:
        events.append("sync")
        sync(file)

    def note_rename(path: Path, to: Path) -> Path:
        events.append("rename")
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    save(store)
    assert events == ["sync", "rename"]


@pytest.mark.parametrize("content", [b"", b"\x80", b"\xc1no", b"index", os.urandom(200)])
def test_a_damaged_index_is_said_and_not_used(
    settings: Settings, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(settings)
    save(store)
    (store.folder / "index.prefixes").write_bytes(content)
    assert opened(settings).load(INFO, MEMORY) is None
    assert "cannot be read and is not used" in caplog.text
    save(store)
    assert store.load(INFO, MEMORY) is not None


def test_an_index_with_other_tokens_is_not_used(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """One bit of a disk, and a prompt would be answered as if it were another."""
    store = opened(settings)
    save(store)
    file = store.folder / "index.prefixes"
    content = file.read_bytes()
    at = content.rindex(bytes(64)) + 20
    file.write_bytes(content[:at] + b"\x01" + content[at + 1 :])
    assert store.load(INFO, MEMORY) is None
    assert "it is damaged: a checksum differs" in caplog.text


def test_nothing_is_written_through_a_link(settings: Settings, tmp_path: Path) -> None:
    """Of another user, where the folder is one that many may write to."""
    store = opened(settings)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (store.folder / "index.prefixes.partial").symlink_to(victim)
    save(store)
    assert victim.read_text() == "precious"
    assert store.load(INFO, MEMORY) is not None


def test_an_index_that_is_a_pipe_is_not_waited_for(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(settings)
    os.mkfifo(store.folder / "index.prefixes")
    assert store.load(INFO, MEMORY) is None
    assert "it is no file, but a device or a pipe" in caplog.text
    with (
        pytest.raises(ConfigurationError, match="cannot be used: it is no file"),
        PrefixStore.open(settings),
    ):
        pass


def test_a_folder_has_one_server(settings: Settings) -> None:
    with (
        PrefixStore.open(settings),
        pytest.raises(ConfigurationError, match="in use by another server"),
        PrefixStore.open(settings),
    ):
        pass
    opened(settings)


def test_a_folder_that_cannot_be_is_said(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    elsewhere = replace(settings, prefix_cache_path=tmp_path / "file" / "folder")
    with (
        pytest.raises(
            ConfigurationError,
            match=r"^--prefix-cache-path .*/file/folder cannot be used: Not a directory$",
        ),
        PrefixStore.open(elsewhere),
    ):
        pass
    with PrefixStore.open(replace(settings, prefix_cache_path=None)) as store:
        assert store is None


def test_the_largest_order_fits_a_ring() -> None:
    size = frame_bytes(
        FrameKind.KEEP, folder_bytes=4096, key_bytes=16, blocks=MOST_BLOCKS, slots=MOST_BLOCKS
    )
    assert size <= DEFAULT_RING_BYTES // 2 - 8
