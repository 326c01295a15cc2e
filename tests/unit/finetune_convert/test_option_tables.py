"""Tests of the option tables, and of the rules for every option in them."""

import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import pytest

import finetune_convert
from finetune_api.schema.json_schema import inline_schema, iterate_fields
from finetune_api.v1alpha1.job import FineTuneJobSpec
from finetune_convert.mapping.rules import Rule, ToField, find_rule
from finetune_convert.option_rules import axolotl, llamafactory, swift
from finetune_convert.option_table import OptionTable, load_table

SWIFT = ("swift-2", "swift-3", "swift-4")
RULES: dict[tuple[str, ...], Mapping[str, Rule]] = {
    SWIFT: swift.RULES,
    ("llamafactory",): llamafactory.RULES,
    ("axolotl",): axolotl.RULES,
}
MIN_OPTIONS = {"swift-2": 230, "swift-3": 450, "swift-4": 450, "llamafactory": 340, "axolotl": 380}


def load_options(tables: tuple[str, ...]) -> set[str]:
    return {option.name for table in tables for option in load_table(table).options.values()}


@pytest.mark.parametrize(("name", "minimum"), MIN_OPTIONS.items())
def test_a_table_contains_all_options(name: str, minimum: int) -> None:
    table = load_table(name)

    assert len(table.options) >= minimum
    assert table.generated.startswith("by tools/option_tables.py")


@pytest.mark.parametrize("name", MIN_OPTIONS)
def test_a_table_states_first_how_it_was_generated_and_is_sorted(name: str) -> None:
    text = resources.files("finetune_convert").joinpath("tables", f"{name}.json").read_text()
    content = json.loads(text)

    assert next(iter(content)) == "generated"
    assert list(content["options"]) == sorted(content["options"])


@pytest.mark.parametrize("tables", RULES, ids=lambda tables: tables[0])
def test_every_option_has_a_rule_or_is_named_by_the_functions_of_the_tool(tables: tuple[str, ...]) -> None:
    folder, tool = Path(finetune_convert.__path__[0]), tables[0].partition("-")[0]
    modules = [*folder.glob(f"formats/{tool}*.py"), *folder.glob("mapping/tr*.py")]
    named = set(re.findall(r'"(\w+)"', "".join(module.read_text() for module in modules)))
    special = {option for option in load_options(tables) if find_rule(RULES[tables], option) is None}

    assert len(modules) >= 4
    assert len(special) > 50
    assert special <= named


@pytest.mark.parametrize("tables", RULES, ids=lambda tables: tables[0])
def test_every_rule_refers_to_an_option(tables: tuple[str, ...]) -> None:
    options = load_options(tables)
    names = [name for name in RULES[tables] if "*" not in name]
    patterns = [name for name in RULES[tables] if "*" in name]

    assert names
    assert [name for name in names if name not in options] == []
    assert [pattern for pattern in patterns if not any(matches(pattern, option) for option in options)] == []


def matches(pattern: str, option: str) -> bool:
    return find_rule({pattern: swift.RULES["seed"]}, option) is not None


@pytest.mark.parametrize("tables", RULES, ids=lambda tables: tables[0])
def test_every_mapped_field_exists_in_the_spec(tables: tuple[str, ...]) -> None:
    fields = {path for path, _, _ in iterate_fields(inline_schema(FineTuneJobSpec))}
    paths = {rule.path for rule in RULES[tables].values() if isinstance(rule, ToField)}

    assert paths
    assert paths <= fields


@pytest.mark.parametrize(
    ("table", "command", "option", "default"),
    [
        ("swift-2", "sft", "lora_rank", 8),
        ("swift-2", "sft", "num_train_epochs", 1),
        ("swift-2", "pt", "sft_type", "full"),
        ("swift-2", "sft", "adam_beta2", 0.95),
        ("swift-3", "sft", "num_train_epochs", 3.0),
        ("swift-3", "sft", "weight_decay", 0.1),
        ("swift-3", "sft", "loss_scale", "default"),
        ("swift-4", "pt", "loss_scale", "all"),
        ("swift-4", "sft", "tuner_type", "lora"),
        ("llamafactory", "train", "learning_rate", 5e-5),
        ("llamafactory", "train", "lr_scheduler_type", "linear"),
        ("axolotl", "train", "num_epochs", 1.0),
        ("axolotl", "train", "sequence_len", 512),
    ],
)
def test_defaults_are_those_of_the_tool(table: str, command: str, option: str, default: object) -> None:
    assert load_table(table).options[option].get_default(command) == default


def test_names_are_found_with_dashes_and_abbreviated() -> None:
    table: OptionTable = load_table("swift-3")
    found = [table.find(name) for name in ("learning-rate", "per_device_train_batch", "lora_rnak", "lr")]

    assert [option and option.name for option in found] == ["learning_rate", "per_device_train_batch_size", None, None]
    assert table.find_nearest("lora_rnak") == "lora_rank"


def test_model_types_of_2_x_have_hub_ids() -> None:
    table = load_table("swift-2")

    assert table.models["qwen1half-7b-chat"] == "Qwen/Qwen1.5-7B-Chat"
    assert len(table.models) > 400
