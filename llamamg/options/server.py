"""Options of the HTTP server and of logging."""

from __future__ import annotations

from llamamg.options.option import Combine, Option, Status
from llamamg.options.values import directory, existing_file, integer, key_file, number, some_words, text, words

GROUP = "Server"
LOG = "Log"


def _prefix(value: str) -> str:
    if value and not value.startswith("/"):
        raise ValueError("must start with a slash, such as /llm")
    if value.endswith("/"):
        raise ValueError("must not end with a slash")
    return value


def _hosts(value: str) -> str:
    return ",".join(some_words(value))


OPTIONS = (
    Option(
        names=("--host",),
        metavar="HOST",
        env="LLAMA_ARG_HOST",
        target="server.host",
        parse=_hosts,
        help="address to listen on; several separated by commas, or a socket path ending in .sock",
        group=GROUP,
        example="0.0.0.0",
    ),
    Option(
        names=("--port",),
        metavar="N",
        env="LLAMA_ARG_PORT",
        target="server.port",
        parse=integer(0, 65535),
        help="port to listen on; 0 takes a free one and prints it",
        group=GROUP,
        example="9000",
    ),
    Option(
        names=("--api-prefix",),
        metavar="PATH",
        env="LLAMA_ARG_API_PREFIX",
        target="server.api_prefix",
        parse=_prefix,
        help="path in front of every endpoint",
        group=GROUP,
        example="/llm",
    ),
    Option(
        names=("--api-key",),
        metavar="KEY,…",
        env="LLAMA_API_KEY",
        target="server.api_keys",
        parse=words,
        combine=Combine.EXTEND,
        default="none",
        help="keys that clients must send; may be repeated",
        group=GROUP,
        example="secret",
    ),
    Option(
        names=("--api-key-file",),
        metavar="FILE",
        env="LLAMA_ARG_API_KEY_FILE",
        target="server.api_keys",
        parse=key_file,
        combine=Combine.EXTEND,
        help="file with one key a line; # starts a comment",
        group=GROUP,
    ),
    Option(
        names=("-a", "--alias"),
        metavar="NAME,…",
        env="LLAMA_ARG_ALIAS",
        target="server.alias",
        parse=words,
        combine=Combine.EXTEND,
        default="the file's name",
        help="name of the model in answers; further ones are accepted too",
        group=GROUP,
        example="my-model",
    ),
    Option(
        names=("--tags",),
        metavar="TAG,…",
        env="LLAMA_ARG_TAGS",
        target="server.tags",
        parse=words,
        combine=Combine.EXTEND,
        help="labels shown by /v1/models",
        group=GROUP,
        example="local",
    ),
    Option(
        names=("-to", "--timeout"),
        metavar="SECONDS",
        env="LLAMA_ARG_TIMEOUT",
        status=Status.NOTED,
        reason="connections are not timed out; a client that is gone is noticed at once",
        parse=number(above=0),
        help="longest silence of a connection while reading a request or writing an answer",
        group=GROUP,
        example="60",
    ),
    Option(
        names=("--sse-ping-interval",),
        metavar="SECONDS",
        env="LLAMA_ARG_SSE_PING_INTERVAL",
        target="server.sse_ping_interval_s",
        parse=number(-1),
        help="silence after which a streaming answer sends a comment; -1 is never",
        group=GROUP,
        example="10",
    ),
    Option(
        names=("--metrics",),
        env="LLAMA_ARG_ENDPOINT_METRICS",
        target="server.endpoint_metrics",
        help="answer GET /metrics (Prometheus)",
        group=GROUP,
    ),
    Option(
        names=("--props",),
        env="LLAMA_ARG_ENDPOINT_PROPS",
        target="server.endpoint_props",
        help="answer POST /props",
        group=GROUP,
    ),
    Option(
        names=("--slots",),
        negatives=("--no-slots",),
        env="LLAMA_ARG_ENDPOINT_SLOTS",
        target="server.endpoint_slots",
        help="answer GET /slots",
        group=GROUP,
    ),
    Option(
        names=("--path",),
        metavar="DIR",
        env="LLAMA_ARG_STATIC_PATH",
        target="server.static_path",
        parse=directory,
        help="folder of static files to serve",
        group=GROUP,
    ),
    Option(
        names=("--cors-origins",),
        metavar="ORIGIN,…",
        env="LLAMA_ARG_CORS_ORIGINS",
        target="server.cors_origins",
        parse=text,
        help="web origins allowed to call; localhost allows only pages from this machine",
        group=GROUP,
        example="localhost",
    ),
    Option(
        names=("--cors-methods",),
        metavar="METHOD,…",
        env="LLAMA_ARG_CORS_METHODS",
        target="server.cors_methods",
        parse=text,
        help="methods allowed to web pages",
        group=GROUP,
        example="GET",
    ),
    Option(
        names=("--cors-headers",),
        metavar="HEADER,…",
        env="LLAMA_ARG_CORS_HEADERS",
        target="server.cors_headers",
        parse=text,
        help="headers allowed to web pages",
        group=GROUP,
        example="Authorization",
    ),
    Option(
        names=("--cors-credentials",),
        negatives=("--no-cors-credentials",),
        env="LLAMA_ARG_CORS_CREDENTIALS",
        target="server.cors_credentials",
        help="let web pages send credentials",
        group=GROUP,
    ),
    Option(
        names=("--ssl-key-file",),
        metavar="FILE",
        env="LLAMA_ARG_SSL_KEY_FILE",
        target="server.ssl_key_file",
        parse=existing_file,
        help="private key (PEM); with --ssl-cert-file the server speaks HTTPS",
        group=GROUP,
    ),
    Option(
        names=("--ssl-cert-file",),
        metavar="FILE",
        env="LLAMA_ARG_SSL_CERT_FILE",
        target="server.ssl_cert_file",
        parse=existing_file,
        help="certificate (PEM)",
        group=GROUP,
    ),
    Option(
        names=("--parse-inline-bytes",),
        metavar="BYTES",
        target="server.parse_inline_bytes",
        parse=integer(0),
        help="larger request bodies are parsed and tokenized in a process of their own",
        group=GROUP,
        example="1024",
    ),
    Option(
        names=("-lv", "--verbosity", "--log-verbosity"),
        metavar="N",
        env="LLAMA_ARG_LOG_VERBOSITY",
        target="server.log_level",
        parse=integer(0, 5),
        help="what is logged: 1 errors, 2 warnings, 3 information, 4 more of it, 5 everything",
        group=LOG,
        example="2",
    ),
    Option(
        names=("-v", "--verbose", "--log-verbose"),
        target="server.log_level",
        const=5,
        help="the same as --verbosity 5",
        group=LOG,
    ),
    Option(
        names=("--log-disable",),
        target="server.log_level",
        const=0,
        help="log nothing but what stops the server; the same as --verbosity 0",
        group=LOG,
    ),
)
