"""The folder in which computed prefixes outlive the server (`--prefix-cache-path`).

Each rank writes a file of its own (`shard/prefixes/kept_prefixes.py`), named by a key that is new
at every end; the router's index says which tokens they are of, and for which model. The index takes
the old one's place when they are complete, and only then older files go: an end that is interrupted
leaves what there was before.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import secrets
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from tgi_trio import __version__
from tgi_trio.errors import ConfigurationError, tell_reason
from tgi_trio.ipc.prefixes import KeepOrder, RestoreOrder, check_owner
from tgi_trio.ipc.startup import ShardInfo, WarmupResult
from tgi_trio.router.scheduling.kept_prefixes import Budget, Collected, KeptPrefixes
from tgi_trio.settings.records import Settings
from tgi_trio.whole_files import open_file

log = logging.getLogger(__name__)

_INDEX: Final = "index.prefixes"
_PARTIAL: Final = f"{_INDEX}.partial"
_LOCK: Final = "lock"
_KEY_BYTES: Final = 16
_OF_RANK: Final = re.compile(r"(?P<key>[0-9a-f]{32})-\d+\.prefixes")
# Settings that K and V depend on, apart from the model's files.
_SETTINGS: Final = (
    *("dtype", "quantize", "kv_cache_dtype", "activations", "batch_invariant", "rope_scaling"),
    *("rope_factor", "num_shard", "pipeline_stages", "speculate", "drafter", "draft_model"),
)
_FACTS: Final = ("dtype", "device", "backend", "block_size", "kv_bytes_per_token", "state_bytes")


class _Index(msgspec.Struct, frozen=True):
    """What the router's file has, in MessagePack."""

    identity: str
    key: bytes
    prefixes: KeptPrefixes
    checksum: int  # CRC-32 of `prefixes`: other tokens than those computed would be wrong answers

    @classmethod
    def of(cls, identity: str, key: bytes, prefixes: KeptPrefixes) -> _Index:
        return cls(identity, key, prefixes, zlib.crc32(msgspec.msgpack.encode(prefixes)))

    def check(self) -> None:
        """Raise ValueError for prefixes that are not those that were written."""
        if self.checksum != zlib.crc32(msgspec.msgpack.encode(self.prefixes)):
            raise ValueError("it is damaged: a checksum differs")
        self.prefixes.check()


@dataclass(frozen=True, slots=True)
class Restoring:
    """What a shard is told to read, and what that is."""

    order: RestoreOrder
    prefixes: KeptPrefixes
    on_device: int  # runs of those; the others come to the host's memory


class PrefixStore:
    """Keeps the prefixes of one model in a folder, which no other server uses meanwhile."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self._settings = settings

    @classmethod
    @contextmanager
    def open(cls, settings: Settings) -> Iterator[PrefixStore | None]:
        """Lock the folder of the settings within the block; None if they name none.

        Raises ConfigurationError if it cannot be used.
        """
        folder = settings.prefix_cache_path
        if folder is None:
            yield None
            return
        store = cls(folder.absolute(), settings)
        with ExitStack() as stack:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                store.sweep()
            except BlockingIOError as error:
                raise ConfigurationError(
                    f"--prefix-cache-path {folder} is in use by another server: give each its own"
                ) from error
            except OSError as error:
                raise ConfigurationError(
                    f"--prefix-cache-path {folder} cannot be used: {error.strerror}"
                ) from error
            yield store

    @property
    def seconds(self) -> float:
        """Between two times that prefixes are kept while a server is idle; 0: never."""
        return self._settings.prefix_cache_save_seconds

    def load(self, info: ShardInfo, memory: WarmupResult) -> Restoring | None:
        """Return what a shard that is ready can begin with; None, and a line, if that is nothing.

        `info`, `memory`: the shard's reports.
        """
        path = self.folder / _INDEX
        try:
            index = self._read(own=True)
            index.check()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning(
                "prefixes: %s cannot be read and is not used: %s", path, tell_reason(error, path)
            )
            return None
        if index.identity != identify(self._settings, info) or len(index.key) != _KEY_BYTES:
            log.warning(
                "prefixes: those in %s are of another model, other flags or another version; this "
                "server replaces them when it ends",
                self.folder,
            )
            return None
        room = (memory.blocks - 1, max(0, memory.state_slots - 1))
        kept, on_device = index.prefixes.divide(*room, memory.host_blocks, memory.host_slots)
        if not kept.runs:
            return None
        own = KeptPrefixes(kept.block_size, kept.runs[:on_device])
        order = RestoreOrder(
            *(self.folder, index.key, own.blocks, own.slots),
            *(kept.blocks - own.blocks, kept.slots - own.slots),
        )
        return Restoring(order, kept, on_device)

    def budget(self, info: ShardInfo, memory: WarmupResult) -> Budget:
        """Return what may be kept.

        `memory`: what drafts keeps some beside the model, on one rank at least.
        """
        ranks = self._settings.num_shard
        block = max(
            info.kv_bytes_per_token * info.block_size, memory.kv_bytes // max(1, memory.blocks)
        )
        return Budget(self._settings.prefix_cache_bytes, block * ranks, info.state_bytes * ranks)

    def order(self, found: Collected) -> KeepOrder:
        """Return the order to keep what has been found."""
        key = secrets.token_bytes(_KEY_BYTES)
        return KeepOrder(self.folder, key, tuple(found.blocks), tuple(found.slots))

    def sync(self, order: KeepOrder) -> None:
        """Wait until the files of all ranks are on the disk, which have been written in parts.

        Raises OSError.
        """
        for path in self.folder.glob(f"{order.key.hex()}-*.prefixes"):
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def save(self, info: ShardInfo, order: KeepOrder, prefixes: KeptPrefixes) -> None:
        """Write the index of files that all ranks have written, and remove older ones.

        Raises OSError.
        """
        index = _Index.of(identify(self._settings, info), order.key, prefixes)
        beside = self.folder / _PARTIAL
        # Made anew: another user could put a link there where many may write.
        beside.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(beside, flags, 0o600), "wb") as file:
            file.write(msgspec.msgpack.encode(index))
            file.flush()
            os.fsync(file.fileno())
        beside.rename(self.folder / _INDEX)
        self.sweep()

    def sweep(self) -> None:
        """Remove files of ranks that the index does not name, and an index cut off.

        Raises OSError. Other files in the folder are not ours.
        """
        try:
            named = self._read().key.hex()
        except (FileNotFoundError, msgspec.DecodeError):
            named = ""
        for path in self.folder.iterdir():
            of_rank = _OF_RANK.fullmatch(path.name)
            if path.name == _PARTIAL if of_rank is None else of_rank["key"] != named:
                path.unlink(missing_ok=True)

    def _read(self, *, own: bool = False) -> _Index:
        """Return the index; `own`: it has to be this user's. Raises OSError and ValueError."""
        path = self.folder / _INDEX
        with open_file(path) as file:
            if own:
                check_owner(path, os.fstat(file.fileno()))
            return msgspec.msgpack.decode(file.read(), type=_Index)


def identify(settings: Settings, info: ShardInfo) -> str:
    """Return a digest of everything that K and V depend on beside tokens."""
    parts = [__version__]
    parts += [f"{name}={getattr(settings, name)}" for name in _SETTINGS]
    parts += [f"{name}={getattr(info, name)}" for name in _FACTS]
    parts += sorted(_describe_files(settings.model_path))
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def _describe_files(path: Path) -> Iterator[str]:
    """Yield name, size and time of each file of a model."""
    for each in path.iterdir() if path.is_dir() else (path,):
        if each.is_file():
            found = each.stat()
            yield f"{each.resolve()} {found.st_size} {found.st_mtime_ns}"
