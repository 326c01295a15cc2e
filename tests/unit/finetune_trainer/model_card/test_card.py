"""Tests of the model card: its metadata, its content, and that a card of a user is kept."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from finetune_trainer.card_marker import is_generated, mark_generated
from finetune_trainer.data_sources.file_digests import FileDigest
from finetune_trainer.model_card.card import CardContent, DataFacts, render_card, render_curves
from finetune_trainer.model_card.collect import write_model_card
from finetune_trainer.model_card.usage_code import LoadableResult
from testing.builders.run_summary import HISTORY, SUMMARY

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONTENT = CardContent(
    title="default/first",
    result=LoadableResult(
        auto_class="AutoModelForCausalLM",
        base_model="Qwen/Qwen2.5-7B-Instruct",
        base_revision=COMMIT,
        is_adapter=True,
        has_vision=False,
        location="acme/support",
    ),
    is_base_on_hub=True,
    pipeline_tag="text-generation",
    tags=("finetune-operator", "sft", "lora"),
    hub_datasets=("acme/rows",),
    description="A LoRA adapter.",
    summary=SUMMARY,
    data=(
        DataFacts(
            "Training",
            ("acme/rows split train",),
            {"rows": "9 of 10", "tokens": "100"},
            (FileDigest(f"/output/cache/hub/acme--rows@{COMMIT}/data/train.jsonl", 7, "ab" * 32),),
        ),
    ),
    settings={"training.learningRate": "0.0003"},
    log_history=[{"step": step, "loss": 1 / step, "learning_rate": 1e-4} for step in range(1, 5)],
    environment={"torch": "2.13.0"},
)


def read_metadata(card: str) -> Any:
    """Return the metadata as the Hub reads it."""
    return ModelCard(card).data


def test_the_metadata_names_base_model_library_task_and_datasets() -> None:
    data = read_metadata(render_card(CONTENT))

    assert data.to_dict() == {
        "base_model": "Qwen/Qwen2.5-7B-Instruct",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "datasets": ["acme/rows"],
        "tags": ["finetune-operator", "sft", "lora"],
    }


def test_metadata_of_a_full_model_from_a_path_names_no_base_model() -> None:
    result = replace(CONTENT.result, is_adapter=False, base_model="/models/base", base_revision=None)

    data = read_metadata(render_card(replace(CONTENT, result=result, is_base_on_hub=False, hub_datasets=())))

    assert (data.library_name, data.base_model, data.datasets) == ("transformers", None, None)
    assert "base_model_relation" not in data


def test_the_card_contains_data_hashes_settings_curves_attempts_and_versions() -> None:
    card = render_card(CONTENT)

    for text in (
        f"| `acme/rows@{COMMIT}: data/train.jsonl` | 7 | `{'ab' * 32}` |",
        "| rows | 9 of 10 |",
        "| training.learningRate | `0.0003` |",
        "| 4 | 0.25 | 0.0001 |",
        "| 0 | 0 to 12 | 1 h 0 min | `node 1, rank 1: OutOfMemoryError` |  |",
        "`batch: 2 x 1 x 2 = 4 → 1 x 2 x 2 = 4`",
        "| torch | 2.13.0 |",
    ):
        assert text in card
    assert "[More Information Needed]" not in card


def test_messages_of_errors_are_not_in_the_card() -> None:
    assert "CUDA out of memory" not in render_card(CONTENT)


def test_a_run_without_restarts_has_no_section_about_attempts() -> None:
    summary = replace(SUMMARY, history=replace(HISTORY, restarts=0, attempts=HISTORY.attempts[1:]))

    assert "## Attempts" not in render_card(replace(CONTENT, summary=summary))


def test_a_hostile_text_adds_no_heading_html_or_metadata() -> None:
    text = "x\n---\nlicense: mit\n---\n# heading <img src=x>\n```"
    result = replace(CONTENT.result, base_model=text, location=text)
    data = (replace(CONTENT.data[0], sources=(text,), files=(FileDigest(text, 1, "00"),)),)

    card = render_card(
        replace(CONTENT, title=text, result=result, data=data, settings={"a": text}, environment={"b": text})
    )

    body = card.split("\n---\n", 1)[1]
    lines = body.splitlines()
    assert read_metadata(card).license is None
    assert not [line for line in lines if line.startswith(("license", "# heading", "---"))]
    assert len([line for line in lines if line.startswith("```")]) == 2
    assert len([line for line in lines if line.startswith("# ")]) == 1


@pytest.mark.parametrize("count", [1, 12, 13, 10_000])
def test_curves_have_at_most_twelve_rows_with_the_first_and_the_last_step(count: int) -> None:
    log: list[dict[str, Any]] = [{"step": step, "loss": 1.0} for step in range(1, count + 1)]

    rows = render_curves(log).splitlines()[2:]

    assert len(rows) == min(count, 12)
    assert (rows[0], rows[-1]) == ("| 1 | 1 |", f"| {count} | 1 |")


def test_curves_contain_training_and_evaluation_of_the_same_step_in_one_row() -> None:
    table = render_curves([{"step": 5, "loss": 2.0}, {"step": 5, "eval_loss": 1.5}, {"step": 5, "train_runtime": 1.0}])

    assert table.splitlines() == [
        "| step | training loss | evaluation loss |",
        "| --- | --- | --- |",
        "| 5 | 2 | 1.5 |",
    ]


@pytest.mark.parametrize(
    ("edit", "is_ours"),
    [
        pytest.param(lambda card: card, True, id="unchanged"),
        pytest.param(lambda card: card.replace("\n", "\r\n"), True, id="other line ends"),
        pytest.param(lambda card: card + "\n", True, id="another empty line"),
        pytest.param(lambda card: card.replace("---\n", "---\nlicense: mit\n", 1), False, id="with a licence"),
        pytest.param(lambda card: card + "More text.\n", False, id="with more text"),
        pytest.param(lambda _: "# My card\n", False, id="written by a user"),
    ],
)
def test_an_edited_card_does_not_count_as_generated(edit: Any, is_ours: bool) -> None:
    assert is_generated(edit(mark_generated("---\ntags: []\n---\n# Card\n"))) is is_ours


def test_a_link_in_the_published_result_is_not_kept_as_a_card(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    (tmp_path / "result").mkdir()
    (tmp_path / "result" / "README.md").symlink_to(tmp_path / "key")
    (tmp_path / "staged").mkdir()

    write_model_card(CONTENT, tmp_path / "staged", published=tmp_path / "result")

    assert (tmp_path / "staged" / "README.md").read_text() == render_card(CONTENT)


@pytest.mark.parametrize("is_edited", [False, True])
def test_an_edited_card_of_the_published_result_is_kept(tmp_path: Path, is_edited: bool) -> None:
    published, staged = tmp_path / "result", tmp_path / "staged"
    published.mkdir()
    staged.mkdir()
    existing = mark_generated("# Earlier\n") + ("license: mit\n" if is_edited else "")
    (published / "README.md").write_text(existing)
    (staged / "README.md").write_text("the template of peft")

    write_model_card(CONTENT, staged, published=published)

    assert (staged / "README.md").read_text() == (existing if is_edited else render_card(CONTENT))
