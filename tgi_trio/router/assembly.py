"""Assembles the router: tokenizer, chat template, engine and HTTP application."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial

import trio

from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.startup import ShardInfo
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.image_rules import image_rules
from tgi_trio.process.descriptors import max_connections
from tgi_trio.process.sockets import start_listening
from tgi_trio.router.adapters.registry import AdapterRegistry
from tgi_trio.router.adapters.text_processors import TextProcessors
from tgi_trio.router.engine.engine import AdmissionLimits, Engine
from tgi_trio.router.facade import EngineFacade
from tgi_trio.router.garbage import collect_in_between, collecting_when_told
from tgi_trio.router.grammar_checker import GrammarChecker, GrammarLimits
from tgi_trio.router.http.app import Application
from tgi_trio.router.http.call import HttpSettings
from tgi_trio.router.http.key_watch import watch_keys
from tgi_trio.router.http.routes import operations
from tgi_trio.router.http.side_threads import switching_soon
from tgi_trio.router.http.wire.http1 import LONGEST_HEAD
from tgi_trio.router.http.wire.server import ServerSettings, serve
from tgi_trio.router.media.kinds import NOTHING_UNSERVED, Kind
from tgi_trio.router.media.media_model import MediaModel
from tgi_trio.router.media.media_service import MediaFlags, MediaService
from tgi_trio.router.media.pixel_store import Arena
from tgi_trio.router.parameters import ValidationLimits
from tgi_trio.router.scheduling.limits import SchedulingLimits
from tgi_trio.router.scheduling.scheduler import Scheduler
from tgi_trio.router.shards.supervisor import Supervisor
from tgi_trio.router.telemetry.connections import counted_acceptor
from tgi_trio.router.telemetry.metrics import Metrics
from tgi_trio.router.telemetry.schedule_recorder import ScheduleRecorder
from tgi_trio.router.telemetry.tracing import Tracer
from tgi_trio.router.text.chat_template import RESERVED, ChatTemplate
from tgi_trio.router.text.own_files import ModelVocabulary
from tgi_trio.router.text.text_processor import ModelTextProcessor, TextProcessor
from tgi_trio.router.text.thoughts.derive import Thoughts, ThoughtSettings, derive_thoughts
from tgi_trio.router.text.tokenizer import Tokenizer, TokenizerPool
from tgi_trio.router.text.tokenizer_files import tokenizer_json
from tgi_trio.router.text.tools.probe import CallStyle, find_call_style
from tgi_trio.router.validation import Validator
from tgi_trio.settings.cluster_secret import read_cluster_secret
from tgi_trio.settings.keys import Keys
from tgi_trio.settings.records import OWN, Settings
from tgi_trio.settings.shown import public_json

log = logging.getLogger(__name__)

BACKLOG = 4096  # connections that may wait to be accepted
FRONTS_HEAD = 1 << 20  # bytes of a request's head where fronts may tell which ids clients have
GRACE = 1.0  # seconds; the launcher has drained already when the server is told to stop


class Assembly:
    """The router's parts: loaded beside the shard, `open`ed once its memory is known, `serve`d."""

    def __init__(
        self,
        text_processors: TextProcessors,
        metrics: Metrics,
        grammars: GrammarChecker | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.closed = trio.Event()
        self._text_processors = text_processors
        self._tokenizer = text_processors.model.tokenizer
        self._metrics = metrics
        self._grammars = grammars
        self._tracer = tracer

    def open_images(self, model: MediaModel, settings: Settings, arena: Arena) -> MediaService:
        """Make the service for a model's images; raises ModelLoadError."""
        names = (each.name for each in fields(MediaFlags))
        flags = MediaFlags(**{name: getattr(settings, name) for name in names})
        workers = settings.validation_workers
        return MediaService(model, flags, arena, self._tokenizer, self._metrics, workers)

    def open(
        self,
        settings: Settings,
        limits: SchedulingLimits,
        supervisor: Supervisor,
        info: ShardInfo,
        recorder: ScheduleRecorder | None = None,
        adapters: AdapterRegistry | None = None,
        images: MediaService | None = None,
        unserved: Mapping[Kind, str] = NOTHING_UNSERVED,
    ) -> Engine:
        """Make the engine and the application in front of it.

        `unserved`: why a model that could take such has no `images`.
        """
        engine = Engine(
            AdmissionLimits(settings.max_concurrent_requests),
            limits,
            self._tokenizer,
            self._metrics,
            scheduler=Scheduler if recorder is None else recorder.scheduler,
            adapters=adapters,
            pixels=None if images is None else images.store,
        )
        pool = TokenizerPool(self._tokenizer, settings.validation_workers)
        validation = ValidationLimits(
            max_input_tokens=settings.max_input_tokens,
            max_total_tokens=settings.max_total_tokens,
            vocab_size=info.vocab_size,
            max_best_of=settings.max_best_of,
            max_stop_sequences=settings.max_stop_sequences,
            max_top_n_tokens=settings.max_top_n_tokens,
        )
        self._facade = EngineFacade(
            settings=settings,
            engine=engine,
            supervisor=supervisor,
            text_processors=self._text_processors,
            validator=Validator(
                pool,
                validation,
                check_grammar=None if self._grammars is None else self._grammars.check,
            ),
            metrics=self._metrics,
            adapters=adapters,
            images=None if images is None else images.reader,
            unserved=unserved,
        )
        self._keys = make_keys(settings)
        http = http_settings(settings, compute_type(info, settings.num_shard))
        self._application = Application(self._facade, http, self._tracer)
        self._metrics.before_render(self._count_responses)
        self._server = server_settings(settings)
        return engine

    async def serve(
        self,
        listeners: Sequence[socket.socket],
        for_metrics: Sequence[socket.socket],
        shutdown: trio.Event,
        task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Listen on bound sockets and serve until `shutdown`; reports the API's addresses.

        `for_metrics`: where only metrics and health are served, without TLS.
        """
        for listener in (*listeners, *for_metrics):
            start_listening(listener, BACKLOG)
        try:
            with switching_soon(), collecting_when_told():  # from now on: see `__main__.serve`
                await self._serve(listeners, for_metrics, shutdown, task_status)
        finally:
            if self._grammars is not None:
                await self._grammars.close()
            if self._tracer is not None:
                await self._tracer.close()
            self.closed.set()

    def _count_responses(self) -> None:
        """Set the gauges of responses that are kept."""
        store = self._application.responses
        self._metrics.gauge("tgi_stored_responses", store.responses)
        self._metrics.gauge("tgi_stored_responses_bytes", store.used)

    async def _serve(
        self,
        listeners: Sequence[socket.socket],
        for_metrics: Sequence[socket.socket],
        shutdown: trio.Event,
        task_status: trio.TaskStatus[list[str]],
    ) -> None:
        async with trio.open_nursery() as nursery:
            if for_metrics:
                watched = Application(self._facade, routes=operations.WATCHED)
                plain = ServerSettings(graceful_timeout=GRACE)
                nursery.start_soon(serve, watched, for_metrics, plain, shutdown)
            acceptor = counted_acceptor(self._metrics, max_connections(), "tgi")
            with self._application.pace.watching():
                async with trio.open_nursery() as watching:
                    known = self._application.http.api_keys
                    watching.start_soon(self._text_processors.warm, self._facade.adapters)
                    watching.start_soon(
                        partial(collect_in_between, let_in=lambda: acceptor.let_in),
                        self._application.count_requests,
                        self._application.count_threads,
                    )
                    watching.start_soon(watch_keys, self._keys, known, self._take_keys)
                    await serve(
                        self._application,
                        listeners,
                        self._server,
                        shutdown,
                        acceptor=acceptor,
                        pace=self._application.pace,
                        task_status=task_status,
                    )
                    watching.cancel_scope.cancel()

    def _take_keys(self, keys: tuple[str, ...]) -> None:
        """Have these keys open from the next request on."""
        self._application.http = replace(self._application.http, api_keys=keys)


def make_keys(settings: Settings) -> Keys:
    """Return where the server's keys come from."""
    return Keys(settings.api_key, settings.api_key_file)


def scheduling_limits(settings: Settings, config: ModelConfig) -> SchedulingLimits:
    """Return the scheduler's numbers from settings that the loaded model has completed.

    `config`: the model's. Raises ModelLoadError as `image_rules`.
    """
    return SchedulingLimits(
        blocks=settings.kv_blocks + 1,  # block 0, never handed out
        block_size=settings.kv_block_size,
        max_batch_size=settings.max_batch_size,
        max_batch_prefill_tokens=settings.max_batch_prefill_tokens,
        max_batch_total_tokens=settings.max_batch_total_tokens,
        max_total_tokens=settings.max_total_tokens,
        waiting_served_ratio=settings.waiting_served_ratio,
        max_waiting_tokens=settings.max_waiting_tokens,
        max_queued_requests=settings.max_concurrent_requests,
        max_queued_tokens=settings.max_queued_tokens,
        token_budget=settings.step_token_budget,
        reserve=False,
        prefix_caching=settings.prefix_caching,
        state_slots=settings.state_slots,
        host_blocks=settings.host_blocks,
        host_slots=settings.host_slots,
        speculate=settings.speculate or 0,
        target_itl=settings.target_itl,
        target_ttft=settings.target_ttft,
        image_sight=image_rules(config).image_attention,
    )


def compute_type(info: ShardInfo, ranks: int) -> str:
    """Return the value of `x-compute-type`: ranks and device as TGI names them, or COMPUTE_TYPE."""
    kind = info.device.partition(":")[0]  # as torch names it: "cuda:0"
    name = "-".join(info.device_name.lower().split())
    return os.environ.get("COMPUTE_TYPE") or (f"{ranks}-{name}" if name else f"{kind}+optimized")


def http_settings(settings: Settings, compute_type: str) -> HttpSettings:
    """Return what flags and environment decide about the HTTP surface.

    Raises ConfigurationError when the cluster's secret or the keys cannot be read any more.
    """
    secret_file = settings.cluster_secret_file
    return HttpSettings(
        payload_limit=settings.payload_limit,
        cors_allow_origin=settings.cors_allow_origin,
        api_keys=make_keys(settings).read(),
        front_secret=None if secret_file is None else read_cluster_secret(secret_file),
        compute_type=compute_type,
        docker_label=os.environ.get("DOCKER_LABEL"),
        predict_route=settings.aip_predict_route,
        health_route=settings.aip_health_route,
        adapter_folder=settings.adapter_folder if settings.adapter_updates else None,
        response_store_bytes=settings.response_store_bytes,
        shown=public_json(settings),
    )


def server_settings(settings: Settings) -> ServerSettings:
    """Return what flags decide about connections."""
    return ServerSettings(
        graceful_timeout=GRACE,
        certfile=settings.ssl_certfile,
        keyfile=settings.ssl_keyfile,
        longest_head=LONGEST_HEAD if settings.cluster_secret_file is None else FRONTS_HEAD,
    )


def load_chat_template(settings: Settings, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the template of `--chat-template` (a file, or the text itself) or the model's own.

    None when there is neither: chat requests are refused then. Raises ConfigurationError.
    """
    given, defaults = settings.chat_template, settings.default_chat_template_kwargs
    if own := sorted(RESERVED & set(defaults or {})):
        raise ConfigurationError(
            f"--default-chat-template-kwargs cannot set {', '.join(own)}: every request has its own"
        )
    if given is not None:
        return ChatTemplate.from_flag(given, tokenizer.special_tokens, defaults)
    sources = tokenizer.chat_templates
    return ChatTemplate(sources, tokenizer.special_tokens, defaults=defaults) if sources else None


def log_roles(template: ChatTemplate) -> None:
    """Log which roles the template does not write, to which conversations are adapted."""
    for tools in (False, True):
        if folded := template.roles(tools=tools).describe_missing():
            beside = " beside tools" if tools else ""
            log.info("the chat template does not take %s%s: they are folded", folded, beside)


def find_thoughts(
    settings: Settings, tokenizer: Tokenizer, template: ChatTemplate
) -> Thoughts | None:
    """Return the marks that set thoughts apart, if the model thinks, and log them."""
    asked = ThoughtSettings.parse(settings.reasoning)
    response_template, added = tokenizer.response_template, tokenizer.added_tokens
    thoughts = derive_thoughts(template, response_template, added, asked)
    if thoughts is not None:
        marks = thoughts.marks
        log.info("thoughts stand between %r and %r (%s)", marks.start, marks.end, thoughts.source)
    return thoughts


def find_calls(tokenizer: Tokenizer, template: ChatTemplate) -> CallStyle:
    """Return how the model writes calls, and log it."""
    style = find_call_style(template, tokenizer.added_tokens)
    log.info("calls are written as %s", style.format.name)
    if style.problem:
        log.warning(
            "calls may be written in another way than %s: %s", style.format.name, style.problem
        )
    return style


def load_text_processor(settings: Settings) -> TextProcessor:
    """Load the model's tokenizer and chat template. Raises ModelLoadError, ConfigurationError."""
    tokenizer = Tokenizer.from_folder(
        settings.tokenizer_path,
        config_path=settings.tokenizer_config_path,
        trust_remote_code=settings.trust_remote_code,
    )
    template = load_chat_template(settings, tokenizer)
    if template is None:
        return TextProcessor(tokenizer)
    log_roles(template)
    thoughts = find_thoughts(settings, tokenizer, template)
    return TextProcessor(tokenizer, template, thoughts, find_calls(tokenizer, template))


def make_text_processors(
    settings: Settings,
    config: ModelConfig,
    text_processor: TextProcessor,
    *,
    has_vision: bool = False,
) -> TextProcessors:
    """Return what reads the text processors of adapters.

    `config`, `text_processor`: the model's; `has_vision`: whether it sees or hears. Raises
    ModelLoadError.
    """
    file = tokenizer_json(settings.tokenizer_path, None, settings.trust_remote_code)
    vocabulary = None
    if settings.serves_adapters and settings.adapter_tokenizers == OWN:
        vocabulary = ModelVocabulary(file, config.vocab_size, in_subprocess=True)
    model = ModelTextProcessor(
        text_processor,
        frozenset(config.eos_ids),
        {} if vocabulary is None else vocabulary.parts,
        settings.default_chat_template_kwargs,
        ThoughtSettings.parse(settings.reasoning),
        keeps_added=has_vision,
    )
    return TextProcessors(model, vocabulary, settings.max_loaded_adapters)


async def load_assembly(
    settings: Settings, config: ModelConfig, metrics: Metrics, *, has_vision: bool = False
) -> Assembly:
    """Load tokenizer and chat template in a thread.

    `config`: the model's; `has_vision`: whether it sees or hears. Raises ModelLoadError,
    ConfigurationError.
    """

    def load() -> tuple[TextProcessors, Tracer | None]:
        endpoint, name = settings.otlp_endpoint, settings.otlp_service_name
        tracer = None if endpoint is None else Tracer.to(endpoint, name)
        return make_text_processors(
            settings, config, load_text_processor(settings), has_vision=has_vision
        ), tracer

    text_processors, tracer = await trio.to_thread.run_sync(load)
    return Assembly(text_processors, metrics, grammar_checker(settings), tracer)


def grammar_checker(settings: Settings) -> GrammarChecker | None:
    """Return what checks grammars; None with `--disable-grammar-support`."""
    if settings.disable_grammar_support:
        return None
    file = tokenizer_json(settings.tokenizer_path, None, settings.trust_remote_code)
    limits = GrammarLimits(settings.max_grammar_bytes, settings.max_grammar_seconds)
    return GrammarChecker(file, limits, settings.validation_workers)
