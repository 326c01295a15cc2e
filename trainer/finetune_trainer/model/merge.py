"""Merges an adapter into the weights of its base model."""

from pathlib import Path

from peft import PeftModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from finetune_trainer.model.load import ModelDescription, load_weights
from finetune_trainer.vision.save_processor import save_processor


def write_merged_model(pretrained: ModelDescription, adapter: Path, folder: Path) -> None:
    """Save the merged model, its tokenizer and its processor to `folder`.

    Called on one rank only. Reloads the base model into host memory, because the trained model may be sharded.
    """
    unset_hf_deepspeed_config()  # ZeRO-3 must not shard this model

    merged = PeftModel.from_pretrained(load_weights(pretrained, pretrained.dtype), adapter).merge_and_unload()
    merged.save_pretrained(folder)
    pretrained.tokenizer.save_pretrained(folder)
    if pretrained.vision:
        save_processor(pretrained.vision, pretrained.name, folder)
