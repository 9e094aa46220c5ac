"""`Http1` reads bytes: what is heard does not depend on how they are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tgi_trio.router.http.wire.http1 import (
    BodyPart,
    ClientEvent,
    Framing,
    Http1,
    Http2Preface,
    Refusal,
    RequestEnd,
    RequestHead,
)
from tgi_trio.router.http.wire.states import IllegalWireEvent, WireState

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

TOKENS = st.text("abcxyz-", min_size=1, max_size=8).map(lambda name: b"x-" + name.encode())
VALUES = st.text("abc 09;=", max_size=12).map(lambda value: value.strip().encode())
GARBAGE = [
    b"",
    b"\0\1\2 no HTTP\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",  # no host
    b"GET / HTTP/1.1\r\nhost: t\r\nbad header\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: t\r\ntransfer-encoding: gzip\r\n\r\n0",
    b"POST / HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\nnot a number\r\n",
    b"POST / HTTP/1.1\r\nhost: t\r\ncontent-length: 3\r\n\r\n12",  # not whole
    PREFACE,  # too late
]


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Return one request as bytes: any framing, any version, perhaps the last one."""
    method = draw(st.sampled_from([b"GET", b"POST", b"HEAD", b"OPTIONS"]))
    target = draw(st.sampled_from([b"/", b"/a%20b?c=d", b"/v1/models", b"*"]))
    version = draw(st.sampled_from([b"1.1", b"1.1", b"1.1", b"1.0"]))
    lines = [b"Host: t"] if version == b"1.1" or draw(st.booleans()) else []
    lines += [name + b": " + value for name, value in draw(st.lists(st.tuples(TOKENS, VALUES)))]
    said = draw(
        st.sampled_from(
            [
                b"",
                b"",
                b"",
                b"connection: close",
                b"connection: keep-alive",
                b"connection: upgrade\r\nupgrade: h2c",
                b"expect: 100-continue",
            ]
        )
    )
    lines += [said] if said else []
    chunks = draw(st.lists(st.binary(min_size=1, max_size=40), max_size=3))
    if version == b"1.1" and draw(st.booleans()):
        lines.append(b"transfer-encoding: chunked")
        body = b"".join(b"%x;a=b\r\n%b\r\n" % (len(each), each) for each in chunks)
        body += b"0\r\n" + (b"x-trailer: y\r\n" if draw(st.booleans()) else b"") + b"\r\n"
    else:
        body = b"".join(chunks)
        lines += [b"content-length: %d" % len(body)] if body or draw(st.booleans()) else []
    head = b"\r\n".join([b"%b %b HTTP/%b" % (method, target, version), *lines])
    return head + b"\r\n\r\n" + body


STREAMS = st.tuples(st.lists(requests(), max_size=4), st.sampled_from(GARBAGE)).map(
    lambda parts: b"".join(parts[0]) + parts[1]
)


def heard(pieces: list[bytes]) -> tuple[list[ClientEvent], WireState]:
    """Return what a client says in `pieces`, parts of one body joined, and where it stands then."""
    http1 = Http1()
    found: list[ClientEvent] = []
    for each in itertools.chain.from_iterable(map(http1.receive, pieces)):
        if isinstance(each, BodyPart) and found and isinstance(found[-1], BodyPart):
            found[-1] = BodyPart(found[-1].data + each.data)
        elif isinstance(each, Http2Preface):
            found.append(Http2Preface(b""))  # what came behind it is with it, as far as it came
        else:
            found.append(each)
    return found, http1.client


@given(data=STREAMS, cuts=st.lists(st.integers(0, 600), max_size=20))
def test_where_bytes_are_cut_makes_no_difference(data: bytes, cuts: list[int]) -> None:
    bounds = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    assert heard([data[a:b] for a, b in itertools.pairwise(bounds)]) == heard([data])


@given(data=STREAMS)
def test_one_byte_at_a_time_says_the_same(data: bytes) -> None:
    assert heard([data[i : i + 1] for i in range(len(data))]) == heard([data])


@given(data=st.binary(max_size=300), cut=st.integers(0, 300))
def test_any_bytes_at_all_are_read_or_refused(data: bytes, cut: int) -> None:
    found, state = heard([data[:cut], data[cut:]])
    assert any(isinstance(each, Refusal) for each in found) == (state is WireState.BROKEN)


@given(several=st.lists(requests(), min_size=1, max_size=5))
@example([b"GET / HTTP/1.0\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"])
@example([b"GET / HTTP/1.1\r\nhost: t\r\nconnection: close, upgrade\r\nupgrade: h2c\r\n\r\n"])
def test_every_request_is_heard_in_order_up_to_the_last_one(several: list[bytes]) -> None:
    found, state = heard([b"".join(several)])
    heads = [each for each in found if isinstance(each, RequestHead)]
    assert not any(isinstance(each, Refusal | Http2Preface) for each in found)
    assert len([each for each in found if isinstance(each, RequestEnd)]) == len(heads)
    for head, request in zip(heads, several, strict=False):
        method, target, version = request.partition(b"\r\n")[0].split(b" ")
        assert (head.method.encode(), head.target) == (method, target)
        assert f"HTTP/{head.version}".encode() == version
    assert all(head.keep_alive for head in heads[:-1]), "nothing is heard behind the last request"
    assert len(heads) == len(several) or not heads[-1].keep_alive
    assert state is (WireState.IDLE if heads[-1].keep_alive else WireState.DEAF)


def test_what_a_request_says() -> None:
    found, state = heard([
        b"POST /generate?x=1 HTTP/1.1\r\nHost: t\r\nExpect: 100-Continue\r\nX-A: B\r\n"
        b"content-length: 2\r\n\r\nab"
    ])  # fmt: skip
    headers = [(b"host", b"t"), (b"expect", b"100-Continue"), (b"x-a", b"B"),
               (b"content-length", b"2")]  # fmt: skip
    head = RequestHead("POST", b"/generate?x=1", "1.1", headers, True, True)
    assert found == [head, BodyPart(b"ab"), RequestEnd()]
    assert state is WireState.IDLE


@pytest.mark.parametrize("close", [False, True])
def test_a_body_that_comes_past_the_protocol_ends_all_the_same(close: bool) -> None:
    head = b"POST / HTTP/1.1\r\nhost: t\r\ncontent-length: 10\r\n"
    head += b"connection: close\r\n\r\n" if close else b"\r\n"
    http1 = Http1()
    assert http1.receive(head + b"abc")[1:] == [BodyPart(b"abc")]
    assert http1.body_left == 7
    assert http1.skip_body(4) == [] and http1.body_left == 3
    assert http1.receive(b"h") == [BodyPart(b"h")]
    with pytest.raises(ValueError, match="3 bytes of a body that has 2 left"):
        http1.skip_body(3)
    assert http1.skip_body(2) == [RequestEnd()] and http1.body_left == 0
    following = http1.receive(b"GET /next HTTP/1.1\r\nhost: t\r\n\r\n")
    targets = [each.target for each in following if isinstance(each, RequestHead)]
    assert targets == ([] if close else [b"/next"])


@given(cut=st.integers(1, len(PREFACE) - 1))
def test_a_client_that_speaks_http2_is_recognised_with_all_it_said(cut: int) -> None:
    http1 = Http1()
    found = http1.receive(PREFACE[:cut])
    said = PREFACE if not found else PREFACE[:cut]
    found = found or http1.receive(PREFACE[cut:])
    assert found == [Http2Preface(said)]
    assert http1.client is http1.server is WireState.CLOSED
    assert http1.receive(b"GET / HTTP/1.1\r\nhost: t\r\n\r\n") == []


def test_a_head_without_an_end_is_refused() -> None:
    http1 = Http1()
    assert http1.receive(b"GET / HTTP/1.1\r\nhost: t\r\n") == []
    found: list[ClientEvent] = []
    sent = 0
    while not found:
        found = http1.receive(b"x: y\r\n" * 100)
        sent += 600
    assert found == [Refusal(431)] and 1 << 14 < sent < 1 << 15
    refusal = found[0]
    assert isinstance(refusal, Refusal)
    assert refusal.answer() == (
        b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\n"
        b"connection: close\r\n\r\n"
    )


# ---- answers ------------------------------------------------------------------------------------

GET = b"GET / HTTP/1.1\r\nhost: t\r\n\r\n"


@pytest.mark.parametrize("first", [17_000, 65_536, 99_000])
def test_a_head_that_is_too_long_in_its_first_piece_is_refused_for_that(first: int) -> None:
    data = b"GET /" + b"x" * 100_000 + b"POST / HTTP/1.1\r\nhost: a\r\n\r\n"
    assert Http1().receive(data[:first]) == [Refusal(431)]


def asked(data: bytes) -> Http1:
    """Return a connection on which the first request of `data` has its turn."""
    http1 = Http1()
    head = http1.receive(data)[0]
    assert isinstance(head, RequestHead)
    http1.take_turn(head)
    return http1


SIZED = [(b"content-length", b"2")]


@pytest.mark.parametrize(
    ("request_", "status", "headers", "framing", "whole"),
    [
        (GET, 200, SIZED, Framing.SIZED, b"abcd"),
        (GET, 200, [], Framing.CHUNKED, b"2\r\nab\r\n2\r\ncd\r\n0\r\n\r\n"),
        (GET, 204, [], Framing.ABSENT, b""),
        (GET.replace(b"GET", b"HEAD"), 200, [], Framing.ABSENT, b""),
        (GET.replace(b"1.1", b"1.0"), 200, [], Framing.UNTIL_CLOSE, b"abcd"),
        (GET.replace(b"1.1", b"1.0"), 200, SIZED, Framing.SIZED, b"abcd"),
    ],
)
def test_how_an_answer_is_framed(request_, status, headers, framing, whole) -> None:
    http1 = asked(request_)
    head = http1.start_answer(status, headers, last=False)
    assert http1.framing is framing
    assert (b"transfer-encoding: chunked\r\n" in head) == (framing is Framing.CHUNKED)
    assert http1.frame_body(b"ab", end=False) + http1.frame_body(b"cd", end=True) == whole
    assert http1.frame_body(b"", end=False) == b"", "an empty chunk would end the answer"


@pytest.mark.parametrize(
    ("request_", "last", "goes_on"),
    [
        (GET, False, True),
        (GET, True, False),  # the server shuts down
        (GET.replace(b"host", b"connection: close\r\nhost"), False, False),
        (GET.replace(b"1.1", b"1.0\r\nconnection: keep-alive"), False, False),
        (GET.replace(b"host", b"content-length: 9\r\nhost"), False, False),  # it goes on sending
    ],
)
def test_when_a_connection_goes_on(request_: bytes, last: bool, goes_on: bool) -> None:
    http1 = asked(request_)
    head = http1.start_answer(200, SIZED, last)
    assert (b"connection: close\r\n" in head) != goes_on
    assert http1.finish_answer() == goes_on
    if goes_on:
        assert http1.receive(GET)[0] == RequestHead("GET", b"/", "1.1", [(b"host", b"t")], True,
                                                    False)  # fmt: skip


def test_a_goodbye_lingers_only_for_a_client_that_may_be_sending() -> None:
    part = asked(GET.replace(b"host", b"content-length: 9\r\nhost"))
    part.start_answer(413, SIZED, last=False)
    assert part.say_goodbye() and part.server is WireState.DRAINING
    assert part.receive(b"the rest" + GET) == [], "read and dropped"
    whole = asked(GET)
    whole.start_answer(200, SIZED, last=True)
    assert not whole.say_goodbye() and whole.server is WireState.CLOSED


def test_answers_out_of_turn_are_refused_by_the_table() -> None:
    http1 = asked(GET + GET)
    with pytest.raises(IllegalWireEvent, match="ANSWERING cannot TURN"):
        http1.take_turn(RequestHead("GET", b"/", "1.1", [], True, False))
    http1.start_answer(200, SIZED, last=False)
    with pytest.raises(IllegalWireEvent, match="SENDING cannot START"):
        http1.start_answer(200, SIZED, last=False)
    with pytest.raises(ValueError, match="no request"):
        Http1().start_answer(200, SIZED, last=False)
