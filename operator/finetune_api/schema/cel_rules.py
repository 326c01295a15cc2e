"""The CEL rules of the CRD, which the API server checks in addition to types, and their messages."""

from dataclasses import dataclass
from typing import Any

from finetune_api.v1alpha1.command import (
    EXCLUDED_BY_COMMAND,
    IMAGE_REQUIRED,
    OUTPUT_EXCLUDED_BY_COMMAND,
    REQUIRED_WITHOUT_COMMAND,
    no_effect_message,
    required_message,
)
from finetune_api.v1alpha1.dataset import PACKING_REQUIRES_SFT
from finetune_api.v1alpha1.job import (
    MAX_JOB_NAME,
    MAX_MEMORY_NEEDS_LIMIT,
    METHODS,
    RESERVED_ENV,
    RESERVED_ENV_PREFIXES,
    RESERVED_PATHS,
    RESERVED_VOLUMES,
    FineTuneJobSpec,
)
from finetune_api.v1alpha1.parallelism import PROBE_EXCLUDES_DEEPSPEED, QUANTIZED_CANNOT_SHARD
from finetune_api.v1alpha1.pod_types import RESERVED_PREFIX
from finetune_api.v1alpha1.training import REWARD_METRICS, REWARDS_NEED_DPO, frozen_rate_message

MUTABLE = (
    "suspend",
    "ttlSecondsAfterFinished",
    "activeDeadlineSeconds",
    "pendingDeadlineSeconds",
    "startupDeadlineSeconds",
    "restartPolicy",
)
MUTABLE_WHILE_SUSPENDED = (
    "resources",
    "shmSize",
    "image",
    "imagePullPolicy",
    "imagePullSecrets",
    "podTemplate",
    "network",
)


@dataclass(frozen=True)
class Rule:
    """One CEL rule with its message. `detail` is a CEL expression for a message that contains the values found."""

    rule: str
    message: str
    detail: str | None = None
    field_path: str | None = None

    def as_schema(self) -> dict[str, Any]:
        """Return the rule as an item of x-kubernetes-validations."""
        keys = {
            "rule": self.rule,
            "message": self.message,
            "messageExpression": self.detail,
            "fieldPath": self.field_path,
        }
        return {key: value for key, value in keys.items() if value is not None}


def name_rules() -> tuple[Rule, ...]:
    """Return the rules on the whole object: Service and pod names are derived from the job's name."""
    return (
        Rule(
            f"self.metadata.name.size() <= {MAX_JOB_NAME}",
            f"metadata.name must have at most {MAX_JOB_NAME} characters, so that the names of its pods fit 63",
            f"'metadata.name must have at most {MAX_JOB_NAME} characters, so that the names of its pods fit 63;"
            " this one has %d'.format([self.metadata.name.size()])",
        ),
        Rule(
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "metadata.name must start with a lower case letter, contain only a-z, 0-9 and '-', and not end with '-'"
            " (DNS-1035), because a Service is named after it",
        ),
    )


def spec_rules() -> tuple[Rule, ...]:
    """Return the rules on the spec; the pydantic models check the same where no API server does, as in local mode."""
    return (
        _one_method(),
        *_fields_fit_the_method(),
        _one_sharding_backend(),
        _max_memory_needs_limit(),
        _quantized_is_not_sharded(),
        _probe_excludes_deepspeed(),
        _batch_is_consistent(),
        *_reserved_names(),
        _eval_steps_need_rows(),
        _reward_metrics_need_dpo(),
        *(_parts_with_rate_are_trained(part) for part in ("vision", "aligner")),
        _packing_needs_sft(),
        *_immutable(),
        *_immutable_while_running(),
    )


def _one_method() -> Rule:
    chosen = ", ".join(f"has(self.{method})" for method in (*METHODS, "command"))
    example = " or ".join((*(f"{method}: {{}}" for method in METHODS), "command: {script: train.py}"))
    return Rule(f"[{chosen}].exists_one(x, x)", f"exactly one training method must be set, such as {example}")


def _fields_fit_the_method() -> tuple[Rule, ...]:
    """Return the rules on fields of the operator's trainer, which are required without command and excluded with it."""
    return (
        *(
            Rule(f"has(self.command) || has(self.{field})", required_message(field))
            for field in REQUIRED_WITHOUT_COMMAND
        ),
        *(
            Rule(f"!has(self.command) || !has(self.{field})", no_effect_message(field), field_path=f".{field}")
            for field in EXCLUDED_BY_COMMAND
        ),
        *(
            Rule(
                f"!has(self.command) || !has(self.output) || !has(self.{field})",
                no_effect_message(field),
                field_path=".output",
            )
            for field in OUTPUT_EXCLUDED_BY_COMMAND
        ),
        Rule("!has(self.command) || has(self.image)", IMAGE_REQUIRED),
    )


def _one_sharding_backend() -> Rule:
    return Rule("!(has(self.deepspeed) && has(self.fsdp))", "deepspeed and fsdp exclude each other; set one of them")


def _max_memory_needs_limit() -> Rule:
    """Return the rule on restartPolicy.maxMemory. The operator checks that it exceeds the limit: comparing quantities
    is too expensive for a CEL rule."""
    return Rule(
        "!has(self.restartPolicy) || !has(self.restartPolicy.maxMemory)"
        " || (has(self.resources) && has(self.resources.limits) && 'memory' in self.resources.limits)",
        MAX_MEMORY_NEEDS_LIMIT,
        field_path=".restartPolicy",
    )


def _quantized_is_not_sharded() -> Rule:
    """Return the rule on quantization; only the pydantic models check a DeepSpeed config."""
    shards_weights = "has(self.fsdp) || (has(self.deepspeed) && self.deepspeed.?preset.orValue('').startsWith('zero3'))"
    return Rule(f"!(has(self.lora) && has(self.lora.quantization) && ({shards_weights}))", QUANTIZED_CANNOT_SHARD)


def _probe_excludes_deepspeed() -> Rule:
    probes = "has(self.training) && has(self.training.probe) && self.training.probe"
    return Rule(f"!(has(self.deepspeed) && {probes})", PROBE_EXCLUDES_DEEPSPEED, field_path=".training")


_MICRO_BATCH = "self.training.perDeviceTrainBatchSize"
# auto counts as 1: it is valid for the same numbers of ranks
_PER_DEVICE = f"(has({_MICRO_BATCH}) && type({_MICRO_BATCH}) == int ? {_MICRO_BATCH} : 1)"
_ACCUMULATION = "self.training.?gradientAccumulationSteps.orValue(1)"
_GPUS = "self.?resources.?limits[?'nvidia.com/gpu'].orValue(0)"
_RANKS = f"self.?numNodes.orValue(1) * self.?nprocPerNode.orValue({_GPUS} > 0 ? {_GPUS} : 1)"
_BOTH_GIVEN = "has(self.training.perDeviceTrainBatchSize) && has(self.training.gradientAccumulationSteps)"


def _batch_is_consistent() -> Rule:
    """Return the rule on globalBatchSize.

    The operator checks jobs with GPUs of other vendors, or with a GPU count that is a string: counting their ranks
    exceeds the cost limit of a CEL rule.
    """
    effective = "self.training.globalBatchSize"
    has_global_batch = f"has(self.training) && has({effective})"
    countable = (
        "(has(self.nprocPerNode) || !has(self.resources) || !has(self.resources.limits)"
        " || self.resources.limits.all(k, !k.endsWith('/gpu')"
        " || (k == 'nvidia.com/gpu' && type(self.resources.limits[k]) == int)))"
    )
    return Rule(
        f"!({has_global_batch} && {countable}) || [{_PER_DEVICE} * {_ACCUMULATION} * {_RANKS}]"
        f".all(unit, {_BOTH_GIVEN} ? {effective} == unit : {effective} % unit == 0)",
        "globalBatchSize must be perDeviceTrainBatchSize x gradientAccumulationSteps x ranks, or a multiple of those"
        " factors that are set",
        "'globalBatchSize is %d, but perDeviceTrainBatchSize x gradientAccumulationSteps x ranks is %d x %d x %d;"
        " make it their product, or remove one of the first two and make it a multiple'"
        f".format([{effective}, {_PER_DEVICE}, {_ACCUMULATION}, {_RANKS}])",
        field_path=".training",
    )


def _reserved_names() -> tuple[Rule, ...]:
    has_reserved_prefix = " || ".join(f"e.name.startsWith('{prefix}')" for prefix in RESERVED_ENV_PREFIXES)
    is_reserved = f"e.name in {list(RESERVED_ENV)} || {has_reserved_prefix}"
    return (
        Rule(
            f"!has(self.env) || !self.env.exists(e, {is_reserved})",
            "env: the variables of the rendezvous are set by the operator and must not be given",
            "'env: %s is set by the operator and must not be given'"
            f".format([self.env.filter(e, {is_reserved})[0].name])",
            field_path=".env",
        ),
        Rule(
            f"!has(self.volumes) || !self.volumes.exists(v, v.name in {list(RESERVED_VOLUMES)})",
            f"volumes: the names {', '.join(RESERVED_VOLUMES)} are reserved for the operator; choose another",
            field_path=".volumes",
        ),
        Rule(
            f"!has(self.volumes) || !self.volumes.exists(v, v.mountPath in {_with_slash(RESERVED_PATHS)})",
            f"volumes: the mount paths {', '.join(RESERVED_PATHS)} are reserved for the operator; choose another",
            field_path=".volumes",
        ),
        Rule(
            "!has(self.volumes) || self.volumes.all(v, self.volumes.exists_one(w, w.mountPath == v.mountPath))",
            "volumes: a mountPath is used twice; give each volume its own",
            field_path=".volumes",
        ),
        *(_reserved_keys(field) for field in ("labels", "annotations")),
    )


def _with_slash(paths: tuple[str, ...]) -> list[str]:
    return [*paths, *(path + "/" for path in paths if path != "/")]


def _reserved_keys(field: str) -> Rule:
    return Rule(
        f"!has(self.podTemplate) || !has(self.podTemplate.{field})"
        f" || !self.podTemplate.{field}.exists(k, k.startsWith('{RESERVED_PREFIX}/'))",
        f"podTemplate.{field}: the prefix {RESERVED_PREFIX}/ is reserved for the operator; choose another",
        field_path=".podTemplate",
    )


def _eval_steps_need_rows() -> Rule:
    return Rule(
        "!has(self.training) || !has(self.training.evalSteps) || !has(self.dataset) || "
        "has(self.dataset.splitDatasetRatio) || (has(self.dataset.eval) && self.dataset.eval.size() > 0)",
        "training.evalSteps is set but dataset.eval is empty; add rows to evaluate on, or set"
        " dataset.splitDatasetRatio",
        field_path=".training",
    )


def _reward_metrics_need_dpo() -> Rule:
    return Rule(
        "has(self.dpo) || !has(self.training) || !has(self.training.metricForBestModel)"
        f" || !self.training.metricForBestModel.startsWith('{REWARD_METRICS}')",
        REWARDS_NEED_DPO,
        field_path=".training",
    )


def _parts_with_rate_are_trained(part: str) -> Rule:
    return Rule(
        f"!has(self.training) || !has(self.training.{part}LearningRate) || !has(self.model)"
        f" || (has(self.model.freeze) && !('{part}' in self.model.freeze))",
        frozen_rate_message(part),
        field_path=".training",
    )


def _packing_needs_sft() -> Rule:
    return Rule(
        "!has(self.dpo) || !has(self.dataset) || !has(self.dataset.packing) || !self.dataset.packing",
        PACKING_REQUIRES_SFT,
        field_path=".dataset",
    )


def _immutable() -> tuple[Rule, ...]:
    fields = (field.alias or name for name, field in FineTuneJobSpec.model_fields.items())
    return tuple(
        Rule(
            _unchanged(field),
            f"spec.{field} is immutable; delete and recreate the job, or create another one",
            field_path=f".{field}",
        )
        for field in fields
        if field not in (*MUTABLE, *MUTABLE_WHILE_SUSPENDED)
    )


def _immutable_while_running() -> tuple[Rule, ...]:
    return tuple(
        Rule(
            f"(has(oldSelf.suspend) && oldSelf.suspend) || ({_unchanged(field)})",
            f"spec.{field} can be changed only while the job is suspended; set spec.suspend to true first",
            field_path=f".{field}",
        )
        for field in MUTABLE_WHILE_SUSPENDED
    )


def _unchanged(field: str) -> str:
    """Return a CEL expression for an unchanged field. The API server estimates the cost of the equivalent
    `self.?x == oldSelf.?x` as unbounded."""
    return f"has(self.{field}) ? has(oldSelf.{field}) && self.{field} == oldSelf.{field} : !has(oldSelf.{field})"
