"""The model as numbers, read from its config alone: built on torch's meta device, where tensors have no data."""

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from finetune_api.v1alpha1.lora import Lora
from finetune_trainer.errors import ModelError, first_line
from finetune_trainer.memory.data_dependent_shapes import KnownNumbers
from finetune_trainer.memory.fake_step import Live, Phase, Shown, Step, simulate_step
from finetune_trainer.memory.vision_sample import Sight
from finetune_trainer.model.lora import add_adapters
from finetune_trainer.model.truncated_config import per_layer, with_layers
from finetune_trainer.vision.freeze import freeze_as_asked, group_of

_FEWEST = 2  # layers of the smallest model that stands in for a large one


@dataclass(frozen=True)
class ModelShape:
    """Bytes that a model holds, and how its step grows with its layers."""

    parameters: int
    trained_parameters: int
    frozen_bytes: int
    trained_bytes: int
    buffer_bytes: int
    adapted: bool = False  # what is trained are adapters
    reference_bytes: int = 0  # of a second model, which does not learn
    # Numbers, not bytes, of what is gathered together where weights are spread:
    layer_parameters: int = 0  # of the largest layer
    outer_parameters: int = 0  # outside of layers: embeddings, output
    largest_parameter: int = 0

    @property
    def loaded_bytes(self) -> int:
        """Of what is trained, which is read as float32 wherever it is kept."""
        return 4 * self.trained_parameters


@dataclass(frozen=True)
class Architecture:
    """A model as it would be built for training."""

    config: PretrainedConfig
    dtype: torch.dtype
    lora: Lora | None
    pure: bool = False  # adapters are of that type, too
    sight: Sight | None = None  # of a model that sees

    @property
    def four_bits(self) -> bool:
        """Of the weights under the adapters."""
        return self.lora is not None and self.lora.quantization is not None

    def build(self, *, layers: int | None = None) -> Any:
        """On the meta device, whole or with the first layers alone."""
        # a copy of its own: a model's config says which attention it takes
        config = copy.deepcopy(self.config) if layers is None else with_layers(self.config, layers)
        try:
            with torch.device("meta"):
                kind = AutoModelForImageTextToText if self.sight else AutoModelForCausalLM
                model = kind.from_config(config, dtype=self.dtype)
                without = freeze_as_asked(model, self.sight.vision, self.sight.frozen) if self.sight else None
                model = add_adapters(model, self.lora, seed=0, without=without) if self.lora else model
                return model.to(self.dtype) if self.pure else model
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"a {config.model_type} model cannot be built from its config: {error}") from error

    @cached_property
    def whole(self) -> Any:
        """All layers, to be looked at only: adapters on many layers take a second to build."""
        return self.build()


def measure_shape(architecture: Architecture) -> ModelShape:
    """Parameters and bytes of the whole model; what is shared counts once."""
    model = architecture.whole
    trained = [each for each in model.parameters() if each.requires_grad]
    frozen = [each for each in model.parameters() if not each.requires_grad]
    packed = {id(each) for each in _packed(architecture)}
    layers = [sum(each.numel() for each in layer.parameters()) for layer in _layers(architecture)]
    return ModelShape(
        parameters=sum(each.numel() for each in (*trained, *frozen)),
        trained_parameters=sum(each.numel() for each in trained),
        frozen_bytes=sum(_nf4_bytes(each) if id(each) in packed else each.nbytes for each in frozen),
        trained_bytes=sum(each.nbytes for each in trained),
        buffer_bytes=sum(each.nbytes for each in model.buffers()),
        adapted=architecture.lora is not None,
        layer_parameters=max(layers, default=0),
        outer_parameters=sum(each.numel() for each in (*trained, *frozen)) - sum(layers),
        largest_parameter=max((each.numel() for each in trained), default=0),
    )


def measure_step(architecture: Architecture, step: Step) -> Live:
    """What lives at the highest moment of a step.

    Of equal layers each takes the same, so two small models tell what many layers take. Raises ModelError.
    """
    layers = _count_layers(architecture.config)
    if layers <= _FEWEST + 1 or not _layers_are_equal(architecture):
        found = _simulate(architecture, step, None)
    else:
        few, more = (_simulate(architecture, step, count) for count in (_FEWEST, _FEWEST + 1))
        found = {phase: _extend(few[phase], more[phase], layers - _FEWEST) for phase in Phase}
    widened = max((each.nbytes for each in _packed(architecture)), default=0)  # one at a time, while it is multiplied
    for phase in (Phase.FORWARD, Phase.LAYERS):
        found[phase] = replace(found[phase], activations=found[phase].activations + widened)
    return max(found.values(), key=lambda live: live.total)


def _packed(architecture: Architecture) -> list[torch.Tensor]:
    """The weights that are kept in 4 bits: of frozen linear layers, but not of the output, nor of what sees."""
    if not architecture.four_bits:
        return []
    output = architecture.whole.get_output_embeddings()
    linear = (module for module in _in_language(architecture) if isinstance(module, torch.nn.Linear))
    return [module.weight for module in linear if module is not output and not module.weight.requires_grad]


def _nf4_bytes(weight: torch.Tensor) -> int:
    """Half a byte each, one more for 64 of them, which is quantized itself: 4 bytes for 256 of those."""
    return int(weight.numel() * (0.5 + 1 / 64 + 4 / (64 * 256)))


def _extend(few: Live, more: Live, further: int) -> Live:
    return Live(
        few.activations + further * (more.activations - few.activations),
        few.logits + further * (more.logits - few.logits),
    )


def _simulate(architecture: Architecture, step: Step, layers: int | None) -> dict[Phase, Live]:
    model = architecture.build(layers=layers)
    try:
        if architecture.sight is None:
            with FakeTensorMode():
                _give_fake_tensors(model)
                return simulate_step(model, step)
        batch, tower = architecture.sight.batch(step.batch), architecture.sight.vision.family.vision
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, KnownNumbers(fake):
            _give_fake_tensors(model)
            pixels = {name: fake.from_tensor(value) for name, value in batch.items() if value.is_floating_point()}
            return simulate_step(model, step, Shown({**batch, **pixels}, tower))
    except Exception as error:  # whatever a model does with tensors that have no data: no job ends for it
        raise ModelError(
            f"the activations of a {architecture.config.model_type} model cannot be forecast: {first_line(error)}"
        ) from error


def _give_fake_tensors(model: torch.nn.Module) -> None:
    """In the place of meta tensors, on which autocast does nothing. What is shared stays shared."""
    fakes: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if id(tensor) not in fakes:
                fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                fakes[id(tensor)] = torch.nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
            table: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
            table[name] = fakes[id(tensor)]


def _count_layers(config: PretrainedConfig) -> int:
    return int(config.get_text_config().num_hidden_layers)


def _layers(architecture: Architecture) -> list[Any]:
    """Of the model whole; none if they are not told apart by how many there are."""
    count = _count_layers(architecture.config)
    lists = (module for module in _in_language(architecture) if isinstance(module, torch.nn.ModuleList))
    return next((list(found) for found in lists if len(found) == count), [])


def _in_language(architecture: Architecture) -> Iterator[torch.nn.Module]:
    """All modules but those of the vision tower and its aligner."""
    family = architecture.sight.vision.family if architecture.sight else None
    for name, module in architecture.whole.named_modules():
        if family is None or group_of(name, family) == "language":
            yield module


def _layers_are_equal(architecture: Architecture) -> bool:
    """Of the same tensors and, by the config, of the same kind."""
    text = architecture.config.get_text_config()
    if any(len({repr(each) for each in getattr(text, name)}) > 1 for name in per_layer(text)):
        return False
    kinds = [Counter((tuple(p.shape), p.dtype) for p in layer.parameters()) for layer in _layers(architecture)]
    return bool(kinds) and all(kind == kinds[0] for kind in kinds)
