"""Tiny models with random weights, trained and reloaded by plain transformers and peft."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from testing.models import tiny_text
from testing.reference.chat import DIALECTS
from testing.reference.combination import Combination
from testing.reference.families import FAMILIES, choose_generic_options

MAX_PARAMETERS = 3_000_000
PROBE_TOKENS = 40  # of the sequence whose logits are compared


def build_model(options: Combination, folder: Path) -> Path:
    """Create a model, and a tokenizer with the chat template of the dialect, unless they exist; return the folder."""
    target = folder / f"{options.family}-{options.dialect}-{options.dtype}"
    if target.exists():
        return target
    tokenizer = tiny_text.build_tokenizer()
    tokenizer.chat_template = DIALECTS[options.dialect].template if options.dialect in DIALECTS else None
    model = create_model(options.family, len(tokenizer)).to(getattr(torch, options.dtype))
    tokenizer.save_pretrained(target)
    tiny_text.save_model(model, target)
    return target


def create_model(model_type: str, vocabulary_size: int) -> Any:
    """Return a model of a family, or of another causal type of transformers, with random weights."""
    if family := FAMILIES.get(model_type):
        options = {**family.sizes, **family.options}
    else:
        default = AutoConfig.for_model(model_type)
        options = choose_generic_options(default.to_dict(), default.attribute_map)
    name = (family and family.model_type) or model_type
    config = AutoConfig.for_model(name, **options, vocab_size=vocabulary_size)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def find_build_problem(model_type: str) -> str | None:
    """Return why the generic sizes do not give a small causal model that transformers can run, or None."""
    try:
        with torch.device("meta"):
            count = sum(each.numel() for each in create_model(model_type, 1024).parameters())
        if count > MAX_PARAMETERS:
            return f"{count / 1e6:.0f} million parameters"
        compute_probe_logits(create_model(model_type, 1024))
    except Exception as error:  # whatever a type does not accept
        return f"{type(error).__name__}: {str(error)[:100]!r}"
    return None


def build_adapter(options: Combination, model: Path, folder: Path) -> Path:
    """Create an adapter with random values, as if it had been trained, unless it exists; return the folder."""
    target = folder / f"{model.name}-adapter-{options.saves_modules}-{options.trains_biases}"
    if target.exists():
        return target
    base = load_base(model)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=list_linear(base),
        modules_to_save=["norm"] if options.saves_modules else None,
        bias="all" if options.trains_biases else "none",
    )
    torch.manual_seed(1)
    adapted = get_peft_model(base, config)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and "lora_A" not in name:
            parameter.data += 0.02 * torch.randn_like(parameter)
    adapted.save_pretrained(target)
    return target


def load_base(folder: Path, *, dtype: torch.dtype | None = None) -> Any:
    """Load a model with the simplest attention, in its own dtype by default."""
    options = {"dtype": dtype or "auto", "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer as transformers does, which replaces parts of its file for some types, such as qwen2."""
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    return tokenizer


def list_linear(model: nn.Module) -> list[str]:
    """Return the names of all linear layers but the output layer."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "lm_head" not in name]


def load_policy(options: Combination, model: Path, adapter: Path | None, initial_adapter: Path) -> Any:
    """Load the model to train, with the initial adapter values of the trainer if it creates an adapter."""
    if options.tuner == "full":
        return load_base(model, dtype=torch.float32).requires_grad_()
    base = load_base(model)
    if adapter:
        return PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        use_rslora=options.rslora,
        use_dora=options.dora,
        target_modules=list_linear(base) if options.targets == ("all-linear",) else list(options.targets),
    )
    adapted = get_peft_model(base, config).eval()
    values = load_file(initial_adapter)
    trained = dict(iterate_trained(adapted))
    assert trained.keys() == values.keys(), f"other adapters: {sorted(trained.keys() ^ values.keys())}"
    for name, parameter in trained.items():
        parameter.data.copy_(values[name])
    return adapted


def load_reference(options: Combination, model: Path, adapter: Path | None) -> Any:
    """Load the reference model of DPO, with the dtype of the policy and the adapter that is trained further."""
    base = load_base(model, dtype=torch.float32 if options.tuner == "full" else None)
    return (PeftModel.from_pretrained(base, adapter) if adapter else base).eval().requires_grad_(requires_grad=False)


def load_result(result: Path, model: Path) -> Any:
    """Load a published model or adapter."""
    if (result / "adapter_config.json").exists():
        return PeftModel.from_pretrained(load_base(model), result).eval()
    return load_base(result)


def iterate_trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that are trained, with their names."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def build_optimizer(model: nn.Module, options: Combination) -> torch.optim.AdamW:
    """Return AdamW for the trained parameters, of which biases and the weights of norms have no weight decay.

    Source: `Trainer.get_decay_parameter_names` of transformers; GPT-2 names its norms `ln_1`, `ln_2` and `ln_f`.
    """
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in iterate_trained(model):
        groups.setdefault(0.0 if re.search(r"bias|norm|\bln_", name) else options.decay, []).append(parameter)
    parameters = [{"params": each, "weight_decay": decay} for decay, each in groups.items()]
    return torch.optim.AdamW(parameters, betas=(0.9, options.beta2), eps=options.epsilon, foreach=False)


def use_autocast(dtype: str) -> AbstractContextManager[object]:
    """Return the context of a forward pass; 16-bit training multiplies matrices in 16 bits."""
    return nullcontext() if dtype == "float32" else torch.autocast("cpu", dtype=getattr(torch, dtype))


@torch.no_grad()
def compute_probe_logits(model: Any) -> torch.Tensor:
    """Return the logits of a fixed sequence, (seq, vocab), in float32."""
    ids = torch.randint(3, 1000, (1, PROBE_TOKENS), generator=torch.Generator().manual_seed(0))
    logits: torch.Tensor = model.eval()(input_ids=ids, use_cache=False).logits[0]
    return logits.float()
