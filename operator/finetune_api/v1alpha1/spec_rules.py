"""Cross-field rules of the spec, each implemented in Python and in CEL.

CEL has limits: before the API server accepts the CRD, it estimates the cost of each rule from the maximum sizes of the
fields, and a rule cannot read objects without a schema (decisions/402).
"""

from typing import TYPE_CHECKING

from finetune_api.batch import BatchError, resolve_batch
from finetune_api.v1alpha1.base import CelRule, CrossFieldRule
from finetune_api.v1alpha1.device_rules import DEVICE_RULES
from finetune_api.v1alpha1.methods import METHODS
from finetune_api.v1alpha1.placement_rules import PLACEMENT_RULES
from finetune_api.v1alpha1.pod_types import (
    RESERVED_ENV,
    RESERVED_ENV_PREFIXES,
    RESERVED_PATHS,
    RESERVED_PREFIX,
    RESERVED_VOLUMES,
)
from finetune_api.v1alpha1.quantity import parse_quantity
from finetune_api.v1alpha1.scheduling import KUEUE_PREFIX
from finetune_api.v1alpha1.training import EIGHT_BIT_ADAMW, EVAL_LOSS
from finetune_supervisor.contract import to_camel

if TYPE_CHECKING:
    from finetune_api.v1alpha1.job import FineTuneJobSpec

REWARD_METRICS = "eval_rewards/"  # prefix of the metrics that only DPO reports


# Rule: the spec has exactly one training method or a command.


def _check_method_count(spec: "FineTuneJobSpec") -> str | None:
    chosen_methods = [method for method in (*METHODS, "command") if getattr(spec, method) is not None]
    if len(chosen_methods) == 1:
        return None
    return f"exactly one training method must be set, such as sft: {{}}; found {len(chosen_methods)}"


def _build_method_rule() -> CelRule:
    chosen_methods = ", ".join(f"has(self.{method})" for method in (*METHODS, "command"))
    example = " or ".join((*(f"{method}: {{}}" for method in METHODS), "command: {script: train.py}"))
    return CelRule(
        f"[{chosen_methods}].exists_one(x, x)", f"exactly one training method must be set, such as {example}"
    )


# Rule: the spec has all fields that its method requires, and no fields without effect.

REQUIRED_WITHOUT_COMMAND = ("model", "dataset", "output")
EXCLUDED_BY_COMMAND = ("model", "dataset", "training", "lora", "deepspeed", "fsdp")
OUTPUT_EXCLUDED_BY_COMMAND = ("output.overwrite", "output.pushToHub")
IMAGE_REQUIRED = "image is required with command: an image with your code and its Python packages"


def _build_required_message(field_name: str) -> str:
    return f"{field_name} is required unless command is set"


def _build_no_effect_message(field_name: str) -> str:
    return (
        f"{field_name} applies to the operator's trainer and has no effect with command; configure your program instead"
    )


def _check_method_fields(spec: "FineTuneJobSpec") -> str | None:
    """Return messages for required fields that are missing and for fields without effect."""
    set_fields = {field for field in spec.model_fields_set if getattr(spec, field) is not None}
    set_fields |= {f"output.{to_camel(field)}" for field in (spec.output.model_fields_set if spec.output else ())}
    if "command" not in set_fields:
        problems = [_build_required_message(field) for field in REQUIRED_WITHOUT_COMMAND if field not in set_fields]
    else:
        trainer_fields = (*EXCLUDED_BY_COMMAND, *OUTPUT_EXCLUDED_BY_COMMAND)
        problems = [_build_no_effect_message(field) for field in trainer_fields if field in set_fields]
        problems += [] if "image" in set_fields else [IMAGE_REQUIRED]
    return "; ".join(problems) or None


def _build_method_field_rules() -> tuple[CelRule, ...]:
    return (
        *(
            CelRule(f"has(self.command) || has(self.{field})", _build_required_message(field))
            for field in REQUIRED_WITHOUT_COMMAND
        ),
        *(
            CelRule(
                f"!has(self.command) || !has(self.{field})", _build_no_effect_message(field), field_path=f".{field}"
            )
            for field in EXCLUDED_BY_COMMAND
        ),
        *(
            CelRule(
                f"!has(self.command) || !has(self.output) || !has(self.{field})",
                _build_no_effect_message(field),
                field_path=".output",
            )
            for field in OUTPUT_EXCLUDED_BY_COMMAND
        ),
        CelRule("!has(self.command) || has(self.image)", IMAGE_REQUIRED),
    )


# Rule: quantized weights are not sharded.


def _shards_quantized_weights(spec: "FineTuneJobSpec") -> bool:
    return spec.shards_weights and spec.lora is not None and spec.lora.quantization is not None


_SHARDS_WEIGHTS = "has(self.fsdp) || (has(self.deepspeed) && self.deepspeed.?preset.orValue('').startsWith('zero3'))"


# Rule: the batch sizes are consistent.


def _check_batch_sizes(spec: "FineTuneJobSpec") -> str | None:
    try:
        resolve_batch(
            micro_batch_size=spec.training.per_device_train_batch_size,
            accumulation_steps=spec.training.gradient_accumulation_steps,
            effective_batch=spec.training.global_batch_size,
            world_size=spec.world_size,
        )
    except BatchError as error:
        return f"training: {error}"
    return None


_MICRO_BATCH = "self.training.perDeviceTrainBatchSize"
# auto is treated as 1, because both values are valid for the same world sizes
_PER_DEVICE = f"(has({_MICRO_BATCH}) && type({_MICRO_BATCH}) == int ? {_MICRO_BATCH} : 1)"
_ACCUMULATION = "self.training.?gradientAccumulationSteps.orValue(1)"
_GPUS = "self.?resources.?limits[?'nvidia.com/gpu'].orValue(0)"
_RANKS = f"self.?numNodes.orValue(1) * self.?nprocPerNode.orValue({_GPUS} > 0 ? {_GPUS} : 1)"
_BOTH_GIVEN = "has(self.training.perDeviceTrainBatchSize) && has(self.training.gradientAccumulationSteps)"


def _build_batch_rule() -> CelRule:
    effective = "self.training.globalBatchSize"
    has_global_batch = f"has(self.training) && has({effective})"
    has_countable_gpus = (
        "(has(self.nprocPerNode) || !has(self.resources) || !has(self.resources.limits)"
        " || self.resources.limits.all(k, k in ['cpu', 'memory', 'ephemeral-storage']"
        " || (k == 'nvidia.com/gpu' && type(self.resources.limits[k]) == int)))"
    )
    return CelRule(
        f"!({has_global_batch} && {has_countable_gpus}) || [{_PER_DEVICE} * {_ACCUMULATION} * {_RANKS}]"
        f".all(unit, {_BOTH_GIVEN} ? {effective} == unit : {effective} % unit == 0)",
        "globalBatchSize must be perDeviceTrainBatchSize x gradientAccumulationSteps x ranks, or a multiple of those"
        " factors that are set",
        "'globalBatchSize is %d, but perDeviceTrainBatchSize x gradientAccumulationSteps x ranks is %d x %d x %d;"
        " make it their product, or remove one of the first two and make it a multiple'"
        f".format([{effective}, {_PER_DEVICE}, {_ACCUMULATION}, {_RANKS}])",
        field_path=".training",
    )


# Rule: maxMemory is at least the memory limit.


def _check_max_memory(spec: "FineTuneJobSpec") -> str | None:
    limit, max_memory = spec.resources.limits.get("memory"), spec.restart_policy.max_memory
    if limit is None or max_memory is None or parse_quantity(max_memory) >= parse_quantity(limit):
        return None
    return f"restartPolicy.maxMemory ({max_memory}) is less than resources.limits.memory ({limit}); raise it"


# Rules: names of variables, volumes, labels and annotations are unique and not reserved.


def _find_invalid_variable(spec: "FineTuneJobSpec") -> str | None:
    names = [variable.name for variable in spec.env]
    for name in names:
        if name in RESERVED_ENV or name.startswith(RESERVED_ENV_PREFIXES):
            return f"env: {name} is set by the operator and must not be given"
        if names.count(name) > 1:
            return f"env: {name} is given twice; remove one of them"
    return None


def _build_variable_rule() -> CelRule:
    has_reserved_prefix = " || ".join(f"e.name.startsWith('{prefix}')" for prefix in RESERVED_ENV_PREFIXES)
    is_reserved = f"e.name in {list(RESERVED_ENV)} || {has_reserved_prefix}"
    return CelRule(
        f"!has(self.env) || !self.env.exists(e, {is_reserved})",
        "env: the variables of the rendezvous are set by the operator and must not be given",
        f"'env: %s is set by the operator and must not be given'.format([self.env.filter(e, {is_reserved})[0].name])",
        field_path=".env",
    )


def _find_invalid_volume(spec: "FineTuneJobSpec") -> str | None:
    names = [volume.name for volume in spec.volumes]
    paths = [volume.mount_path.rstrip("/") or "/" for volume in spec.volumes]
    for kind, values, reserved in (("name", names, RESERVED_VOLUMES), ("mountPath", paths, RESERVED_PATHS)):
        for value in values:
            if values.count(value) > 1:
                return f"volumes: {kind} {value} is used twice; give each volume its own"
            if value in reserved:
                return f"volumes: {kind} {value} is reserved for the operator; choose another"
    return None


def _build_volume_rules() -> tuple[CelRule, ...]:
    paths = [*RESERVED_PATHS, *(path + "/" for path in RESERVED_PATHS if path != "/")]
    return (
        CelRule(
            f"!has(self.volumes) || !self.volumes.exists(v, v.name in {list(RESERVED_VOLUMES)})",
            f"volumes: the names {', '.join(RESERVED_VOLUMES)} are reserved for the operator; choose another",
            field_path=".volumes",
        ),
        CelRule(
            f"!has(self.volumes) || !self.volumes.exists(v, v.mountPath in {paths})",
            f"volumes: the mount paths {', '.join(RESERVED_PATHS)} are reserved for the operator; choose another",
            field_path=".volumes",
        ),
        CelRule(
            "!has(self.volumes) || self.volumes.all(v, self.volumes.exists_one(w, w.mountPath == v.mountPath))",
            "volumes: a mountPath is used twice; give each volume its own",
            field_path=".volumes",
        ),
    )


def _build_reserved_key_rule(field_name: str) -> CelRule:
    return CelRule(
        f"!has(self.podTemplate) || !has(self.podTemplate.{field_name})"
        f" || !self.podTemplate.{field_name}.exists(k, k.startsWith('{RESERVED_PREFIX}/'))",
        f"podTemplate.{field_name}: the prefix {RESERVED_PREFIX}/ is reserved for the operator; choose another",
        field_path=".podTemplate",
    )


# Rule: the operator sets Kueue's labels of a job with a queue.


def _find_queue_label(spec: "FineTuneJobSpec") -> str | None:
    if spec.scheduling is None:
        return None
    labels = [key for key in spec.pod_template.labels if key.startswith(KUEUE_PREFIX)]
    return f"podTemplate.labels: {labels[0]} is set by scheduling; remove it" if labels else None


_QUEUE_LABEL_RULE = CelRule(
    "!has(self.scheduling) || !has(self.podTemplate) || !has(self.podTemplate.labels)"
    f" || !self.podTemplate.labels.exists(k, k.startsWith('{KUEUE_PREFIX}'))",
    f"podTemplate.labels: the labels with the prefix {KUEUE_PREFIX} are set by scheduling; remove them",
    field_path=".podTemplate",
)


# Rule: parts of a vision-language model that have a separate learning rate are not frozen.


def _build_frozen_part_rule(part: str) -> "CrossFieldRule[FineTuneJobSpec]":
    def is_frozen_with_learning_rate(spec: "FineTuneJobSpec") -> bool:
        has_rate = spec.training.learning_rates_by_part[part] is not None
        return has_rate and spec.model is not None and (spec.model.freeze is None or part in spec.model.freeze)

    return CrossFieldRule.from_cel_rule(
        f"{part} with a learning rate is trained",
        is_frozen_with_learning_rate,
        CelRule(
            f"!has(self.training) || !has(self.training.{part}LearningRate) || !has(self.model)"
            f" || (has(self.model.freeze) && !('{part}' in self.model.freeze))",
            f"training.{part}LearningRate: {part} is frozen (model.freeze, default: vision and aligner); set"
            f" model.freeze without {part}, or remove the rate",
            field_path=".training",
        ),
    )


# The CRD has the same order. The model reports only the first violated rule; the API server reports all violated rules.
SPEC_RULES: "tuple[CrossFieldRule[FineTuneJobSpec], ...]" = (
    CrossFieldRule("one method", _check_method_count, (_build_method_rule(),)),
    CrossFieldRule("fields fit the method", _check_method_fields, _build_method_field_rules()),
    CrossFieldRule.from_cel_rule(
        "one sharding backend",
        lambda spec: spec.deepspeed is not None and spec.fsdp is not None,
        CelRule("!(has(self.deepspeed) && has(self.fsdp))", "deepspeed and fsdp exclude each other; set one of them"),
    ),
    CrossFieldRule.from_cel_rule(
        "maxMemory needs a memory limit",
        lambda spec: spec.restart_policy.max_memory is not None and "memory" not in spec.resources.limits,
        CelRule(
            "!has(self.restartPolicy) || !has(self.restartPolicy.maxMemory)"
            " || (has(self.resources) && has(self.resources.limits) && 'memory' in self.resources.limits)",
            "restartPolicy.maxMemory raises resources.limits.memory, which is not set; set resources.limits.memory",
            field_path=".restartPolicy",
        ),
    ),
    CrossFieldRule.from_cel_rule(
        "quantized weights are not sharded",
        _shards_quantized_weights,
        CelRule(
            f"!(has(self.lora) && has(self.lora.quantization) && ({_SHARDS_WEIGHTS}))",
            "lora.quantization: 4-bit weights cannot be sharded over ranks; remove fsdp, or use a deepspeed preset up"
            " to zero2_offload, which shards only gradients and optimizer states",
        ),
        cel_limitations="a stage in deepspeed.config, an object without a schema",
    ),
    CrossFieldRule.from_cel_rule(
        "8-bit moments are not sharded",
        lambda spec: spec.training.optim == EIGHT_BIT_ADAMW and (spec.deepspeed is not None or spec.fsdp is not None),
        CelRule(
            "!((has(self.deepspeed) || has(self.fsdp)) && has(self.training) && has(self.training.optim)"
            f" && self.training.optim == '{EIGHT_BIT_ADAMW}')",
            "training.optim: moments in 8 bits cannot be sharded over ranks; remove deepspeed and fsdp, or set"
            " adamw_torch_fused",
            field_path=".training",
        ),
    ),
    CrossFieldRule.from_cel_rule(
        "checkpoints of adapters are synchronous",
        lambda spec: spec.lora is not None and spec.training.async_checkpoints is True,
        CelRule(
            "!(has(self.lora) && has(self.training) && has(self.training.asyncCheckpoints)"
            " && self.training.asyncCheckpoints)",
            "training.asyncCheckpoints: checkpoints of adapters are small and written synchronously; remove"
            " asyncCheckpoints",
            field_path=".training",
        ),
    ),
    CrossFieldRule.from_cel_rule(
        "torchCompile excludes deepspeed",
        lambda spec: spec.deepspeed is not None and spec.training.torch_compile,
        CelRule(
            "!(has(self.deepspeed) && has(self.training) && has(self.training.torchCompile)"
            " && self.training.torchCompile)",
            "training.torchCompile: DeepSpeed runs code between the operations that would be compiled; remove"
            " torchCompile, or replace deepspeed by fsdp",
            field_path=".training",
        ),
    ),
    CrossFieldRule.from_cel_rule(
        "probe excludes deepspeed",
        lambda spec: spec.deepspeed is not None and spec.training.probe,
        CelRule(
            "!(has(self.deepspeed) && has(self.training) && has(self.training.probe) && self.training.probe)",
            "training.probe: gradients inside DeepSpeed cannot be reset after a probe; remove probe or deepspeed",
            field_path=".training",
        ),
    ),
    *DEVICE_RULES,
    CrossFieldRule(
        "batch is consistent",
        _check_batch_sizes,
        (_build_batch_rule(),),
        cel_limitations="jobs with other resources than CPU, memory and nvidia.com/gpu, or with a GPU count that is a"
        " string: counting their ranks exceeds the cost limit of a CEL rule",
    ),
    CrossFieldRule(
        "maxMemory is at least the memory limit",
        _check_max_memory,
        cel_limitations="all: comparing two quantities exceeds the cost limit of a CEL rule",
    ),
    CrossFieldRule(
        "variables are distinct and not reserved",
        _find_invalid_variable,
        (_build_variable_rule(),),
        cel_limitations="a name that is given twice, because it is the key of the list, which the API server compares",
    ),
    CrossFieldRule(
        "volumes are distinct and not reserved",
        _find_invalid_volume,
        _build_volume_rules(),
        cel_limitations="a name that is used twice, because it is the key of the list, which the API server compares;"
        " mount paths that differ only by trailing slashes, which CEL compares unchanged",
    ),
    CrossFieldRule(
        "labels and annotations are not reserved",
        None,  # PodTemplate implements the check, so that the error path is spec.podTemplate
        (_build_reserved_key_rule("labels"), _build_reserved_key_rule("annotations")),
        cel_limitations="prefixes that only end with the reserved one, which no key of the operator has",
    ),
    CrossFieldRule("labels of the queue are set by scheduling", _find_queue_label, (_QUEUE_LABEL_RULE,)),
    *PLACEMENT_RULES,
    CrossFieldRule.from_cel_rule(
        "evaluation has rows",
        lambda spec: (
            spec.training.eval_steps is not None and spec.dataset is not None and not spec.dataset.has_evaluation
        ),
        CelRule(
            "!has(self.training) || !has(self.training.evalSteps) || !has(self.dataset) || "
            "has(self.dataset.splitDatasetRatio) || (has(self.dataset.eval) && self.dataset.eval.size() > 0)",
            "training.evalSteps is set but dataset.eval is empty; add rows to evaluate on, or set"
            " dataset.splitDatasetRatio",
            field_path=".training",
        ),
    ),
    CrossFieldRule.from_cel_rule(
        "reward metrics need dpo",
        lambda spec: spec.dpo is None and (spec.training.metric_for_best_model or "").startswith(REWARD_METRICS),
        CelRule(
            "has(self.dpo) || !has(self.training) || !has(self.training.metricForBestModel)"
            f" || !self.training.metricForBestModel.startsWith('{REWARD_METRICS}')",
            f"training.metricForBestModel: metrics that begin with {REWARD_METRICS} exist only with dpo; use"
            f" {EVAL_LOSS}",
            field_path=".training",
        ),
    ),
    _build_frozen_part_rule("vision"),
    _build_frozen_part_rule("aligner"),
    CrossFieldRule.from_cel_rule(
        "packing needs sft",
        lambda spec: spec.dpo is not None and spec.dataset is not None and spec.dataset.packing,
        CelRule(
            "!has(self.dpo) || !has(self.dataset) || !has(self.dataset.packing) || !self.dataset.packing",
            "dataset.packing works only with sft: dpo compares the two sequences of one row, and a pack contains many"
            " rows; remove packing",
            field_path=".dataset",
        ),
    ),
)
