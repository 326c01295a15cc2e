"""Errors of transformers, peft, datasets, accelerate and tokenizers that a job's settings or data cause."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy
import peft
import tokenizers
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Trainer, TrainingArguments


def _model(**changes: Any) -> Any:
    settings = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 32,
    }
    return AutoModelForCausalLM.from_config(LlamaConfig(**(settings | changes)))


def _tokenizer(**settings: Any) -> Any:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))  # noqa: S106
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **settings)


def _adapt(**settings: Any) -> Any:
    return peft.get_peft_model(_model(), peft.LoraConfig(**settings))


def _arguments(**settings: Any) -> Any:
    return TrainingArguments(output_dir="out", report_to=[], use_cpu=True, **settings)


def _texts(*texts: str) -> Any:
    return datasets.Dataset.from_dict({"text": list(texts)})


def _load_config(folder: Path, content: str) -> None:
    (folder / "brk").mkdir()
    (folder / "brk" / "config.json").write_text(content)
    AutoConfig.from_pretrained("brk")


def _folder(folder: Path, **files: str) -> str:
    (folder / "emp").mkdir()
    for name, content in files.items():
        (folder / "emp" / f"{name}.json").write_text(content)
    return "./emp"


def _load_without_weights(folder: Path) -> None:
    (folder / "noweights").mkdir()
    (folder / "noweights" / "config.json").write_text(json.dumps(_model().config.to_dict()))
    AutoModelForCausalLM.from_pretrained("./noweights")


def _load_other_vocabulary(folder: Path) -> None:
    _model().save_pretrained("small")
    AutoModelForCausalLM.from_pretrained("small", vocab_size=64)


def _load_adapter_of_other_width(folder: Path) -> None:
    _adapt(r=4, target_modules=["q_proj", "v_proj"]).save_pretrained("adapter")
    peft.PeftModel.from_pretrained(_model(hidden_size=32), "adapter")


def _load_missing_shard(folder: Path) -> None:
    _model().save_pretrained("sh", max_shard_size="5KB")
    sorted(folder.glob("sh/*.safetensors"))[1].unlink()
    AutoModelForCausalLM.from_pretrained("./sh")


def _load_cut_tokenizer(folder: Path) -> None:
    _tokenizer().save_pretrained("tok")
    (folder / "tok" / "tokenizer.json").write_text('{"version": "1.0"')
    AutoTokenizer.from_pretrained("tok")


def _train_without_labels(folder: Path) -> None:
    model = transformers.AutoModel.from_config(_model().config)
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2]] * 8})
    Trainer(model=model, args=_arguments(max_steps=1), train_dataset=rows).train()


def _apply_template(template: str, roles: tuple[str, ...] = ("user",)) -> None:
    _tokenizer(chat_template=template).apply_chat_template([{"role": role, "content": "a"} for role in roles])


def _concatenate(folder: Path) -> None:
    datasets.concatenate_datasets([_texts("a"), datasets.Dataset.from_dict({"text": [1]})])


ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{% endfor %}"
)

PROVOCATIONS: dict[str, Callable[[Path], object]] = {
    "tokenizer.json cut": _load_cut_tokenizer,
    "unpadded batch to tensors": lambda folder: _tokenizer()(["a", "a b"], return_tensors="pt"),
    "padding without pad token": lambda folder: _tokenizer()(["a", "a b"], padding=True),
    "tokenizer given None": lambda folder: _tokenizer()([None]),
    "chat template absent": lambda folder: _tokenizer().apply_chat_template([{"role": "user", "content": "a"}]),
    "chat template refuses the roles": lambda folder: _apply_template(ALTERNATE, ("user", "user")),
    "chat template syntax error": lambda folder: _apply_template("{% for m in messages %}{% endif %}"),
    "chat template adds int to str": lambda folder: _apply_template("{{ 'a' + 1 }}"),
    "MLM collator without mask token": lambda folder: transformers.DataCollatorForLanguageModeling(_tokenizer()),
    "unused model_kwargs in generate": lambda folder: _model().generate(torch.ones(1, 2).long(), temprature=1.0),
    "assistant num_beams groups": lambda folder: _model().generate(torch.ones(1, 2).long(), num_return_sequences=3),
    "neither input_ids nor embeds": lambda folder: _model()(),
    "generation config contradiction": lambda folder: transformers.GenerationConfig(max_new_tokens=-2).validate(),
    "unknown scheduler": lambda folder: _arguments(lr_scheduler_type="cosin"),
    "unknown optimizer name": lambda folder: _arguments(optim="adamw9"),
    "bf16 and fp16 both": lambda folder: _arguments(bf16=True, fp16=True),
    "tf32 asked for on CPU": lambda folder: _arguments(tf32=True),
    "TrainingArguments misspelt": lambda folder: _arguments(evaluation_strategey="steps"),
    "load_best without matching strategies": lambda folder: _arguments(
        load_best_model_at_end=True, eval_strategy="epoch", save_strategy="steps"
    ),
    "Trainer without a train set": lambda folder: Trainer(model=_model(), args=_arguments(max_steps=1)).train(),
    "Trainer eval strategy without eval set": lambda folder: Trainer(
        model=_model(), args=_arguments(eval_strategy="steps", eval_steps=1)
    ),
    "Trainer without labels": _train_without_labels,
    "resume from folder without checkpoints": lambda folder: Trainer(
        model=_model(), args=_arguments(), train_dataset=_texts("a")
    ).train(resume_from_checkpoint=True),
    "resume from misspelt checkpoint": lambda folder: Trainer(
        model=_model(), args=_arguments(), train_dataset=_texts("a")
    ).train(resume_from_checkpoint="out/checkpoint-999"),
    "HfArgumentParser missing": lambda folder: transformers.HfArgumentParser(TrainingArguments).parse_dict({"lr": 1}),
    "weights of another vocabulary size": _load_other_vocabulary,
    "folder with config and no weights": _load_without_weights,
    "AutoModel folder without config": lambda folder: AutoConfig.from_pretrained(_folder(folder, config="{}")),
    "AutoModel of an unknown model type": lambda folder: _load_config(folder, '{"model_type": "llamma9"}'),
    "config.json broken by hand edit": lambda folder: _load_config(folder, '{"model_type": "llama",}'),
    "tokenizer folder without tokenizer files": lambda folder: AutoTokenizer.from_pretrained(
        _folder(folder, config='{"model_type": "llama"}')
    ),
    "hidden size not divisible by heads": lambda folder: LlamaConfig(hidden_size=17, num_attention_heads=2),
    "unknown attention implementation": lambda folder: AutoModelForCausalLM.from_config(
        _model().config, attn_implementation="flash_attn"
    ),
    "causal LM class for an encoder-decoder config": lambda folder: AutoModelForCausalLM.from_config(
        transformers.T5Config()
    ),
    "quantisation config with both bits": lambda folder: transformers.BitsAndBytesConfig(
        load_in_4bit=True, load_in_8bit=True
    ),
    "resize_token_embeddings misuse": lambda folder: _model().resize_token_embeddings("64"),
    "pipeline of unknown task": lambda folder: transformers.pipeline("text-gen"),
    "second shard gone": _load_missing_shard,
    "from tokenizer.json of another schema": lambda folder: tokenizers.Tokenizer.from_str(
        '{"model": {"type": "Unknown"}}'
    ),
    "adapter of another base width": _load_adapter_of_other_width,
    "LoRA rank zero": lambda folder: _adapt(r=0, target_modules=["q_proj"]),
    "LoRA target modules absent": lambda folder: _adapt(target_modules=["query_key_value"]),
    "LoRA target of unsupported layer type": lambda folder: _adapt(target_modules=["input_layernorm"]),
    "LoRA targets cannot be inferred": lambda folder: peft.get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(2, 2)), peft.LoraConfig()
    ),
    "layers_to_transform with regex": lambda folder: peft.LoraConfig(
        target_modules=".*q_proj", layers_to_transform=[0]
    ),
    "unknown task type": lambda folder: peft.LoraConfig(task_type="CAUSALLM"),
    "set_adapter that is not there": lambda folder: _adapt(target_modules=["q_proj"]).set_adapter("dpo"),
    "adapter folder without adapter_config": lambda folder: peft.PeftModel.from_pretrained(_model(), _folder(folder)),
    "prompt tuning without tokens number": lambda folder: peft.PromptTuningConfig(
        prompt_tuning_init="TEXT", task_type="CAUSAL_LM", num_virtual_tokens=2, prompt_tuning_init_text="a"
    ),
    "datasets map with KeyError": lambda folder: _texts("a").map(lambda row: {"a": row["prompt"]}),
    "datasets map batched with wrong lengths": lambda folder: _texts("a", "b").map(
        lambda rows: {"ids": [1, 2, 3]}, batched=True
    ),
    "datasets load_from_disk on plain folder": lambda folder: datasets.load_from_disk(_folder(folder)[2:]),
    "datasets stratified split on non-ClassLabel": lambda folder: _texts("a", "b").train_test_split(
        stratify_by_column="text"
    ),
    "datasets train_test_split too small": lambda folder: _texts("a").train_test_split(test_size=0.5),
    "datasets select beyond length": lambda folder: _texts("a", "b").select([5]),
    "datasets class label unknown name": lambda folder: datasets.ClassLabel(names=["a"]).str2int("z"),
    "datasets cast impossible": lambda folder: _texts("b").cast_column("text", datasets.Value("int32")),
    "datasets rename onto existing": lambda folder: datasets.Dataset.from_dict({"a": [1], "b": [1]}).rename_column(
        "a", "b"
    ),
    "datasets remove absent column": lambda folder: _texts("a").remove_columns(["label"]),
    "datasets concatenate differing features": _concatenate,
    "image processor on wrong channels": lambda folder: transformers.image_utils.make_flat_list_of_images(
        numpy.zeros((2, 2, 2, 5, 6))
    ),
}
