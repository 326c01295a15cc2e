"""Tests attention over several sequences in one row against masked attention, and its kernel's arguments."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from finetune_trainer.data.collator import Collator, SequenceLayout
from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.data.token_dataset import IGNORE_INDEX
from finetune_trainer.methods.dpo import compute_sequence_logps
from finetune_trainer.model import varlen_attention
from finetune_trainer.model.attention_backend import SDPA
from finetune_trainer.model.varlen_attention import VARLEN, AttentionInputs, compute_varlen_attention
from finetune_trainer.training.token_losses import compute_target_losses
from finetune_trainer.varlen_inputs import build_varlen_inputs
from testing.models import attention_families
from testing.models.micro_batches import build_micro_batch

LENGTHS = (5, 1, 9, 3)  # tokens of each sequence
PREFIXES = (range(0), range(4), range(0), range(6, 11))  # the second and the fourth continue parts of those before
KEY_POSITIONS = (*range(5), *range(4), 5, *range(6, 15), *range(6, 11), *range(15, 18))
HEADS = 4
CAUSAL_MODULE = torch.nn.Module()


def build_inputs(*, key_heads: int = 2, value_size: int = 16, dtype: torch.dtype = torch.float64) -> AttentionInputs:
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, 16), (key_heads, 16), (key_heads, value_size))
    return AttentionInputs(
        *(
            torch.randn(1, heads, sum(LENGTHS), size, generator=generator, dtype=dtype, requires_grad=True)
            for heads, size in shapes
        )
    )


def number_tokens(lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of each token's sequence, and its distance from the end of the sequence."""
    sequences = torch.repeat_interleave(torch.tensor(lengths))
    return sequences, torch.cat([torch.arange(length - 1, -1, -1) for length in lengths])


def compute_masked_attention(
    inputs: AttentionInputs, *, sliding_window: int | None, scaling: float, key_lengths: Sequence[int] = LENGTHS
) -> torch.Tensor:
    """Return softmax attention with one mask for all sequences, (1, tokens, heads, value size).

    key_lengths: number of keys of each sequence; its last key is at the position of its last query.
    """
    query, key, value = inputs
    key, value = (tensor.repeat_interleave(HEADS // tensor.shape[1], dim=1) for tensor in (key, value))
    query_sequences, query_distances = number_tokens(LENGTHS)
    key_sequences, key_distances = number_tokens(key_lengths)
    distances = key_distances - query_distances[:, None]
    mask = (query_sequences[:, None] == key_sequences) & (distances >= 0)
    if sliding_window is not None:
        mask &= distances < sliding_window
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~mask, -torch.inf)
    return (scores.softmax(dim=-1) @ value).transpose(1, 2)


def run_reference_kernel(*tensors: Any, scale: float, window_size: tuple[int, int], **options: Any) -> torch.Tensor:
    """Compute what `varlen_attn` is documented to compute, from the boundaries of the sequences."""
    query, key, value, boundaries, key_boundaries, longest, longest_key = tensors
    assert boundaries.dtype == key_boundaries.dtype == torch.int32
    assert tuple(boundaries.diff().tolist()) == LENGTHS
    key_lengths = key_boundaries.diff().tolist()
    assert (longest, longest_key) == (max(LENGTHS), max(key_lengths))
    assert query.shape[1] == key.shape[1] or options == {"enable_gqa": True}
    assert window_size[1] == 0
    window = None if window_size[0] == -1 else window_size[0] + 1
    inputs = AttentionInputs(*(tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)))
    return compute_masked_attention(inputs, sliding_window=window, scaling=scale, key_lengths=key_lengths)[0]


@pytest.mark.parametrize("uses_kernel", [False, True])
@pytest.mark.parametrize("sliding_window", [None, 1, 4, 100])
@pytest.mark.parametrize(("key_heads", "value_size"), [(4, 16), (2, 16), (4, 8)])
def test_the_output_and_the_gradients_equal_those_of_masked_attention(
    monkeypatch: pytest.MonkeyPatch, key_heads: int, value_size: int, sliding_window: int | None, uses_kernel: bool
) -> None:
    monkeypatch.setattr(varlen_attention, "can_use_kernel", lambda *_: uses_kernel)
    monkeypatch.setattr(varlen_attention, "varlen_attn", run_reference_kernel)
    inputs = build_inputs(key_heads=key_heads, value_size=value_size)
    expected = compute_masked_attention(inputs, sliding_window=sliding_window, scaling=0.3)

    actual, weights = compute_varlen_attention(
        CAUSAL_MODULE, *inputs, None, scaling=0.3, sliding_window=sliding_window, **build_varlen_inputs(LENGTHS)
    )

    assert weights is None
    torch.testing.assert_close(actual, expected)
    direction = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, inputs, direction)
    torch.testing.assert_close(torch.autograd.grad(actual, inputs, direction), expected_gradients)


@pytest.mark.parametrize("uses_kernel", [False, True])
@pytest.mark.parametrize("sliding_window", [None, 1, 4, 100])
def test_a_sequence_attends_to_the_prefix_that_an_earlier_one_contains(
    monkeypatch: pytest.MonkeyPatch, sliding_window: int | None, uses_kernel: bool
) -> None:
    monkeypatch.setattr(varlen_attention, "can_use_kernel", lambda *_: uses_kernel)
    monkeypatch.setattr(varlen_attention, "varlen_attn", run_reference_kernel)
    inputs, positions = build_inputs(), torch.tensor(KEY_POSITIONS)
    key, value = (tensor[:, :, positions] for tensor in (inputs.key, inputs.value))
    expected = compute_masked_attention(
        AttentionInputs(inputs.query, key, value),
        sliding_window=sliding_window,
        scaling=0.3,
        key_lengths=[len(prefix) + length for prefix, length in zip(PREFIXES, LENGTHS, strict=True)],
    )

    options = {"scaling": 0.3, "sliding_window": sliding_window, **build_varlen_inputs(LENGTHS, PREFIXES)}
    actual, _ = compute_varlen_attention(CAUSAL_MODULE, *inputs, None, **options)

    torch.testing.assert_close(actual, expected)
    direction = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, inputs, direction)
    torch.testing.assert_close(torch.autograd.grad(actual, inputs, direction), expected_gradients)


def test_heads_are_repeated_for_a_kernel_without_grouped_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 has no argument for them."""
    monkeypatch.setattr(varlen_attention, "can_use_kernel", lambda *_: True)
    monkeypatch.setattr(varlen_attention, "varlen_attn", run_reference_kernel)
    monkeypatch.setattr(varlen_attention, "_KERNEL_ACCEPTS_GROUPED_HEADS", False)
    inputs = build_inputs()

    actual, _ = compute_varlen_attention(CAUSAL_MODULE, *inputs, None, scaling=0.3, **build_varlen_inputs(LENGTHS))

    torch.testing.assert_close(actual, compute_masked_attention(inputs, sliding_window=None, scaling=0.3))


def test_the_installed_kernel_has_the_arguments_that_are_used() -> None:
    assert {"scale", "window_size", "enable_gqa"} <= varlen_attention._KERNEL_PARAMETERS.keys()


def test_the_kernel_is_not_used_on_a_cpu() -> None:
    assert not varlen_attention.can_use_kernel(build_inputs(dtype=torch.bfloat16), 0.0)


def test_inputs_of_the_kernel_are_cast_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms with float32 weights return float32 queries and keys, but values are in 16 bits."""
    query, key, value = (tensor.float() for tensor in build_inputs())
    dtypes: list[torch.dtype] = []

    def record_dtypes(*tensors: Any, **_: Any) -> torch.Tensor:
        dtypes.extend(tensor.dtype for tensor in tensors[:3])
        return torch.zeros_like(tensors[0])

    monkeypatch.setattr(varlen_attention, "can_use_kernel", lambda *_: True)
    monkeypatch.setattr(varlen_attention, "varlen_attn", record_dtypes)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        compute_varlen_attention(CAUSAL_MODULE, query, key, value.bfloat16(), None, **build_varlen_inputs(LENGTHS))

    assert dtypes == [torch.bfloat16] * 3


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"softcap": 30.0}, "does not support softcap"),
        ({"s_aux": torch.zeros(4)}, "does not support s_aux"),
        ({"is_causal": False}, "does not support attention in both directions"),
        ({"attention_mask": torch.zeros(1)}, "does not support a mask"),
        ({"sequence_lengths": None}, "does not pass the lengths"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_change_attention_are_rejected(options: dict[str, Any], problem: str) -> None:
    arguments = {"attention_mask": None, **build_varlen_inputs(LENGTHS), **options}
    if arguments["sequence_lengths"] is None:
        del arguments["sequence_lengths"]

    with pytest.raises(ValueError, match=problem):
        compute_varlen_attention(CAUSAL_MODULE, *build_inputs(), **arguments)


def test_attention_in_both_directions_of_a_module_is_rejected() -> None:
    module = torch.nn.Module()
    module.is_causal = False  # type: ignore[assignment]

    with pytest.raises(ValueError, match="attention in both directions"):
        compute_varlen_attention(module, *build_inputs(), None, **build_varlen_inputs(LENGTHS))


def build_pairs(layout: SequenceLayout) -> MicroBatch:
    """Build two preference pairs; the prompt of the second one is longer than the sliding window of some families."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for prompt_length, *lengths in ((3, 4, 6), (11, 5, 2)):
        prompt, *completions = (
            torch.randint(attention_families.VOCABULARY, (length,), generator=generator)
            for length in (prompt_length, *lengths)
        )
        ignored = torch.full_like(prompt, IGNORE_INDEX)
        pairs.append(
            tuple(
                {"input_ids": torch.cat((prompt, completion)), "labels": torch.cat((ignored, completion))}
                for completion in completions
            )
        )
    return Collator(0, layout)(pairs)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", attention_families.CONFIGS)
def test_losses_and_gradients_of_pairs_with_shared_prompts_equal_those_of_padded_rows(
    family: str, checkpointing: bool
) -> None:
    sharing = SequenceLayout(padding_free=True, shares_prompts=True)
    assert build_pairs(sharing).shared_lengths == (2, 10)
    results = []
    for attention, layout in ((SDPA, SequenceLayout()), (VARLEN, sharing)):
        model = attention_families.build_model(attention_families.CONFIGS[family](), attn_implementation=attention)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        logps = compute_sequence_logps(model.train(), build_pairs(layout))
        sums = torch.stack((logps.chosen, logps.rejected))
        (sums * torch.tensor([[1.0], [-0.5]])).sum().backward()  # type: ignore[no-untyped-call]
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        results.append((sums.detach(), gradients))

    (expected_sums, expected_gradients), (sums, gradients) = results
    torch.testing.assert_close(sums, expected_sums, rtol=1e-6, atol=1e-5)
    assert_gradients_equal(gradients, expected_gradients)


def build_batch(layout: SequenceLayout) -> MicroBatch:
    generator = torch.Generator().manual_seed(0)
    rows = (torch.randint(attention_families.VOCABULARY, (length,), generator=generator) for length in (9, 4, 7, 1))
    return build_micro_batch(*rows, layout=layout)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", attention_families.CONFIGS)
def test_losses_and_gradients_of_a_model_equal_those_of_padded_rows(family: str, checkpointing: bool) -> None:
    results = []
    for attention, layout in ((SDPA, SequenceLayout()), (VARLEN, SequenceLayout(padding_free=True))):
        model = attention_families.build_model(attention_families.CONFIGS[family](), attn_implementation=attention)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        losses = compute_target_losses(model.train(), build_batch(layout))
        losses.sum().backward()  # type: ignore[no-untyped-call]
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        results.append((losses.detach(), gradients))

    (expected_losses, expected_gradients), (losses, gradients) = results
    torch.testing.assert_close(losses, expected_losses, rtol=1e-6, atol=1e-6)
    assert_gradients_equal(gradients, expected_gradients)


def assert_gradients_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(actual[name], gradient, rtol=1e-5, atol=1e-6 + 1e-5 * scale)
