"""Options of llama-server that are recognised and not (or not yet) honoured here: each says why, none is ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llamamg.options.option import Option, Status
from llamamg.options.values import integer, text

GROUP = "Recognised, not supported"
NOTED = "Recognised, without effect here"


def _no(names: str, reason: str, *, value: bool = True, env: str = "") -> Option:
    """An option that stops the start; `value` says whether it takes one."""
    return Option(
        names=tuple(names.split()),
        parse=text if value else None,
        metavar="…" if value else "",
        env=env,
        status=Status.UNSUPPORTED,
        reason=reason,
        help=reason,
        group=GROUP,
    )


def _no_unless(names: str, reason: str, parse: Callable[[str], object], *neutral: object, env: str = "") -> Option:
    """An option that stops the start unless its value asks for what happens anyway."""
    return Option(
        names=tuple(names.split()),
        parse=parse,
        metavar="N",
        env=env,
        status=Status.UNSUPPORTED,
        reason=reason,
        neutral=neutral,
        help=reason,
        group=GROUP,
        example=str(neutral[0]),
    )


def _toggle(names: str, negatives: str, reason: str, neutral: bool, env: str = "") -> Option:
    """A toggle of which one position is what happens anyway."""
    return Option(
        names=tuple(names.split()),
        negatives=tuple(negatives.split()),
        env=env,
        status=Status.UNSUPPORTED,
        reason=reason,
        neutral=(neutral,),
        help=reason,
        group=GROUP,
    )


def _noted(names: str, reason: str, *, value: bool = False, negatives: str = "", env: str = "") -> Option:
    """An option that starts with a remark."""
    return Option(
        names=tuple(names.split()),
        negatives=tuple(negatives.split()),
        parse=text if value else None,
        metavar="…" if value else "",
        env=env,
        status=Status.NOTED,
        reason=reason,
        help=reason,
        group=NOTED,
    )


def _all(names: str, reason: str, **more: Any) -> tuple[Option, ...]:
    """Several unrelated options with one reason; `NAME:ENV` gives a variable."""
    out = []
    for item in names.split():
        flags, _, env = item.partition(":")
        out.append(_no(flags.replace(",", " "), reason, env=env, **more))
    return tuple(out)


_LORA = "LoRA adapters and control vectors are not supported; merge the adapter into the GGUF file"
_MEDIA = "images, audio and video are not supported; serve a text model without a projector"
_EMBED = "embedding and reranking are not supported; use llama-server for such models"
_DOWNLOAD = "models are not downloaded; fetch the GGUF file and pass it with --model"
_ROUTER = "serving several models from one process is not supported; start one server for each"
_TOOLS = "built-in tools, MCP and agents are not part of this server; run them in the client"
_UI = "there is no built-in web interface; --path serves static files"
_AFFINITY = "thread affinity, priority and polling are not supported; use taskset, nice or numactl around llamamg"
_DRAFT = "draft models are not supported; speculation is by n-gram lookup (plugin spec)"
_PROMPT = "it belongs to llama.cpp's command-line tools, a server takes prompts over HTTP; leave it out"
_PRESET = "presets that download a model are not supported; pass a GGUF file with --model"
_REMOVED = "llama.cpp has removed it; use --load-mode"
_LOGFILE = "logs go to stderr; redirect it"
_LATER = "it is not supported yet; leave it out"

OPTIONS = (
    *_all("--lora --lora-scaled --control-vector --control-vector-scaled --control-vector-layer-range", _LORA),
    _no("--lora-init-without-apply", _LORA, value=False),
    *_all(
        "-mm,--mmproj:LLAMA_ARG_MMPROJ -mmu,--mmproj-url:LLAMA_ARG_MMPROJ_URL -mmdev,--mmproj-device --media-path",
        _MEDIA,
    ),
    *_all("--image-min-tokens:LLAMA_ARG_IMAGE_MIN_TOKENS --image-max-tokens:LLAMA_ARG_IMAGE_MAX_TOKENS", _MEDIA),
    *_all("--mtmd-batch-max-tokens:LLAMA_ARG_MTMD_BATCH_MAX_TOKENS --video-fps:LLAMA_ARG_VIDEO_FPS", _MEDIA),
    *_all(
        "--video-timestamp-interval:LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL --video-ffmpeg-dir:LLAMA_ARG_VIDEO_FFMPEG_DIR",
        _MEDIA,
    ),
    _toggle("--mmproj-auto", "--no-mmproj --no-mmproj-auto", _MEDIA, False, "LLAMA_ARG_MMPROJ_AUTO"),
    _toggle("--mmproj-offload", "--no-mmproj-offload", _MEDIA, False, "LLAMA_ARG_MMPROJ_OFFLOAD"),
    *_all("--pooling:LLAMA_ARG_POOLING --embd-normalize", _EMBED),
    _no("--embedding --embeddings", _EMBED, value=False, env="LLAMA_ARG_EMBEDDINGS"),
    _no("--rerank --reranking", _EMBED, value=False, env="LLAMA_ARG_RERANKING"),
    *_all("-mu,--model-url:LLAMA_ARG_MODEL_URL -dr,--docker-repo:LLAMA_ARG_DOCKER_REPO -hft,--hf-token", _DOWNLOAD),
    *_all("-hf,-hfr,--hf-repo:LLAMA_ARG_HF_REPO -hff,--hf-file:LLAMA_ARG_HF_FILE", _DOWNLOAD),
    _no("-cl --cache-list", _DOWNLOAD, value=False),
    _noted("--offline", "nothing is ever downloaded", env="LLAMA_ARG_OFFLINE"),
    *_all(
        "--models-dir:LLAMA_ARG_MODELS_DIR --models-preset:LLAMA_ARG_MODELS_PRESET --models-max:LLAMA_ARG_MODELS_MAX",
        _ROUTER,
    ),
    _toggle("--models-autoload", "--no-models-autoload", _ROUTER, False, "LLAMA_ARG_MODELS_AUTOLOAD"),
    *_all("--tools:LLAMA_ARG_TOOLS --tools-runtime:LLAMA_ARG_TOOLS_RUNTIME", _TOOLS),
    *_all("--mcp-servers-config:LLAMA_ARG_MCP_SERVERS_CONFIG --mcp-servers-json:LLAMA_ARG_MCP_SERVERS_JSON", _TOOLS),
    _toggle("-ag --agent", "-no-ag --no-agent", _TOOLS, False, "LLAMA_ARG_AGENT"),
    *_all(
        "--ui-config,--webui-config:LLAMA_ARG_UI_CONFIG --ui-config-file,--webui-config-file:LLAMA_ARG_UI_CONFIG_FILE",
        _UI,
    ),
    _toggle("--ui --webui", "--no-ui --no-webui", _UI, False, "LLAMA_ARG_UI"),
    _toggle(
        "--ui-mcp-proxy --webui-mcp-proxy",
        "--no-ui-mcp-proxy --no-webui-mcp-proxy",
        _UI,
        False,
        "LLAMA_ARG_UI_MCP_PROXY",
    ),
    *_all(
        "-C,--cpu-mask -Cr,--cpu-range --cpu-strict --prio --poll -Cb,--cpu-mask-batch -Crb,--cpu-range-batch",
        _AFFINITY,
    ),
    *_all("--cpu-strict-batch --prio-batch --poll-batch --numa:LLAMA_ARG_NUMA", _AFFINITY),
    *_all("-hfd,-hfrd,--hf-repo-draft,--spec-draft-hf:LLAMA_ARG_SPEC_DRAFT_HF_REPO", _DRAFT),
    *_all(
        "-md,--model-draft,--spec-draft-model:LLAMA_ARG_SPEC_DRAFT_MODEL -devd,--device-draft,--spec-draft-device",
        _DRAFT,
    ),
    *_all("-ngld,--gpu-layers-draft,--n-gpu-layers-draft,--spec-draft-ngl:LLAMA_ARG_N_GPU_LAYERS_DRAFT", _DRAFT),
    *_all("-ctkd,--cache-type-k-draft,--spec-draft-type-k:LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K", _DRAFT),
    *_all("-ctvd,--cache-type-v-draft,--spec-draft-type-v:LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V", _DRAFT),
    *_all("-td,--threads-draft,--spec-draft-threads -tbd,--threads-batch-draft,--spec-draft-threads-batch", _DRAFT),
    *_all("-Cd,--cpu-mask-draft,--spec-draft-cpu-mask -Crd,--cpu-range-draft,--spec-draft-cpu-range", _DRAFT),
    *_all(
        "--cpu-strict-draft,--spec-draft-cpu-strict --prio-draft,--spec-draft-prio --poll-draft,--spec-draft-poll",
        _DRAFT,
    ),
    *_all("-Cbd,--cpu-mask-batch-draft,--spec-draft-cpu-mask-batch --prio-batch-draft,--spec-draft-prio-batch", _DRAFT),
    *_all("--cpu-strict-batch-draft,--spec-draft-cpu-strict-batch --poll-batch-draft,--spec-draft-poll-batch", _DRAFT),
    *_all("-otd,--override-tensor-draft,--spec-draft-override-tensor", _DRAFT),
    *_all("-ncmoed,--n-cpu-moe-draft,--spec-draft-ncmoe,--spec-draft-n-cpu-moe:LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE", _DRAFT),
    _no("-cmoed --cpu-moe-draft --spec-draft-cpu-moe", _DRAFT, value=False, env="LLAMA_ARG_SPEC_DRAFT_CPU_MOE"),
    *_all("--draft-p-split,--spec-draft-p-split:LLAMA_ARG_SPEC_DRAFT_P_SPLIT", _DRAFT),
    *_all("--spec-synth-len:LLAMA_ARG_SPEC_SYNTH_LEN --spec-synth-rates:LLAMA_ARG_SPEC_SYNTH_RATES", _LATER),
    _toggle(
        "--spec-draft-backend-sampling",
        "--no-spec-draft-backend-sampling",
        _DRAFT,
        False,
        "LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING",
    ),
    *_all(
        "-lcs,--lookup-cache-static -lcd,--lookup-cache-dynamic",
        "n-gram counts are not kept in files; --spec-type ngram-map-k4v or suffix count what the context holds",
    ),
    *_all("--draft,--draft-n,--draft-max:LLAMA_ARG_DRAFT_MAX", "llama.cpp has removed it; use --spec-draft-n-max"),
    *_all("--draft-min,--draft-n-min:LLAMA_ARG_DRAFT_MIN", "llama.cpp has removed it; use --spec-draft-n-min"),
    *_all(
        "--spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits",
        "llama.cpp has removed it; use --spec-ngram-KIND-…",
    ),
    _no("--spec-default", "write it out: --spec-type ngram-mod", value=False),
    *_all("-p,--prompt -f,--file -bf,--binary-file", _PROMPT),
    _no("-r --reverse-prompt", "send `stop` with the request", value=True),
    *_all(
        "--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default", _PRESET, value=False
    ),
    *_all("--fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default", _PRESET, value=False),
    *_all("--gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default", _PRESET, value=False),
    *_all("--mmap --no-mmap --mlock -dio,--direct-io -ndio,--no-direct-io", _REMOVED, value=False),
    *_all("--log-file:LLAMA_ARG_LOG_FILE --log-prompts-dir", _LOGFILE),
    _toggle("--log-jsonl", "--no-log-jsonl", _LATER, False, "LLAMA_ARG_LOG_JSONL"),
    _noted("--log-colors", "the log is plain text", value=True, env="LLAMA_ARG_LOG_COLORS"),
    _noted("--log-prefix", "log lines have one form", negatives="--no-log-prefix", env="LLAMA_ARG_LOG_PREFIX"),
    _noted(
        "--log-timestamps", "log lines have one form", negatives="--no-log-timestamps", env="LLAMA_ARG_LOG_TIMESTAMPS"
    ),
    _noted("--perf", "timings are always measured", negatives="--no-perf", env="LLAMA_ARG_PERF"),
    _noted("--threads-http", "HTTP runs in one event loop, not in threads", value=True, env="LLAMA_ARG_THREADS_HTTP"),
    _noted("-dt --defrag-thold", "llama.cpp no longer needs it", value=True, env="LLAMA_ARG_DEFRAG_THOLD"),
    _no("-fitt --fit-target", "values are not fitted to memory; leave it out", env="LLAMA_ARG_FIT_TARGET"),
    _no("-fitc --fit-ctx", "values are not fitted to memory; set --ctx-size", env="LLAMA_ARG_FIT_CTX"),
    _no("--kv-unified-per-slot", "set --ctx-size and --parallel instead", env="LLAMA_ARG_KV_UNIFIED_PER_SLOT"),
    _toggle(
        "-cb --cont-batching",
        "-nocb --no-cont-batching",
        "continuous batching is always on",
        True,
        "LLAMA_ARG_CONT_BATCHING",
    ),
    _no_unless(
        "--cache-reuse",
        "reusing shifted chunks is not supported yet; leave it out",
        integer(0),
        0,
        env="LLAMA_ARG_CACHE_REUSE",
    ),
    _no_unless("--sleep-idle-seconds", "unloading an idle model is not supported yet; leave it out", integer(), -1),
    _no_unless(
        "--reasoning-budget",
        "a token budget for thinking is not supported yet; leave it out",
        integer(-1),
        -1,
        env="LLAMA_ARG_THINK_BUDGET",
    ),
    _no(
        "--reasoning-budget-message",
        "a token budget for thinking is not supported yet; leave it out",
        env="LLAMA_ARG_THINK_BUDGET_MESSAGE",
    ),
    _toggle("--skip-chat-parsing", "--no-skip-chat-parsing", _LATER, False, "LLAMA_ARG_SKIP_CHAT_PARSING"),
    _no(
        "--reuse-port",
        "sharing a port between servers is not supported; put a proxy in front",
        value=False,
        env="LLAMA_ARG_REUSE_PORT",
    ),
    _no(
        "-bs --backend-sampling",
        "sampling inside the graph is not supported yet; leave it out",
        value=False,
        env="LLAMA_ARG_BACKEND_SAMPLING",
    ),
    _no("--spm-infill", "the infill endpoint is not supported yet; leave it out", value=False),
    _no("--list-devices", "`llamamg doctor` lists the devices", value=False),
    _no("--completion-bash", "shell completion is not supported", value=False),
    _no("--tensor-parallel-size", "use --split-mode tensor with --device"),
)
