"""Converts the options of ms-swift to a job of our own trainer."""

import math
from collections.abc import Mapping

from finetune_convert.conversion import ConversionError, EntryEffect
from finetune_convert.formats.swift_options import (
    DEEPSPEED,
    LOSSES,
    MODEL,
    NAMES,
    PARTS,
    QUANT_BITS,
    QUANTIZATION,
    TARGETS,
    TUNER,
    find_loss_problem,
    find_quantization_problem,
    get_dpo_loss,
    get_first,
    get_tuner,
)
from finetune_convert.formats.swift_rows import add_model_hub, add_rows, uses_modelscope
from finetune_convert.launch.topology import Topology
from finetune_convert.mapping.converters import read_number, to_bool
from finetune_convert.mapping.rules import Options, Rule, ToSecret, apply_rules, group
from finetune_convert.mapping.tool_input import check_unresolved, is_vision_model, place_on_nodes
from finetune_convert.mapping.trainer_conversion import TrainerConversion, select_rules
from finetune_convert.mapping.training_settings import TrainerSettings
from finetune_convert.option_rules.swift import RULES

EFFECTIVE_BATCH = 16  # ms-swift derives gradient_accumulation_steps from it
FULL_RATE, ADAPTER_RATE = 1e-5, 1e-4
FULL_INTERVAL_2, ADAPTER_INTERVAL_2 = 200, 50  # steps between evaluations in 2.x


def select_swift_rules(options: Options) -> Mapping[str, Rule]:
    """Return the rules that fit the method and tuner of the command."""
    tokens = RULES | group(ToSecret("HF_TOKEN" if options.get("use_hf") else "MODELSCOPE_API_TOKEN"), "hub_token")
    return select_rules(
        tokens,
        is_full=get_tuner(options) == "full",
        has_adapter=bool(options.get("adapters") or options.get("resume_only_model")),
        is_dpo=options.command == "rlhf",
    )


def convert_for_trainer(swift: TrainerConversion) -> None:
    """Convert a command to a job of our own trainer.

    Raises: ConversionError
    """
    draft, options = swift.draft, swift.options
    check_unresolved(options.given.values(), select_swift_rules(options))
    topology = place_on_nodes(draft, swift.source, for_trainer=True, ranks_fill_devices=False)
    _add_model(swift)
    draft.set("dpo" if swift.is_dpo else "sft", {})
    if not swift.is_full:
        draft.set("lora", {})
    _add_adapter(swift)
    add_rows(swift)
    _add_method(swift)
    apply_rules(options, select_swift_rules(options), draft, tool=swift.tool)
    _add_freeze(swift)
    swift.add_learning_rate(FULL_RATE if swift.is_full else ADAPTER_RATE)
    _add_settings(swift, topology)
    _add_sharding(swift, topology)
    swift.finish()


def _add_model(swift: TrainerConversion) -> None:
    options, draft = swift.options, swift.draft
    given, kind = get_first(options, MODEL), options.get("model_type")
    if given is None:
        name = options.table.models.get(str(kind))
        if name is None:
            problem = "the command names no model" if kind is None else f"--model_type {kind} is unknown"
            raise ConversionError(f"{problem}; add --model")
        swift.note(("model_type",), EntryEffect.MAPPED, f"{kind} is {name} on the Hugging Face Hub", "model.name")
        swift.note(("use_hf",), EntryEffect.SAME, "the model is read from the Hugging Face Hub")
    else:
        name = swift.place_model(MODEL, str(given))
        swift.note(("model_type",), EntryEffect.UNUSED, "the type follows from the model's config")
        add_model_hub(swift, name)
    draft.set("model.name", name)
    revision = options.get("model_revision")
    if revision == "master" and uses_modelscope(swift):
        swift.note(("model_revision",), EntryEffect.SAME, "the main branch is the default")
    elif revision and not name.startswith("/"):
        draft.set("model.revision", str(revision))
        swift.note(("model_revision",), EntryEffect.TAKEN, "", "model.revision")
    else:
        swift.note(("model_revision",), EntryEffect.UNUSED, "a folder has no revisions")


def _add_adapter(swift: TrainerConversion) -> None:
    options, tuner = swift.options, get_tuner(swift.options)
    what = "all weights are trained" if swift.is_full else f"{tuner}: spec.lora"
    swift.note(TUNER, EntryEffect.MAPPED if tuner in ("lora", "full") else EntryEffect.CHANGED, what)
    adapters, checkpoint = options.get("adapters") or [], options.get("resume_from_checkpoint")
    names = ("resume_from_checkpoint", "resume_only_model")
    has_adapter = False
    if adapters and swift.is_full:
        swift.note(
            ("adapters",), EntryEffect.CHANGED, "full fine-tuning does not start from an adapter; merge it first"
        )
    elif adapters:
        has_adapter = True
        swift.add_adapter(("adapters",), str(adapters[0]))
    if checkpoint and options.get("resume_only_model") and not swift.is_full and not has_adapter:
        has_adapter = True
        swift.add_adapter(names, str(checkpoint))
    else:
        swift.note_checkpoint(*names)
    swift.note(("lora_modules",), EntryEffect.UNUSED, "it belongs to inference")
    _add_targets(swift, has_adapter=has_adapter)
    swift.add_quantization(
        QUANTIZATION,
        is_quantized=bool(get_first(options, QUANT_BITS)),
        double=to_bool(options.get("bnb_4bit_use_double_quant")),
        problem=find_quantization_problem(options),
    )


def _add_targets(swift: TrainerConversion, *, has_adapter: bool) -> None:
    value = get_first(swift.options, TARGETS)
    if value not in ("DEFAULT", ["DEFAULT"]) or swift.is_full or has_adapter:
        swift.add_targets(TARGETS, value, has_adapter=has_adapter)
        return
    path = "lora.targetModules"
    swift.draft.set(path, ["q_proj", "k_proj", "v_proj"])
    name = next((name for name in TARGETS if swift.options.has(name)), TARGETS[-1])
    message = "DEFAULT depends on the model, and is q_proj, k_proj, v_proj for Llama and Qwen; check the names"
    swift.draft.note(name, EntryEffect.EDIT, message, field=path, line=swift.options.get_line(*TARGETS))


def _add_method(swift: TrainerConversion) -> None:
    options, draft = swift.options, swift.draft
    swift.add_thinking("enable_thinking")
    reason = find_loss_problem(options)
    if reason:
        swift.note(
            ("use_loss_scale", "use_chat_template", *(() if swift.is_dpo else ("loss_type",))),
            EntryEffect.CHANGED,
            reason,
        )
        if options.command == "pt":
            draft.note("pt", EntryEffect.CHANGED, reason)
    else:
        swift.note(
            ("use_loss_scale", "use_chat_template", *(() if swift.is_dpo else ("loss_type",))),
            EntryEffect.SAME,
            "as in this trainer",
        )
    swift.note(("rlhf_type",), EntryEffect.MAPPED, "spec.dpo", "dpo")
    if swift.is_dpo:
        swift.note(
            ("loss_scale",),
            EntryEffect.SAME if options.get("loss_scale") == "last_round" else EntryEffect.CHANGED,
            "the loss covers the text that differs between chosen and rejected",
        )
        swift.add_dpo_loss("loss_type", "label_smoothing", get_dpo_loss(options))
        return
    swift.note(("label_smoothing",), EntryEffect.UNUSED, "only dpo uses it")
    scale = "all" if options.command == "pt" else str(options.get("loss_scale") or "default")
    loss = LOSSES.get(scale, "assistant")
    draft.spec["sft"] = {} if loss == "assistant" else {"lossOn": loss}
    swift.note(
        ("loss_scale",),
        EntryEffect.MAPPED if scale in LOSSES else EntryEffect.CHANGED,
        f"{scale}: {loss}",
        "sft.lossOn",
    )


def _add_freeze(swift: TrainerConversion) -> None:
    options, draft = swift.options, swift.draft
    names, is_version_2 = tuple(PARTS.values()), options.table.name == "swift-2"
    is_vision = is_vision_model(str(draft.get("model.name")), str(options.get("model_type")))
    frozen = [part for part, name in PARTS.items() if name in options.table.options and to_bool(options.get(name))]
    full_2 = is_version_2 and swift.is_full and is_vision  # 2.x trains all parts, and LoRA only the language model
    if not options.has(*names) and not full_2:
        return
    if len(frozen) == 3:
        raise ConversionError("freeze_vit, freeze_aligner and freeze_llm freeze the whole model; nothing is trained")
    if is_version_2 and not swift.is_full:
        swift.note(names, EntryEffect.SAME, "LoRA trains only the language model")
        return
    if frozen == ["vision", "aligner"]:
        swift.note(names, EntryEffect.SAME, "vision and aligner are frozen by default")
        return
    if not is_vision and not frozen:
        swift.note(names, EntryEffect.UNUSED, "the model has no vision part, by its name")
        return
    draft.set("model.freeze", frozen)
    message = f"frozen parts: {', '.join(frozen) or 'none'}"
    swift.note(names, EntryEffect.MAPPED, message, "model.freeze")
    if not options.has(*names):
        draft.note("freeze_vit", EntryEffect.DEFAULT, f"{swift.tool} trains all parts", field="model.freeze")


def _add_settings(swift: TrainerConversion, topology: Topology) -> None:
    options = swift.options
    _add_version_2_defaults(swift)
    settings = TrainerSettings(swift, NAMES, topology)
    micro = int(read_number(options, *NAMES.micro_batch, default=1))
    settings.add_batch(default_accumulation=max(1, math.ceil(EFFECTIVE_BATCH / max(1, micro) / topology.ranks)))
    settings.add_schedule()
    settings.add_evaluation(default_strategy=str(options.get_first(*NAMES.save_strategy) or "steps"))
    settings.add_checkpoints()
    settings.add_best_model()
    hub = "modelscope" if uses_modelscope(swift) else "huggingface"
    settings.add_upload(push=("push_to_hub",), repo=("hub_model_id",), private=("hub_private_repo",), hub=hub)


def _add_version_2_defaults(swift: TrainerConversion) -> None:
    """State defaults that 2.x computes: recomputation of activations, and intervals of evaluation and checkpoints."""
    options, draft = swift.options, swift.draft
    if options.table.name != "swift-2":
        return
    if options.get("gradient_checkpointing") is None:
        draft.set("training.gradientCheckpointing", True)
        message = f"{swift.tool} recomputes activations by default"
        draft.note("gradient_checkpointing", EntryEffect.DEFAULT, message, field="training.gradientCheckpointing")
    draft.set("training.averageTokensAcrossDevices", False)
    message = f"{swift.tool} averages the loss per rank"
    draft.note("loss", EntryEffect.DEFAULT, message, field="training.averageTokensAcrossDevices")
    if options.get("eval_steps") is None:
        options.computed["eval_steps"] = FULL_INTERVAL_2 if swift.is_full else ADAPTER_INTERVAL_2
    if options.get("save_steps") is None:
        options.computed["save_steps"] = options.get("eval_steps")


def _add_sharding(swift: TrainerConversion, topology: Topology) -> None:
    options, draft = swift.options, swift.draft
    swift.add_deepspeed(DEEPSPEED, get_first(options, DEEPSPEED))
    swift.add_fsdp(("fsdp",), ("fsdp_config",), offload="offload" in str(options.get("fsdp")))
    if topology.devices > topology.ranks_per_node and not {"deepspeed", "fsdp"} & draft.spec.keys():
        _split_model(swift, topology)


def _split_model(swift: TrainerConversion, topology: Topology) -> None:
    """Note that ms-swift divides the layers of the model among the devices of a rank, and shard the weights instead."""
    devices = topology.devices // topology.ranks_per_node
    what = f"without NPROC_PER_NODE, {swift.tool} divides the layers among {devices} GPUs of one rank"
    if swift.draft.get("lora.quantization"):
        message = f"{what}; this trainer has one rank per GPU, and every GPU holds the whole 4-bit model"
        swift.draft.note("device_map", EntryEffect.CHANGED, message)
        return
    swift.draft.set("fsdp", {})
    message = (
        f"{what}; this trainer has one rank per GPU and shards the weights: remove fsdp if a GPU can hold the model"
    )
    swift.draft.note("device_map", EntryEffect.MAPPED, message, field="fsdp")
