"""What each part of the package may import: the table that the tree is held to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """What one part of the package may import; a part is a module or package below tgi_trio."""

    ours: frozenset[str]  # parts, the part itself is always allowed
    banned: frozenset[str] = frozenset()  # never, nor anything inside
    only: frozenset[str] | None = None  # the only outside packages, besides the standard library


def ours(text: str) -> frozenset[str]:
    return frozenset(text.split())


MODEL = ours("torch transformers llvmlite triton")
SERVER = ours("trio quart quart_trio hypercorn anyio pytest_trio")
NOTHING = ours("")
# the parts of ipc that await
ROUTER_ENDS = ours("ipc.router_end ipc.tcp_router_end ipc.spawn ipc.watch")
SHARD_ALONE = SERVER | {f"tgi_trio.{name}" for name in ROUTER_ENDS}

# The most specific row of a module counts.
RULES: dict[str, Rule] = {
    "errors": Rule(NOTHING, only=NOTHING),
    "log_levels": Rule(NOTHING, only=NOTHING),
    "logs": Rule(ours("log_levels"), only=ours("orjson")),
    "devices": Rule(ours("errors"), only=NOTHING),
    "process.early_interrupt": Rule(NOTHING, only=NOTHING),
    "process.held_signals": Rule(NOTHING, only=NOTHING),
    "model": Rule(ours("errors whole_files"), only=NOTHING),
    "model.gguf.folder": Rule(ours("errors model"), only=ours("orjson")),  # megabytes of JSON
    "model.adapters.trained_whole": Rule(ours("errors model"), only=ours("numpy")),  # likewise
    "model.scales": Rule(ours("errors model"), only=ours("numpy")),  # reads numbers of files
    "settings": Rule(
        ours(
            "errors model.config model.facts model.serving model.speculators.mtp "
            "model.speculators.recognise whole_files"
        ),
        only=NOTHING,
    ),
    # Reads what strangers wrote, so it has no use for anything that could run it.
    "conversion": Rule(
        ours("errors model.config model.adapters.config model.adapters.tensor_kinds whole_files"),
        only=ours("numpy safetensors"),
    ),
    "hub.brought_adapters": Rule(
        ours("hub.download hub.repository model.adapters.own_adapters model.config"), only=NOTHING
    ),
    "hub.repository": Rule(ours("errors"), only=NOTHING),
    "hub.library": Rule(NOTHING, only=ours("huggingface_hub")),
    "hub.failures": Rule(ours("errors hub.repository"), only=ours("huggingface_hub")),
    "hub.download": Rule(
        ours("errors hub.failures hub.library hub.repository"), only=ours("huggingface_hub tqdm")
    ),
    "hub.names": Rule(ours("errors"), only=NOTHING),
    "hub.gguf": Rule(
        ours(
            "errors hub.download hub.names hub.projectors hub.repository model.gguf model.pointers"
        ),
        only=NOTHING,
    ),
    "hub.projectors": Rule(
        ours("errors hub.download hub.names hub.repository model.gguf model.pointers"),
        only=NOTHING,
    ),
    "hub.composed": Rule(
        ours(
            "errors conversion hub.folders hub.names model.checkpoint_files model.config "
            "model.made_folders model.parts model.wrappers"
        ),
        only=NOTHING,
    ),
    "hub": Rule(
        ours("errors demo conversion model.pointers model.speculators.recognise"),
        only=ours("huggingface_hub"),
    ),
    "ipc": Rule(ours("errors settings"), only=ours("numpy")),
    "sandbox": Rule(ours("errors ipc.parent"), only=NOTHING),
    "media": Rule(ours("errors sandbox ipc.images"), only=ours("numpy PIL transformers av")),
    "media.image_text": Rule(NOTHING, only=ours("msgspec")),  # the router reads by it as well
    "media.packed_frames": Rule(ours("media.image_text"), only=NOTHING),
    # The router counts with these.
    "media.sound": Rule(NOTHING, only=NOTHING),
    "media.video_canvas": Rule(ours("errors"), only=NOTHING),
    "media.frame_canvases": Rule(ours("errors media.video_canvas"), only=ours("numpy")),
    "media.omni_canvases": Rule(ours("media.patch_canvases media.video_canvas"), only=NOTHING),
    "media.patch_canvases": Rule(ours("media.video_canvas"), only=ours("numpy")),
    "media.video_canvases": Rule(
        ours("media.frame_canvases media.omni_canvases media.patch_canvases media.video_canvas"),
        only=NOTHING,
    ),
    "media.canvases": Rule(ours("errors"), only=ours("numpy")),
    "media.kimi_k25": Rule(ours("errors media.canvases"), only=NOTHING),
    "media.deepseek_ocr": Rule(ours("errors media.canvases"), only=NOTHING),
    "media.granite_docling": Rule(ours("errors media.canvases"), only=NOTHING),
    "media.lfm2": Rule(ours("errors media.canvases"), only=NOTHING),
    "media.minimax_m3": Rule(NOTHING, only=NOTHING),
    "media.nemotron": Rule(ours("errors media.canvases"), only=NOTHING),
    "media.phi4": Rule(ours("errors media.canvases"), only=NOTHING),
    "media.step3p7": Rule(ours("errors media.canvases"), only=NOTHING),
    "grammars": Rule(
        ours("errors process.library_panics sandbox whole_files"),
        only=ours("llguidance msgspec numpy tokenizers"),
    ),
    "router": Rule(
        ours(
            "errors settings process.accepting process.descriptors file_watch "
            "process.library_panics process.name_lookups process.shortages process.sockets "
            "process.thread_limit process.threads whole_files model.config "
            "model.adapters.own_tokens model.audio_families model.hunyuan_vl "
            "model.image_families model.image_rules model.processor_files model.published "
            "model.video_families logs "
            "ipc media.sound media.image_text media.packed_frames media.canvases "
            "media.video_canvas media.frame_canvases media.omni_canvases media.patch_canvases "
            "media.video_canvases media.deepseek_ocr media.granite_docling media.kimi_k25 "
            "media.lfm2 media.minimax_m3 media.nemotron media.phi4 media.step3p7"
        ),
        banned=MODEL,
    ),
    # Needs the model's whole check: whether its text is computed here.
    "router.media.served_images": Rule(
        ours(
            "errors settings model.adapters.own_adapters model.audio_families model.check "
            "model.config model.specs.decoder model.towers router.media.media_model "
            "router.media.kinds"
        ),
        only=NOTHING,
    ),
    "router.request": Rule(
        ours("ipc.messages router.delta router.media.prompt_image"), only=ours("numpy")
    ),
    "router.scheduling": Rule(
        ours(
            "errors model.image_families router.request router.media.prompt_image "
            "router.media.layouts.layout "
            "ipc.messages ipc.frames ipc.images ipc.transfers"
        ),
        only=ours("numpy"),
    ),
    "router.http.wire": Rule(
        ours("errors process.accepting file_watch process.sockets whole_files"), only=ours("trio")
    ),
    "router.http.wire.http1": Rule(
        ours("router.http.wire.headers router.http.wire.states"), only=ours("httptools")
    ),
    "router.http.wire.states": Rule(NOTHING, only=NOTHING),
    # The only file that knows hypercorn.
    "router.http.wire.http2": Rule(
        ours("router.http.wire"), only=ours("trio hypercorn h2 hyperframe")
    ),
    "shard": Rule(
        ours(
            "process.address_space errors settings model devices grammars logs ipc "
            "process.thread_limit whole_files"
        ),
        banned=SHARD_ALONE,
    ),
    # The only file of it that makes pixels: of a black image, to see what a tower takes.
    "shard.media.largest": Rule(
        ours(
            "errors ipc media.feature_extractors media.processors shard.media.features "
            "shard.machine"
        ),
        banned=SHARD_ALONE,
    ),
    "process.signals": Rule(ours("process.name_lookups"), only=ours("trio")),
    "file_watch": Rule(NOTHING, only=ours("trio")),
    "process": Rule(NOTHING, only=NOTHING),
    "process.accepting": Rule(NOTHING, only=ours("trio")),
    "process.address_space": Rule(ours("errors"), only=NOTHING),
    "process.descriptors": Rule(ours("errors"), only=NOTHING),
    "process.stack_size": Rule(ours("errors"), only=NOTHING),
    "process.thread_limit": Rule(ours("errors"), only=NOTHING),
    "process.shortages": Rule(
        ours("process.descriptors errors process.thread_limit"), only=NOTHING
    ),
    "process.library_panics": Rule(ours("errors"), only=NOTHING),
    "process.sockets": Rule(ours("errors whole_files"), only=NOTHING),
    "whole_files": Rule(NOTHING, only=NOTHING),
    "process.threads": Rule(ours("errors process.thread_limit"), only=ours("outcome trio")),
    "process.name_lookups": Rule(ours("process.threads"), only=ours("trio")),
    "launcher": Rule(
        ours(
            "errors settings model logs hub demo ipc router process.signals process.sockets "
            "start.rank_settings start.tables start.timeline"
        ),
        banned=MODEL,
    ),
    "start": Rule(NOTHING, only=NOTHING),
    "start.checks": Rule(ours("errors settings model devices router.text router.telemetry")),
    "start.drafter": Rule(ours("errors settings hub demo model.speculators")),
    "start.rank_settings": Rule(
        ours("errors settings model ipc router.media.media_model"), banned=MODEL
    ),
    "start.tables": Rule(ours("settings logs router.shards"), banned=MODEL),
    "start.timeline": Rule(NOTHING, only=NOTHING),
    "cluster": Rule(
        ours(
            "errors logs process.signals process.descriptors file_watch process.name_lookups "
            "process.sockets process.threads whole_files settings.keys router.http.sse "
            "router.http.wire router.http.dispatch router.http.api_keys router.http.key_watch "
            "router.http.messages router.telemetry.connections router.telemetry.metrics "
            "router.telemetry.metric_table"
        ),
        banned=MODEL,
    ),
    # Judgement without a clock or a socket, so that it can be tried in virtual time.
    **{f"cluster.{name}": Rule(NOTHING, only=NOTHING) for name in ("members", "event_cutter")},
    "cluster.claims": Rule(NOTHING, only=ours("orjson")),
    "cluster.prefix_chain": Rule(NOTHING, only=NOTHING),
    "cluster.routing": Rule(ours("cluster.prefix_chain"), only=NOTHING),
    # The only file that knows Ray.
    "cluster.controller": Rule(
        ours(
            "errors cluster.divided cluster.supervised_front cluster.replica_plan "
            "cluster.rank_processes cluster.replica_host cluster.scaling"
        ),
        only=ours("ray"),
    ),
    "cluster.divided": Rule(NOTHING, only=NOTHING),
    "cluster.rank_processes": Rule(ours("cluster.divided"), only=NOTHING),
    "cluster.supervised_front": Rule(NOTHING, only=NOTHING),
    "cluster.scaling": Rule(NOTHING, only=NOTHING),
    "cluster.replica_plan": Rule(ours("cluster.scaling"), only=NOTHING),
    "cluster.replica_host": Rule(ours("cluster.divided cluster.scaling"), only=NOTHING),
    "cluster.kept_server": Rule(ours("ipc.parent"), only=NOTHING),
    "cluster.gossip": Rule(ours("cluster.prefix_chain"), only=NOTHING),
    "client": Rule(
        ours("errors process.name_lookups whole_files"), only=ours("trio h11 orjson numpy")
    ),
    "cli": Rule(
        ours(
            "errors settings devices log_levels logs hub conversion demo process.descriptors "
            "ipc router launcher client cluster process.signals process.sockets "
            "process.stack_size whole_files"
        ),
        banned=MODEL,
    ),
    # A made-up shard runs the real worker loop on a made-up model, without torch.
    "testing": Rule(ours("errors settings ipc router shard"), banned=MODEL),
    # Stands in for torch's own device, and runs Triton's kernels; compiles them for real ones.
    **{
        f"testing.stand_in_{part}": Rule(
            ours(
                "testing.stand_in_tensor testing.stand_in_driver testing.stand_in_device "
                "shard.torch_backend.recordings.graph_nodes"
            ),
            only=ours("torch triton"),
        )
        for part in ("device", "driver", "group", "nodes", "tensor")
    },
    "testing.sanitizer": Rule(
        ours(
            "shard.torch_backend testing.stand_in_device testing.stand_in_driver "
            "testing.stand_in_group testing.stand_in_tensor"
        ),
        banned=SERVER,
    ),
    "testing.compiled_kernels": Rule(
        ours(
            "shard.torch_backend testing.variant testing.kernel_variants testing.code_variants "
            "testing.trellis_variants testing.adapter_variants testing.invariant_variants "
            "testing.kernel_fingerprints"
        ),
        banned=SERVER,
    ),
    "testing.variant": Rule(NOTHING, only=ours("torch")),
    "testing.kernel_fingerprints": Rule(ours("testing.variant"), banned=SERVER),
    "testing.kernel_variants": Rule(
        ours(
            "shard.torch_backend testing.variant testing.attention_variants "
            "testing.stream_variants testing.block_variants testing.choice_variants "
            "testing.chosen_variants testing.delta_variants testing.entries_variants "
            "testing.gated_variants testing.indexed_variants testing.mixture_variants "
            "testing.recurrence_variants testing.beside_heads_variants"
        ),
        banned=SERVER,
    ),
    **{
        f"testing.{what}_variants": Rule(ours("shard.torch_backend testing.variant"), banned=SERVER)
        for what in (
            *("attention", "block", "choice", "chosen", "entries", "gated", "stream"),
            *("mixture", "code", "trellis", "adapter", "delta", "recurrence", "beside_heads"),
        )
    },
    "testing.indexed_variants": Rule(
        ours("shard.torch_backend testing.variant testing.attention_variants"), banned=SERVER
    ),
    "testing.invariant_variants": Rule(
        ours(
            "shard.torch_backend testing.variant testing.attention_variants "
            "testing.entries_variants"
        ),
        banned=SERVER,
    ),
    "testing.quick_interpreter": Rule(
        ours("testing.quick_memory testing.quick_operations testing.quick_reductions"),
        banned=SERVER,
    ),
    "testing.quick_reductions": Rule(ours("testing.quick_memory"), banned=SERVER),
    "testing.quick_operations": Rule(
        ours("testing.quick_accesses testing.quick_memory"), banned=SERVER
    ),
    "testing.quick_accesses": Rule(ours("testing.quick_memory"), banned=SERVER),
    "testing.quick_memory": Rule(ours(""), banned=SERVER),
    "testing.fake_server": Rule(
        ours("__main__ cli demo model.facts"), banned=MODEL
    ),  # a program, like __main__
    "testing.checkpoints": Rule(
        ours("errors testing.tiny_families testing.tiny_hybrids"), banned=SERVER
    ),  # writes tiny model folders
    "testing.wrapped_families": Rule(
        ours("testing.checkpoints testing.tiny_families testing.tiny_hybrids"), banned=SERVER
    ),
    "testing.whole_options": Rule(ours("testing.checkpoints"), banned=SERVER),
    "testing.wrapped_checkpoints": Rule(
        ours(
            "testing.checkpoints testing.tiny_families testing.whole_options "
            "testing.wrapped_families"
        ),
        banned=SERVER,
    ),
    "demo": Rule(ours("errors"), banned=SERVER),
    "console": Rule(ours("__main__ process.early_interrupt")),
    "__main__": Rule(
        ours(
            "process.address_space cli demo process.descriptors process.early_interrupt errors "
            "process.held_signals hub log_levels logs launcher model.config model.facts "
            "router.shards.prefix_store settings process.signals start.checks start.drafter "
            "start.timeline devices ipc.litmus ipc.waiting process.stack_size "
            "process.thread_limit"
        ),
        banned=MODEL,
    ),
    "__init__": Rule(NOTHING, only=NOTHING),
    **{name: Rule(ours("errors settings ipc"), only=ours("numpy trio")) for name in ROUTER_ENDS},
}
