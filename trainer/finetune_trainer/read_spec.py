"""Read and validate the job spec that the operator passes to the trainer."""

from pathlib import Path

from pydantic import ValidationError

from finetune_api.schema.validation_errors import explain_validation_error
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_api.v1alpha1.recorded_defaults import apply_defaults
from finetune_supervisor.contract import DEFAULTS_FILE
from finetune_trainer.errors import InvalidSpec


def read_spec(path: Path) -> TrainerSpec:
    """Read and validate the spec, with the defaults with which the job began. Raises InvalidSpec."""
    defaults = path.with_name(DEFAULTS_FILE)
    try:
        spec = TrainerSpec.model_validate_json(path.read_bytes())
        spec = apply_defaults(spec, defaults.read_text(encoding="utf-8") if defaults.exists() else "")
    except ValidationError as error:
        raise InvalidSpec(explain_validation_error(error, parent_path="spec")) from error
    if spec.training.lr_scheduler_type == "constant" and spec.training.warmup_steps:
        raise InvalidSpec(
            "spec.training.warmupSteps has no effect with lrSchedulerType constant; use constant_with_warmup"
        )
    return spec
