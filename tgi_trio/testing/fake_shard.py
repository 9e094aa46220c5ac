"""A fake shard: the real worker loop around `FakeRunner`, as a process or in a thread.

`python -m tgi_trio.testing.fake_shard <channel spec> <FakeSettings as JSON>` takes the place of
`python -m tgi_trio.shard`. `FakeShard` is the same in a thread of the test's own process. It
never imports torch.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from types import TracebackType
from typing import cast

from tgi_trio.errors import ConfigurationError, PeerGone
from tgi_trio.ipc.channel import ShardEnd
from tgi_trio.ipc.control import ControlPage
from tgi_trio.ipc.endpoints import ChannelSpec
from tgi_trio.settings.records import ShardOptions
from tgi_trio.shard import process
from tgi_trio.shard.loop import worker
from tgi_trio.shard.loop.image_queue import ImageSource
from tgi_trio.testing.fake_model import FakeCrash, FakeRunner, FakeSettings

_STOP_POLL_S = 0.02
_JOIN_S = 120.0


class FakeShard:
    """A fake shard in a thread. A context manager: entering starts it, leaving stops it.

    `runner` is None until the shard has loaded. `error` is the exception that ended its loop, None
    while it runs and after a regular end.
    """

    def __init__(
        self,
        spec: ChannelSpec,
        settings: FakeSettings | None = None,
        images: ImageSource | None = None,
    ) -> None:
        """Serve the shard's end of the channel `spec`, in the same process."""
        self._images = images
        self.settings = settings or FakeSettings()
        self.runner: FakeRunner | None = None
        self.error: BaseException | None = None
        # A descriptor of its own, which this end closes with the segment.
        own = replace(spec, segment=os.dup(spec.segment))
        self._end = cast(_StoppableEnd, _StoppableEnd.attach(own.text()))
        self._thread = threading.Thread(target=self._main, name="fake-shard", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether its loop runs."""
        return self._thread.is_alive()

    def wait(self, seconds: float = _JOIN_S) -> None:
        """Wait until its loop has ended by itself. Raises TimeoutError if it does not."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"the fake shard has not ended within {seconds:g} s")

    def stop(self) -> None:
        """End the loop wherever it is, and wait for it. Raises TimeoutError if it does not end."""
        self._end.stopping.set()
        if self.runner is not None:
            self.runner.released.set()
        self.wait()

    def __enter__(self) -> FakeShard:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _main(self) -> None:
        end = self._end
        # This thread owns the mutex: if it crashes, that is released as by the death of a process.
        end.hold_alive_mutex()
        try:
            worker.run(
                end,
                self._load,
                ShardOptions(speculate=self.settings.speculate),
                rank=end.spec.rank,
                incarnation=end.page.incarnation,
                images=self._images,
            )
        except FakeCrash:
            return
        except BaseException as error:
            self.error = error
        finally:
            end.close()

    def _load(self) -> FakeRunner:
        self.runner = FakeRunner(self.settings, in_thread=True)
        if self._end.stopping.is_set():  # stop() has not seen the runner
            self.runner.released.set()
        return self.runner


class _StoppableEnd(ShardEnd):
    """A shard's end to which another thread can feign the router's death."""

    def __init__(self, spec: ChannelSpec, page: ControlPage) -> None:
        self.stopping = threading.Event()
        super().__init__(spec, page)

    def wait(self, timeout: float | None) -> bool:
        self._check()
        return super().wait(_STOP_POLL_S if timeout is None else min(timeout, _STOP_POLL_S))

    def beat(self, step: int, phase: int) -> None:
        super().beat(step, phase)
        self._check()

    def _on_full(self) -> None:
        super()._on_full()
        self._check()

    def _check(self) -> None:
        if self.stopping.is_set():
            raise PeerGone("router", "the test has stopped the fake shard")


def main(argv: list[str]) -> int:
    """Run a fake shard process; returns its exit code."""
    if len(argv) != 2:
        print("usage: python -m tgi_trio.testing.fake_shard <spec> <JSON>", file=sys.stderr)
        return 2
    try:
        settings = FakeSettings.parse(argv[1])
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    options = ShardOptions(speculate=settings.speculate)
    return process.serve(argv[0], lambda: FakeRunner(settings), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
