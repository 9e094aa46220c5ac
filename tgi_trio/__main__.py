"""`python -m tgi_trio`: parse the command line, run the command, say how it ended."""

from __future__ import annotations

from tgi_trio.process.early_interrupt import end_silently

if __name__ == "__main__":
    end_silently()  # what follows takes a tenth of a second

import errno
import gc
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tgi_trio.cli.options import DoctorOptions
from tgi_trio.cli.parser import Invocation, UsageError, asks_for_json, parse
from tgi_trio.cli.stopping import (
    find_exit_code,
    handle_stop,
    ignore_requests,
    interrupt,
    stop_at_once,
)
from tgi_trio.cli.streams import forget_reader, open_standard_streams
from tgi_trio.errors import TgiTrioError, tell_reason
from tgi_trio.process.held_signals import hold_signals
from tgi_trio.settings.records import Options

if TYPE_CHECKING:
    from tgi_trio.ipc.waiting import WaitingShards

ShardArgv = Callable[[str, str], list[str]]  # see router.shards.shard_instance, too heavy for here

EXIT_FAILURE = 1
EXIT_USAGE = 2
_SERVING = ("serve", "rank", "shard", "cluster", "front")  # a signal is how they end
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
EXIT_UNREAD = 128 + signal.SIGPIPE  # as of a program that the signal ends


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    open_standard_streams()
    words = sys.argv[1:] if argv is None else argv
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        handle_stop(interrupt)  # nothing is done yet, whatever was to be done
        with hold_signals():  # some flags are read by libraries
            invocation = parse(words, os.environ)
    except UsageError as error:
        _complain(error, asks_for_json(words, os.environ))
        return EXIT_USAGE
    except KeyboardInterrupt:
        return find_exit_code()
    return _run(invocation)


def _run(invocation: Invocation) -> int:
    """Run the command that was read, and return the exit code."""
    as_json = getattr(invocation.options, "json_output", False)
    try:
        if invocation.command in _SERVING:
            handle_stop(stop_at_once)
            ignore_requests()
        code = _COMMANDS[invocation.command](invocation)
        sys.stdout.flush()  # what cannot be written is known here, not when Python ends
        return code
    except TgiTrioError as error:
        _complain(error, as_json)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return find_exit_code()
    except BaseExceptionGroup as group:  # out of a nursery
        if group.split(KeyboardInterrupt)[1] is not None:
            raise
        return find_exit_code()
    except BrokenPipeError:  # `| head` has seen enough
        forget_reader()
        return EXIT_UNREAD
    except OSError as error:
        if error.errno in _NO_ROOM and error.filename is None:  # `> /dev/full`
            forget_reader()
            _complain(f"the output cannot be written: {error.strerror}", as_json)
            return EXIT_FAILURE
        if invocation.command not in ("chat", "bench", "batch"):
            raise
        _complain(f"the server cannot be reached: {tell_reason(error)}", as_json)
        return EXIT_FAILURE


def _complain(problem: object, as_json: bool) -> None:
    """Write to standard error why the command ends."""
    if as_json:
        with hold_signals():
            from tgi_trio.logs import say_record

        say_record(str(problem), "ERROR")
    else:
        print(f"tgi-trio: {problem}", file=sys.stderr)


def _start_logging(invocation: Invocation) -> None:
    """Set up logging as the options ask, and log what parsing the command line has noted."""
    with hold_signals():
        import logging

        from tgi_trio.log_levels import parse_log_levels
        from tgi_trio.logs import set_up_logging

    options = invocation.options
    levels = parse_log_levels(options.logger_level)
    set_up_logging(json_output=options.json_output, levels=levels)
    log = logging.getLogger("tgi_trio.cli")
    for warning in invocation.warnings:
        log.warning("%s", warning)
    for note in invocation.notes:
        log.info("%s", note)


def serve(invocation: Invocation, shard: ShardArgv | None = None, stop_timeout: float = 5.0) -> int:
    """Serve until told to stop; `shard` gives another command line for shard processes.

    `stop_timeout`: seconds that they have to exit when told to.
    """
    # Imported here: `--help` and mistakes in flags answer at once.
    with hold_signals():
        from tgi_trio.ipc.litmus import partner_ahead
        from tgi_trio.ipc.waiting import waiting_shards
        from tgi_trio.process.address_space import check_address_space
        from tgi_trio.process.descriptors import check_limit
        from tgi_trio.process.stack_size import check_stack
        from tgi_trio.process.thread_limit import check_threads

    options = invocation.options
    check_limit(_ranks_here(options))
    check_address_space()
    check_stack()
    check_threads(_ranks_here(options))
    gc.disable()  # until the server listens (`Assembly.serve`): little of a start is garbage
    try:
        count, kind = (0, "") if shard else _likely_shards(options)
        with waiting_shards(count, kind) as waiting, partner_ahead():
            return _serve(invocation, shard, waiting, stop_timeout)
    finally:
        gc.enable()


def _ranks_here(options: Options) -> int:
    """Return how many ranks the flags ask of this machine; visible devices are not counted yet."""
    return max(1, options.num_shard or 1) - options.ranks_elsewhere


def _likely_shards(options: Options) -> tuple[int, str]:
    """Return how many shards this machine will have, and of which kind.

    A guess, as flags have not been checked: at most as many as there are processors.
    """
    from tgi_trio.devices import has_driver

    count = _ranks_here(options)
    kind = "torch" if options.cpu_backend == "torch" else "kernels"
    if options.device != "cpu" and options.cpu_backend == "auto" and has_driver():
        kind = "device"
    return max(0, min(count, os.cpu_count() or 1)), kind


def _serve(
    invocation: Invocation, shard: ShardArgv | None, waiting: WaitingShards, stop_timeout: float
) -> int:
    with hold_signals():
        import logging

        from tgi_trio.cli.files import check_files
        from tgi_trio.hub.projectors import want_projector
        from tgi_trio.hub.resolve import resolve_served
        from tgi_trio.launcher import Launcher, bind
        from tgi_trio.model.config import read_config
        from tgi_trio.model.facts import find_model_facts
        from tgi_trio.process.descriptors import raise_limit
        from tgi_trio.process.signals import run_to_its_end
        from tgi_trio.router.shards.prefix_store import PrefixStore
        from tgi_trio.settings.records import BASE
        from tgi_trio.settings.resolve import resolve
        from tgi_trio.start.checks import check_start
        from tgi_trio.start.drafter import find_drafter, limit_speculation
        from tgi_trio.start.timeline import Timeline

    timeline = Timeline()
    timeline.mark("imported")
    _start_logging(invocation)
    options = invocation.options
    check_files(options)
    if options.env:
        _print_machine(options)
    raise_limit()
    with bind(options) as listeners:
        found = resolve_served(
            options.model_id,
            options.revision,
            cache_dir=options.huggingface_hub_cache,
            trust_remote_code=options.trust_remote_code,
            progress=not options.json_output,
            own_tokenizer=options.tokenizer_name is None,
            own_texts=options.adapter_tokenizers != BASE,
            projector=want_projector(options.mmproj, options.no_mmproj),
        )
        given = options
        options = limit_speculation(replace(options, draft_model=find_drafter(options, found)))
        tokenizer = _find_tokenizer(options)
        config = read_config(found.model, options.rope)
        settings = replace(
            resolve(options, find_model_facts(config, tokenizer, options.rope), given),
            adapter_folders=_find_adapters(options),
        )
        for warning in check_start(settings, config, merged=found.merged):
            logging.getLogger("tgi_trio.cli").warning("%s", warning)
        timeline.mark("model found")
        with PrefixStore.open(settings) as prefixes:
            launcher = Launcher(
                settings, config, listeners, timeline, shard, waiting, stop_timeout, prefixes
            )
            run_to_its_end(launcher.run)
    return 0


def _find_adapters(options: Options) -> dict[str, str]:
    """Return the folders of the adapters that --lora-adapters names, by name."""
    from tgi_trio.hub.resolve import resolve_adapter

    cache, progress = options.huggingface_hub_cache, not options.json_output
    adapters = [
        resolve_adapter(entry, cache_dir=cache, progress=progress)
        for entry in options.lora_adapters
    ]
    return {name: str(folder) for name, folder in adapters}


def _find_tokenizer(options: Options) -> Path | None:
    """Return the folder that --tokenizer-name means; None: the model's own."""
    from tgi_trio.hub.resolve import resolve_tokenizer

    if options.tokenizer_name is None:
        return None
    return resolve_tokenizer(
        options.tokenizer_name,
        cache_dir=options.huggingface_hub_cache,
        trust_remote_code=options.trust_remote_code,
        progress=not options.json_output,
    )


def _print_machine(options: Options) -> None:
    """Print what `doctor` finds."""
    with hold_signals():
        from tgi_trio.cli.doctor import doctor, run_checks
        from tgi_trio.logs import say_record

    asked = DoctorOptions(port=options.port)
    if not options.json_output:
        doctor(asked, sys.stderr)
        return
    for found in run_checks(asked):
        message = f"{found.subject}: {found.found}"
        say_record(message, verdict=found.verdict.value, cure=found.cure)


def _print(invocation: Invocation) -> int:
    print(invocation.text, end="")
    return 0


@dataclass(frozen=True, slots=True)
class _Imported:
    """A command whose module is imported when it is run: mistakes in flags answer at once."""

    module: str  # of `tgi_trio.cli`
    function: str  # of its options, returns the exit code
    logs: bool = False  # whether logging is set up for it

    def __call__(self, invocation: Invocation) -> int:
        with hold_signals():
            run = self.find()
        if self.logs:
            _start_logging(invocation)
        return run(invocation.options)

    def find(self) -> Callable[[Any], int]:
        """Import the module; return the function."""
        found: Callable[[Any], int] = getattr(
            import_module(f"tgi_trio.cli.{self.module}"), self.function
        )
        return found


# a row per row of `cli.commands.COMMANDS`, and one for --help and --version
_COMMANDS: Mapping[str, Callable[[Invocation], int]] = {
    "print": _print,
    "serve": serve,
    "download-weights": _Imported("download", "run_download", logs=True),
    "quantize": _Imported("quantize", "run_quantize", logs=True),
    "rank": _Imported("rank", "run_rank", logs=True),
    "shard": _Imported("shard", "run_shard", logs=True),
    "chat": _Imported("chat", "run_chat"),
    "bench": _Imported("bench", "run_bench"),
    "batch": _Imported("batch", "run_batch"),
    "print-schema": _Imported("print_schema", "run_print_schema"),
    "cluster": _Imported("cluster", "run_cluster", logs=True),
    "front": _Imported("front", "run_front", logs=True),
    "doctor": _Imported("doctor", "run_doctor"),
    "completion": _Imported("completion", "run_completion"),
}


if __name__ == "__main__":
    sys.exit(main())
