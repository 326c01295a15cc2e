"""Publishes a result on the Hugging Face Hub."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)

from finetune_api.v1alpha1.output import PushToHub
from finetune_trainer.card_marker import CARD_FILE, is_generated
from finetune_trainer.errors import HubUnavailable, InvalidSpec, first_line

_REJECTIONS = (LocalTokenNotFoundError, HFValidationError, OfflineModeIsEnabled)
_PERMANENT_STATUSES = (400, 401, 403, 404, 409)  # HTTP status codes of errors that a retry cannot fix


def create_repository(target: PushToHub) -> None:
    """Create the repository if it does not exist, and check that the token may write to it."""
    with _translate_hub_errors(target):
        HfApi().create_repo(target.repo, private=target.private, exist_ok=True)
        HfApi().auth_check(target.repo, write=True)  # the repository may belong to another account


def upload(target: PushToHub, folder: Path, *, title: str, files: Sequence[str]) -> str:
    """Upload the folder in one commit and return the URL of the commit; keep a model card that somebody has edited."""
    with _translate_hub_errors(target):
        card = _read_card(target)
        is_kept = card is not None and not is_generated(card)
        if is_kept:
            print(f"{CARD_FILE} of {target.repo} was written or edited by somebody else and is kept", flush=True)
        commit = HfApi().upload_folder(
            repo_id=target.repo,
            folder_path=folder,
            allow_patterns=list(files),
            commit_message=f"Result of {title}",
            ignore_patterns=[CARD_FILE] if is_kept else None,
        )
        return str(commit.commit_url)


def _read_card(target: PushToHub) -> str | None:
    """Return the model card of the repository; None if it has none."""
    with TemporaryDirectory() as folder:
        try:
            path = HfApi().hf_hub_download(target.repo, CARD_FILE, cache_dir=folder)
        except EntryNotFoundError:
            return None
        return Path(path).read_text(encoding="utf-8", errors="replace")


@contextmanager
def _translate_hub_errors(target: PushToHub) -> Iterator[None]:
    """Raise InvalidSpec for errors that the user must fix, and HubUnavailable for retryable errors."""
    try:
        yield
    except (httpx2.HTTPError, OSError, *_REJECTIONS) as error:
        if not _is_permanent(error):
            raise HubUnavailable(f'publishing "{target.repo}" on the Hub failed: {first_line(error)}') from error
        raise InvalidSpec(
            f'spec.output.pushToHub: the Hub rejected "{target.repo}" ({first_line(error)}); set HF_TOKEN, from a'
            " Secret in spec.env, to a token with write access, or correct repo"
        ) from error


def _is_permanent(error: Exception) -> bool:
    """Return whether a retry cannot help."""
    if isinstance(error, HfHubHTTPError):
        return error.response is not None and error.response.status_code in _PERMANENT_STATUSES
    return isinstance(error, _REJECTIONS)
