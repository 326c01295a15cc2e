"""Choose the device to which a rank loads weights, and load them on rank 0 only if FSDP2 distributes them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.distributed.collectives import run_on_rank_zero


@dataclass(frozen=True)
class WeightLoading:
    """How the ranks load the weights of a model (decisions/525)."""

    device: torch.device | None = None  # None: transformers chooses, as for ZeRO-3, which shards while it loads
    rank_zero_only: bool = False


DEFAULT_LOADING = WeightLoading()


@dataclass(frozen=True)
class _LoadedTensors:
    """What other ranks need to know about the model of rank 0."""

    dtypes: dict[str, torch.dtype]  # of the parameters
    buffers: dict[str, torch.Tensor]
    must_stay_untied: bool  # the config ties weights that differ in the checkpoint


def choose_weight_loading(spec: TrainerSpec, device: torch.device) -> WeightLoading:
    """Load directly to the rank's device; with FSDP2, only rank 0 loads, to host memory.

    Call it after the training arguments are built, which enable ZeRO-3.
    """
    if is_deepspeed_zero3_enabled():
        return DEFAULT_LOADING
    if spec.fsdp is not None:
        return WeightLoading(torch.device("cpu"), rank_zero_only=True)
    return WeightLoading(device)


def load_on_rank_zero(
    load: Callable[[], PreTrainedModel], build_on_meta: Callable[[], PreTrainedModel]
) -> PreTrainedModel:
    """Load the model on rank 0 (collective); return it there, and a model without weights on other ranks.

    Such a model has the buffers of rank 0, and uninitialized parameters in host memory, which the kernel allocates
    only when they are written. build_on_meta: builds the model on the meta device, and is called on other ranks.
    Raises: the TrainerError of `load`, on every rank.
    """
    models: list[PreTrainedModel] = []

    def load_and_describe() -> _LoadedTensors:
        models.append(load())
        return _describe_tensors(models[0])

    tensors = run_on_rank_zero(load_and_describe)
    model = models[0] if models else build_on_meta()
    if tensors.must_stay_untied:  # otherwise, accelerate would tie them
        model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
    return model if models else _allocate(model, tensors)


def _describe_tensors(model: PreTrainedModel) -> _LoadedTensors:
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters(remove_duplicate=False)}
    untied = model.get_expanded_tied_weights_keys(all_submodels=True).keys() - model.all_tied_weights_keys.keys()
    return _LoadedTensors(dtypes, dict(model.named_buffers()), must_stay_untied=bool(untied))


def _allocate(model: PreTrainedModel, tensors: _LoadedTensors) -> PreTrainedModel:
    """Move a model from the meta device to host memory, with the dtypes and buffers of rank 0."""
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(tensors.dtypes[name])
    model.to_empty(device="cpu")
    for name, buffer in tensors.buffers.items():
        module_name, _, buffer_name = name.rpartition(".")
        model.get_submodule(module_name)._buffers[buffer_name] = buffer
    model.tie_weights()
    return model
