"""Provokes errors of the installed libraries and reads them as the corpus stores them."""

import contextlib
import io
import os
import re
import sysconfig
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from testing.corpus.provoke import checkpoints, losses, network

MAX_TEXT_LENGTH = 400
PROVOCATIONS: dict[str, Callable[[Path], object]] = {
    **checkpoints.PROVOCATIONS,
    **losses.PROVOCATIONS,
    **network.PROVOCATIONS,
}
_SITE_PACKAGES = sysconfig.get_path("purelib")


@dataclass(frozen=True)
class ProvokedError:
    """Class and text of an error, with placeholders instead of the paths of this machine."""

    error_type: str
    text: str


def find_description(source: str) -> str | None:
    """Return the description in the source of an entry if a provocation reproduces it, otherwise None."""
    prefix, _, details = source.partition(": ")
    description = details.rpartition(", ")[0]
    return description if prefix == "provoked" and description in PROVOCATIONS else None


def provoke(description: str) -> ProvokedError:
    """Run the provocation of this description in an empty folder and return the error that it raises.

    Raises: AssertionError if the provocation does not raise an error.
    """
    with (
        tempfile.TemporaryDirectory() as name,
        contextlib.chdir(name),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(action="ignore"),
    ):
        try:
            PROVOCATIONS[description](Path(name))
        except (Exception, SystemExit) as error:
            return ProvokedError(_qualified_name(type(error)), _use_placeholders(str(error), Path(name)))
    raise AssertionError(f"{description}: no error was raised")


def _qualified_name(error_class: type[BaseException]) -> str:
    prefix = "" if error_class.__module__ == "builtins" else f"{error_class.__module__}."
    return prefix + error_class.__qualname__


def _use_placeholders(text: str, folder: Path) -> str:
    for path in (str(folder), os.path.realpath(folder)):
        text = text.replace(path, "/path/to")
    text = text.replace(_SITE_PACKAGES, "/venv/lib/python3.11/site-packages")
    text = re.sub(r"http://127\.0\.0\.1:\d+", "https://huggingface.co", text)
    return re.sub(r"host='127\.0\.0\.1', port=\d+", "host='huggingface.co', port=443", text)[:MAX_TEXT_LENGTH]
