"""One of the adapters that are served, and who uses it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import trio

from tgi_trio.router.adapters.adapter_states import AdapterState


@dataclass(slots=True, eq=False)
class ServedAdapter:
    """One adapter."""

    name: str
    number: int
    folder: Path
    state: AdapterState = AdapterState.ABSENT
    users: int = 0  # requests that use it
    waiting: int = 0  # requests that wait for it
    used: int = 0  # sequence number of its last use, for LRU
    sha256: bytes = b""  # of the files that were loaded first
    nbytes: int = 0  # in the shard's memory
    failures: int = 0  # loads that failed
    why: str = ""  # error of the last failure
    listed: bool = True  # False: unloaded by name, and forgotten after its last request
    own: bool = False  # the model's own: it stays
    news: trio.Event = field(default_factory=trio.Event)  # set when waiting requests should look

    @property
    def idle(self) -> bool:
        """Whether it may be unloaded: it is in memory, and no request uses or wants it."""
        used = self.own or self.users or self.waiting
        return self.state is AdapterState.RESIDENT and not used
