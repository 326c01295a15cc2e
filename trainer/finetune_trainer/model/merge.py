"""Merge an adapter into the weights of its base model."""

from pathlib import Path

from peft import PeftModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from finetune_trainer.model.load import Pretrained, load_weights
from finetune_trainer.vision.save_processor import save_processor


def write_merged(pretrained: Pretrained, adapter: Path, folder: Path) -> None:
    """Save the merged model, its tokenizer and its processor to `folder`.

    On one rank only. The base model is loaded again into host memory, because the trained one may be sharded.
    """
    unset_hf_deepspeed_config()  # otherwise ZeRO-3 would shard this model too

    merged = PeftModel.from_pretrained(load_weights(pretrained, pretrained.dtype), adapter).merge_and_unload()
    merged.save_pretrained(folder)
    pretrained.tokenizer.save_pretrained(folder)
    if pretrained.vision:
        save_processor(pretrained.vision, pretrained.name, folder)
