"""A value of every kind that flags have: as it is typed, and as it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SAMPLES: dict[str, tuple[str, Any]] = {
    "switch": ("true", True),
    "toggle": ("false", False),
    "extension": (".bin", ".bin"),
    "bool": ("false", False),
    "rope": ("dynamic", "dynamic"),
    "factor": ("2.5", 2.5),
    "int": ("1", 1),
    "tokens": ("7", 7),
    "bytes": ("9", 9),
    "us": ("3", 3),
    "seconds": ("1.5", 1.5),
    "ratio": ("0.25", 0.25),
    "replicas": ("2:8", (2, 8)),
    "text": ("x", "x"),
    "origin": ("*", "*"),
    "model": ("a/b", "a/b"),
    "levels": ("info,tgi_trio.shard=warn", "info,tgi_trio.shard=warn"),
    "object": ('{"a": [false]}', {"a": [False]}),
    "reasoning": ("<a>,</a>", "<a>,</a>"),
    "shell": ("bash", "bash"),
    "usage-stats": ("ON", "on"),
    "whose": ("base", "base"),
    "path": ("/x", Path("/x")),
    "dtype": ("bfloat16", "bfloat16"),
    "quantization": ("eetq", "eetq"),
    "kv_dtype": ("fp8_e5m2", "fp8_e5m2"),
    "weights": ("gguf:q8_0", "gguf:q8_0"),
    "bits": ("16", 16),
    "image_urls": ("public, :8080", "public, :8080"),
    "adapters": ("a/b, c = /d@e", ("a/b", "c=/d@e")),
    "backend": ("torch", "torch"),
    "drafter": ("ngram", "ngram"),
    "sizes": ("1, 2,8", (1, 2, 8)),
    "ip": ("127.0.0.1", "127.0.0.1"),
    "key": ("secret", "secret"),
    "url": ("https://a.example/b", "https://a.example/b"),
    "address": ("127.0.0.1:80", "127.0.0.1:80"),
    "shard": ("tcp://[::1]:80", "tcp://[::1]:80"),
    "route": ("/a/b", "/a/b"),
    "collector": ("http://127.0.0.1:4317", "http://127.0.0.1:4317"),
}
