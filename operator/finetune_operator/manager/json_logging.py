"""Configures logging to stderr as one JSON object per line, with extra fields such as `job`."""

import logging
import sys

from pythonjsonlogger.json import JsonFormatter

MINIMUM_LEVELS = {
    "kopf": logging.WARNING,  # kopf logs every event twice
    "aiohttp.access": logging.WARNING,
    "asyncio": logging.WARNING,
}


def configure_logging(level: str) -> None:
    """Replace the handlers of the root logger by one that writes JSON lines from this level on."""
    formatter = JsonFormatter(
        "{levelname}{name}{message}",
        style="{",
        rename_fields={"levelname": "level", "name": "logger", "timestamp": "time", "exc_info": "error"},
        reserved_attrs=[*_list_standard_fields(), "k8s_ref", "k8s_skip", "settings"],  # extra fields that kopf adds
        timestamp=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name, minimum_level in MINIMUM_LEVELS.items():
        logging.getLogger(name).setLevel(max(minimum_level, logging.getLogger().level))


def _list_standard_fields() -> list[str]:
    return [*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"]
