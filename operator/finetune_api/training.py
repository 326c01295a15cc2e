"""How the optimizer steps, and what is measured and saved on the way."""

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from finetune_api.model import Model, validations

REPORTERS = ("tensorboard", "wandb", "mlflow", "swanlab")  # each needs the package of its name


class Training(Model):
    """How the optimizer steps. Names are those of transformers.TrainingArguments."""

    per_device_train_batch_size: int | None = Field(
        default=None, ge=1, le=65536, description="Samples per rank and forward pass (default 1)."
    )
    gradient_accumulation_steps: int | None = Field(
        default=None, ge=1, le=65536, description="Forward passes per optimizer step (default 1, or derived)."
    )
    global_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=16_777_216,
        description="Effective batch: perDeviceTrainBatchSize x gradientAccumulationSteps x ranks. "
        "Given, it must hold exactly; what is missing of the other two is derived.",
    )
    per_device_eval_batch_size: int | None = Field(
        default=None, ge=1, le=65536, description="Samples per rank in evaluation (default: as in training)."
    )
    average_tokens_across_devices: bool = Field(
        default=True, description="Weigh every token of the effective batch equally, whatever rank it is on."
    )
    learning_rate: float | None = Field(
        default=None,
        gt=0,
        le=10,
        description="Peak learning rate (default 1e-4 with lora, 1e-5 without; a tenth of that for dpo).",
    )
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial"] = Field(
        default="cosine", description="Shape of the learning rate over the steps."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up from zero.")
    weight_decay: float = Field(default=0.0, ge=0, le=1, description="AdamW weight decay.")
    max_grad_norm: float = Field(default=1.0, ge=0, description="Gradient clipping by norm; 0 switches it off.")
    num_train_epochs: float | None = Field(
        default=None, gt=0, le=100_000, description="Passes over the rows (default 3)."
    )
    max_steps: int | None = Field(default=None, ge=1, description="Optimizer steps, instead of numTrainEpochs.")
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations to save memory.")
    seed: int = Field(default=42, ge=0, le=4_294_967_295, description="Seed of weights, dropout and data order.")
    logging_steps: int = Field(default=1, ge=1, description="Steps between two reports of the loss.")
    report_to: tuple[Literal["tensorboard", "wandb", "mlflow", "swanlab", "none"], ...] | None = Field(
        default=None,
        min_length=1,
        max_length=4,
        description="Where measurements go besides the log (default: tensorboard, if the image has it, to"
        " logs/tensorboard of the output); the others need their package in the image and their settings in spec.env.",
    )
    save_steps: int = Field(default=100, ge=1, description="Steps between two checkpoints.")
    save_total_limit: int = Field(default=2, ge=1, le=1000, description="Checkpoints kept, pruned after a good save.")
    eval_steps: int | None = Field(
        default=None,
        ge=1,
        description="Steps between evaluations (default: at the end only); needs rows to evaluate on.",
    )
    probe: bool = Field(
        default=False, description="Try the costliest micro-batch before the first step; changes no number."
    )
    ddp_timeout: int = Field(
        default=1800, ge=10, le=604_800, description="Seconds until a collective that hangs fails on every rank."
    )

    model_config = ConfigDict(
        json_schema_extra=validations(
            (
                "!(has(self.numTrainEpochs) && has(self.maxSteps))",
                "numTrainEpochs and maxSteps exclude each other; set one of them",
            ),
            (
                "!has(self.reportTo) || self.reportTo.size() == 1 || !self.reportTo.exists(name, name == 'none')",
                "reportTo: none stands alone; leave out either none or the others",
            ),
        )
    )

    @model_validator(mode="after")
    def _none_is_alone(self) -> Self:
        if self.report_to and "none" in self.report_to and len(self.report_to) > 1:
            raise ValueError("reportTo: none stands alone; leave out either none or the others")
        return self

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.num_train_epochs is not None and self.max_steps is not None:
            raise ValueError("numTrainEpochs and maxSteps exclude each other; set one of them")
        return self
