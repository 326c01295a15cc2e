"""One JSON object per line on stderr: time, level, logger, message, and what a record adds, such as `job`."""

import logging
import sys

from pythonjsonlogger.json import JsonFormatter

QUIET = {
    "kopf": logging.WARNING,  # it tells of every event, twice
    "aiohttp.access": logging.WARNING,
    "asyncio": logging.WARNING,
}


def configure_logs(level: str) -> None:
    """Replace whatever handlers there are."""
    formatter = JsonFormatter(
        "{levelname}{name}{message}",
        style="{",
        rename_fields={"levelname": "level", "name": "logger", "timestamp": "time", "exc_info": "error"},
        reserved_attrs=[*_standard_fields(), "k8s_ref", "k8s_skip", "settings"],  # kopf's own
        timestamp=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name, quiet in QUIET.items():
        logging.getLogger(name).setLevel(max(quiet, logging.getLogger().level))


def _standard_fields() -> list[str]:
    return [*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"]
