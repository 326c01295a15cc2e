"""The result on ModelScope, by its own client (https://pypi.org/project/modelscope-hub)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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

_REFUSALS = (AuthenticationError, InvalidParameter, NotExistError, PermissionDeniedError, QuotaExceededError)


def make_repository(target: PushToHub) -> None:
    with _explained(target):
        api = HubApi()
        api.whoami()  # of a repository that exists nothing else asks for the token before the upload
        try:
            visibility = "private" if target.private else "public"
            api.create_repo(
                target.repo, "model", visibility=visibility, license="Other"
            )  # else it is said to be Apache's
        except AlreadyExistsError:
            return


def upload(target: PushToHub, folder: Path, *, title: str) -> str:
    with _explained(target):
        api = HubApi()
        said = f"Result of {title}"
        # its cache would lie among what is uploaded
        api.upload_folder(target.repo, "model", folder, commit_message=said, use_cache=False, disable_tqdm=True)
        return f"{api.legacy.endpoint}/models/{target.repo}"


@contextmanager
def _explained(target: PushToHub) -> Iterator[None]:
    try:
        yield
    except _REFUSALS as error:
        raise InvalidSpec(
            f'spec.output.pushToHub: ModelScope refuses "{target.repo}" ({first_line(error)}); give'
            " MODELSCOPE_API_TOKEN, from a Secret in spec.env, of somebody who may write there, or correct repo"
        ) from error
    except (HubError, RequestException, OSError) as error:
        raise HubUnavailable(f'ModelScope could not take "{target.repo}": {first_line(error)}') from error
