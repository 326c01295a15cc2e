"""The rows that a checkpoint was trained on; training resumes from it on the same rows only (decisions/547)."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from finetune_trainer.errors import OutputError

# What identifies the rows of a job: keys consist of the name of a dataset and one of the keys below.
RowIdentity = Mapping[str, str]

_DATASETS = ("train", "eval")
ROWS = "rows"  # digest of the tokenized rows; the other keys only explain why it differs
FILE_PREFIX = "file "  # before the path of a file with rows; the value is its sha256
RELEASE = "release"
MEDIA = "content of images or videos"
PLAIN_TEXT_RULE = "rule for plain text"  # only with rows to which releases without a row identity gave other targets
_MAX_NAMED = 3
_ADVICE = "create a job with another output.subPath, which starts a new training; the checkpoints stay as they are"


def check_trained_rows(folder: Path, trained: RowIdentity, current: RowIdentity) -> None:
    """Check that the rows of this attempt are those of the newest checkpoint.

    trained: identity that the checkpoint contains; empty if a release without row identities wrote it.
    Raises: OutputError that names the cause of a difference.
    """
    if any(f"{name} {ROWS}" not in trained and f"{name} {PLAIN_TEXT_RULE}" in current for name in _DATASETS):
        raise OutputError(
            f"{folder} holds checkpoints of a release that computed other targets for plain text, and the rows that it"
            " tokenized are no longer in cache/tokens; restore that folder or set spec.image to the image of that"
            f" release, or {_ADVICE}"
        )
    digests = (f"{name} {ROWS}" for name in _DATASETS)
    if any(trained.get(key, current.get(key)) != current.get(key) for key in digests):
        causes = tuple(dict.fromkeys(_list_causes(trained, current)))
        more = f" and {len(causes) - _MAX_NAMED} more" if len(causes) > _MAX_NAMED else ""
        raise OutputError(
            f"{folder} holds checkpoints that were trained on other rows: {', '.join(causes[:_MAX_NAMED])}{more};"
            f" restore the rows, or {_ADVICE}"
        )
    if f"train {ROWS}" not in trained:
        print(f"{folder}: rows are not verified, because the newest checkpoint does not identify its rows", flush=True)


def _list_causes(trained: RowIdentity, current: RowIdentity) -> Iterator[str]:
    """Yield the files that differ, or else what else was recorded about the tokenization and differs."""
    changed = {key: key.partition(" ")[2] for key in {**trained, **current} if trained.get(key) != current.get(key)}
    files = {key: name.removeprefix(FILE_PREFIX) for key, name in changed.items() if name.startswith(FILE_PREFIX)}
    for key, path in files.items():
        yield f"{path} {'was added' if key not in trained else 'has changed' if key in current else 'was removed'}"
    others = [(key, name) for key, name in changed.items() if name != ROWS and trained.keys() & current.keys() >= {key}]
    for key, name in () if files else others:
        yield f"the {name} has changed" + (f" from {trained[key]} to {current[key]}" if name == RELEASE else "")
    if not files and not others:
        yield "nothing that is recorded has changed, so that the chat template may insert the date"
