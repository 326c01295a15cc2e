"""Provokes errors of the installed libraries and reads them as the corpus stores them."""

import contextlib
import importlib.metadata
import io
import os
import re
import sys
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
class ProvokedSource:
    """Source of a corpus entry that was provoked: what was done, with which version of which library."""

    description: str
    library: str
    version: str


@dataclass(frozen=True)
class ProvokedError:
    """Class and text of an error, with placeholders instead of the paths of this machine."""

    error_type: str
    text: str


def parse_source(source: str) -> ProvokedSource | None:
    """Return the source of an entry that a provocation reproduces, or None for every other source."""
    prefix, _, details = source.partition(": ")
    description, _, origin = details.rpartition(", ")
    if prefix != "provoked" or description not in PROVOCATIONS:
        return None
    return ProvokedSource(description, *origin.split(" ", 1))


def installed_version(library: str) -> str:
    """Return the version of an installed library without its build, such as `+cpu`; of Python without the patch."""
    if library == "python":
        return "{}.{}".format(*sys.version_info)
    return importlib.metadata.version(library).partition("+")[0]


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
