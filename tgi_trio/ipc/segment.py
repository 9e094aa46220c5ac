"""Anonymous shared memory: all pages reserved at creation, passed on as a descriptor.

A segment never has a name (`O_TMPFILE`), so no crash can leave one behind and nobody can attach to
it by name. `shm_open` needs one until `shm_unlink`: only for microseconds, but a `kill -9` has hit
them. `multiprocessing.shared_memory` keeps names, and its resource tracker unlinks segments that
are in use (Python 3.11 and 3.12).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from types import TracebackType
from typing import Final

from tgi_trio.errors import SegmentError

_SHM: Final = "/dev/shm"
_SHM_REFUSALS = frozenset(
    {
        *(errno.ENOSPC, errno.ENOMEM, errno.EFBIG),
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.ENODEV),
        *(errno.EOPNOTSUPP, errno.EISDIR),  # no O_TMPFILE in this file system, or kernel
    }
)
_MFD_NOEXEC_SEAL = 0x0008  # Linux 6.3; not in the os module
_F_ADD_SEALS = 1033  # fcntl.F_ADD_SEALS is missing from some builds
_F_SEAL_SHRINK, _F_SEAL_GROW = 0x0002, 0x0004


class Segment:
    """A piece of shared memory: `fd` to pass on, `buf` to use. A context manager."""

    def __init__(self, fd: int, size: int, kind: str) -> None:
        """Map `size` bytes of `fd`, which this object owns from now on."""
        self.fd = fd
        self.size = size
        self.kind = kind  # "shm", "memfd" or "inherited"; for logs and tests
        try:
            # MAP_POPULATE: no page faults in the first pass over a ring.
            self.map = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError:
            os.close(fd)
            raise
        self.buf = memoryview(self.map)

    @classmethod
    def create(cls, size: int, *, label: str) -> Segment:
        """Create `size` zeroed bytes, reserved so that no later write can fail with SIGBUS.

        Prefers /dev/shm; if that is too small, full or not writable, uses a sealed memfd. Raises
        SegmentError, which names `label`, if the kernel gives neither.
        """
        try:
            return cls(_open_shm(size), size, "shm")
        except OSError as error:
            if error.errno not in _SHM_REFUSALS:
                raise
            shm_problem = error
        try:
            return cls(_open_memfd(size), size, "memfd")
        except OSError as error:
            cure = (
                "Free memory, raise the container's memory limit, or give it a larger /dev/shm "
                "(docker run --shm-size 1g)."
            )
            if error.errno == errno.EFBIG:
                cure = "Raise the limit of a file's size (`ulimit -f`, `LimitFSIZE=`)."
            raise SegmentError(
                f"{label}: no shared memory of {size / 2**20:.1f} MiB. /dev/shm says "
                f"'{os.strerror(shm_problem.errno or 0)}', memfd_create says "
                f"'{os.strerror(error.errno or 0)}'. {cure}"
            ) from error

    @classmethod
    def open(cls, fd: int) -> Segment:
        """Map an inherited descriptor; the segment owns it from now on."""
        return cls(fd, os.fstat(fd).st_size, "inherited")

    def words(self, offset: int, count: int = 1) -> memoryview:
        """Return `count` aligned 8-byte words at `offset`.

        Stores through such a view are single machine stores; those of `struct.pack_into` are not,
        so a reader in another process could see them half done.
        """
        if offset % 8:
            raise ValueError(f"offset {offset} is not aligned to 8 bytes")
        return self.buf[offset : offset + 8 * count].cast("Q")

    def close(self) -> None:
        """Close the descriptor and unmap; views that are still alive keep the mapping."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        try:
            self.buf.release()
            self.map.close()
        except BufferError:
            # A numpy column or a ring's view still points here: unmapping now would turn its next
            # read into SIGSEGV. The mapping goes with the last view.
            return

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _open_shm(size: int) -> int:
    fd = os.open(_SHM, os.O_TMPFILE | os.O_EXCL | os.O_RDWR, 0o600)  # it cannot be given a name
    try:
        # ftruncate alone reserves nothing: on a full /dev/shm the first write would be SIGBUS.
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open_memfd(size: int) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("tgi-trio", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel before 6.3 does not know the flag
            raise
        fd = os.memfd_create("tgi-trio", flags)
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)
        # Sealed, so that no holder of the descriptor can shrink it, which would be SIGBUS too.
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd
