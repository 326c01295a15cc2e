"""Converts what the tools have in common to a job of our own trainer: adapters, learning rate and sharding."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune_convert.conversion import ConversionError, EntryEffect
from finetune_convert.data_paths import DataPaths, is_path
from finetune_convert.job_draft import JobDraft
from finetune_convert.mapping.consistency import make_consistent
from finetune_convert.mapping.converters import read_number, to_bool, to_deepspeed_preset, to_float, to_target_modules
from finetune_convert.mapping.rules import Options, Rule, ToField, Unconvertible, Unused
from finetune_convert.mapping.tool_input import ToolInput
from finetune_supervisor.contract import parse_json

ADAPTER_SHAPE = ("lora.r", "lora.loraAlpha", "lora.targetModules", "lora.useRslora", "lora.useDora")
DPO_LOSSES = ("sigmoid", "ipo", "hinge", "robust")
ASSUMED_PRESET = "zero2"
REPORTER_SECRETS = {"wandb": "WANDB_API_KEY", "swanlab": "SWANLAB_API_KEY"}
NOT_CONVERTED = "is not converted"
# vision-language models whose original repositories contain the program of the model
_REMOTE_CODE = re.compile(r"InternVL|MiniCPM-[VOvo]|Ovis|deepseek-vl")


@dataclass
class TrainerConversion:
    """One input during its conversion to a job of our own trainer; `tool` is the name in messages."""

    source: ToolInput
    options: Options
    draft: JobDraft
    tool: str
    is_full: bool  # whether all weights are trained
    is_dpo: bool

    def __post_init__(self) -> None:
        self.paths = DataPaths(self.draft)

    def note(self, names: Sequence[str], effect: EntryEffect, message: str, path: str | None = None) -> None:
        """Add an entry for each of the names that is in the input."""
        for name in names:
            if name in self.options.given:
                self.draft.note(name, effect, message, field=path, line=self.options.given[name].line)

    def find_name(self, names: Sequence[str]) -> str:
        """Return the name that the version of the tool uses."""
        return next((name for name in names if name in self.options.table.options), names[-1])

    def state(self, names: Sequence[str], path: str, value: object, default: str | None = None) -> None:
        """Set a field from the input, or from the tool's default, which `default` describes if it is not the value."""
        self.draft.set(path, value)
        if not self.options.has(*names):
            message = f"the default of {self.tool} is {value if default is None else default}"
            self.draft.note(self.find_name(names), EntryEffect.DEFAULT, message, field=path)
        for name in names:
            if given := self.options.given.get(name):
                is_same = given.value == value
                message = "" if is_same else f"{given.text} is {value}"
                effect = EntryEffect.TAKEN if is_same else EntryEffect.MAPPED
                self.draft.note(name, effect, message, field=path, line=given.line)

    def choose(self, names: Sequence[str], path: str, value: object, *, absent: str) -> None:
        """Set a field to the value that the names mean together; None: `absent` explains why there is none."""
        if value is not None:
            self.draft.set(path, value)
        effect = EntryEffect.SAME if value is None else EntryEffect.MAPPED
        self.note(names, effect, absent if value is None else str(value), path)

    def add_packing(self, name: str) -> None:
        """Set packing, which only sft has."""
        is_requested, path = to_bool(self.options.get(name)), "dataset.packing"
        if is_requested and not self.is_dpo:
            self.draft.set(path, True)
            self.note((name,), EntryEffect.TAKEN, "", path)
        else:
            effect = EntryEffect.CHANGED if is_requested else EntryEffect.SAME
            self.note((name,), effect, "rows are not packed", path)

    def place_model(self, names: Sequence[str], name: str) -> str:
        """Return the Hub id, or the path on a volume, of a model."""
        needs_program_code = _REMOTE_CODE.search(name) and not name.lower().endswith("-hf")
        if needs_program_code:
            message = (
                "this trainer runs no program code of a model's repository; name a converted model, such as"
                " OpenGVLab/InternVL2_5-8B-MPO-hf, or run the original program with --form command"
            )
            self.note(names, EntryEffect.EDIT, message, "model.name")
        if not is_path(name):
            if not needs_program_code:
                self.note(names, EntryEffect.TAKEN, "", "model.name")
            return name
        self.note(names, EntryEffect.MAPPED, "is a folder on a volume", "model.name")
        return self.paths.place(names[-1], name, line=self.options.get_line(*names))

    def add_adapter(self, names: Sequence[str], adapter: str) -> None:
        """Set the adapter that is trained further; it has its own rank and modules."""
        for path in ADAPTER_SHAPE:
            self.draft.spec["lora"].pop(path.partition(".")[2], None)
        line = self.options.get_line(*names)
        placed = self.paths.place(names[0], adapter, line=line) if is_path(adapter) else adapter
        self.draft.set("lora.adapter", placed)
        self.note(names, EntryEffect.MAPPED, f"is {placed}", "lora.adapter")

    def add_targets(self, names: Sequence[str], value: Any, *, has_adapter: bool) -> None:
        """Set the modules that get an adapter."""
        path = "lora.targetModules"
        if self.is_full or has_adapter:
            reason = "the adapter has its own modules" if has_adapter else "full fine-tuning has no adapters"
            self.note(names, EntryEffect.UNUSED, reason)
            return
        try:
            modules = to_target_modules(value)
        except Unconvertible as error:
            self.note(names, EntryEffect.CHANGED, str(error), path)
            return
        if modules != ["all-linear"]:
            self.draft.set(path, modules)
        self.note(names, EntryEffect.MAPPED, " ".join(modules), path)

    def add_learning_rate(self, default: float) -> None:
        """Set the learning rate; 0 or less is an error."""
        rate = to_float(self.options.get("learning_rate") or default)
        if not 0 < rate <= 10:
            raise ConversionError(f"learning_rate: {rate:g} is out of range; expected more than 0 and at most 10")
        self.state(("learning_rate",), "training.learningRate", rate, f"{default:g}")

    def add_deepspeed(self, names: Sequence[str], value: Any) -> None:
        """Set the DeepSpeed preset or config; a config file is recognised by its name."""
        path = "deepspeed.preset"
        if not value:
            self.note(names, EntryEffect.SAME, "no DeepSpeed")
            return
        config = parse_json_config(value)
        if config is not None:
            self.draft.set("deepspeed.config", config)
            self.note(
                names, EntryEffect.MAPPED, "batch, optimizer and precision are those of the job", "deepspeed.config"
            )
            return
        try:
            preset = to_deepspeed_preset(value)
        except Unconvertible as error:
            self.draft.set(path, ASSUMED_PRESET)
            message = f"{error}; {ASSUMED_PRESET} is assumed: choose a preset, or copy the config to deepspeed.config"
            self.note(names, EntryEffect.EDIT, message, path)
            return
        if preset is None:
            self.note(names, EntryEffect.MAPPED, "stage 0 shards nothing, so the job has no deepspeed")
            return
        self.draft.set(path, preset)
        effect, message = (EntryEffect.TAKEN, "") if preset == value else (EntryEffect.MAPPED, f"{value} is {preset}")
        if "/" in str(value) or str(value).endswith(".json"):
            message = f"{preset}, from the name of the file; its content is not part of the input"
        self.note(names, effect, message, path)

    def add_fsdp(self, names: Sequence[str], config_names: Sequence[str], *, offload: bool) -> None:
        """Set FSDP2 if one of the names is on; DeepSpeed in the input takes precedence."""
        is_on = any(self.options.get(name) not in (None, "", [], {}, False) for name in names)
        if is_on and "deepspeed" not in self.draft.spec:
            self.draft.set("fsdp", {"cpuOffload": True} if offload else {})
        self.note(
            names,
            EntryEffect.MAPPED if is_on else EntryEffect.SAME,
            "FSDP2" if is_on else "no FSDP",
            "fsdp" if is_on else None,
        )
        message = "only reshardAfterForward and cpuOffload exist; the rest is chosen by the trainer"
        self.note(config_names, EntryEffect.MAPPED if is_on else EntryEffect.UNUSED, message, "fsdp")

    def add_split(self, names: Sequence[str], size: float, *, has_evaluation: bool) -> None:
        """Hold out training rows for the evaluation. size: their fraction, or if it is at least 1 their number."""
        rows = self.source.request.rows
        ratio = size if size < 1 else size / rows if rows and rows > size else 0
        if size <= 0 or has_evaluation:
            self.note(names, EntryEffect.UNUSED if has_evaluation else EntryEffect.SAME, "no rows are held out")
        elif ratio:
            self.state(names, "dataset.splitDatasetRatio", round(ratio, 6), "0")
        else:
            message = f"{size:g} rows are a fraction only with the number of rows: state it with --rows N"
            self.note(names, EntryEffect.CHANGED, message, "dataset.splitDatasetRatio")

    def add_dpo_loss(self, loss_name: str, smoothing_name: str, loss: Any) -> None:
        """Set the loss of dpo and its label smoothing, if our trainer has them."""
        smoothing = read_number(self.options, smoothing_name)
        if problem := find_dpo_problem(loss, smoothing):
            self.note((loss_name, smoothing_name), EntryEffect.CHANGED, problem)
            return
        if loss not in (None, "sigmoid"):
            self.draft.set("dpo.lossType", loss)
        self.note((loss_name,), EntryEffect.TAKEN, "", "dpo.lossType")
        if smoothing:
            self.draft.set("dpo.labelSmoothing", smoothing)
        effect = EntryEffect.TAKEN if smoothing else EntryEffect.SAME
        self.note((smoothing_name,), effect, "", "dpo.labelSmoothing")

    def note_checkpoint(self, *names: str) -> None:
        """Add an entry for the checkpoint of another program from which the input continues."""
        has_checkpoint = bool(self.options.get(names[0]))
        message = "a job resumes from its own checkpoints; checkpoints of other programs cannot be read"
        self.note(names, EntryEffect.CHANGED if has_checkpoint else EntryEffect.SAME, message)

    def finish(self) -> None:
        """Resolve contradictions, and add volumes and output; an option without an entry gets one."""
        make_consistent(self.draft)
        self._add_reporter_secrets()
        self.draft.add_output()
        self.paths.add_volumes()
        if self.source.request.image is not None:
            message = "is not used, because the job runs the trainer of this project; --form command uses it"
            self.draft.note("--image", EntryEffect.NOTE, message)
        listed = {entry.option for entry in self.draft.entries}
        self.note([name for name in self.options.given if name not in listed], EntryEffect.CHANGED, NOT_CONVERTED)

    def _add_reporter_secrets(self) -> None:
        """Refer to the API keys of the reporters, which are in files of the original machine."""
        names = {variable["name"] for variable in self.draft.spec.get("env", [])}
        reporters = self.draft.get("training.reportTo")
        for reporter, variable in REPORTER_SECRETS.items():
            if isinstance(reporters, list) and reporter in reporters and variable not in names:
                self.draft.add_secret(variable, variable)

    def add_quantization(self, names: Sequence[str], *, is_quantized: bool, double: bool, problem: str | None) -> None:
        """Set QLoRA if the input quantizes the weights, unless there is a problem.

        double: whether the scales of the weights are quantized as well.
        """
        if not is_quantized or problem:
            effect = EntryEffect.CHANGED if problem else EntryEffect.SAME
            self.note(names, effect, problem or "the weights are not quantized")
            return
        self.draft.set("lora.quantization", "nf4")
        effect = EntryEffect.MAPPED if double else EntryEffect.CHANGED
        message = "NF4 with 4 bits and double quantization" + ("" if double else ", which the input turns off")
        self.note(names, effect, message, "lora.quantization")

    def add_thinking(self, name: str, *, default: bool | None = None) -> None:
        """Set the variable enable_thinking of the chat template."""
        value = self.options.get(name) if self.options.has(name) else default
        if value is not None and self.options.has(name):
            self.draft.set("dataset.chatTemplateKwargs", {"enable_thinking": bool(value)})
            self.note((name,), EntryEffect.MAPPED, str(value).lower(), "dataset.chatTemplateKwargs")


def parse_json_config(value: Any) -> dict[str, Any] | None:
    """Return a config that is a JSON object, or None."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return None
    try:
        config = parse_json(value)
    except ValueError:
        return None
    return config if isinstance(config, dict) else None


def select_rules(rules: Mapping[str, Rule], *, is_full: bool, has_adapter: bool, is_dpo: bool) -> Mapping[str, Rule]:
    """Return the rules without those that do not fit: of LoRA in full fine-tuning, and of dpo in sft."""
    dropped: dict[str, str] = {}
    if is_full:
        dropped["lora."] = "full fine-tuning has no adapters"
    elif has_adapter:
        dropped |= dict.fromkeys(ADAPTER_SHAPE, "the adapter that is continued has its own rank and modules")
    if not is_dpo:
        dropped["dpo."] = "only dpo uses it"
    return {name: _drop_rule(rule, dropped) for name, rule in rules.items()} if dropped else rules


def _drop_rule(rule: Rule, dropped: Mapping[str, str]) -> Rule:
    if not isinstance(rule, ToField):
        return rule
    path = rule.path
    reason = next(
        (why for prefix, why in dropped.items() if path == prefix or path.startswith(f"{prefix.rstrip('.')}.")), None
    )
    return Unused(reason) if reason else rule


def find_dpo_problem(loss: Any, smoothing: float) -> str | None:
    """Return why our trainer does not have a loss of dpo, or None."""
    if loss not in (None, *DPO_LOSSES):
        return f"the loss {loss} is none of {', '.join(DPO_LOSSES)}"
    if smoothing and loss != "robust":
        return "labels are smoothed only with the loss robust"
    if loss == "robust" and not 0 < smoothing < 0.5:
        return "the loss robust needs a label smoothing from 0 to 0.5"
    return None
