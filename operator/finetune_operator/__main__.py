"""`python -m finetune_operator`: flags, each with an environment variable behind it."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from finetune_operator import names
from finetune_operator.kube.credentials import NoAccess
from finetune_operator.manager.json_logging import configure_logs
from finetune_operator.manager.manager import Options, operate
from finetune_operator.plan.run_plan import Settings
from finetune_operator.plan.supervisor_bundle import SupervisorMissing, pack_supervisor

LEVELS = ("debug", "info", "warning", "error")

logger = logging.getLogger("finetune_operator")


def main() -> None:
    """Run until SIGTERM; exit code 2 for what a person must change, 1 for what a restart may mend."""
    flags = parse_flags(sys.argv[1:], os.environ)
    configure_logs(flags.log_level)
    try:
        asyncio.run(operate(build_options(flags)))
    except (NoAccess, SupervisorMissing) as error:
        logger.error("%s", error)
        sys.exit(2)
    except Exception:  # the outermost loop: one line of JSON, not a bare traceback
        logger.critical("the operator stops", exc_info=True)
        sys.exit(1)


def parse_flags(arguments: Sequence[str], environment: Mapping[str, str]) -> argparse.Namespace:
    """What is not given as a flag comes from the environment; a bad value of either ends the program with its name."""
    parser = argparse.ArgumentParser(prog="finetune-operator", description="Runs FineTuneJobs.")

    def add(flag: str, text: str, *, default: str = "", kind: Callable[[str], Any] = str, **more: Any) -> None:
        variable = "FINETUNE_" + flag.removeprefix("--").replace("-", "_").upper()
        value = environment.get(variable, default)  # a string, which argparse checks as it does a flag
        parser.add_argument(flag, default=value, type=kind, help=f"{text} [{variable}]", **more)

    add("--trainer-image", "image of jobs that name none")
    add("--cluster-domain", "DNS domain of the cluster", default="cluster.local")
    add("--kubeconfig", "kubeconfig to use outside of a cluster")
    add("--context", "context of the kubeconfig")
    add("--metrics-port", "port of /metrics, /healthz and /readyz", default="8080", kind=int)
    add("--lease-name", "Lease in the operator's namespace", default=names.MANAGER)
    add("--workers", "jobs that get a pass at the same time", default="16", kind=_positive)
    add("--log-level", ", ".join(LEVELS), default="info", kind=_level)
    parser.add_argument(
        "--namespace",
        action="append",
        dest="namespaces",
        help="serve this namespace only; may be repeated [FINETUNE_NAMESPACES, separated by commas]",
    )
    parser.add_argument(
        "--leader-election",
        action=argparse.BooleanOptionalAction,
        default=environment.get("FINETUNE_LEADER_ELECTION", "true").lower() != "false",
        help="act only while holding the Lease [FINETUNE_LEADER_ELECTION, true or false]",
    )
    flags = parser.parse_args(arguments)
    if flags.namespaces is None:
        flags.namespaces = [name for name in environment.get("FINETUNE_NAMESPACES", "").split(",") if name]
    if not flags.trainer_image:
        parser.error("--trainer-image is missing: name the image that jobs without spec.image run in")
    return flags


def build_options(flags: argparse.Namespace) -> Options:
    """The flags with their types."""
    return Options(
        settings=Settings(
            trainer_image=flags.trainer_image, supervisor=pack_supervisor(), cluster_domain=flags.cluster_domain
        ),
        namespaces=tuple(dict.fromkeys(flags.namespaces)),
        kubeconfig=flags.kubeconfig or None,
        context=flags.context or None,
        metrics_port=flags.metrics_port,
        leader_election=flags.leader_election,
        lease_name=flags.lease_name,
        workers=flags.workers,
    )


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


def _level(text: str) -> str:
    if text.lower() not in LEVELS:
        raise argparse.ArgumentTypeError(f"{text}: must be one of {', '.join(LEVELS)}")
    return text.lower()


if __name__ == "__main__":
    main()
