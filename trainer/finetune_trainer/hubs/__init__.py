"""Publishes results on the Hugging Face Hub or ModelScope, in addition to the output volume."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from finetune_api.v1alpha1.output import PushToHub


def create_repository(target: PushToHub) -> None:
    """Create the repository if it does not exist, and check write access before training starts.

    Raises: InvalidSpec if the hub rejects the request, HubUnavailable if it is down or unreachable.
    """
    _import_client(target).create_repository(target)


def upload(target: PushToHub, folder: Path, *, title: str, files: Sequence[str]) -> str:
    """Upload these files of `folder` (escaped as for glob) that are new or changed, and return the URL of the result.

    Raises: InvalidSpec if the hub rejects the request, HubUnavailable if it is down or unreachable.
    """
    url: str = _import_client(target).upload(target, folder, title=title, files=files)
    return url


def _import_client(target: PushToHub) -> ModuleType:
    """Import the client of the specified hub only, because each client requires a different library."""
    return import_module(f"{__name__}.{target.hub}")
