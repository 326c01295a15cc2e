"""Where results are published beside the output: the Hugging Face Hub or ModelScope."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

from finetune_api.v1alpha1.output import PushToHub


def make_repository(target: PushToHub) -> None:
    """If it is not there yet. What would forbid the upload at the end should show before the first step.

    Raises InvalidSpec where the hub refuses, HubUnavailable where it does not answer.
    """
    _client(target).make_repository(target)


def upload(target: PushToHub, folder: Path, *, title: str) -> str:
    """Where it can be seen. A file that is there already as it is travels no second time. Raises as above."""
    address: str = _client(target).upload(target, folder, title=title)
    return address


def _client(target: PushToHub) -> ModuleType:
    """Only the one that is asked for: each brings libraries of its own."""
    return import_module(f"{__name__}.{target.hub}")
