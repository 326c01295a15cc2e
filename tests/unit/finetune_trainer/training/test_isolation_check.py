"""Tests the check that sequences of a micro-batch have the logits that they would have alone."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, OpenAIGPTConfig, PretrainedConfig

from finetune_trainer.data.collator import Collator, SequenceLayout
from finetune_trainer.data.epoch_order import RowOrder
from finetune_trainer.data.packing import PackOrder
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.model.varlen_attention import VARLEN, compute_varlen_attention
from finetune_trainer.training.isolation_check import IsolationProbe, draw_parts, find_fault
from finetune_trainer.training.preflight import check_isolation, use_default_attention
from finetune_trainer.training.trainer_inputs import TrainerInputs
from finetune_trainer.varlen_inputs import SequenceLengths
from testing.models import attention_families

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")
PADDING_FREE = SequenceLayout(padding_free=True, shares_prompts=True)
UNMASKED = SequenceLayout(masks_padding=False, pad_multiple=64)
SPECIAL_IDS = (0, 1, 2, 3)
CHANGED = "a sequence changes the logits of another one in its row"


PACKS_CHANGED = rf"spec\.dataset\.packing: .*{CHANGED}"
BuildConfig = Callable[[], PretrainedConfig]
LINEAR_ATTENTION, DEEPSEEK_V4 = (
    attention_families.build_linear_attention_config,
    attention_families.build_deepseek_v4_config,
)
ROBERTA, CPMANT = attention_families.build_roberta_config, attention_families.build_cpmant_config


class Tokenizer:
    """What the check reads of a tokenizer."""

    def __init__(self, pad_token_id: int = 0) -> None:
        self.pad_token_id = self.eos_token_id = pad_token_id
        self.all_special_ids = list(SPECIAL_IDS)
        self.added_tokens_decoder = {5: "<image>"}

    def __len__(self) -> int:
        return attention_families.VOCABULARY


def build_model(family: str = "llama", **options: Any) -> Any:
    return attention_families.build_model(attention_families.CONFIGS[family](), **options)


def build_probe(layout: SequenceLayout, *, rows: int, packed: bool, **options: Any) -> IsolationProbe:
    config = attention_families.CONFIGS["llama"]()
    return IsolationProbe(draw_parts(Tokenizer(), config, rows=rows), layout, rows, packed=packed, **options)


def run_plainly(model: Any, layout: SequenceLayout) -> Any:
    return partial(use_default_attention, model) if layout.padding_free else nullcontext


def build_trainer(
    model: Any, layout: SequenceLayout, *, packing: bool, padded_layout: SequenceLayout | None = None, pad_id: int = 0
) -> Any:
    """Return what the check reads of a trainer."""
    lengths = np.array([4, 4])
    order = PackOrder(lengths, max_length=8, seed=0) if packing else RowOrder(lengths, seed=0)
    spec = SimpleNamespace(model=SimpleNamespace(name="tiny"), training=SimpleNamespace(torch_compile=False))
    values = dict.fromkeys(field.name for field in fields(TrainerInputs)) | {
        "layout": layout,
        "padded_layout": padded_layout,
        "collate": Collator(pad_id, layout),
        "data": SimpleNamespace(order=order, vision=None),
        "plan": SimpleNamespace(batch=SimpleNamespace(micro_batch_size=4), spec=spec),
        "tokenizer": Tokenizer(pad_id),
        "ranks": SimpleNamespace(is_rank_zero=True),
        "notes": {},
    }
    inputs: Any = TrainerInputs(**values)  # type: ignore[arg-type]
    args = SimpleNamespace(device=CPU, bf16=False, fp16=False)
    return SimpleNamespace(inputs=inputs, model=model, model_wrapped=model, args=args)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", attention_families.CONFIGS)
def test_suitable_models_pass_every_check_and_keep_their_training_mode(family: str, rows: int) -> None:
    padded, padding_free = build_model(family).train(), build_model(family, attn_implementation=VARLEN)

    for model, layout, packed in (
        (padded, SequenceLayout(), True),
        (padded, SequenceLayout(), False),
        (padded, UNMASKED, True),
        (padded, UNMASKED, False),
        (padding_free, PADDING_FREE, True),
    ):
        probe = build_probe(layout, rows=rows, packed=packed)
        assert find_fault(model, probe, CPU, run_plainly(model, layout)) is None
    assert padded.training
    assert not padding_free.training
    assert padding_free.config._attn_implementation == VARLEN


def test_a_model_that_ignores_the_lengths_is_rejected() -> None:
    """transformers' SDPA isolates rows by position ids, but eager attention of several sequences needs a mask."""
    from transformers import AttentionInterface
    from transformers.models.llama.modeling_llama import eager_attention_forward

    AttentionInterface.register(VARLEN, eager_attention_forward)
    try:
        model = build_model(attn_implementation=VARLEN)
        with pytest.raises(
            InvalidSpec, match=r'with varlen: in model "tiny", a sequence changes the logits of another'
        ):
            check_isolation(build_trainer(model, PADDING_FREE, packing=False))
    finally:
        AttentionInterface.register(VARLEN, torch.compiler.disable(compute_varlen_attention))  # type: ignore[no-untyped-call]


def test_packs_of_a_model_that_ignores_position_ids_are_rejected_before_it_attends_much() -> None:
    """The first models of OpenAI have masks of their own; with random weights, attention changes the logits little."""
    config = OpenAIGPTConfig(vocab_size=attention_families.VOCABULARY, n_embd=32, n_layer=2, n_head=4)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)

    with pytest.raises(InvalidSpec, match=r"spec.dataset.packing: in model .*, a sequence changes the logits"):
        check_isolation(build_trainer(model, UNMASKED, packing=True))


def test_a_model_that_does_not_attend_to_shared_prompts_is_rejected() -> None:
    class WithoutPrefixes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model(attn_implementation=VARLEN)
            self.config = self.model.config
            self.set_attn_implementation = self.model.set_attn_implementation

        def forward(self, sequence_lengths: SequenceLengths | None = None, **inputs: Any) -> Any:
            lengths = sequence_lengths and SequenceLengths(sequence_lengths.values)
            return self.model(**inputs, sequence_lengths=lengths)

    check_isolation(build_trainer(WithoutPrefixes(), SequenceLayout(padding_free=True), packing=False))
    with pytest.raises(InvalidSpec, match=r"a completion does not attend to a prompt that it shares; set sdpa"):
        check_isolation(build_trainer(WithoutPrefixes(), PADDING_FREE, packing=False))


@pytest.mark.parametrize(
    ("build_config", "layout", "packing", "problem"),
    [
        pytest.param(LINEAR_ATTENTION, SequenceLayout(), True, PACKS_CHANGED, id="state across rows"),
        pytest.param(DEEPSEEK_V4, SequenceLayout(), True, PACKS_CHANGED, id="blocks that are found by position"),
        pytest.param(ROBERTA, UNMASKED, True, PACKS_CHANGED, id="positions with an offset, packs"),
        pytest.param(
            ROBERTA,
            PADDING_FREE,
            False,
            "attnImplementation: with varlen: .*a sequence has other logits than alone",
            id="positions with an offset, varlen",
        ),
        pytest.param(
            CPMANT, UNMASKED, False, r"spec\.model\.name: .*a token attends to later ones", id="no causal model"
        ),
        pytest.param(
            CPMANT,
            SequenceLayout(),
            False,
            r"spec\.model\.name: .*a row has other logits than alone, because of padding",
            id="no causal model, masked",
        ),
    ],
)
def test_an_unsuitable_model_is_rejected(
    build_config: BuildConfig, layout: SequenceLayout, packing: bool, problem: str
) -> None:
    """DeepSeek-V4 attends to the first blocks of a pack, whichever row they belong to.

    CPM-Ant hides as many tokens at the start of a row as there is padding at its end.
    """
    options = {"attn_implementation": VARLEN} if layout.padding_free else {}
    model = attention_families.build_model(build_config(), **options)

    with pytest.raises(InvalidSpec, match=problem):
        check_isolation(build_trainer(model, layout, packing=packing, pad_id=int(build_config is ROBERTA)))


@pytest.mark.parametrize(("build_config", "layout"), [(LINEAR_ATTENTION, UNMASKED), (DEEPSEEK_V4, SequenceLayout())])
def test_a_model_that_is_unsuitable_for_packs_can_be_trained_on_rows(
    build_config: BuildConfig, layout: SequenceLayout
) -> None:
    check_isolation(build_trainer(attention_families.build_model(build_config()), layout, packing=False))


def test_a_model_that_attends_to_later_tokens_is_rejected_if_padding_has_no_mask() -> None:
    model = build_model("gemma3_text")
    model.config.use_bidirectional_attention = True
    model.config.is_causal = False

    with pytest.raises(InvalidSpec, match=r'spec\.model\.name: in model "tiny", a token attends to later ones'):
        check_isolation(build_trainer(model, UNMASKED, packing=False))
    check_isolation(build_trainer(model, SequenceLayout(), packing=False))


def test_varlen_that_auto_chose_is_replaced_by_padded_rows(capsys: pytest.CaptureFixture[str]) -> None:
    model = attention_families.build_model(ROBERTA(), attn_implementation=VARLEN)
    trainer = build_trainer(model, PADDING_FREE, packing=False, padded_layout=UNMASKED, pad_id=1)

    check_isolation(trainer)

    assert "attention: sdpa with padded rows instead of varlen: a sequence has other" in capsys.readouterr().out
    assert trainer.inputs.notes.keys() == {"attention"}
    assert (trainer.inputs.layout, trainer.inputs.padded_layout) == (UNMASKED, None)
    assert model.config._attn_implementation == "sdpa"
    tokens = torch.arange(6, 12)
    batch = trainer.inputs.collate([({"input_ids": tokens, "labels": tokens},)])
    assert batch.inputs["input_ids"].shape == (1, UNMASKED.pad_multiple)


def test_packs_for_which_padded_rows_are_wrong_too_are_rejected() -> None:
    model = attention_families.build_model(ROBERTA(), attn_implementation=VARLEN)

    with pytest.raises(InvalidSpec, match=r"spec\.dataset\.packing: .*a sequence changes the logits of another one"):
        check_isolation(build_trainer(model, PADDING_FREE, packing=True, padded_layout=UNMASKED, pad_id=1))


def test_a_model_without_position_ids_is_rejected() -> None:
    class WithoutPositions(torch.nn.Module):
        config = attention_families.CONFIGS["llama"]()

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any: ...

    with pytest.raises(
        InvalidSpec, match=r"spec\.dataset\.packing: .* does not accept .* 'position_ids'\); leave pack"
    ):
        check_isolation(build_trainer(WithoutPositions(), SequenceLayout(), packing=True))


def test_logits_that_are_not_finite_are_left_to_the_check_of_the_loss() -> None:
    model = build_model(attn_implementation=VARLEN)
    model.model.norm.weight.data.fill_(torch.nan)

    check_isolation(build_trainer(model, PADDING_FREE, packing=False))


@pytest.mark.parametrize(
    ("steps", "fault"), [(1, None), (16, "a sequence changes the logits of another one in its row")]
)
def test_rounding_to_16_bits_is_tolerated(steps: int, fault: str | None) -> None:
    """Kernels may round differently if other rows change."""

    class Rounding(torch.nn.Module):
        calls = 0

        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            self.calls += 1
            signs = torch.tensor([1, -1]).expand(*input_ids.shape, 2)
            return SimpleNamespace(logits=signs * (1 + self.calls * steps * torch.finfo(torch.bfloat16).eps))

    probe = build_probe(SequenceLayout(), rows=1, packed=True, dtype=torch.bfloat16)

    assert find_fault(Rounding(), probe, CPU) == fault


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        pytest.param({}, 256, id="longer than the blocks of known models"),
        pytest.param({"max_position_embeddings": 90}, 30, id="three parts fit into the context"),
        pytest.param({"vocab_size": 2**20}, 85, id="the logits of three parts need 1 GiB"),
    ],
)
def test_parts_fit_into_context_and_memory(fields: dict[str, int], length: int) -> None:
    config = attention_families.CONFIGS["llama"]()
    for name, value in fields.items():
        setattr(config, name, value)

    assert draw_parts(Tokenizer(), config, rows=1).shape == (2, 3, length)


def test_parts_contain_neither_special_tokens_nor_placeholders() -> None:
    config: PretrainedConfig = attention_families.CONFIGS["llama"]()
    config.video_token_index, config.image_token_id, config.eos_token_id = 7, 8, [9, 10]

    ids = set(draw_parts(Tokenizer(), config, rows=1).flatten().tolist())

    assert ids == set(range(attention_families.VOCABULARY)) - {*SPECIAL_IDS, 5, 7, 8, 9, 10}
