"""How the optimizer steps, and what is measured and saved on the way."""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from finetune_api.batch import AUTO
from finetune_api.v1alpha1.base import Model, validations

REPORTERS = ("tensorboard", "wandb", "mlflow", "swanlab")  # each needs the package of its name
EVAL_LOSS = "eval_loss"
REWARDS = "eval_rewards/"  # the beginning of every metric that dpo alone measures
REWARDS_NEED_DPO = (
    f"training.metricForBestModel: what begins with {REWARDS} is measured with dpo alone; use {EVAL_LOSS}"
)
_COMPARES = "has(self.earlyStoppingPatience) || (has(self.loadBestModelAtEnd) && self.loadBestModelAtEnd)"
_COMPARED_NEED_STEPS = (
    "loadBestModelAtEnd and earlyStoppingPatience compare evaluations, and without evalSteps there is one, at the end;"
    " set evalSteps"
)
_METRIC_IS_COMPARED = (
    "metricForBestModel is what loadBestModelAtEnd and earlyStoppingPatience go by; set one of them, or leave it out"
)
_THRESHOLD_NEEDS_PATIENCE = "earlyStoppingThreshold belongs to earlyStoppingPatience; set that, too"
_SCALING_NEEDS_RATE = "lrScaling scales learningRate, which must say what suits baseBatchSize; set it"


def rate_of_frozen(part: str) -> str:
    return (
        f"training.{part}LearningRate: {part} is frozen, as vision and aligner are unless model.freeze says otherwise;"
        f" list in model.freeze what is to be frozen without {part}, or leave the rate out"
    )


class LrScaling(Model):
    """Makes learning rates that suit one effective batch suit another."""

    rule: Literal["linear", "sqrt"] = Field(
        description="Rates grow with the effective batch, or with its square root, as is usual for AdamW."
    )
    base_batch_size: int = Field(ge=1, le=16_777_216, description="The effective batch that the given rates suit.")


AUTO_NEEDS_A_SUM = (
    "perDeviceTrainBatchSize: auto needs globalBatchSize, so that what fits does not decide what is learned; set it"
)
AUTO_CHOOSES_BOTH = (
    "perDeviceTrainBatchSize: auto chooses gradientAccumulationSteps as well; leave that out, or write a number"
)


_AUTO = "has(self.perDeviceTrainBatchSize) && type(self.perDeviceTrainBatchSize) == string"


MicroBatch = Annotated[
    Annotated[int, Field(ge=1, le=65536)] | Literal["auto"],
    Field(
        json_schema_extra={
            "x-kubernetes-int-or-string": True,
            "pattern": f"^{AUTO}$",
            **validations(("type(self) != int || (self >= 1 && self <= 65536)", "must be auto, or 1 to 65536")),
        }
    ),
]


class Training(Model):
    """How the optimizer steps. Names are those of transformers.TrainingArguments."""

    per_device_train_batch_size: MicroBatch | None = Field(
        default=None,
        description="Samples per rank and forward pass (default 1). auto: as many as fit into memory, of those that"
        " divide globalBatchSize, which must be given; gradientAccumulationSteps follows.",
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
    vision_learning_rate: float | None = Field(
        default=None, gt=0, le=10, description="That of a model's vision tower (default: learningRate)."
    )
    aligner_learning_rate: float | None = Field(
        default=None, gt=0, le=10, description="That of what aligns vision with language (default: learningRate)."
    )
    lr_scaling: LrScaling | None = Field(
        default=None, description="Scale all of these from the batch that they suit to the effective batch."
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
    save_total_limit: int = Field(
        default=2, ge=1, le=1000, description="Newest checkpoints kept, pruned after a good save."
    )
    eval_steps: int | None = Field(
        default=None,
        ge=1,
        description="Steps between evaluations (default: at the end only); needs rows to evaluate on.",
    )
    load_best_model_at_end: bool = Field(
        default=False,
        description="Publish the weights of the best evaluation, not those of the last step. An evaluation that is"
        " better than all before makes a checkpoint, and the best one's stays beside those of saveTotalLimit. Needs"
        " evalSteps.",
    )
    metric_for_best_model: Literal["eval_loss", "eval_rewards/accuracies", "eval_rewards/margins"] | None = Field(
        default=None,
        description="What evaluations are compared by (default: eval_loss). Of a loss less is better, of what dpo"
        " measures more.",
    )
    early_stopping_patience: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description="Evaluations in a row without improvement after which training ends well. Needs evalSteps.",
    )
    early_stopping_threshold: float | None = Field(
        default=None,
        ge=0,
        description="How much better than the best an evaluation must be to count (default: at all).",
    )
    probe: bool = Field(
        default=False, description="Try the costliest micro-batch before the first step; changes no number."
    )
    allow_mixed_hardware: bool = Field(
        default=False,
        description="Train although ranks have different GPUs, drivers or versions; all wait for the slowest.",
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
            (f"!({_COMPARES}) || has(self.evalSteps)", _COMPARED_NEED_STEPS),
            (f"!has(self.metricForBestModel) || {_COMPARES}", _METRIC_IS_COMPARED),
            ("!has(self.earlyStoppingThreshold) || has(self.earlyStoppingPatience)", _THRESHOLD_NEEDS_PATIENCE),
            ("!has(self.lrScaling) || has(self.learningRate)", _SCALING_NEEDS_RATE),
            (f"!({_AUTO}) || has(self.globalBatchSize)", AUTO_NEEDS_A_SUM),
            (f"!({_AUTO}) || !has(self.gradientAccumulationSteps)", AUTO_CHOOSES_BOTH),
        )
    )

    @property
    def rates_of_parts(self) -> dict[str, float | None]:
        """By the part of a vision-language model, as model.freeze names it."""
        return {"vision": self.vision_learning_rate, "aligner": self.aligner_learning_rate}

    @property
    def compares_evaluations(self) -> bool:
        return self.load_best_model_at_end or self.early_stopping_patience is not None

    @property
    def chooses_batch(self) -> bool:
        """The trainer finds out how many samples fit."""
        return self.per_device_train_batch_size == AUTO

    @model_validator(mode="after")
    def _auto_chooses(self) -> Self:
        if self.chooses_batch and self.global_batch_size is None:
            raise ValueError(AUTO_NEEDS_A_SUM)
        if self.chooses_batch and self.gradient_accumulation_steps is not None:
            raise ValueError(AUTO_CHOOSES_BOTH)
        return self

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

    @model_validator(mode="after")
    def _evaluations_can_be_compared(self) -> Self:
        if self.compares_evaluations and self.eval_steps is None:
            raise ValueError(_COMPARED_NEED_STEPS)
        if self.metric_for_best_model is not None and not self.compares_evaluations:
            raise ValueError(_METRIC_IS_COMPARED)
        if self.early_stopping_threshold is not None and self.early_stopping_patience is None:
            raise ValueError(_THRESHOLD_NEEDS_PATIENCE)
        return self

    @model_validator(mode="after")
    def _a_rate_is_scaled(self) -> Self:
        if self.lr_scaling is not None and self.learning_rate is None:
            raise ValueError(_SCALING_NEEDS_RATE)
        return self
