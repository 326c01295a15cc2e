"""Tests that an attempt claims an output folder only with the rows of its newest checkpoint."""

from pathlib import Path

import pytest

from finetune_trainer.checkpoint.checkpoints import Checkpoints
from finetune_trainer.checkpoint.output_folder import OutputFolder
from finetune_trainer.checkpoint.row_identity import RowIdentity, check_trained_rows
from finetune_trainer.errors import OutputError
from testing.builders.checkpoint import write_checkpoint
from testing.builders.identity import identity

OUTPUT = Path("/output/job")
TRAINED = {
    "train rows": "1",
    "train file /data/a rows": "a",
    "train file /data/b": "b",
    "train tokenizer": "t",
    "train chat template": "c",
    "train release": "x 1",
    "eval rows": "2",
    "eval file /data/e": "e",
    "eval release": "x 1",
}


@pytest.mark.parametrize(
    ("current", "causes"),
    [
        ({"train rows": "9", "train file /data/b": "9"}, "/data/b has changed"),
        ({"train rows": "9", "train file /data/c": "c"}, "/data/c was added"),
        ({"train rows": "9", "train file /data/b": None}, "/data/b was removed"),
        ({"eval rows": "9", "eval file /data/e": "9"}, "/data/e has changed"),
        (
            {"train rows": "9", **{f"train file /data/{name}": "9" for name in ("a rows", "b", "c", "d")}},
            "/data/a rows has changed, /data/b has changed, /data/c was added and 1 more",
        ),
        ({"train rows": "9", "train file /data/b": "9", "train tokenizer": "9"}, "/data/b has changed"),
        (
            {"train rows": "9", "train tokenizer": "9", "train chat template": "9"},
            "the tokenizer has changed, the chat template has changed",
        ),
        ({"train rows": "9", "train release": "x 2", "eval release": "x 2"}, "the release has changed from x 1 to x 2"),
        ({"train rows": "9", "train new": "1"}, "nothing that is recorded has changed, so that the chat template may"),
    ],
    ids=["changed", "added", "removed", "evaluation", "many", "file first", "tokenizer", "release", "unknown"],
)
def test_other_rows_are_refused_with_their_cause(current: dict[str, str | None], causes: str) -> None:
    found = {key: value for key, value in {**TRAINED, **current}.items() if value is not None}

    with pytest.raises(OutputError) as raised:
        check_trained_rows(OUTPUT, TRAINED, found)

    assert str(raised.value).startswith(f"/output/job holds checkpoints that were trained on other rows: {causes}")
    assert str(raised.value).endswith(
        "; restore the rows, or create a job with another output.subPath, which starts a new training; the checkpoints"
        " stay as they are"
    )


def test_equal_rows_go_on_whatever_they_were_computed_from(capsys: pytest.CaptureFixture[str]) -> None:
    others = {key: value if key.endswith(" rows") else "9" for key, value in TRAINED.items() if " file " not in key}

    check_trained_rows(OUTPUT, TRAINED, {**others, "train file /data/renamed": "a", "train rule for plain text": "new"})

    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("current", [{}, TRAINED], ids=["unknown", "known"])
def test_a_checkpoint_without_a_row_identity_is_resumed_with_a_line(
    current: RowIdentity, capsys: pytest.CaptureFixture[str]
) -> None:
    check_trained_rows(OUTPUT, {}, current)

    assert capsys.readouterr().out == (
        "/output/job: rows are not verified, because the newest checkpoint does not identify its rows\n"
    )


@pytest.mark.parametrize("name", ["train", "eval"])
def test_rows_that_the_release_of_the_checkpoint_rendered_otherwise_are_refused(name: str) -> None:
    with pytest.raises(OutputError, match=r"computed other targets for plain text.*cache/tokens; restore that folder"):
        check_trained_rows(OUTPUT, {}, {**TRAINED, f"{name} rule for plain text": "new"})


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_attempt_with_other_rows_does_not_claim_the_folder(output: OutputFolder, overwrite: bool) -> None:
    checkpoints = Checkpoints(output, keep_last=9, rows=TRAINED)
    write_checkpoint(checkpoints, 1)
    write_checkpoint(checkpoints, 2)
    (output.checkpoints / "step-00000002" / "manifest.json").write_text("{")
    later = OutputFolder(output.root, identity(attempt=1))

    with pytest.raises(OutputError, match="trained on other rows"):
        later.claim(overwrite=overwrite, rows={"train rows": "others"})

    output.check_holder()
    later.claim(overwrite=overwrite, rows=TRAINED)


def test_the_rows_of_checkpoints_that_will_be_moved_aside_are_not_compared(output: OutputFolder) -> None:
    write_checkpoint(Checkpoints(output, keep_last=9, rows=TRAINED), 1)
    recreated = OutputFolder(output.root, identity(uid="new", name="job-ours"))
    others = (identity(uid="new"), identity(uid="new", name="job-ours", fingerprint="f2"))

    assert recreated.read_trained_rows(overwrite=False) == output.read_trained_rows(overwrite=True) == TRAINED
    assert recreated.read_trained_rows(overwrite=True) is None
    assert [OutputFolder(output.root, other).read_trained_rows(overwrite=False) for other in others] == [None, None]
    recreated.claim(overwrite=True, rows={"train rows": "others"})
