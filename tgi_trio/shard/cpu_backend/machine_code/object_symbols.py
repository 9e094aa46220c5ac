"""Undefined symbols of an object file, read from its ELF-64 symbol table."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, ...
_SYMBOLS = 2  # section type SHT_SYMTAB


def missing_symbols(data: bytes) -> list[str]:
    """Return the names of the undefined symbols of a little-endian ELF-64 file."""
    return [name for name, section in _symbols(data) if section == 0 and name]


def _symbols(data: bytes) -> Iterator[tuple[str, int]]:
    """Yield the names of symbols and their section numbers."""
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
