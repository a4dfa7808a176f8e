"""Flags of the Rust gateway that have no meaning here, as data: they are accepted with a warning, so that a
command line written for it works here too."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Collection

log = logging.getLogger(__name__)

#: flags that take no value
SWITCHES = """
    --router-disable-arg-fallback --disable-load-monitoring --mm-pixel-rdma --mm-allow-private-media-hosts
    --log-mm-timing --upstream-http2 --worker-overload-protection --disable-worker-overload-protection
    --worker-overload-shed --dp-aware --routing-key-override --sticky-sessions --dp-minimum-tokens-scheduler
    --enable-igw --enable-rl --pd-disaggregation --epd-disaggregation --log-json --service-discovery
    --trust-tenant-header --priority-scheduler-enabled --tenant-rate-limit-enabled
    --disable-circuit-breaker --disable-health-check --remove-unhealthy-workers --no-remove-unhealthy-workers
    --worker-auto-recovery --no-worker-auto-recovery --disable-tokenizer-autoload --tokenizer-cache-enable-l0
    --tokenizer-cache-enable-l1 --enable-wasm --enable-trace --control-plane-audit-enabled --enable-mesh
    --oracle-external-auth
""".split()  # noqa: SIM905

#: flags that take one value
VALUES = """
    --job-queue-capacity --job-queue-concurrency --load-monitor-interval --multimodal-tensor-transport
    --multimodal-shm-min-bytes --multimodal-max-inflight-bytes --mm-per-request-image-limit --mm-processing
    --mm-pixel-cache-mb --mm-allowed-media-domains --rdma-listen-ip --rdma-slot-ttl-s --reasoning-parser
    --tool-call-parser --mcp-config-path --upstream-pool-idle-timeout-secs --health-check-port --encode-policy
    --prefill-policy --decode-policy --cache-threshold --cache-match-threshold --prefix-token-count
    --prefix-hash-load-factor --prefix-hash-balance-abs-threshold --least-load-kv-pressure-weight
    --least-load-default-throughput --least-load-mean-prefill-tokens --least-load-max-waiting-requests
    --power-of-two-load-metric --balance-abs-threshold --spill-abs-threshold --balance-rel-threshold
    --spill-rel-threshold --balance-token-usage-threshold --overload-token-usage-threshold
    --worker-overload-waiting-requests --worker-overload-token-usage --kv-index --worker-stall-secs
    --worker-wedge-secs --worker-stale-secs --worker-warmup-secs --worker-warmup-share --worker-warmup-blocks
    --worker-warmup-thin-ratio --worker-warmup-divert-every --selection-policy --selection-accounting-ttl-ms
    --overlap-decay --selection-temperature --bucket-adjust-interval-secs --eviction-interval-secs
    --max-tree-size --block-size --cache-boundaries --cache-index --cache-ttl-secs --max-idle-secs
    --sticky-key-idle-secs --assignment-mode --max-buffered-request-bytes --pd-admission-wait-secs
    --stream-body-stall-timeout-secs --rl-control-timeout-secs --rl-fanout-concurrency
    --prefill-max-inflight-requests-per-worker --prefill-queue-size --prefill-queue-timeout-secs
    --worker-startup-timeout-secs --worker-startup-delay --worker-startup-check-interval --log-dir
    --discovery-provider --discovery-file --discovery-check-interval-secs --service-discovery-port
    --service-discovery-namespace --kv-connector-annotation --kv-engine-id-annotation --model-id-from
    --model-alias --jemalloc-prof-dir --tenant-header-name --rate-limit-tokens-per-second
    --max-background-responses --priority-scheduler-default-max-class --priority-scheduler-config
    --priority-scheduler-tenant-metric-top-n --tenant-rate-limit-config
    --retry-initial-backoff-ms --retry-max-backoff-ms --retry-backoff-multiplier --retry-jitter-factor
    --cb-failure-threshold --cb-success-threshold --cb-timeout-duration-secs --cb-window-duration-secs
    --health-failure-threshold --health-success-threshold --health-check-timeout-secs
    --health-check-interval-secs --health-check-endpoint --parser --tokenizer-cache-l0-max-entries
    --tokenizer-cache-l0-max-memory --tokenizer-cache-l1-max-memory --storage-hook-wasm-path
    --history-backend --history-memory-max-responses --history-memory-max-items
    --history-memory-retention-secs
    --schema-config --oracle-wallet-path --oracle-tns-alias --oracle-connect-descriptor --oracle-username
    --oracle-password --oracle-pool-min --oracle-pool-max --oracle-pool-timeout-secs --postgres-db-url
    --postgres-pool-max --postgres-op-timeout-secs --redis-url --redis-pool-max --redis-retention-days
    --redis-op-timeout-secs --client-cert-path --client-key-path --otlp-traces-endpoint --jwt-issuer
    --jwt-audience --jwt-jwks-uri --tenant-api-key --mesh-server-name --mesh-host --mesh-advertise-host
    --mesh-port --mesh-tls-ca-cert --mesh-tls-cert --mesh-tls-key
""".split()  # noqa: SIM905

#: flags that take any number of values
LISTS = """
    --routing-key-headers --encode --prefill --decode --selector --encode-selector --prefill-selector
    --decode-selector --router-selector --prometheus-duration-buckets --storage-context-headers
    --control-plane-api-keys --jwt-role-mapping --mesh-peer-urls --ca-cert-paths
""".split()  # noqa: SIM905

#: policies that need what engines over this wire do not tell; the nearest one here takes their place
POLICIES = {
    "cache_aware": "least_load",
    "prefix_hash": "least_load",
    "manual": "least_load",
    "consistent_hashing": "least_load",
    "bucket": "least_load",
}


class _Ignored(argparse.Action):
    """Notes that the flag was given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        namespace.ignored_flags = [*getattr(namespace, "ignored_flags", []), option_string or self.dest]


def add_ignored(parser: argparse.ArgumentParser, *, but: Collection[str] = ()) -> None:
    """Accept the flags of the tables above, `but` some that mean something after all, without showing them."""
    parser.set_defaults(ignored_flags=[])
    for names, nargs in ((SWITCHES, 0), (VALUES, None), (LISTS, "*")):
        for name in names:
            if name in but:
                continue
            parser.add_argument(
                name,
                action=_Ignored,
                nargs=nargs,
                dest="ignored_flags",
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )


def warn_ignored(args: argparse.Namespace) -> None:
    if args.ignored_flags:
        log.warning("these flags have no meaning here and are ignored: %s", " ".join(args.ignored_flags))


def known_policy(name: str) -> str:
    """The policy that is used when `name` is asked for; warns when it is another one."""
    if name in POLICIES:
        log.warning("--policy %s needs what engines do not tell over this wire; %s is used", name, POLICIES[name])
    return POLICIES.get(name, name)
