"""A certificate is renewed while the server runs."""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.router.http.served import Client, Server, served
from tgi_trio import file_watch
from tgi_trio.errors import ConfigurationError
from tgi_trio.file_watch import LOOK_SECONDS
from tgi_trio.router.http.wire.certificate import Certificate
from tgi_trio.router.http.wire.server import ServerSettings

pytestmark = pytest.mark.trio

DATA = Path(__file__).parent / "data"
OLD, RENEWED = (DATA / name for name in ("localhost.pem", "renewed.pem"))


def split(pair: Path) -> tuple[str, str]:
    """Return certificate and key of a file that has both."""
    mark = "-----BEGIN CERTIFICATE-----"
    key, _, certificate = pair.read_text().partition(mark)
    return mark + certificate, key


class Renewal:
    """What certbot keeps: two links, which it turns to other files one after the other."""

    def __init__(self, folder: Path) -> None:
        self.certfile, self.keyfile = folder / "fullchain.pem", folder / "privkey.pem"
        self._folder = folder
        self._written = 0
        certificate, key = split(OLD)
        self.put(self.certfile, certificate)
        self.put(self.keyfile, key)

    def put(self, link: Path, text: str) -> None:
        self._written += 1
        file = self._folder / f"{self._written}.pem"
        file.write_text(text)
        other = self._folder / "link"
        other.symlink_to(file)
        os.replace(other, link)


@pytest.fixture
def files(tmp_path: Path) -> Renewal:
    return Renewal(tmp_path)


async def look(clock: trio.testing.MockClock) -> None:
    await trio.testing.wait_all_tasks_blocked()
    clock.jump(LOOK_SECONDS)
    await trio.testing.wait_all_tasks_blocked()


async def test_a_new_pair_is_taken_when_it_is_whole(
    files: Renewal, mock_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    certificate = Certificate(files.certfile, files.keyfile)
    first = certificate.context
    async with trio.open_nursery() as nursery:
        nursery.start_soon(certificate.watch)
        await look(mock_clock)
        assert certificate.context is first and not caplog.messages, "nothing has changed"
        new_certificate, new_key = split(RENEWED)
        files.put(files.certfile, new_certificate)
        for _ in range(3):
            await look(mock_clock)
        assert certificate.context is first
        assert len(caplog.messages) == 1 and "cannot use the certificate" in caplog.text
        files.put(files.keyfile, new_key)
        await look(mock_clock)
        assert certificate.context is not first
        assert len(caplog.messages) == 2 and "has changed" in caplog.messages[1]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("content", [None, "", "nothing", "-----BEGIN CERTIFICATE-----\nx"])
async def test_what_cannot_be_used_changes_nothing(
    files: Renewal,
    mock_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
    content: str | None,
) -> None:
    certificate = Certificate(files.certfile, files.keyfile)
    first = certificate.context
    async with trio.open_nursery() as nursery:
        nursery.start_soon(certificate.watch)
        await look(mock_clock)
        if content is None:
            files.certfile.unlink()
        else:
            files.put(files.certfile, content)
        for _ in range(3):
            await look(mock_clock)
        assert certificate.context is first
        assert [each.levelname for each in caplog.records] == ["WARNING"]
        nursery.cancel_scope.cancel()


async def test_a_pair_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--ssl-certfile"):
        Certificate(tmp_path / "none.pem", None)


async def test_new_connections_get_the_new_certificate_and_old_ones_go_on(
    files: Renewal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_watch, "LOOK_SECONDS", 0.01)
    settings = ServerSettings(certfile=files.certfile, keyfile=files.keyfile)
    async with served(settings=settings) as server:
        old = await connect(server, OLD)
        assert (await old.get("/health")).status == 200
        certificate, key = split(RENEWED)
        files.put(files.keyfile, key)
        files.put(files.certfile, certificate)
        while (new := await try_to_connect(server, RENEWED)) is None:
            await trio.sleep(0.01)
        assert (await new.get("/health")).status == 200
        assert (await old.get("/health")).status == 200
        assert await try_to_connect(server, OLD) is None


async def connect(server: Server, trusted: Path) -> Client:
    context = ssl.create_default_context(cafile=str(trusted))
    stream = trio.SSLStream(
        await server.raw(), context, server_hostname="localhost", https_compatible=True
    )
    await stream.do_handshake()
    return Client(stream)


async def try_to_connect(server: Server, trusted: Path) -> Client | None:
    """Return a client that trusts only this certificate, None where another is served."""
    try:
        return await connect(server, trusted)
    except trio.BrokenResourceError:
        return None
