"""Chooses the attention implementation: one that needs no padding, or else the fastest one that is installed.

Models whose classes have no SDPA, such as Gemma 2 and gpt-oss, are trained with eager attention.
"""

import importlib.util
import math
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PretrainedConfig
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_supervisor.contract import parse_json
from finetune_supervisor.messages import Degradation
from finetune_trainer.atomic_files import write_json
from finetune_trainer.distributed.devices import get_device_name
from finetune_trainer.errors import InvalidSpec, first_line
from finetune_trainer.foreign_files import read_regular_file
from finetune_trainer.model.truncated_config import truncate_layers
from finetune_trainer.model.varlen_attention import VARLEN
from finetune_trainer.model.varlen_support import find_varlen_obstacle
from finetune_trainer.varlen_inputs import build_varlen_inputs, split_by_position_ids
from finetune_trainer.vision.towers import build_on_meta

SDPA = "sdpa"  # included in torch and supported on every device
EAGER = "eager"  # matrix products and softmax, which every model supports
_INSTALLED = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
}
_FILE = "attention.json"
_RELATIVE_TOLERANCE = 0.02  # 16-bit rounding error, relative to the largest output element
_MAX_RELATIVE_TIME = 0.97  # a candidate must be 3 % faster than the baseline; smaller differences are noise
_WARMUP_ROUNDS, _ROUNDS = 2, 5
_REQUESTED = "set in spec.model.attnImplementation"
_MISSING_SDPA = "scaled_dot_product_attention"  # part of the error message of transformers


@dataclass(frozen=True)
class AttentionChoice:
    """Chosen attention implementation and the reason for the choice, which is logged."""

    name: str  # value of attn_implementation in transformers
    reason: str


@dataclass(frozen=True)
class AttentionTrial:
    """Settings of an attention benchmark, which runs one layer of the model on one micro-batch."""

    config: PretrainedConfig
    dtype: torch.dtype
    device: torch.device
    row_count: int
    tokens_per_row: int
    is_packed: bool
    baseline: str = SDPA  # implementation whose output is correct


def select_attention(
    spec: TrainerSpec, trial: AttentionTrial, checkpoint_folder: Path, *, is_multimodal: bool
) -> AttentionChoice:
    """Return the attention implementation in the spec.

    `auto`: varlen, or the fastest installed one if the model does not support varlen. Called on rank 0 only.
    Raises: InvalidSpec.
    """
    requested = spec.model.attn_implementation
    if requested not in ("auto", VARLEN):
        check_backend_installed(requested)
        check_backend_supported(requested, spec, trial.config, has_sdpa=supports_sdpa(trial.config))
        return AttentionChoice(requested, _REQUESTED)
    obstacle = find_varlen_obstacle(trial.config, text_only=spec.model.text_only) or _find_kernel_obstacle(trial)
    if requested == VARLEN and obstacle:
        raise _build_varlen_error(spec, obstacle)
    if obstacle is None:
        return AttentionChoice(VARLEN, "no padding" if requested == "auto" else _REQUESTED)
    has_sdpa = supports_sdpa(trial.config)
    if not has_sdpa:
        trial = replace(trial, baseline=EAGER)
    if is_multimodal:
        choice = AttentionChoice(trial.baseline, "the default for vision-language models")
    else:
        choice = choose_fastest_backend(trial, find_installed_backends(), checkpoint_folder / _FILE)
    missing_sdpa = "" if has_sdpa else f"models of type {trial.config.model_type} have no {SDPA}; "
    return replace(choice, reason=f"{missing_sdpa}{choice.reason}; {VARLEN} is not supported: {obstacle}")


def disable_cudnn_attention() -> None:
    """Exclude cuDNN from the kernels among which SDPA chooses.

    On recent GPUs, torch prefers it, but it builds a plan for each new shape, and micro-batches differ in length.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def choose_simulated_attention(spec: TrainerSpec, config: PretrainedConfig) -> str:
    """Return the implementation that the memory forecast simulates: eager, varlen, or SDPA for other fused ones.

    Raises: InvalidSpec if the model does not support the implementation that the spec requests.
    """
    requested = spec.model.attn_implementation
    if requested == EAGER:
        return EAGER
    if requested in ("auto", VARLEN):
        obstacle = find_varlen_obstacle(config, text_only=spec.model.text_only)
        if obstacle is None:
            return VARLEN
        if requested == VARLEN:
            raise _build_varlen_error(spec, obstacle)
    has_sdpa = supports_sdpa(config)
    check_backend_supported(requested, spec, config, has_sdpa=has_sdpa)
    return SDPA if has_sdpa else EAGER


def supports_sdpa(config: PretrainedConfig) -> bool:
    """Return whether all parts of the model, including vision and audio towers, support SDPA.

    Builds the model with one layer on the meta device. If that fails for another reason, loading the model will report
    it, so the answer is then True.
    """
    try:
        build_on_meta(truncate_layers(config, 1), attn_implementation=SDPA)
    except Exception as error:  # any model code may fail for a model with one layer
        return _MISSING_SDPA not in str(error)
    return True


def choose_default_attention(config: PretrainedConfig) -> str:
    """Return the implementation for padded rows that every model of this type supports: SDPA, or else eager."""
    return SDPA if supports_sdpa(config) else EAGER


def check_backend_supported(name: str, spec: TrainerSpec, config: PretrainedConfig, *, has_sdpa: bool) -> None:
    """Raise InvalidSpec if the spec requests SDPA for a model without SDPA."""
    if name == SDPA and not has_sdpa:
        raise InvalidSpec(
            f'spec.model.attnImplementation: model "{spec.model.name}" of type {config.model_type} has no sdpa; set'
            f" {EAGER}, or auto"
        )


def _build_varlen_error(spec: TrainerSpec, obstacle: str) -> InvalidSpec:
    return InvalidSpec(
        f'spec.model.attnImplementation: {VARLEN} does not work with model "{spec.model.name}": {obstacle}; set auto'
    )


def describe_linear_attention(config: PretrainedConfig) -> Iterator[str]:
    """Yield a log line if the model has layers of linear attention, such as Qwen3.5: which implementation they use."""
    if has_linear_attention(config):
        yield f"linear attention: {'fla (installed)' if has_linear_attention_kernels() else 'torch'}"


def describe_slow_linear_attention(config: PretrainedConfig, device: torch.device) -> Iterator[Degradation]:
    """Yield a degradation if the layers of linear attention run on a GPU without the kernels for them."""
    if device.type == "cuda" and has_linear_attention(config) and not has_linear_attention_kernels():
        yield Degradation(
            "SlowLinearAttention",
            "the model's linear attention runs in plain torch, several times slower than with its kernels; use an image"
            " that also contains flash-linear-attention (docs/user-guide/models.md)",
        )


def has_linear_attention(config: PretrainedConfig) -> bool:
    """Return whether the model has layers of linear attention."""
    return "linear_attention" in (getattr(config.get_text_config(), "layer_types", None) or ())


def has_linear_attention_kernels() -> bool:
    """Return whether the package of flash-linear-attention is installed, which transformers then uses."""
    return importlib.util.find_spec("fla") is not None


def build_attention_trial(
    spec: TrainerSpec, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, tokens_per_row: int
) -> AttentionTrial:
    """Return the settings of the attention benchmark for a job.

    The benchmark uses two rows, or one if the micro-batch size is 1, as FlashAttention requires for packed rows.
    tokens_per_row: number of tokens in the longest row, or in a pack.
    """
    row_count = 1 if spec.training.per_device_train_batch_size == 1 else 2
    return AttentionTrial(config, dtype, device, row_count, tokens_per_row, is_packed=spec.dataset.packing)


def find_installed_backends() -> tuple[str, ...]:
    """Return the installed implementations except SDPA; all of them require a GPU."""
    return tuple(name for name, is_installed in _INSTALLED.items() if torch.cuda.is_available() and is_installed())


def check_backend_installed(name: str) -> None:
    """Raise InvalidSpec if this image lacks the implementation or there is no GPU for it."""
    if name in _INSTALLED and name not in find_installed_backends():
        available = ", ".join((SDPA, "eager", *find_installed_backends()))
        raise InvalidSpec(
            f"spec.model.attnImplementation: {name} is not installed in this image, or there is no GPU for it; use one"
            f" of {available}, or auto"
        )


def choose_fastest_backend(trial: AttentionTrial, candidates: Iterable[str], cache_file: Path) -> AttentionChoice:
    """Benchmark the candidates, or reuse the choice of an earlier attempt with the same GPU and candidates.

    All attempts use the same implementation, because implementations differ in rounding.
    """
    names = tuple(candidates)
    if not names:
        return AttentionChoice(trial.baseline, "no other is installed")
    cache_key = {"device": get_device_name(trial.device), "candidates": list(names)}
    with suppress(OSError, ValueError, KeyError, TypeError):
        cached = parse_json(read_regular_file(cache_file))
        if cached["circumstances"] == cache_key and cached["name"] in (trial.baseline, *names):
            return AttentionChoice(cached["name"], "chosen by an earlier attempt")
    choice = benchmark_backends(trial, names)
    write_json(cache_file, {"name": choice.name, "why": choice.reason, "circumstances": cache_key})
    return choice


def benchmark_backends(trial: AttentionTrial, candidates: Iterable[str]) -> AttentionChoice:
    """Measure the time of one layer with each candidate, and choose the fastest correct one (decisions/703).

    Candidates that fail or whose output differs from the output of the baseline are rejected.
    """
    with _restore_rng_and_memory(trial.device):
        try:
            layer = _build_layer(trial)
            expected_output, baseline_seconds = _time_layer(layer, trial.baseline, trial)
        except Exception as error:  # not fatal, because the full model may still work
            return AttentionChoice(trial.baseline, f"a single layer cannot be benchmarked: {first_line(error)}")
        seconds, results = {trial.baseline: baseline_seconds}, [f"{trial.baseline} {1000 * baseline_seconds:.2f}"]
        for name in candidates:
            outcome = _try_backend(layer, name, trial, expected_output)
            results.append(f"{name} {outcome if isinstance(outcome, str) else f'{1000 * outcome:.2f}'}")
            if isinstance(outcome, float) and outcome < _MAX_RELATIVE_TIME * baseline_seconds:
                seconds[name] = outcome
    fastest = min(seconds, key=lambda name: seconds[name])
    shape = f"{trial.row_count} x {trial.tokens_per_row} tokens{', packed' if trial.is_packed else ''}"
    return AttentionChoice(fastest, f"ms per layer, forward and backward, {shape}: {', '.join(results)}")


def _find_kernel_obstacle(trial: AttentionTrial) -> str | None:
    """Return why varlen fails for one layer on this GPU, or that its output is wrong; None on a CPU."""
    if not _runs_kernel(trial.device):
        return None
    with _restore_rng_and_memory(trial.device):
        try:
            layer = _build_layer(trial)
            expected_output, _ = _time_layer(layer, trial.baseline, trial)
        except Exception:  # not fatal, because the full model may still work
            return None
        outcome = _try_backend(layer, VARLEN, trial, expected_output)
    return outcome if isinstance(outcome, str) else None


def _runs_kernel(device: torch.device) -> bool:
    return device.type == "cuda"


def _try_backend(
    layer: torch.nn.Module, name: str, trial: AttentionTrial, expected_output: torch.Tensor
) -> float | str:
    """Return the median time in seconds, or the reason for rejecting the implementation."""
    try:
        output, seconds = _time_layer(layer, name, trial)
    except Exception as error:  # the kernel libraries raise exceptions of many types
        return f"fails: {first_line(error)}"
    return "wrong output" if _is_outside_tolerance(output, expected_output) else seconds


def _build_layer(trial: AttentionTrial) -> torch.nn.Module:
    config = truncate_layers(trial.config.get_text_config(), 1)
    with trial.device:
        layer: torch.nn.Module = AutoModel.from_config(config, dtype=trial.dtype, attn_implementation=trial.baseline)
    return layer.train()


def _time_layer(layer: torch.nn.Module, name: str, trial: AttentionTrial) -> tuple[torch.Tensor, float]:
    """Return the output, (tokens, hidden), and the median time of a forward and backward pass in seconds."""
    layer.set_attn_implementation(name)  # type: ignore[operator]
    inputs, durations = _build_inputs(trial, padding_free=name == VARLEN), []
    for _ in range(_WARMUP_ROUNDS + _ROUNDS):
        layer.zero_grad(set_to_none=True)
        started = _read_clock(trial.device)
        output: torch.Tensor = layer(**inputs).last_hidden_state
        output.float().sum().backward()  # type: ignore[no-untyped-call]
        durations.append(_read_clock(trial.device) - started)
    return output.detach().flatten(0, 1), statistics.median(durations[_WARMUP_ROUNDS:])


def _build_inputs(trial: AttentionTrial, *, padding_free: bool) -> dict[str, Any]:
    """Return the inputs of the layer. padding_free: whether all sequences are in one row."""
    shape = (trial.row_count, trial.tokens_per_row)
    ids = torch.arange(math.prod(shape), device=trial.device).view(shape)
    ids = ids % trial.config.get_text_config().vocab_size
    rows_per_pack = 4 if trial.is_packed else 1
    length = max(trial.tokens_per_row // rows_per_pack, 1)
    positions = torch.arange(trial.tokens_per_row, device=trial.device) % length
    inputs = {"input_ids": ids, "position_ids": positions.expand(trial.row_count, -1), "use_cache": False}
    if not padding_free:
        return inputs
    varlen_inputs = build_varlen_inputs(split_by_position_ids(inputs["position_ids"].flatten()))
    return {
        **{name: value.reshape(1, -1) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()},
        **{name: v.to(trial.device) if isinstance(v, torch.Tensor) else v for name, v in varlen_inputs.items()},
    }


def _is_outside_tolerance(output: torch.Tensor, expected_output: torch.Tensor) -> bool:
    difference = (output.float() - expected_output.float()).abs().max() / expected_output.float().abs().max()
    return not bool(difference <= _RELATIVE_TOLERANCE)  # also True if the difference is NaN


def _read_clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def _restore_rng_and_memory(device: torch.device) -> Iterator[None]:
    """Restore the random state, free the GPU memory and reset its peak statistics."""

    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        yield
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
