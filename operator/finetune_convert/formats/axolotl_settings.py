"""Converts batch, schedule, evaluation, sharding and reporting of axolotl's config."""

import math

from finetune_convert.conversion import EntryEffect
from finetune_convert.launch.topology import Topology
from finetune_convert.mapping.converters import read_number, to_bool, to_float
from finetune_convert.mapping.rules import Unconvertible
from finetune_convert.mapping.trainer_conversion import TrainerConversion
from finetune_convert.mapping.training_settings import SettingNames, TrainerSettings
from finetune_convert.shell.words import Word

NAMES = SettingNames(
    micro_batch=("micro_batch_size",),
    eval_batch=("eval_batch_size",),
    epochs=("num_epochs",),
    eval_strategy=("evaluation_strategy", "eval_strategy"),
)
SAVE_TOTAL_LIMIT = 4
MAX_DEFAULT_WARMUP, DEFAULT_WARMUP_RATIO = 100, 0.03
_REPORTERS = {"use_wandb": "wandb", "use_mlflow": "mlflow", "use_tensorboard": "tensorboard"}
_REPORTER_VARIABLES = {
    "wandb_project": "WANDB_PROJECT", "wandb_entity": "WANDB_ENTITY", "wandb_name": "WANDB_NAME",
    "wandb_mode": "WANDB_MODE", "wandb_run_id": "WANDB_RUN_ID", "mlflow_tracking_uri": "MLFLOW_TRACKING_URI",
    "mlflow_experiment_name": "MLFLOW_EXPERIMENT_NAME", "mlflow_run_name": "MLFLOW_RUN_NAME",
}  # fmt: skip


def add_settings(conversion: TrainerConversion, topology: Topology) -> None:
    """Convert everything but model, rows and adapter."""
    options, draft = conversion.options, conversion.draft
    rate = options.get("learning_rate")
    if rate == "required" or rate is None:
        raise Unconvertible("the config has no learning_rate; add it")
    conversion.add_learning_rate(to_float(rate))
    settings = TrainerSettings(conversion, NAMES, topology)
    settings.add_batch(default_accumulation=_derive_accumulation(conversion, settings))
    settings.note(
        ("batch_size",), EntryEffect.MAPPED, "the effective batch of all ranks", "training.gradientAccumulationSteps"
    )
    settings.add_schedule()
    _add_default_warmup(settings)
    _add_intervals(settings)
    settings.add_best_model()
    settings.add_upload(push=(), repo=("hub_model_id",), private=(), hub="huggingface")
    draft.set("training.averageTokensAcrossDevices", False)
    draft.note(
        "average_tokens_across_devices",
        EntryEffect.DEFAULT,
        "axolotl averages the loss per rank",
        field="training.averageTokensAcrossDevices",
    )
    _add_memory(conversion)
    _add_reporters(conversion)


def _derive_accumulation(conversion: TrainerConversion, settings: TrainerSettings) -> int | None:
    """Return the accumulation steps that batch_size means, which is the effective batch."""
    options = conversion.options
    total = options.get("batch_size")
    if not total or options.has("gradient_accumulation_steps"):
        return None
    micro = int(read_number(options, "micro_batch_size", default=1))
    return max(1, int(to_float(total)) // (micro * settings.job_ranks))


def _add_default_warmup(settings: TrainerSettings) -> None:
    """Set the warm-up of axolotl without warmup_steps and warmup_ratio: 3 % of the steps, at most 100."""
    if settings.options.has("warmup_steps", "warmup_ratio"):
        return
    path, draft = "training.warmupSteps", settings.draft
    training = draft.spec.get("training", {})
    total = training.get("maxSteps") or settings.count_steps(training.get("numTrainEpochs", 1))
    if total:
        steps = min(int(DEFAULT_WARMUP_RATIO * total), MAX_DEFAULT_WARMUP)
        draft.set(path, steps)
        draft.note(
            "warmup_steps",
            EntryEffect.DEFAULT,
            f"the default of axolotl is 3 % of {total} steps, at most 100",
            field=path,
        )
    else:
        message = "the default of axolotl is 3 % of the steps, at most 100; state the number of rows with --rows N"
        draft.note("warmup_steps", EntryEffect.CHANGED, message, field=path)


def _add_intervals(settings: TrainerSettings) -> None:
    options, draft = settings.options, settings.draft
    per_epoch = settings.count_steps()
    for name, path, has_rows in (
        ("evals_per_epoch", "training.evalSteps", _has_evaluation(settings)),
        ("saves_per_epoch", "training.saveSteps", True),
    ):
        count = to_float(options.get(name) or 0)
        if not options.has(name):
            continue
        if not count or not has_rows:
            settings.note((name,), EntryEffect.UNUSED, "there is nothing to do")
        elif per_epoch:
            draft.set(path, max(1, math.ceil(per_epoch / count)))
            settings.note((name,), EntryEffect.MAPPED, f"every {draft.get(path)} of {per_epoch} steps per epoch", path)
        else:
            effect = EntryEffect.UNUSED if name.startswith("saves") else EntryEffect.CHANGED
            settings.note(
                (name,),
                effect,
                f"intervals are counted in steps; state the number of rows with --rows N, or set {path}",
                path,
            )
    if not options.has("evals_per_epoch"):
        strategy = (
            "steps"
            if options.get("eval_steps")
            else "no"
            if not options.has("eval_strategy", "evaluation_strategy")
            else None
        )
        if strategy == "no" and _has_evaluation(settings):
            draft.note("eval_strategy", EntryEffect.SAME, "without an interval there is one evaluation, at the end")
        else:
            settings.add_evaluation(default_strategy=strategy)
    else:
        settings.note(
            ("eval_strategy", "evaluation_strategy", "eval_steps"), EntryEffect.UNUSED, "evals_per_epoch overrides it"
        )
    if options.has("saves_per_epoch"):
        settings.note(("save_strategy", "save_steps"), EntryEffect.UNUSED, "saves_per_epoch overrides it")
    else:
        settings.add_checkpoints()
    limit = int(read_number(options, "save_total_limit", default=SAVE_TOTAL_LIMIT))
    draft.set("training.saveTotalLimit", max(1, min(limit, 1000)))
    settings.note(("save_total_limit",), EntryEffect.TAKEN, "", "training.saveTotalLimit")


def _has_evaluation(settings: TrainerSettings) -> bool:
    dataset = settings.draft.spec.get("dataset", {})
    return bool(dataset.get("eval")) or "splitDatasetRatio" in dataset


def _add_memory(conversion: TrainerConversion) -> None:
    options, draft, path = conversion.options, conversion.draft, "training.gradientCheckpointing"
    value = options.get("gradient_checkpointing")
    if value not in (None, False):
        draft.set(path, True)
    message = "" if value in (True, False) else f"{value}: activations are recomputed, not offloaded"
    conversion.note(("gradient_checkpointing",), EntryEffect.MAPPED if message else EntryEffect.TAKEN, message, path)
    conversion.add_deepspeed(("deepspeed",), options.get("deepspeed"))
    config = options.get("fsdp_config")
    offload = isinstance(config, dict) and any(
        to_bool(config.get(key)) for key in ("offload_params", "fsdp_offload_params")
    )
    conversion.add_fsdp(("fsdp", "fsdp_config"), (), offload=offload)
    conversion.note_checkpoint("resume_from_checkpoint")


def _add_reporters(conversion: TrainerConversion) -> None:
    options, draft = conversion.options, conversion.draft
    reporters = [reporter for name, reporter in _REPORTERS.items() if to_bool(options.get(name))]
    if not reporters and options.get("wandb_project"):
        reporters = ["wandb"]  # axolotl reports to wandb if a project is set
    if reporters:
        draft.set("training.reportTo", reporters)
    conversion.note(tuple(_REPORTERS), EntryEffect.MAPPED, " ".join(reporters) or "none", "training.reportTo")
    conversion.note(
        ("use_comet", "use_trackio"),
        EntryEffect.UNUSED,
        "this trainer reports to tensorboard, wandb, mlflow and swanlab",
    )
    for name, variable in _REPORTER_VARIABLES.items():
        value = options.get(name)
        if options.has(name) and value:
            draft.add_env(variable, Word(str(value), options.get_line(name) or 1))
            conversion.note((name,), EntryEffect.MAPPED, f"is {variable}", "env")
        else:
            conversion.note((name,), EntryEffect.SAME, "it is not set")
