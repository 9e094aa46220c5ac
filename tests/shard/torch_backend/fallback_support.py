"""How types run through the transformers that is installed."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version

from tgi_trio.model.families.registry import THROUGH_TRANSFORMERS

# CodeGen's attention can be replaced since transformers 5.24.
OLDER = {"codegen": "cached"} if Version(version("transformers")) < Version("5.24") else {}
WAYS = THROUGH_TRANSFORMERS | OLDER
