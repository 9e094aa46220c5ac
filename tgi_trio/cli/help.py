"""`--help`: grouped, one line per flag with its environment variable and default."""

from __future__ import annotations

from tgi_trio.cli.flags import FLAGS, KINDS, Flag

USAGE = """\
Usage: python -m tgi_trio [serve] [FLAGS]                 start the server (the default)
       python -m tgi_trio download-weights MODEL [FLAGS]  fetch a model into the cache
       python -m tgi_trio --version
"""

DOWNLOAD_FLAGS = ("revision", "huggingface-hub-cache", "trust-remote-code", "json-output")


def serve_help() -> str:
    """Return the help of `serve`, which is also that of the whole program."""
    parts = [
        USAGE,
        "A flag wins over its environment variable, named in brackets; (=X) is the default.\n",
    ]
    for group, rows in FLAGS:
        parts.append(f"{group}:")
        parts.extend(_line(flag) for flag in rows)
        parts.append("")
    return "\n".join(parts)


def download_help() -> str:
    """Return the help of `download-weights`."""
    rows = [flag for _, group in FLAGS for flag in group if flag.name in DOWNLOAD_FLAGS]
    return "\n".join(
        [
            "Usage: python -m tgi_trio download-weights MODEL [FLAGS]",
            "",
            "Fetch what serving MODEL, a hub repository, needs, and print the folder.",
            "",
            *(_line(flag) for flag in rows),
            "",
        ]
    )


def default_text(flag: Flag) -> str:
    """Return a flag's default as people read it."""
    default = flag.default
    if default is None or default == ():
        return flag.unset or "none"
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def _line(flag: Flag) -> str:
    names = f"{flag.short}, --{flag.name}" if flag.short else f"--{flag.name}"
    left = f"  {names} {KINDS[flag.kind][0]}".rstrip()
    return f"{left:<46} {flag.help} [{flag.env}] (={default_text(flag)})"
