"""Compare the simulated step of a tiny model with the bytes that a real step allocates."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config, Qwen3Config

from finetune_api.v1alpha1.lora import Lora
from finetune_trainer.errors import ModelError
from finetune_trainer.memory.breakdown import DdpStrategy, RankLayout, break_down_rank_memory
from finetune_trainer.memory.fake_step import ActivationMemory, SimulatedStep, simulate_step
from finetune_trainer.memory.forecast import ForecastModel, choose_mask_use
from finetune_trainer.memory.fused_kernels import MaskUse, use_fused_dropout
from finetune_trainer.memory.model_shape import Architecture, measure_shape, measure_step_peak
from finetune_trainer.model.attention_backend import EAGER, SDPA
from finetune_trainer.model.lora import add_adapters
from finetune_trainer.model.quantization import build_nf4_config, disable_cpu_repacking
from finetune_trainer.model.varlen_attention import VARLEN
from finetune_trainer.training.token_losses import compute_target_losses
from testing.builders.jobs import parse_spec
from testing.models import tiny_families, tiny_text
from testing.models.micro_batches import build_micro_batch

LORA = Lora(r=4, lora_dropout=0.1, target_modules=("all-linear",))
PACKED = {"train": [{"name": "rows.jsonl"}], "packing": True, "maxLength": 64}
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}


def build_config(config_class: type = Qwen2Config, *, layers: int = 5, **fields: Any) -> Any:
    return config_class(**{**SIZES, "num_hidden_layers": layers, "vocab_size": 500, "pad_token_id": 0, **fields})


def build_step(**fields: Any) -> SimulatedStep:
    defaults = {"batch": 1, "length": 48, "recomputation_interval": None, "autocast": None}
    return SimulatedStep(**{**defaults, **fields})


def measure_peak(
    config: Any, lora: Lora | None = None, *, attention: str = SDPA, **step_fields: Any
) -> ActivationMemory:
    """Return the peak of a step of a float32 model."""
    return measure_step_peak(Architecture(config, torch.float32, lora, attention=attention), build_step(**step_fields))


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_forecast_of_model_states_is_exact(lora: Lora | None) -> None:
    model: Any = tiny_text.build_model(256)
    architecture = Architecture(model.config, torch.float32, lora)
    model = add_adapters(model, lora, seed=0) if lora else model
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    ids = torch.zeros(1, 16, dtype=torch.int64)

    compute_target_losses(model, build_micro_batch(*ids)).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()

    states = [tensor for state in optimizer.state.values() for key, tensor in state.items() if key != "step"]
    actual = {
        "weights": sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers()),
        "gradients": sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
        "optimizer states": sum(tensor.nbytes for tensor in states),
    }
    footprint = DdpStrategy().compute_footprint(measure_shape(architecture), 1)
    forecast = {part.name: part.size for part in footprint.resident_parts}
    assert forecast.pop("reference model") == 0
    assert forecast.pop("weights") + forecast.pop("adapters") == actual.pop("weights")
    assert forecast == actual


def test_forecast_activations_match_the_tensors_that_autograd_saves() -> None:
    """The CPU's attention saves the same tensors as the simulated fused kernel."""
    length, model = 64, tiny_text.build_model(256)
    saved: dict[int, torch.Tensor] = {}
    model_storages = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def record_saved_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in model_storages:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.zeros(1, length, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(record_saved_tensor, lambda tensor: tensor):
        logits = model(input_ids=ids, use_cache=False).logits
    saved_bytes = sum(-(-tensor.untyped_storage().nbytes() // 512) * 512 for tensor in saved.values())
    loss_bytes = logits.nbytes + 2 * (logits.nbytes - logits[:, -1].nbytes)

    peak = measure_peak(model.config, length=length)

    assert saved_bytes + loss_bytes <= peak.total <= 1.1 * (saved_bytes + loss_bytes)


def test_loss_backward_pass_needs_twelve_bytes_per_logit() -> None:
    """At the peak, the 16-bit logits are freed and three float32 copies of the target logits exist."""
    vocab_size, length = 50_000, 64
    architecture = Architecture(build_config(vocab_size=vocab_size), torch.bfloat16, LORA)

    peak = measure_step_peak(architecture, build_step(length=length, autocast=torch.bfloat16))

    assert peak.logits == pytest.approx(12 * (length - 1) * vocab_size, rel=0.001)


@pytest.mark.parametrize("interval", [None, 2], ids=["activations kept", "recomputed in every second"])
def test_forecast_of_4_bit_weights_matches_bitsandbytes(tmp_path: Path, interval: int | None) -> None:
    model_config = build_config(layers=4, hidden_size=128, intermediate_size=512)
    AutoModelForCausalLM.from_config(model_config).save_pretrained(tmp_path)
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=build_nf4_config(torch.float32, None)
    )
    disable_cpu_repacking(quantized)
    lora, micro_batch = LORA.model_copy(update={"quantization": "nf4"}), build_step(recomputation_interval=interval)

    architecture = Architecture(model_config, torch.float32, lora)
    shape, peak = measure_shape(architecture), measure_step_peak(architecture, micro_batch)
    adapted = add_adapters(quantized, lora, seed=0)
    simulated_peak = max(phase_peak.total for phase_peak in simulate_step(adapted, micro_batch).values())

    assert simulated_peak <= peak.total <= simulated_peak + 4 * 128 * 512
    assert shape.frozen_bytes == pytest.approx(sum(map(count_frozen_bytes, adapted.parameters())), rel=0.05)


def count_frozen_bytes(parameter: torch.nn.Parameter) -> int:
    """Return the bytes of a frozen parameter with its quantization constants, or 0 if it is trained."""
    state = getattr(parameter, "quant_state", None)
    constants = (state.absmax, state.code, state.state2.absmax, state.state2.code) if state else ()
    return 0 if parameter.requires_grad else parameter.nbytes + sum(constant.nbytes for constant in constants)


@pytest.mark.parametrize(
    ("lora", "layers", "interval"),
    [
        pytest.param(None, 4, None, id="full"),
        pytest.param(LORA, 4, None, id="lora"),
        pytest.param(LORA, 4, 1, id="lora, every layer recomputed"),
        pytest.param(None, 6, 2, id="full, whole periods of two layers"),
        pytest.param(LORA, 7, 2, id="lora, one layer more than whole periods"),
        pytest.param(None, 9, 3, id="full, periods of three layers"),
    ],
)
def test_extrapolated_peak_equals_the_peak_of_the_full_model(
    lora: Lora | None, layers: int, interval: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    micro_batch = build_step(recomputation_interval=interval, autocast=torch.bfloat16)
    architecture = Architecture(build_config(layers=layers), torch.float32, lora)
    extrapolated = measure_step_peak(architecture, micro_batch)

    monkeypatch.setattr("finetune_trainer.memory.model_shape._has_equal_layers", lambda _: False)

    assert measure_step_peak(architecture, micro_batch) == extrapolated


def test_the_more_layers_recompute_their_activations_the_less_memory_is_needed() -> None:
    peaks = [
        measure_peak(build_config(layers=6), length=256, recomputation_interval=interval).activations
        for interval in (1, 2, 3, 6, None)
    ]

    assert peaks == sorted(peaks)
    assert len(set(peaks)) == len(peaks)


def test_peak_of_unequal_layers_is_not_extrapolated() -> None:
    """Only the last layer has sliding-window attention, which needs a mask for samples longer than the window."""
    full_attention = ["full_attention"] * 5

    def measure_peak_bytes(layer_types: list[str]) -> int:
        config = build_config(layer_types=layer_types, use_sliding_window=True, sliding_window=32)
        return measure_peak(config, length=512).total

    equal, unequal = map(measure_peak_bytes, (full_attention, [*full_attention[1:], "sliding_attention"]))
    assert unequal > equal + 4 * 512**2, "a float32 mask of 512 x 512 tokens"


@pytest.mark.parametrize("config_class", [Qwen3Config, GPT2Config], ids=lambda config_class: config_class.model_type)
def test_forecast_supports_other_architectures(config_class: type) -> None:
    gpt2_sizes = {"n_embd": 64, "n_head": 4, "n_layer": 5}
    fields = gpt2_sizes if config_class is GPT2Config else {**SIZES, "num_hidden_layers": 5}

    kept_peak, recomputed_peak = (
        measure_peak(config_class(**fields, vocab_size=500), length=128, recomputation_interval=interval)
        for interval in (None, 1)
    )

    assert 0 < recomputed_peak.activations < kept_peak.activations


def test_eager_attention_needs_memory_for_the_attention_weights() -> None:
    """The float32 weights of all layers are saved for the backward pass."""
    fused, eager = (measure_peak(build_config(), attention=attention, length=512) for attention in (SDPA, EAGER))

    assert eager.activations > fused.activations + 5 * SIZES["num_attention_heads"] * 512**2 * 4


def test_a_model_without_sdpa_has_a_forecast() -> None:
    architecture = Architecture(tiny_families.build_config("gemma2"), torch.float32, None, attention=EAGER)

    assert measure_shape(architecture).parameters == sum(
        parameter.numel() for parameter in tiny_families.build_model("gemma2").parameters()
    )
    assert measure_step_peak(architecture, build_step()).activations > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_with_experts_has_a_forecast(dtype: torch.dtype) -> None:
    architecture = Architecture(tiny_families.build_config("qwen3_moe"), dtype, None)

    plain, with_router_loss = (
        measure_step_peak(architecture, build_step(length=256, has_router_loss=has_router_loss))
        for has_router_loss in (False, True)
    )

    assert 0 < plain.activations < with_router_loss.activations


def test_two_samples_need_an_attention_mask_in_every_layer() -> None:
    one, two = (measure_peak(build_config(layers=3), batch=batch, length=1024) for batch in (1, 2))

    mask_bytes = 2 * 1024**2 * (1 + 3 * 4)  # two masks: one byte shared by all layers, four bytes in each layer
    assert two.activations - 2 * one.activations > 0.9 * mask_bytes


def test_pack_needs_an_attention_mask_in_every_layer() -> None:
    one, pack = (
        measure_peak(build_config(layers=3), length=1024, mask_use=mask_use)
        for mask_use in (MaskUse.PADDED_ROWS, MaskUse.PACKS)
    )

    assert pack.activations - one.activations > 0.9 * 1024**2 * (1 + 3 * 4)


def test_two_samples_without_masks_need_twice_the_memory_of_one() -> None:
    one, two = (
        measure_peak(build_config(layers=3), batch=batch, length=1024, mask_use=MaskUse.NEVER) for batch in (1, 2)
    )

    assert two.activations == pytest.approx(2 * one.activations, rel=0.01)


@pytest.mark.parametrize(
    ("fields", "attention", "mask_use"),
    [
        ({}, VARLEN, MaskUse.NEVER),
        ({"dataset": PACKED}, VARLEN, MaskUse.NEVER),
        ({}, SDPA, MaskUse.WINDOWS),
        ({"training": {"routerAuxLossCoef": 0.1}}, SDPA, MaskUse.PADDED_ROWS),
        ({"dataset": PACKED}, SDPA, MaskUse.PACKS),
    ],
)
def test_the_layout_of_the_micro_batches_determines_the_mask(
    fields: dict[str, Any], attention: str, mask_use: MaskUse
) -> None:
    spec = parse_spec(**fields)

    assert choose_mask_use(spec, ForecastModel(build_config(), torch.float32, attention=attention)) is mask_use


def test_dropout_saves_one_byte_per_element() -> None:
    dropout = torch.nn.Dropout(0.1)
    use_fused_dropout(dropout)
    with FakeTensorMode():
        output = dropout(torch.empty(8, 100, requires_grad=True))

    assert output.grad_fn.name() == "NativeDropoutBackward0"
    assert output.grad_fn._saved_result1.nbytes == 8 * 100


def test_error_names_the_model_type_that_cannot_be_built() -> None:
    from transformers import ViTConfig

    with pytest.raises(ModelError, match="a vit model cannot be built from its config"):
        measure_shape(Architecture(ViTConfig(), torch.float32, None))


def test_gradient_buckets_have_the_size_of_the_gradients() -> None:
    shape, peak = measure_shape(Architecture(build_config(), torch.float32, LORA)), ActivationMemory(1000, 1000)
    layouts = [RankLayout(ranks, 1, 0, on_gpu=True) for ranks in (1, 4)]
    one_rank, four_ranks = (
        {part.name: part.size for part in break_down_rank_memory(shape, peak, layout).parts} for layout in layouts
    )

    assert "gradient buckets" not in one_rank
    assert four_ranks["gradient buckets"] == four_ranks["gradients"] == shape.trained_bytes
