"""Publishes a result on ModelScope with its client (https://pypi.org/project/modelscope-hub)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modelscope_hub import HubApi
from modelscope_hub.errors import (
    AlreadyExistsError,
    AuthenticationError,
    HubError,
    InvalidParameter,
    NotExistError,
    PermissionDeniedError,
    QuotaExceededError,
)
from requests import RequestException

from finetune_api.v1alpha1.output import PushToHub
from finetune_trainer.errors import HubUnavailable, InvalidSpec, first_line

_PERMANENT_ERRORS = (AuthenticationError, InvalidParameter, NotExistError, PermissionDeniedError, QuotaExceededError)


def create_repository(target: PushToHub) -> None:
    """Create the repository if it does not exist, and check that the token is valid."""
    with _translate_hub_errors(target):
        api = HubApi()
        api.whoami()  # validate the token even if the repository exists
        try:
            visibility = "private" if target.private else "public"
            # Set the license, because the default is Apache 2.0.
            api.create_repo(target.repo, "model", visibility=visibility, license="Other")
        except AlreadyExistsError:
            return


def upload(target: PushToHub, folder: Path, *, title: str, files: Sequence[str]) -> str:
    """Upload the folder and return the URL of the repository."""
    with _translate_hub_errors(target):
        api = HubApi()
        # Disable the cache, which the client would write into the uploaded folder.
        options: dict[str, Any] = {"allow_patterns": list(files), "use_cache": False, "disable_tqdm": True}
        api.upload_folder(target.repo, "model", folder, commit_message=f"Result of {title}", **options)
        return f"{api.legacy.endpoint}/models/{target.repo}"


@contextmanager
def _translate_hub_errors(target: PushToHub) -> Iterator[None]:
    """Raise InvalidSpec for errors that the user must fix, and HubUnavailable for retryable errors."""
    try:
        yield
    except _PERMANENT_ERRORS as error:
        raise InvalidSpec(
            f'spec.output.pushToHub: ModelScope rejected "{target.repo}" ({first_line(error)}); set'
            " MODELSCOPE_API_TOKEN, from a Secret in spec.env, to a token with write access, or correct repo"
        ) from error
    except (HubError, RequestException, OSError) as error:
        raise HubUnavailable(f'publishing "{target.repo}" on ModelScope failed: {first_line(error)}') from error
