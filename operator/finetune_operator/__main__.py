"""Entry point of `python -m finetune_operator`. The default of every flag is an environment variable."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from yarl import URL

from finetune_operator import names
from finetune_operator.kube.credentials import NoClusterAccess
from finetune_operator.manager.json_logging import configure_logging
from finetune_operator.manager.manager import OperatorOptions, run_operator
from finetune_operator.notifications.sink import (
    DEFAULT_SOURCE,
    SIGNING_KEY_FILE,
    TOKEN_FILE,
    URL_FILE,
    InvalidSink,
    SinkConfig,
    parse_sink_url,
)
from finetune_operator.plan.supervisor_bundle import SupervisorMissing, pack_supervisor
from finetune_operator.settings import Settings

# The API server accepts objects with up to 10,000 levels of nesting. Python's default limit of 1,000 frames would end
# the process at each LIST that contains such an object. 10,000 levels need less than 2 MB of the stack (decisions/121).
RECURSION_LIMIT = 50_000
LOG_LEVELS = ("debug", "info", "warning", "error")

logger = logging.getLogger("finetune_operator")


def main() -> None:
    """Run the operator until SIGTERM.

    Exit codes: 2 for a configuration error, 1 for an error that a restart may fix.
    """
    flags = parse_flags(sys.argv[1:], os.environ)
    configure_logging(flags.log_level)
    sys.setrecursionlimit(RECURSION_LIMIT)
    try:
        asyncio.run(run_operator(build_options(flags)))
    except (NoClusterAccess, SupervisorMissing) as error:
        logger.error("%s", error)
        sys.exit(2)
    except Exception:  # top level: log the traceback as one JSON line
        logger.critical("unexpected error, exiting", exc_info=True)
        sys.exit(1)


def parse_flags(arguments: Sequence[str], environment: Mapping[str, str]) -> argparse.Namespace:
    """Parse the flags, with defaults from environment variables; exit with code 2 if a value is invalid."""
    parser = argparse.ArgumentParser(prog="finetune-operator", description="Runs FineTuneJobs.")

    def name_variable(flag: str) -> str:
        return "FINETUNE_" + flag.removeprefix("--").replace("-", "_").upper()

    def add_flag(flag: str, description: str, *, default: str = "", parse: Callable[[str], Any] = str) -> None:
        variable = name_variable(flag)
        value = environment.get(variable, default)  # argparse also applies `type` to a default that is a string
        parser.add_argument(flag, default=value, type=parse, help=f"{description} [{variable}]")

    def add_switch(flag: str, description: str) -> None:
        variable = name_variable(flag)
        if (value := environment.get(variable, "true").lower()) not in ("true", "false"):
            parser.error(f"{variable}: found {value}; set it to true or false")
        description = f"{description} [{variable}, true or false]"
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=value == "true", help=description)

    add_flag("--trainer-image", "image of jobs without spec.image")
    add_flag("--cluster-domain", "DNS domain of the cluster", default="cluster.local")
    add_flag(
        "--default-ttl-seconds",
        "seconds until finished jobs without spec.ttlSecondsAfterFinished are deleted; empty: never",
        parse=_parse_ttl_seconds,
    )
    add_flag(
        "--notification-url",
        "HTTP endpoint for notifications; empty: as in the secrets, or none",
        parse=_parse_notification_url,
    )
    add_flag("--notification-source", "attribute source of notifications", default=DEFAULT_SOURCE)
    add_flag("--notification-secrets", f"folder with {URL_FILE}, {TOKEN_FILE} and {SIGNING_KEY_FILE}, each optional")
    add_flag("--kubeconfig", "kubeconfig, for running outside of a cluster")
    add_flag("--context", "context of the kubeconfig")
    add_flag("--metrics-port", "port of /metrics, /healthz and /readyz", default="8080", parse=int)
    add_flag("--lease-name", "Lease in the operator's namespace", default=names.MANAGER)
    add_flag("--workers", "jobs that are reconciled at the same time", default="16", parse=_parse_positive_integer)
    add_flag(
        "--max-job-metrics",
        "jobs with metrics of their own: unfinished ones, then the latest finished ones; 0 for none",
        default="1000",
        parse=_parse_count,
    )
    add_flag("--log-level", ", ".join(LOG_LEVELS), default="info", parse=_parse_log_level)
    parser.add_argument(
        "--namespace",
        action="append",
        dest="namespaces",
        help="serve this namespace only; may be repeated [FINETUNE_NAMESPACES, separated by commas]",
    )
    add_switch("--leader-election", "act only while holding the Lease")
    add_switch("--delete-finished-jobs", "delete jobs after their TTL")
    flags = parser.parse_args(arguments)
    if flags.namespaces is None:
        flags.namespaces = [name for name in environment.get("FINETUNE_NAMESPACES", "").split(",") if name]
    if not flags.trainer_image:
        parser.error("--trainer-image is missing: name the image that jobs without spec.image run in")
    return flags


def build_options(flags: argparse.Namespace) -> OperatorOptions:
    """Convert the parsed flags to the manager's options."""
    return OperatorOptions(
        settings=Settings(
            trainer_image=flags.trainer_image,
            version=_read_version(),
            supervisor=pack_supervisor(),
            cluster_domain=flags.cluster_domain,
            default_ttl_seconds=flags.default_ttl_seconds,
            delete_finished_jobs=flags.delete_finished_jobs,
        ),
        namespaces=tuple(dict.fromkeys(flags.namespaces)),
        kubeconfig=flags.kubeconfig or None,
        context=flags.context or None,
        metrics_port=flags.metrics_port,
        leader_election=flags.leader_election,
        lease_name=flags.lease_name,
        workers=flags.workers,
        sink=_build_sink_config(flags),
        max_job_metrics=flags.max_job_metrics,
    )


def _build_sink_config(flags: argparse.Namespace) -> SinkConfig | None:
    if flags.notification_url is None and not flags.notification_secrets:
        return None
    secrets = Path(flags.notification_secrets) if flags.notification_secrets else None
    return SinkConfig(flags.notification_url, flags.notification_source or DEFAULT_SOURCE, secrets)


def _parse_notification_url(text: str) -> URL | None:
    try:
        return parse_sink_url(text) if text else None
    except InvalidSink as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _read_version() -> str:
    try:
        return metadata.version(names.MANAGER)
    except metadata.PackageNotFoundError:  # running from a source tree, without package metadata
        return "dev"


def _parse_positive_integer(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


def _parse_count(text: str) -> int:
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text}: must not be negative")
    return number


def _parse_ttl_seconds(text: str) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or not text.isascii():
        raise argparse.ArgumentTypeError(f"{text}: must be a number of seconds, or empty to keep finished jobs")
    return int(text)


def _parse_log_level(text: str) -> str:
    if text.lower() not in LOG_LEVELS:
        raise argparse.ArgumentTypeError(f"{text}: must be one of {', '.join(LOG_LEVELS)}")
    return text.lower()


if __name__ == "__main__":
    main()
