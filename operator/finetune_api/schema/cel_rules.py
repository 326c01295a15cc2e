"""What the API server checks beyond types: the CEL rules of the CRD, each with the words its user reads."""

from dataclasses import dataclass
from typing import Any

from finetune_api.v1alpha1.command import (
    IMAGE_NEEDED,
    NEEDED_BY_TRAINER,
    NOT_BESIDE_COMMAND,
    OUTPUT_NOT_BESIDE_COMMAND,
    needed,
    not_beside_command,
)
from finetune_api.v1alpha1.dataset import PACKING_NEEDS_SFT
from finetune_api.v1alpha1.job import (
    MAX_JOB_NAME,
    MEMORY_HAS_NO_LIMIT,
    METHODS,
    RESERVED_ENV,
    RESERVED_ENV_PREFIXES,
    RESERVED_PATHS,
    RESERVED_VOLUMES,
    FineTuneJobSpec,
)
from finetune_api.v1alpha1.parallelism import NO_PROBE, QUANTIZED_IS_WHOLE
from finetune_api.v1alpha1.pod_types import RESERVED_PREFIX
from finetune_api.v1alpha1.training import REWARDS, REWARDS_NEED_DPO, rate_of_frozen

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
    """One CEL rule. `detail` is CEL too: it makes a message with the numbers seen, where that helps."""

    rule: str
    message: str
    detail: str | None = None
    field_path: str | None = None

    def as_schema(self) -> dict[str, Any]:
        """As x-kubernetes-validations has it."""
        keys = {
            "rule": self.rule,
            "message": self.message,
            "messageExpression": self.detail,
            "fieldPath": self.field_path,
        }
        return {key: value for key, value in keys.items() if value is not None}


def name_rules() -> tuple[Rule, ...]:
    """Rules on the whole object: names of Service and pods are derived from the job's."""
    return (
        Rule(
            f"self.metadata.name.size() <= {MAX_JOB_NAME}",
            f"metadata.name must have at most {MAX_JOB_NAME} characters, so that the names of its pods fit 63",
            f"'metadata.name must have at most {MAX_JOB_NAME} characters, so that the names of its pods fit 63;"
            " this one has %d'.format([self.metadata.name.size()])",
        ),
        Rule(
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "metadata.name must start with a lower case letter and hold only a-z, 0-9 and '-', with no '-' at its end"
            " (DNS-1035), because a Service is named after it",
        ),
    )


def spec_rules() -> tuple[Rule, ...]:
    """Rules on the spec; the pydantic models hold the same where no API server looks first."""
    return (
        _one_method(),
        *_fits_the_method(),
        _one_way_to_spread(),
        _memory_can_grow(),
        _quantized_is_whole(),
        _probe_can_be_undone(),
        _batch_holds(),
        *_reserved(),
        _eval_steps(),
        _rewards_are_measured(),
        *(_what_has_a_rate_is_trained(part) for part in ("vision", "aligner")),
        _packs_are_for_sft(),
        *_immutable(),
        *_immutable_while_running(),
    )


def _one_method() -> Rule:
    chosen = ", ".join(f"has(self.{method})" for method in (*METHODS, "command"))
    example = " or ".join((*(f"{method}: {{}}" for method in METHODS), "command: {script: train.py}"))
    return Rule(f"[{chosen}].exists_one(x, x)", f"exactly one training method must be set, such as {example}")


def _fits_the_method() -> tuple[Rule, ...]:
    """What the operator's own trainer needs is no part of a job that brings its own program."""
    return (
        *(Rule(f"has(self.command) || has(self.{field})", needed(field)) for field in NEEDED_BY_TRAINER),
        *(
            Rule(f"!has(self.command) || !has(self.{field})", not_beside_command(field), field_path=f".{field}")
            for field in NOT_BESIDE_COMMAND
        ),
        *(
            Rule(
                f"!has(self.command) || !has(self.output) || !has(self.{field})",
                not_beside_command(field),
                field_path=".output",
            )
            for field in OUTPUT_NOT_BESIDE_COMMAND
        ),
        Rule("!has(self.command) || has(self.image)", IMAGE_NEEDED),
    )


def _one_way_to_spread() -> Rule:
    return Rule("!(has(self.deepspeed) && has(self.fsdp))", "deepspeed and fsdp exclude each other; set one of them")


def _memory_can_grow() -> Rule:
    """That it is more than the limit is left to the operator: quantities are too dear to compare here."""
    return Rule(
        "!has(self.restartPolicy) || !has(self.restartPolicy.maxMemory)"
        " || (has(self.resources) && has(self.resources.limits) && 'memory' in self.resources.limits)",
        MEMORY_HAS_NO_LIMIT,
        field_path=".restartPolicy",
    )


def _quantized_is_whole() -> Rule:
    """A raw config of DeepSpeed is looked into by the models alone."""
    spreads = "has(self.fsdp) || (has(self.deepspeed) && self.deepspeed.?preset.orValue('').startsWith('zero3'))"
    return Rule(f"!(has(self.lora) && has(self.lora.quantization) && ({spreads}))", QUANTIZED_IS_WHOLE)


def _probe_can_be_undone() -> Rule:
    probes = "has(self.training) && has(self.training.probe) && self.training.probe"
    return Rule(f"!(has(self.deepspeed) && {probes})", NO_PROBE, field_path=".training")


_SIZE = "self.training.perDeviceTrainBatchSize"
_PER_DEVICE = f"(has({_SIZE}) && type({_SIZE}) == int ? {_SIZE} : 1)"  # auto holds for every rank count that 1 does
_ACCUMULATION = "self.training.?gradientAccumulationSteps.orValue(1)"
_GPUS = "self.?resources.?limits[?'nvidia.com/gpu'].orValue(0)"
_RANKS = f"self.?numNodes.orValue(1) * self.?nprocPerNode.orValue({_GPUS} > 0 ? {_GPUS} : 1)"
_BOTH = "has(self.training.perDeviceTrainBatchSize) && has(self.training.gradientAccumulationSteps)"


def _batch_holds() -> Rule:
    """Left to the operator where ranks are GPUs of another vendor or counted by a string.

    Summing those costs more than the API server allows a rule.
    """
    effective = "self.training.globalBatchSize"
    given = f"has(self.training) && has({effective})"
    countable = (
        "(has(self.nprocPerNode) || !has(self.resources) || !has(self.resources.limits)"
        " || self.resources.limits.all(k, !k.endsWith('/gpu')"
        " || (k == 'nvidia.com/gpu' && type(self.resources.limits[k]) == int)))"
    )
    return Rule(
        f"!({given} && {countable}) || [{_PER_DEVICE} * {_ACCUMULATION} * {_RANKS}]"
        f".all(unit, {_BOTH} ? {effective} == unit : {effective} % unit == 0)",
        "globalBatchSize must be perDeviceTrainBatchSize x gradientAccumulationSteps x ranks, or a multiple of what is"
        " given of them",
        "'globalBatchSize is %d, but perDeviceTrainBatchSize x gradientAccumulationSteps x ranks is %d x %d x %d;"
        " make it their product, or leave one of the first two out and make it a multiple'"
        f".format([{effective}, {_PER_DEVICE}, {_ACCUMULATION}, {_RANKS}])",
        field_path=".training",
    )


def _reserved() -> tuple[Rule, ...]:
    ours = " || ".join(f"e.name.startsWith('{prefix}')" for prefix in RESERVED_ENV_PREFIXES)
    taken = f"e.name in {list(RESERVED_ENV)} || {ours}"
    return (
        Rule(
            f"!has(self.env) || !self.env.exists(e, {taken})",
            "env: the variables of the rendezvous are set by the operator and cannot be given",
            f"'env: %s is set by the operator and cannot be given'.format([self.env.filter(e, {taken})[0].name])",
            field_path=".env",
        ),
        Rule(
            f"!has(self.volumes) || !self.volumes.exists(v, v.name in {list(RESERVED_VOLUMES)})",
            f"volumes: the names {', '.join(RESERVED_VOLUMES)} are the operator's own; choose another",
            field_path=".volumes",
        ),
        Rule(
            f"!has(self.volumes) || !self.volumes.exists(v, v.mountPath in {_with_slash(RESERVED_PATHS)})",
            f"volumes: the mount paths {', '.join(RESERVED_PATHS)} are the operator's own; choose another",
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


def _eval_steps() -> Rule:
    return Rule(
        "!has(self.training) || !has(self.training.evalSteps) || !has(self.dataset) || "
        "has(self.dataset.splitDatasetRatio) || (has(self.dataset.eval) && self.dataset.eval.size() > 0)",
        "training.evalSteps is set but dataset.eval is empty; add rows to evaluate on, or set"
        " dataset.splitDatasetRatio",
        field_path=".training",
    )


def _rewards_are_measured() -> Rule:
    return Rule(
        "has(self.dpo) || !has(self.training) || !has(self.training.metricForBestModel)"
        f" || !self.training.metricForBestModel.startsWith('{REWARDS}')",
        REWARDS_NEED_DPO,
        field_path=".training",
    )


def _what_has_a_rate_is_trained(part: str) -> Rule:
    return Rule(
        f"!has(self.training) || !has(self.training.{part}LearningRate) || !has(self.model)"
        f" || (has(self.model.freeze) && !('{part}' in self.model.freeze))",
        rate_of_frozen(part),
        field_path=".training",
    )


def _packs_are_for_sft() -> Rule:
    return Rule(
        "!has(self.dpo) || !has(self.dataset) || !has(self.dataset.packing) || !self.dataset.packing",
        PACKING_NEEDS_SFT,
        field_path=".dataset",
    )


def _immutable() -> tuple[Rule, ...]:
    fields = (field.alias or name for name, field in FineTuneJobSpec.model_fields.items())
    return tuple(
        Rule(
            _unchanged(field),
            f"spec.{field} is immutable; delete the job and create it anew, or create another one beside it",
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
    """`self.?x == oldSelf.?x` says the same, but the API server estimates its cost as unbounded."""
    return f"has(self.{field}) ? has(oldSelf.{field}) && self.{field} == oldSelf.{field} : !has(oldSelf.{field})"
