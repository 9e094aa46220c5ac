"""Addresses to listen on, and errors that name the flag."""

from __future__ import annotations

import pytest

from tgi_trio.errors import ConfigurationError
from tgi_trio.router.http.server import listen


def test_a_port_in_use_names_the_flag():
    (first,) = listen(["127.0.0.1:0"])
    try:
        with pytest.raises(ConfigurationError, match="--port"):
            listen([f"127.0.0.1:{first.getsockname()[1]}"])
    finally:
        first.close()


@pytest.mark.parametrize("bind", ["127.0.0.1:70000", "127.0.0.1:x", "no.such.host.invalid:0"])
def test_addresses_that_cannot_be_had(bind):
    with pytest.raises(ConfigurationError, match=r"--port|--hostname"):
        listen([bind])
