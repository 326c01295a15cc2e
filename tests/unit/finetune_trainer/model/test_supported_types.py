"""Tests the rejection of model types that cannot be trained."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.model.load import read_config
from finetune_trainer.model.supported_types import check_needs_no_remote_code, check_towers
from finetune_trainer.vision.families import FAMILIES
from finetune_trainer.vision.towers import find_towers
from testing.models import tiny_families, tiny_towers


@pytest.mark.parametrize("model_type", tiny_towers.CONFIGS)
def test_towers_of_other_families_are_rejected_with_the_offer_of_text_training(model_type: str) -> None:
    with pytest.raises(InvalidSpec) as raised:
        check_towers(ModelSource(name="acme/eyes"), tiny_towers.build_config(model_type))

    message = str(raised.value)
    assert message.startswith(f'spec.model.name: "acme/eyes" is of type {model_type}, whose ')
    assert "set spec.model.textOnly: true to train its text part and keep the rest unchanged" in message
    assert f"choose a vision-language model of type {', '.join(FAMILIES)}" in message


@pytest.mark.parametrize("model_type", ["qwen2_5_omni", "kosmos-2"])
def test_text_training_is_not_offered_if_the_model_cannot_be_trained_on_text(model_type: str) -> None:
    with pytest.raises(InvalidSpec) as raised:
        check_towers(ModelSource(name="acme/eyes"), CONFIG_MAPPING[model_type]())

    assert f"is of type {model_type}" in str(raised.value)
    assert "textOnly" not in str(raised.value)


@pytest.mark.parametrize(
    ("model_type", "towers"),
    [
        ("gemma4", ("vision_config", "audio_config")),
        ("qwen2_5_omni", ("thinker_config.audio_config", "thinker_config.vision_config")),
        ("voxtral", ("audio_config",)),
        ("chameleon", ("chameleon",)),
        ("fuyu", ("fuyu",)),
        ("granite_speech", ("granite_speech",)),
        ("qwen3_5_text", ()),
        ("gemma3_text", ()),
    ],
)
def test_towers_are_found_at_any_depth(model_type: str, towers: tuple[str, ...]) -> None:
    config = tiny_towers.build_config("gemma4") if model_type == "gemma4" else CONFIG_MAPPING[model_type]()

    found = find_towers(config)

    assert set(towers) <= set(found)
    assert bool(found) == bool(towers)


@pytest.mark.parametrize("model_type", tiny_families.CONFIGS)
def test_text_models_have_no_towers(model_type: str) -> None:
    assert find_towers(tiny_families.build_config(model_type)) == ()


def test_a_model_type_whose_tower_was_removed_is_a_text_model() -> None:
    config = tiny_towers.build_config("gemma4")
    config.vision_config = config.audio_config = None

    assert find_towers(config) == ()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("OpenGVLab/InternVL3-8B", 'use the converted model "OpenGVLab/InternVL3-8B-hf"'),
        ("OpenGVLab/InternVL3_5-8B", 'use the converted model "OpenGVLab/InternVL3_5-8B-HF"'),
        ("OpenGVLab/InternVL2_5-8B", "only InternVL2_5-2B-MPO-hf and InternVL2_5-8B-MPO-hf are converted"),
    ],
)
def test_original_internvl_repositories_are_rejected_with_the_converted_model(name: str, remedy: str) -> None:
    with pytest.raises(InvalidSpec, match=remedy) as raised:
        check_needs_no_remote_code(ModelSource(name=name), {"model_type": "internvl_chat", "auto_map": {}})

    assert str(raised.value).startswith(f'spec.model.name: "{name}" is of type internvl_chat, which needs program code')


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "minicpmv"},
        {"model_type": "ovis"},
        {"model_type": "deepseek_vl_v2"},
        {"model_type": "martian", "auto_map": {"AutoConfig": "configuration_martian.MartianConfig"}},
    ],
    ids=lambda config: config["model_type"],
)
def test_a_type_that_needs_remote_code_is_rejected_by_name(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")

    with pytest.raises(InvalidSpec, match=f"is of type {config['model_type']}, which needs program code"):
        read_config(ModelSource(name=str(tmp_path)))


def test_a_known_type_with_remote_code_in_its_repository_is_accepted() -> None:
    check_needs_no_remote_code(ModelSource(name="m"), {"model_type": "qwen2", "auto_map": {}})
