"""`python -m smg launch`: the HTTP front from the command line."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import resource
import signal
import sys
from collections.abc import Callable, Collection, Coroutine
from typing import TYPE_CHECKING, Any

from smg.http.flags import POLICIES, add_ignored, known_policy, warn_ignored

if TYPE_CHECKING:
    from smg.http.service import ServiceOptions

DESCRIPTION = """\
Listen for HTTP requests and for engine ranks. Ranks dial the handshake address derived from their worker URL
when they start, so start this first, or have the engines wait for it.

    python -m smg launch --worker-urls ipc:///run/user/1000/smg/engine-31000 --backend tokenspeed \\
        --zmq-engine-count 2 --model-path DIR

Flags have the Rust gateway's names. Those of its flags that mean nothing here are accepted with a warning.
"""

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}
DESCRIPTORS = 65_536  # a connection has one, and two while it streams
POLICY_NAMES = ("least_load", "round_robin", "random", "power_of_two", "passthrough")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter

    group = parser.add_argument_group("engines")
    group.add_argument(
        "--worker-urls",
        nargs="+",
        action="extend",
        required=True,
        metavar="ipc://PATH",
        help="one per group; its directory must be private to this user",
    )
    group.add_argument("--backend", required=True, metavar="NAME", help="the engines' wire: tokenspeed or vllm")
    group.add_argument("--zmq-engine-count", type=int, default=1, metavar="N", help="ranks per worker URL (default 1)")
    add_router_arguments(parser, group)


def add_router_arguments(
    parser: argparse.ArgumentParser,
    group: argparse._ArgumentGroup,
    *,
    port: int = 30000,
    own: Collection[str] = (),
) -> None:
    """What a command that runs the router takes, beside what says which engines it serves.

    `group`: where the engines' options go; `port`: the default one; `own`: flags of the Rust gateway that are no
    part of the router, and which this command takes itself.
    """
    group.add_argument("--min-ready", type=int, metavar="N", help="ranks a group needs to be ready (default all)")
    group.add_argument(
        "--zmq-handshake-address",
        metavar="tcp://HOST:PORT",
        help="where ranks dial in, instead of the address derived from the worker URL",
    )
    group.add_argument(
        "--max-logprobs", type=int, default=20, metavar="N", help="the --max-logprobs that vLLM's engines have (20)"
    )
    group.add_argument(
        "--structured-backend",
        default="xgrammar",
        metavar="NAME",
        help="what vLLM's engines compile grammars with: xgrammar, guidance, outlines or lm-format-enforcer (xgrammar)",
    )
    group.add_argument("--max-inflight", type=int, metavar="N", help="requests per rank before 429 (default: no bound)")
    group.add_argument(
        "--stall-timeout-secs",
        type=float,
        default=60.0,
        metavar="S",
        help="a rank silent for this long with work in flight gets nothing new (default 60)",
    )
    group.add_argument(
        "--policy",
        choices=[*POLICY_NAMES, *POLICIES],
        default="least_load",
        help="how to choose among groups (default least_load); ranks of a group go by load",
    )

    group = parser.add_argument_group("model")
    group.add_argument(
        "--model-path", "--model", required=True, metavar="DIR", help="model directory, for its tokenizer"
    )
    group.add_argument("--served-model-name", metavar="NAME", help="its name in the API (default: its path)")
    group.add_argument("--tokenizer-path", metavar="PATH", help="tokenizer directory or tokenizer.json")
    group.add_argument("--chat-template", metavar="FILE", help="a chat template, instead of the model's own")

    group = parser.add_argument_group("listening")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    group.add_argument("--port", type=int, default=port, help=f"port to listen on (default {port})")
    group.add_argument("--prometheus-host", default="127.0.0.1", help="address of /metrics (default 127.0.0.1)")
    group.add_argument("--prometheus-port", type=int, default=29000, help="port of /metrics (default 29000)")
    group.add_argument("--tls-cert-path", metavar="PEM", help="serve HTTPS with this certificate chain")
    group.add_argument("--tls-key-path", metavar="PEM", help="its private key")
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="require Authorization: Bearer KEY; may be given several times",
    )
    group.add_argument(
        "--cors-allowed-origins", nargs="*", default=[], metavar="ORIGIN", help="allow browsers from there"
    )
    group.add_argument("--request-id-headers", nargs="*", metavar="NAME", help="headers that may bring a request's id")

    group = parser.add_argument_group("limits")
    group.add_argument(
        "--max-concurrent-requests",
        type=int,
        default=-1,
        metavar="N",
        help="served at once (default -1: all)",
    )
    group.add_argument("--queue-size", type=int, default=100, metavar="N", help="waiting beyond that (100)")
    group.add_argument("--queue-timeout-secs", type=float, default=60.0, metavar="S", help="for so long (60)")
    group.add_argument(
        "--request-timeout-secs", type=float, default=1800.0, metavar="S", help="a request's deadline (1800)"
    )
    group.add_argument(
        "--retry-max-retries",
        type=int,
        default=5,
        metavar="N",
        help="how often a request moves to another rank when its rank dies before its first token (default 5)",
    )
    group.add_argument("--disable-retries", action="store_true", help="as --retry-max-retries 0")
    group.add_argument(
        "--max-payload-size", type=int, default=64 << 20, metavar="BYTES", help="of a body (default 64 MiB)"
    )
    group.add_argument("--max-stop-strings", type=int, default=4, metavar="N", help="per request (default 4)")
    group.add_argument("--max-choices", type=int, default=128, metavar="N", help="highest n (default 128)")
    group.add_argument("--max-output-tokens", type=int, metavar="N", help="highest max_tokens")
    group.add_argument(
        "--header-read-timeout-secs", type=float, default=30.0, metavar="S", help="for a head (default 30)"
    )
    group.add_argument(
        "--body-read-timeout-secs", type=float, default=60.0, metavar="S", help="for a body (default 60)"
    )
    group.add_argument("--idle-connection-timeout-secs", type=float, default=90.0, metavar="S", help="(default 90)")
    group.add_argument(
        "--shutdown-grace-period-secs",
        type=float,
        default=180.0,
        metavar="S",
        help="for requests that run when SIGTERM comes (default 180)",
    )
    group.add_argument(
        "--sse-keepalive-secs",
        type=float,
        default=15.0,
        metavar="S",
        help="a comment on a stream that is silent for so long; 0 = never (default 15)",
    )

    group = parser.add_argument_group("telling")
    group.add_argument("--log-level", choices=list(LEVELS), default="info", help="(default info)")
    group.add_argument("--log-request-ids", action="store_true", help="let engines see the clients' request ids")
    group.add_argument("--response-timings", action="store_true", help="add `timings` to every `usage`")
    add_ignored(parser, but=own)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status."""
    return run_service("launch", args, lambda options: _serve(options, args.shutdown_grace_period_secs))


def run_service(
    command: str, args: argparse.Namespace, serve: Callable[[ServiceOptions], Coroutine[Any, Any, int]]
) -> int:
    """What every command does that runs a service: set the process up, then `serve` on an event loop.

    `args`: as `add_router_arguments` and the engines' options make it. Returns the exit status, which is that of
    `serve`, or 1 with a line that says what is wrong.
    """
    logging.basicConfig(level=LEVELS[args.log_level], format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    warn_ignored(args)
    try:
        import uvloop

        from smg import check_distribution
        from smg.errors import Error

        check_distribution()
        options = service_options(args)
    except ImportError as exc:
        print(f"smg {command}: {exc}; install the extra: pip install 'smg-fastpath[server]'", file=sys.stderr)
        return 1
    # What is loaded by now stays; and what a request leaves behind is freed by reference counts, so that collecting
    # after every 700 objects would only look at running requests again and again.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    # The loop takes the GIL from the thread that reads long prompts sooner than after 5 ms: streams wait for it.
    sys.setswitchinterval(0.0005)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(DESCRIPTORS, hard)), hard))
    try:
        return int(uvloop.run(serve(options)))
    except (Error, OSError, ValueError) as exc:
        print(f"smg {command}: {exc}", file=sys.stderr)
        return 1


def service_options(args: argparse.Namespace) -> ServiceOptions:
    """The command line as `ServiceOptions`."""
    from smg.http.exchange import REQUEST_ID_HEADERS
    from smg.http.front import FrontOptions
    from smg.http.requests import Limits
    from smg.http.server import ConnectionLimits
    from smg.http.service import ServiceOptions

    defaults = Limits()
    limits = Limits(
        stop_strings=args.max_stop_strings,
        choices=args.max_choices,
        output_tokens=args.max_output_tokens or defaults.output_tokens,
    )
    return ServiceOptions(
        worker_urls=args.worker_urls,
        backend=args.backend,
        model_path=args.model_path,
        ranks=args.zmq_engine_count,
        min_ready=args.min_ready,
        handshake_address=args.zmq_handshake_address,
        max_inflight=args.max_inflight,
        stall_timeout=args.stall_timeout_secs,
        log_request_ids=args.log_request_ids,
        max_logprobs=args.max_logprobs,
        structured_backend=args.structured_backend,
        policy=known_policy(args.policy),
        tokenizer_path=args.tokenizer_path,
        chat_template=args.chat_template,
        host=args.host,
        port=args.port,
        prometheus_host=args.prometheus_host,
        prometheus_port=args.prometheus_port,
        tls_cert_path=args.tls_cert_path,
        tls_key_path=args.tls_key_path,
        api_keys=args.api_key,
        cors_origins=args.cors_allowed_origins,
        request_id_headers=args.request_id_headers or REQUEST_ID_HEADERS,
        connection=ConnectionLimits(
            body_bytes=args.max_payload_size,
            header_timeout=args.header_read_timeout_secs,
            body_timeout=args.body_read_timeout_secs,
            idle_timeout=args.idle_connection_timeout_secs,
        ),
        front=FrontOptions(
            limits=limits,
            served_model_name=args.served_model_name,
            max_concurrent_requests=args.max_concurrent_requests,
            queue_size=args.queue_size,
            queue_timeout_secs=args.queue_timeout_secs,
            request_timeout_secs=args.request_timeout_secs,
            max_retries=0 if args.disable_retries else args.retry_max_retries,
            sse_keepalive_secs=args.sse_keepalive_secs,
            response_timings=args.response_timings,
        ),
    )


async def _serve(options: ServiceOptions, grace: float) -> int:
    from smg.http.service import Service

    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    async with Service(options) as service:
        for group in service.groups:
            print(f"{group.url}: waiting for ranks to dial {group.handshake_address}", flush=True)
        print(f"answering on {service.url}, metrics on {service.metrics_url}", flush=True)
        await stop.wait()
        print("shutting down; again to hurry", flush=True)
        await service.drain(grace, hurry)
    return 0
