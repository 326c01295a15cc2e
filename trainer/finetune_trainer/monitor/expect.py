"""The memory that a rank is expected to need, from the samples that there are."""

from finetune_api.v1alpha1 import TrainerSpec
from finetune_trainer.data.load import Data
from finetune_trainer.errors import ModelError, TrainerError
from finetune_trainer.memory.forecast import Model, forecast
from finetune_trainer.memory.gpus import GIB
from finetune_trainer.memory.parts import Part, Parts
from finetune_trainer.model.load import Pretrained


def expect_memory(spec: TrainerSpec, pretrained: Pretrained, data: Data, *, on_gpu: bool) -> Parts | TrainerError:
    """Or why it cannot be told; a run does not end for that."""
    if pretrained.vision:
        return ModelError("what images cost is not simulated")
    longest = spec.dataset.max_length if spec.dataset.packing else int(data.train.lengths.max())
    model = Model(pretrained.config, pretrained.dtype)
    try:
        found = forecast(spec, model, on_gpu=on_gpu, longest=longest)
    except TrainerError as error:
        return error
    if on_gpu:
        return found.rank
    # without a GPU the peak that is measured is that of the whole process
    processes = sum(part.size for part in found.node.parts if part.name == "processes")
    return Parts((*found.rank.parts, Part("process", processes // spec.ranks_per_node)))


def describe_expected(expected: Parts | TrainerError) -> str:
    """The largest parts first."""
    if isinstance(expected, TrainerError):
        return f"memory per rank: no forecast: {expected}"
    parts = sorted((part for part in expected.parts if part.size), key=lambda part: -part.size)
    named = ", ".join(f"{part.name} {part.size / GIB:.2f}" for part in parts)
    return f"memory per rank: at most {expected.total / GIB:.2f} GiB forecast ({named})"
