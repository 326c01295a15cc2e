"""Tests parameter groups with separate learning rates for the vision tower and the aligner."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from finetune_api.learning_rates import LearningRates
from finetune_api.v1alpha1.lora import Lora
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.model.lora import add_adapters
from finetune_trainer.model.param_groups import build_parameter_groups, check_learning_rates, count_parameters
from finetune_trainer.startup_log import describe_weights
from finetune_trainer.vision.families import FAMILIES
from finetune_trainer.vision.freeze import find_group, freeze_parameters
from testing.models import tiny_text

QWEN = FAMILIES["qwen2_vl"]
RATES = LearningRates(0.25, {"vision": 0.5, "aligner": 0.125})


@pytest.fixture
def model(get_vision_folder: Callable[[str], Path]) -> Any:
    return AutoModelForImageTextToText.from_pretrained(get_vision_folder("qwen2_vl"))


def build_groups(model: torch.nn.Module, rates: LearningRates = RATES) -> list[dict[str, Any]]:
    decayed_names = {name for name, _ in model.named_parameters() if "norm" not in name and "bias" not in name}
    return build_parameter_groups(model, QWEN, rates, decayed_names=decayed_names, weight_decay=0.1)


def test_every_weight_is_updated_with_the_learning_rate_of_its_model_part(model: Any) -> None:
    optimizer = torch.optim.SGD([{**group, "weight_decay": 0} for group in build_groups(model)])
    initial_weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)

    optimizer.step()

    for name, weight in model.named_parameters():
        expected = initial_weights[name] - RATES.get_rate(find_group(name, QWEN))
        torch.testing.assert_close(weight.detach(), expected, msg=name)


def test_every_trained_weight_is_in_one_group_and_norms_have_no_weight_decay(model: Any) -> None:
    freeze_parameters(model, QWEN, ("aligner",))
    groups = build_groups(model)

    grouped = [id(weight) for group in groups for weight in group["params"]]
    decaying = {id(weight) for group in groups if group["weight_decay"] for weight in group["params"]}

    trained = {id(weight): name for name, weight in model.named_parameters() if weight.requires_grad}
    assert sorted(grouped) == sorted(trained)
    assert {trained[weight_id] for weight_id in decaying} == {
        n for n in trained.values() if "norm" not in n and "bias" not in n
    }
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [
        (0.25, 0.1), (0.25, 0.0), (0.5, 0.1), (0.5, 0.0)
    ]  # fmt: skip


def test_the_first_group_has_the_default_learning_rate(model: Any) -> None:
    assert build_groups(model, LearningRates(0.25, {"aligner": 0.5}))[0]["lr"] == 0.25


def test_adapters_have_the_learning_rate_of_their_model_part(model: Any) -> None:
    adapted = add_adapters(model, Lora(), seed=1)

    assert {group["lr"] for group in build_groups(adapted)} == {0.25, 0.5, 0.125}


def test_a_learning_rate_for_a_model_part_without_adapters_is_rejected(model: Any) -> None:
    adapted = add_adapters(model, Lora(target_modules=("q_proj",)), seed=1)
    assert count_parameters(adapted, QWEN)["language"].trained > 0

    with pytest.raises(InvalidSpec, match=r"visionLearningRate: no parameter of vision is trained: .*targetModules"):
        check_learning_rates(adapted, QWEN, RATES)


def test_the_startup_log_contains_the_trained_parameters_per_model_part(model: Any) -> None:
    freeze_parameters(model, QWEN, ("vision",))
    counts = count_parameters(model, QWEN)

    (line,) = describe_weights(model, QWEN)

    total = sum(weight.numel() for weight in model.parameters())
    trained = sum(counts[part].trained for part in ("language", "aligner"))
    assert sum(count.total for count in counts.values()) == total
    assert line == (
        f"trainable parameters (full): {trained:,} of {total:,} ({trained / total:.2%}); vision frozen;"
        f" aligner {counts['aligner'].total:,} of {counts['aligner'].total:,} (100.00%);"
        f" language {counts['language'].total:,} of {counts['language'].total:,} (100.00%)"
    )


def test_the_startup_log_contains_the_adapter_parameters() -> None:
    model = add_adapters(tiny_text.build_model(64), Lora(r=2, target_modules=("q_proj",)), seed=1)

    (line,) = describe_weights(model, None)

    assert line.startswith("trainable parameters (lora): 768 of ")
