"""The memory that a rank is expected to need, from the samples that there are."""

import torch

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.data.load import Data
from finetune_trainer.data_sources.media import Kind
from finetune_trainer.errors import TrainerError
from finetune_trainer.memory.breakdown import Part, Parts
from finetune_trainer.memory.forecast import Model, forecast
from finetune_trainer.memory.gpus import GIB
from finetune_trainer.memory.vision_sample import a_word
from finetune_trainer.model.load import Pretrained
from finetune_trainer.vision.processor import SEEN, Vision
from finetune_trainer.vision.video_processor import Features


def expect_memory(spec: TrainerSpec, pretrained: Pretrained, data: Data, *, on_gpu: bool) -> Parts | TrainerError:
    """Or why it cannot be told; a run does not end for that."""
    room = spec.dataset.max_length if spec.dataset.packing else None
    longest = room or int(data.train.lengths.max())
    model = Model(pretrained.config, pretrained.dtype, pretrained.vision)
    try:
        sample = costliest_sample(data, pretrained.vision, longest) if pretrained.vision else None
        found = forecast(spec, model, on_gpu=on_gpu, longest=longest, sample=sample)
    except TrainerError as error:
        return error
    if on_gpu:
        return found.rank
    # without a GPU the peak that is measured is that of the whole process
    processes = sum(part.size for part in found.node.parts if part.name == "processes")
    return Parts((*found.rank.parts, Part("process", processes // spec.ranks_per_node)))


def costliest_sample(data: Data, vision: Vision, length: int) -> Features:
    """The row or pack with most visual tokens, followed by words up to that length."""
    item = data.shows_most
    if item is None:
        shown = vision.stand_in(Kind.IMAGE)
    else:
        shown = max(data.samples[item], key=lambda each: (any(name in each for name in SEEN), len(each["input_ids"])))
    words = torch.full((max(length - len(shown["input_ids"]), 0),), a_word(vision))
    seen = {name: shown[name] for name in SEEN if name in shown}
    return {**seen, "input_ids": torch.cat((shown["input_ids"], words))}


def describe_expected(expected: Parts | TrainerError) -> str:
    """The largest parts first."""
    if isinstance(expected, TrainerError):
        return f"memory per rank: no forecast: {expected}"
    parts = sorted((part for part in expected.parts if part.size), key=lambda part: -part.size)
    named = ", ".join(f"{part.name} {part.size / GIB:.2f}" for part in parts)
    return f"memory per rank: at most {expected.total / GIB:.2f} GiB forecast ({named})"
