"""Frames over a connection between two machines, and the proof of who is at its other end."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgi_trio.errors import CorruptRing, PeerGone, ProtocolMismatch, RingFull
from tgi_trio.ipc import peering
from tgi_trio.ipc.broadcast import Broadcast
from tgi_trio.ipc.frame_codec import Frame, encode
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.peering import Side
from tgi_trio.ipc.prefixes import KeepOrder, decode_keep, encode_keep
from tgi_trio.ipc.ring import LONGEST
from tgi_trio.ipc.tcp import (
    FrameSocket,
    TcpEnd,
    TcpShardEnd,
    TcpSpec,
    prepare_connection,
    tcp_leader_end,
)

SECRET = b"sixteen letters and more"


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for end in (one, other):
        prepare_connection(end)
    with one, other:
        yield one, other


def spec_of(end: socket.socket, **changes: int) -> TcpSpec:
    fields = {"rank": 1, "incarnation": 2} | changes
    return TcpSpec(socket=end.detach(), **fields)


def test_a_leader_and_its_shard_say_frames_to_each_other(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    beats: list[tuple[int, int]] = []
    leader = tcp_leader_end(spec_of(connection[0]).text())
    shard = TcpShardEnd(spec_of(connection[1]), lambda *beat: beats.append(beat))
    frame = encode(FrameKind.SHUTDOWN, {"command": 7}, {})
    assert leader.incarnation == 2 and shard.writer.max_payload == LONGEST
    leader.reserve(len(frame))[:] = frame
    leader.commit()
    leader.send(b"12345")  # neither its length nor its place need be a whole number of words
    leader.send(frame)
    for wanted in (frame, b"12345", frame):
        while (view := shard.try_receive()) is None:
            assert shard.wait(30)
        assert bytes(view) == wanted
        if wanted is frame:
            assert Frame(view).word("command") == 7
        del view
        shard.release()
    assert shard.try_receive() is None and not shard.wait(0)
    shard.beat(3, 4)
    assert beats == [(3, 4)]
    leader.close()
    assert shard.wait(30)
    with pytest.raises(PeerGone, match="the leader: it has closed"):
        shard.try_receive()
    shard.close()


def test_a_large_frame_waits_for_its_reader_who_may_be_slow(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    large = bytes(range(256)) * 2**16
    one = TcpEnd(spec_of(connection[0]), lambda: "reader")
    other = TcpEnd(spec_of(connection[1]), lambda: "writer")

    def send_both() -> None:
        one.send(large)
        one.send(b"then")

    thread = threading.Thread(target=send_both)
    thread.start()
    for wanted in (large, b"then"):
        while (view := other.try_receive()) is None:
            assert other.wait(30)
        assert view == wanted
        del view
        other.release()
    thread.join(30)
    one.close()
    other.close()


def test_the_memory_of_a_long_frame_is_given_back(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    one, other = (TcpEnd(spec_of(end), lambda: "peer") for end in connection)
    tracemalloc.start()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            sending = pool.submit(one.send, bytes(2**24))
            while (view := other.try_receive()) is None:
                assert other.wait(30)
            assert len(view) == 2**24
            del view
            sending.result()
            before = tracemalloc.get_traced_memory()[0]
            other.release()
            assert before - tracemalloc.get_traced_memory()[0] > 2**23
    tracemalloc.stop()
    one.close()
    other.close()


def test_a_reader_that_takes_nothing_is_named(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    beats: list[tuple[int, int]] = []
    end = TcpShardEnd(
        spec_of(connection[0], full_timeout_ms=10, rank=0),
        lambda *beat: beats.append(beat),
    )
    with pytest.raises(RingFull, match=r"the router: has taken no more of a frame of 67108864"):
        end.send(bytes(2**26))
    assert beats, "waiting is a sign of life"
    assert not end.try_send(b"more"), "what has begun must leave first"
    end.close()


def test_orders_to_keep_many_blocks_are_longer_than_any_ring(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    order = KeepOrder(Path("/kept"), bytes(16), tuple(range(1_000_000)))
    leader = tcp_leader_end(spec_of(connection[0]).text())
    rank = TcpShardEnd(spec_of(connection[1]), lambda step, phase: None)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(Broadcast([leader]).send, encode_keep(1, order))
        while (view := rank.try_receive()) is None:
            assert rank.wait(30)
        assert decode_keep(Frame(view)) == order
        sending.result()
    rank.release()
    leader.close()
    rank.close()


def test_lengths_that_cannot_be_true(connection: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = connection
    end = TcpEnd(spec_of(receiver), lambda: "rank 1")
    with pytest.raises(ValueError, match="a frame of 4294967297 bytes; at most 4294967296"):
        end.send(bytes(LONGEST + 1))
    sender.sendall((LONGEST + 1).to_bytes(8, "little"))
    assert end.wait(30)
    with pytest.raises(
        CorruptRing, match="rank 1: a frame of 4294967297 bytes; at most 4294967296"
    ):
        end.try_receive()
    end.close()


def test_an_end_that_dies_in_the_middle_of_a_frame(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    sender, receiver = connection
    end = TcpEnd(spec_of(receiver), lambda: "rank 1")
    sender.sendall((64).to_bytes(8, "little") + bytes(40))
    sender.close()
    with pytest.raises(PeerGone):
        while end.try_receive() is None:
            assert end.wait(30)
    end.close()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.binary(max_size=300), max_size=8),
    st.lists(st.integers(1, 97), min_size=1, max_size=8),
)
def test_frames_come_whole_however_they_are_cut(frames: list[bytes], cuts: list[int]) -> None:
    sender, receiver = socket.socketpair()
    with sender, receiver:
        stream = b"".join(
            len(each).to_bytes(8, "little") + each + bytes(-len(each) % 8) for each in frames
        )
        reading = FrameSocket(receiver, lambda: "peer")
        found, at, turn = [], 0, 0
        while at < len(stream):
            cut = cuts[turn % len(cuts)]
            sender.sendall(stream[at : at + cut])
            at, turn = at + cut, turn + 1
            while (view := reading.try_receive()) is not None:
                found.append(bytes(view))
                reading.release()
        assert found == frames


def test_a_spec_is_one_word(connection: tuple[socket.socket, socket.socket]) -> None:
    spec = TcpSpec(socket=5, rank=3, incarnation=1)
    assert TcpSpec.is_one(spec.text()) and TcpSpec.parse(spec.text()) == spec
    assert " " not in spec.text()
    for wrong in ("segment=3", "tcp:socket=3"):
        with pytest.raises(ValueError, match="expected tcp: and the fields socket, rank"):
            TcpSpec.parse(wrong)


def test_a_proof_is_of_one_side_one_secret_and_these_challenges() -> None:
    caller, called = peering.make_challenge(), peering.make_challenge()
    assert caller != called and len(caller) == peering.CHALLENGE_BYTES
    for side in Side:
        proof = peering.prove(SECRET, side, caller, called)
        assert len(proof) == peering.PROOF_BYTES
        assert peering.check_proof(proof, SECRET, side, caller, called)
        other = Side.CALLED if side is Side.CALLER else Side.CALLER
        assert not peering.check_proof(proof, SECRET, other, caller, called)
        assert not peering.check_proof(proof, SECRET + b".", side, caller, called)
        assert not peering.check_proof(proof, SECRET, side, peering.make_challenge(), called)


def test_who_speaks_otherwise_is_told_so() -> None:
    challenge = peering.make_challenge()
    peering.check_challenge(challenge, "10.0.0.1")
    with pytest.raises(ProtocolMismatch, match=r"10\.0\.0\.1: it speaks another protocol"):
        peering.check_challenge(b"GET / HTTP/1.1\r\n", "10.0.0.1")
    with pytest.raises(ProtocolMismatch, match="both machines need the same version of tgi-trio"):
        peering.check_challenge(challenge[:8] + bytes(16) + challenge[24:], "10.0.0.1")
