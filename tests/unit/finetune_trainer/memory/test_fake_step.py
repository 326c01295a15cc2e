"""The simulated step against real ones: the bytes that the tensors of a tiny model take on this machine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from finetune_api.v1alpha1.lora import Lora
from finetune_trainer.errors import ModelError
from finetune_trainer.memory.breakdown import Layout, Whole, rank_parts
from finetune_trainer.memory.fake_step import Live, Step, loss_of_every_token, simulate_step
from finetune_trainer.memory.fused_kernels import use_fused_dropout
from finetune_trainer.memory.model_shape import Architecture, measure_shape, measure_step
from finetune_trainer.methods.sft import target_losses
from finetune_trainer.model.lora import add_adapters
from finetune_trainer.model.quantization import four_bit
from testing.models import tiny_text as tiny

LORA = Lora(r=4, lora_dropout=0.1, target_modules=("all-linear",))
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}


def config(kind: type = Qwen2Config, *, layers: int = 5, **fields: Any) -> Any:
    return kind(**{**SIZES, "num_hidden_layers": layers, "vocab_size": 500, "pad_token_id": 0, **fields})


def step(**fields: Any) -> Step:
    given = {"batch": 1, "length": 48, "checkpointing": False, "autocast": None, "loss": loss_of_every_token, **fields}
    return Step(**given)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_what_stays_is_counted_to_the_byte(lora: Lora | None) -> None:
    model: Any = tiny.build_model(256)
    architecture = Architecture(model.config, torch.float32, lora)
    model = add_adapters(model, lora, seed=0) if lora else model
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    ids = torch.zeros(1, 16, dtype=torch.int64)

    target_losses(model(input_ids=ids).logits, ids).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()

    states = [each for state in optimizer.state.values() for key, each in state.items() if key != "step"]
    real = {
        "weights": sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers()),
        "gradients": sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
        "optimizer states": sum(each.nbytes for each in states),
    }
    forecast = {part.name: part.size for part in Whole(on_gpu=True).footprint(measure_shape(architecture), 1).held}
    assert forecast.pop("reference model") == 0
    assert forecast.pop("weights") + forecast.pop("adapters") == real.pop("weights")
    assert forecast == real


def test_what_a_forward_pass_keeps_is_what_autograd_keeps() -> None:
    """Attention apart: the fused kernel of a GPU keeps what its simulation says, this machine's keeps the same."""
    length, model = 64, tiny.build_model(256)
    kept: dict[int, torch.Tensor] = {}
    held = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in held:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.zeros(1, length, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(input_ids=ids, use_cache=False).logits
    saved = sum(-(-each.untyped_storage().nbytes() // 512) * 512 for each in kept.values())
    loss_on_top = logits.nbytes + 2 * (logits.nbytes - logits[:, -1].nbytes)

    live = measure_step(Architecture(model.config, torch.float32, None), step(length=length))

    assert saved + loss_on_top <= live.total <= 1.1 * (saved + loss_on_top)


def test_logits_take_twelve_bytes_each_when_the_loss_goes_back() -> None:
    """In 16 bits they are gone by then; three copies in 32 bits remain of those that have a target."""
    vocabulary, length = 50_000, 64
    big = Architecture(config(vocab_size=vocabulary), torch.bfloat16, LORA)

    live = measure_step(big, step(length=length, autocast=torch.bfloat16))

    assert live.logits == pytest.approx(12 * (length - 1) * vocabulary, rel=0.001)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_4_bit_weights_take_what_bitsandbytes_holds_and_one_layer_that_is_widened(
    tmp_path: Path, checkpointing: bool
) -> None:
    of = config(layers=4, hidden_size=128, intermediate_size=512)
    AutoModelForCausalLM.from_config(of).save_pretrained(tmp_path)
    packed = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=four_bit(torch.float32, None))
    lora, wanted = LORA.model_copy(update={"quantization": "nf4"}), step(checkpointing=checkpointing)

    forecast = Architecture(of, torch.float32, lora)
    shape, live = measure_shape(forecast), measure_step(forecast, wanted)
    real = add_adapters(packed, lora, seed=0)
    highest = max(each.total for each in simulate_step(real, wanted).values())

    assert highest <= live.total <= highest + 4 * 128 * 512
    assert shape.frozen_bytes == pytest.approx(sum(map(held_bytes, real.parameters())), rel=0.05)


def held_bytes(parameter: torch.nn.Parameter) -> int:
    """Of what is frozen, with the constants of what is in 4 bits."""
    state = getattr(parameter, "quant_state", None)
    constants = (state.absmax, state.code, state.state2.absmax, state.state2.code) if state else ()
    return 0 if parameter.requires_grad else parameter.nbytes + sum(each.nbytes for each in constants)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_few_layers_tell_what_many_take(
    lora: Lora | None, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = step(checkpointing=checkpointing, autocast=torch.bfloat16)
    many = Architecture(config(layers=6), torch.float32, lora)
    extended = measure_step(many, wanted)

    monkeypatch.setattr("finetune_trainer.memory.model_shape._layers_are_equal", lambda _: False)

    assert measure_step(many, wanted) == extended


def test_layers_that_differ_are_simulated_one_by_one() -> None:
    """A layer that attends to a window needs a mask when samples are longer; the last of five does."""
    kinds = ["full_attention"] * 5

    def total(layer_types: list[str]) -> int:
        of = config(layer_types=layer_types, use_sliding_window=True, sliding_window=32)
        return measure_step(Architecture(of, torch.float32, None), step(length=512)).total

    assert total([*kinds[1:], "sliding_attention"]) > total(kinds) + 4 * 512**2  # in float32


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config, GPT2Config], ids=lambda kind: kind.model_type)
def test_architectures_need_nothing_of_their_own(kind: type) -> None:
    fields = {"n_embd": 64, "n_head": 4, "n_layer": 5} if kind is GPT2Config else {**SIZES, "num_hidden_layers": 5}
    architecture = Architecture(kind(**fields, vocab_size=500), torch.float32, None)

    kept, recomputed = (measure_step(architecture, step(length=128, checkpointing=each)) for each in (False, True))

    assert 0 < recomputed.activations < kept.activations


def test_several_samples_need_a_mask_and_a_copy_of_it_per_layer() -> None:
    architecture = Architecture(config(layers=3), torch.float32, None)

    one, two = (measure_step(architecture, step(batch=batch, length=1024)) for batch in (1, 2))

    masks = 2 * 1024**2 * (1 + 3 * 4)  # two samples, one byte each for all layers, four in each layer
    assert two.activations - 2 * one.activations > 0.9 * masks


def test_a_pack_needs_the_mask_that_keeps_its_rows_apart() -> None:
    architecture = Architecture(config(layers=3), torch.float32, None)

    one, pack = (measure_step(architecture, step(length=1024, packed=packed)) for packed in (False, True))

    assert pack.activations - one.activations > 0.9 * 1024**2 * (1 + 3 * 4)


def test_dropout_keeps_a_byte_per_number() -> None:
    dropout = torch.nn.Dropout(0.1)
    use_fused_dropout(dropout)
    with FakeTensorMode():
        made = dropout(torch.empty(8, 100, requires_grad=True))

    assert made.grad_fn.name() == "NativeDropoutBackward0"
    assert made.grad_fn._saved_result1.nbytes == 8 * 100


def test_an_architecture_that_cannot_be_run_is_named() -> None:
    from transformers import ViTConfig

    with pytest.raises(ModelError, match="a vit model cannot be built from its config"):
        measure_shape(Architecture(ViTConfig(), torch.float32, None))


def test_shared_embeddings_count_once() -> None:
    tied, apart = (
        measure_shape(Architecture(config(tie_word_embeddings=tie), torch.float32, None)) for tie in (True, False)
    )

    assert apart.parameters - tied.parameters == 500 * 64


def test_buckets_are_a_second_copy_of_the_gradients() -> None:
    shape, live = measure_shape(Architecture(config(), torch.float32, LORA)), Live(1000, 1000)
    alone, several = (
        {part.name: part.size for part in rank_parts(shape, live, Layout(ranks, 1, 0, on_gpu=True)).parts}
        for ranks in (1, 4)
    )

    assert "gradient buckets" not in alone
    assert several["gradient buckets"] == several["gradients"] == shape.trained_bytes
