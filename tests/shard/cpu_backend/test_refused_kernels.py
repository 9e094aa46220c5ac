"""What kernels must not contain: an error that names the module, the line and the function."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.shard.cpu_backend.test_compiler import control
from tgi_trio.shard.cpu_backend.kernels.arrays import ints_at, words_at
from tgi_trio.shard.cpu_backend.kernels.compiler.program import Program
from tgi_trio.shard.cpu_backend.kernels.compiler.types import Kernel
from tgi_trio.shard.cpu_backend.kernels.compiler.values import KernelError

WRONG = {
    "x = 1\n    if at:\n        x = 0.5\n    return x": "x has one type or another here",
    "x = 1\n    for i in range(at):\n        x += 0.5": "x has another type when the loop begins",
    "x = 1\n    while x:\n        x = 0.5": "x has another type when the loop begins",
    "for i in range(at):\n        x = 1\n        x = 0.5\n    x += 1": "x has one type or another",
    "if at:\n        return 1\n    return 0.5": "it returns float64, int64",
    "if at:\n        return 1": "it returns int64, none",
    "return missing": "missing has no value",
    "return [at]": "kernels have no List",
    "assert at": "kernels have no Assert",
    "return print(at)": "print cannot be called in a kernel",
    "return abs(x=at)": "arguments have no names in calls",
    "return ints_at(at, 2)[-1]": "arrays are not counted from their end",
    "return ints_at(at)": "ints_at takes 2 arguments|missing 1 required",
    "return at.bytes": "int64 has no bytes",
    "return at[0]": "int64 has no elements",
    "a, b = at, at, at": "3 values for 2 names",
    "a, b = at": "int64 cannot be unpacked",
    "return 1 < at < 3": "compare two values at a time",
    "return at + words_at(at, 1)[0]": "signed and unsigned numbers need a conversion",
    "return at ** 2": "Pow of int64",
    "for i in range(at):\n        pass\n    else:\n        pass": "loops have no else",
    "value = pass_by(at)": "value would have no value",
    "return ints_at": "no number",
    "ints_at(at, 3)[1:] = 0": "a slice is a whole array",
    "return ~0.5": "~ of float64",
    "return wrong(at)": "wrong calls itself",
    "return at < (1 << 63)": "signed and unsigned numbers need a conversion",
    "return np.uint64(-1)": "-1 does not fit into uint64",
    "return np.int64(1 << 63)": "9223372036854775808 does not fit into int64",
    "return 1 << 64": "18446744073709551616 does not fit into 64 bits",
    "return np.int64(1e400)": "inf does not fit into int64",
    "return (at, 2)[2]": "a tuple of 2 has no item 2",
    "return (at, 2)[0.5]": "an index is no float64",
    "return at or 5": "`or` of numbers is a condition, and has no value",
    "x = 1 and at": "`and` or `or` of numbers is a condition",
    "for i in range():\n        pass": "range takes 1 to 3 numbers",
}


@pytest.mark.parametrize("body", WRONG)
@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # Python sees one of them, too
def test_what_kernels_must_not_contain_is_an_error_that_names_the_line(
    body: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"def pass_by(at):\n    pass\n\ndef wrong(at):\n    {body}\n"
    file = tmp_path / "wrong.py"
    file.write_text(text)
    module = ModuleType("wrong_kernels")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "wrong_kernels", module)
    module.__dict__.update(ints_at=ints_at, words_at=words_at, np=np)
    exec(compile(text, file, "exec"), module.__dict__)
    for name in ("pass_by", "wrong"):
        module.__dict__[name] = Kernel(module.__dict__[name])
    with pytest.raises((KernelError, TypeError), match=WRONG[body]) as caught:
        Program().add_entry(module.__dict__["wrong"], (), 1, "run")
    if isinstance(caught.value, KernelError):
        assert "(wrong_kernels, line " in str(caught.value)
        assert str(caught.value).endswith("in wrong)")


def test_arguments_are_counted() -> None:
    with pytest.raises(KernelError, match="control takes 3 arguments"):
        Program().add_entry(control, (), 2, "run")
