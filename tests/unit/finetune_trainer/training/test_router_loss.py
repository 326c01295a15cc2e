"""Tests the auxiliary loss that balances the experts of a mixture-of-experts model."""

import pytest
import torch
from transformers import CONFIG_MAPPING

from finetune_api.v1alpha1.training import Training
from finetune_trainer.data.collator import Collator, SequenceLayout
from finetune_trainer.data.token_dataset import IGNORE_INDEX, POSITION_IDS
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.model.supported_types import check_router_loss
from finetune_trainer.training.router_loss import RouterLossTerm, count_router_units
from finetune_trainer.training.token_losses import compute_target_losses
from testing.builders.jobs import parse_spec
from testing.models import tiny_families, tiny_towers

WEIGHTED = Training(router_aux_loss_coef=0.5)
BATCH = Collator(0, SequenceLayout())(
    [
        ({"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)},)
        for ids, labels in (
            ([5, 6, 7], [IGNORE_INDEX, 6, 7]),
            ([5, 6, 7, 8], [IGNORE_INDEX] * 4),
            ([5, 6, 7, 8], [IGNORE_INDEX, 6, 7, 8]),
        )
    ]
)


def test_the_units_are_tokens_without_padding_and_fillers() -> None:
    assert count_router_units(WEIGHTED, BATCH) == (7.0,)
    assert count_router_units(Training(), BATCH) == ()


def test_the_term_is_the_weighted_loss_of_the_model_times_its_units() -> None:
    model = tiny_families.build_model("qwen3_moe")
    expected = model(**BATCH.inputs, output_router_logits=True).aux_loss
    term = RouterLossTerm(WEIGHTED, BATCH, is_training=True)

    losses = compute_target_losses(model, BATCH, receive_router_loss=term.receiver)

    (loss,) = term.sums
    torch.testing.assert_close(loss, 0.5 * 7 * expected)
    torch.testing.assert_close(losses, compute_target_losses(model, BATCH))
    loss.backward()  # type: ignore[no-untyped-call]
    assert model.model.layers[0].mlp.gate.weight.grad.abs().max() > 0


def test_the_padding_of_packs_is_not_counted() -> None:
    model = tiny_families.build_model("mixtral")
    packs = ([5, 6, 7, 8, 9], [0, 1, 0, 1, 2]), ([9, 8], [0, 1])
    batch = Collator(0, SequenceLayout(pad_multiple=8))(
        [
            ({"input_ids": torch.tensor(ids), "labels": torch.tensor(ids), POSITION_IDS: torch.tensor(positions)},)
            for ids, positions in packs
        ]
    )
    one_row = {
        name: torch.tensor([[*packs[0][index], *packs[1][index]]])
        for index, name in enumerate(("input_ids", POSITION_IDS))
    }
    expected = model(**one_row, output_router_logits=True, use_cache=False).aux_loss
    term = RouterLossTerm(WEIGHTED, batch, is_training=True)

    compute_target_losses(model, batch, receive_router_loss=term.receiver)

    torch.testing.assert_close(term.sums, (0.5 * 7 * expected,))


def test_the_term_is_zero_in_evaluation() -> None:
    term = RouterLossTerm(WEIGHTED, BATCH, is_training=False)

    compute_target_losses(tiny_families.build_model("mixtral"), BATCH, receive_router_loss=term.receiver)

    assert [loss.item() for loss in term.sums] == [0.0]


def test_without_a_coefficient_there_is_no_term() -> None:
    term = RouterLossTerm(Training(), BATCH, is_training=True)

    assert term.receiver is None
    assert term.sums == ()


@pytest.mark.parametrize("model_type", ["gemma2", "llama4", "afmoe"])  # afmoe returns the logits of routers only
def test_the_coefficient_is_rejected_for_a_model_without_the_loss(model_type: str) -> None:
    config = tiny_towers.build_config("llama4") if model_type == "llama4" else CONFIG_MAPPING[model_type]()

    with pytest.raises(
        InvalidSpec, match=rf"spec\.training\.routerAuxLossCoef: .* of type {model_type} has no auxiliary"
    ):
        check_router_loss(parse_spec(training={"routerAuxLossCoef": 0.01}), config)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_the_coefficient_is_accepted_for_a_model_with_the_loss(model_type: str) -> None:
    check_router_loss(parse_spec(training={"routerAuxLossCoef": 0.01}), tiny_families.build_config(model_type))
