"""What an object file calls that is not in it: its undefined symbols, by the ELF-64 format."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, ...
_SYMBOLS = 2  # the type of a section


def missing_symbols(data: bytes) -> list[str]:
    """Return the names of undefined symbols of a little-endian ELF-64 file."""
    return [name for name, section in _symbols(data) if section == 0 and name]


def _symbols(data: bytes) -> Iterator[tuple[str, int]]:
    """Yield the names of symbols and the sections they are in."""
    (start,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [_SECTION.unpack_from(data, start + i * size) for i in range(count)]
    for section in sections:
        if section[1] != _SYMBOLS:
            continue
        names = sections[section[6]][4]
        for place in range(section[4], section[4] + section[5], _SYMBOL.size):
            name, _, _, where, _, _ = _SYMBOL.unpack_from(data, place)
            begin = names + name
            yield data[begin : data.index(b"\0", begin)].decode(), where
