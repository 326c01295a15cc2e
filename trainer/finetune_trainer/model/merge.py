"""Merges an adapter into the weights of its base model."""

from pathlib import Path

from peft import PeftModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from finetune_trainer.model.load import ModelDescription, load_weights
from finetune_trainer.model.save import save_tokenizer_and_processors


def write_merged_model(model_description: ModelDescription, adapter: Path, folder: Path) -> None:
    """Save the merged model, its tokenizer and its processor to `folder`.

    Called on one rank only. Reloads the base model into host memory, because the trained model may be sharded.
    """
    unset_hf_deepspeed_config()  # ZeRO-3 must not shard this model

    merged = PeftModel.from_pretrained(
        load_weights(model_description, model_description.dtype), adapter
    ).merge_and_unload()
    merged.save_pretrained(folder)
    save_tokenizer_and_processors(model_description, folder)
