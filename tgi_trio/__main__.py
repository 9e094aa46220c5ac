"""`python -m tgi_trio`: parse the command line, run the command, say how it ended."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from tgi_trio.cli.options import DoctorOptions
from tgi_trio.cli.parser import Invocation, UsageError, parse
from tgi_trio.errors import ConfigurationError, TgiTrioError

ShardArgv = Callable[[str, str], list[str]]  # see router.shard_process, too heavy to import here

EXIT_FAILURE = 1
EXIT_USAGE = 2


def _stop_at_once(number: int, frame: object) -> None:
    """What SIGTERM does until the launcher's nursery takes it over: nothing is served yet."""
    sys.exit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    signal.signal(signal.SIGTERM, _stop_at_once)
    try:
        invocation = parse(sys.argv[1:] if argv is None else argv, os.environ)
    except UsageError as error:
        print(f"tgi-trio: {error}", file=sys.stderr)
        return EXIT_USAGE
    if invocation.command == "print":
        print(invocation.text, end="")
        return 0
    try:
        return _COMMANDS[invocation.command](invocation)
    except TgiTrioError as error:
        print(f"tgi-trio: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if invocation.command not in ("chat", "bench"):
            raise
        print(f"tgi-trio: the server cannot be reached: {error}", file=sys.stderr)
        return EXIT_FAILURE


def serve(invocation: Invocation, shard: ShardArgv | None = None) -> int:
    """Serve until told to stop; `shard` gives another command line for shard processes."""
    # Imported here: `--help` and mistakes in flags answer at once.
    import trio

    from tgi_trio.cli.keys import with_key_file
    from tgi_trio.hub import resolve_model
    from tgi_trio.launcher import Launcher, Timeline, bind
    from tgi_trio.logs import set_up_logging
    from tgi_trio.settings import read_model_facts, resolve

    timeline = Timeline()
    options = with_key_file(invocation.options)
    set_up_logging(json_output=options.json_output, level=os.environ.get("LOG_LEVEL", "INFO"))
    if options.env:
        from tgi_trio.cli.doctor import doctor

        doctor(DoctorOptions(port=options.port), sys.stderr)
    for warning in invocation.warnings:
        print(f"tgi-trio: warning: {warning}", file=sys.stderr)
    with bind(options) as listeners:
        path = resolve_model(
            options.model_id,
            options.revision,
            cache_dir=options.huggingface_hub_cache,
            trust_remote_code=options.trust_remote_code,
            progress=not options.json_output,
        )
        settings = resolve(options, read_model_facts(path))
        timeline.mark("model found")
        trio.run(Launcher(settings, listeners, timeline, *([shard] if shard else [])).run)
    return 0


def _download_weights(invocation: Invocation) -> int:
    from tgi_trio.cli.download import download_weights

    print(download_weights(invocation.options))
    return 0


def _quantize(invocation: Invocation) -> int:
    raise ConfigurationError(
        "quantize writes no checkpoints in this build: serve the model as it is, on a CPU with "
        "--quantize eetq for 8-bit weights"
    )


def _chat(invocation: Invocation) -> int:
    import trio

    from tgi_trio.cli.chat import chat

    trio.run(chat, invocation.options, sys.stdin, sys.stdout)
    return 0


def _bench(invocation: Invocation) -> int:
    import trio

    from tgi_trio.cli.bench import bench

    trio.run(bench, invocation.options, sys.stdout)
    return 0


def _doctor(invocation: Invocation) -> int:
    from tgi_trio.cli.doctor import doctor

    return doctor(invocation.options, sys.stdout)


def _completion(invocation: Invocation) -> int:
    from tgi_trio.cli.completion import completion

    print(completion(invocation.options.shell), end="")
    return 0


# a row per row of `cli.commands.COMMANDS`
_COMMANDS: Mapping[str, Callable[[Invocation], int]] = {
    "serve": serve,
    "download-weights": _download_weights,
    "quantize": _quantize,
    "chat": _chat,
    "bench": _bench,
    "doctor": _doctor,
    "completion": _completion,
}


if __name__ == "__main__":
    sys.exit(main())
