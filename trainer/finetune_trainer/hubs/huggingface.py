"""The result on the Hugging Face Hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

from finetune_api.v1alpha1.output import PushToHub
from finetune_trainer.errors import HubUnavailable, InvalidSpec, first_line

_REFUSED = (400, 401, 403, 404, 409)  # statuses that asking again does not change


def make_repository(target: PushToHub) -> None:
    with _explained(target):
        HfApi().create_repo(target.repo, private=target.private, exist_ok=True)
        HfApi().auth_check(target.repo, write=True)  # one that exists already may be somebody else's


def upload(target: PushToHub, folder: Path, *, title: str) -> str:
    with _explained(target):
        commit = HfApi().upload_folder(repo_id=target.repo, folder_path=folder, commit_message=f"Result of {title}")
        return str(commit.commit_url)


@contextmanager
def _explained(target: PushToHub) -> Iterator[None]:
    try:
        yield
    except HfHubHTTPError as error:
        if error.response is None or error.response.status_code not in _REFUSED:
            raise HubUnavailable(f'the Hub could not take "{target.repo}": {first_line(error)}') from error
        raise _refused(target, error) from error
    except (LocalTokenNotFoundError, HFValidationError, OfflineModeIsEnabled) as error:
        raise _refused(target, error) from error
    except (httpx2.HTTPError, OSError) as error:
        raise HubUnavailable(f'the Hub could not take "{target.repo}": {first_line(error)}') from error


def _refused(target: PushToHub, error: Exception) -> InvalidSpec:
    return InvalidSpec(
        f'spec.output.pushToHub: the Hub refuses "{target.repo}" ({first_line(error)}); give HF_TOKEN, from a Secret'
        " in spec.env, of somebody who may write there, or correct repo"
    )
