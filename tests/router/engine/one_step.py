"""A link to a shard that computes one step."""

from __future__ import annotations

from collections.abc import Iterator

import trio

from tests.support.step_frames import encode_report
from tgi_trio.ipc.frame_codec import Frame
from tgi_trio.ipc.frames import Finish
from tgi_trio.ipc.messages import Fault, StepReport, encode_faults
from tgi_trio.router.scheduling.shard_commands import Command, Prefill


class OneStep:
    """A link to a shard that computes one step of all its sequences; the last `ends` end in it.

    `faulty`: then a step fails on the first one.
    """

    def __init__(self, *, faulty: bool = False, ends: int = 1) -> None:
        self._faulty = faulty
        self._ends = ends
        self.prompts: dict[int, int] = {}  # lengths by sequence
        self._number = 0

    def send_frame(self, frame: bytes) -> None:
        """No adapters are loaded here."""

    def send(self, command: Command) -> None:
        self._number = command.number
        if isinstance(command, Prefill):
            self.prompts |= {row.sequence: len(row.token_ids) for row in command.rows}

    def flush(self) -> None: ...

    async def wait(self) -> None:
        await trio.lowlevel.checkpoint()

    def replies(self) -> Iterator[Frame]:
        prompts, self.prompts = self.prompts, {}
        if not prompts:
            return
        count = len(prompts)
        ends = min(self._ends, count)
        report = StepReport(
            step=1,
            acknowledged=self._number,
            sequence=list(prompts),
            computed=list(prompts.values()),
            token_count=[1] * count,
            prompt_count=[0] * count,
            finish=[int(Finish.NONE)] * (count - ends) + [int(Finish.LENGTH)] * ends,
            token_ids=[100 + n for n in range(count)],
            logprobs=[-0.5] * count,
            top_count=[0] * count,
        )
        frames = list(encode_report(report, 1 << 16))
        if self._faulty:
            frames.append(encode_faults(self._number, [Fault(report.sequence[0], "it is broken")]))
        for frame in frames:
            yield Frame(memoryview(frame))
