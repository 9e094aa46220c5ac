"""The metrics of many replicas as one page."""

from __future__ import annotations

from collections.abc import Mapping

from tgi_trio.router.telemetry.metrics import write_label


def label_series(pages: Mapping[str, bytes]) -> bytes:
    """Return the series of several pages in Prometheus' text form, each with a label `replica`.

    `pages`: replica -> its page. Families are in the order in which they first appear, each with
    one HELP and one TYPE, as the format demands. Nothing is summed up, which is left to Prometheus'
    queries, since the sum of a gauge such as a fraction means nothing.
    """
    comments: dict[bytes, list[bytes]] = {}  # family -> its lines of help and type
    series: dict[bytes, list[bytes]] = {}
    for replica, page in pages.items():
        label = write_label("replica", replica).encode()
        family = b""
        for line in page.splitlines():
            if line.startswith(b"#"):
                words = line.split(b" ", 3)
                if len(words) > 2 and words[1] in (b"HELP", b"TYPE"):
                    family = words[2]
                    known = comments.setdefault(family, [])
                    if line not in known and len(known) < 2:
                        known.append(line)
            elif line.strip():
                series.setdefault(family, []).append(_with_label(line, label))
    lines = [line for family, each in series.items() for line in (*comments.get(family, ()), *each)]
    return b"\n".join([*lines, b""])


def _with_label(line: bytes, label: bytes) -> bytes:
    name, brace, rest = line.partition(b"{")
    if brace:
        comma = b"" if rest.startswith(b"}") else b","
        return b"%b{%b%b%b" % (name, label, comma, rest)
    name, _, value = line.partition(b" ")
    return b"%b{%b} %b" % (name, label, value)
