"""Defines spec.training: batch, optimizer, schedule, evaluation, checkpoints and reporting."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from finetune_api.batch import AUTO
from finetune_api.v1alpha1.base import CelRule, CrossFieldRule, Model, ModelWithRules, build_validation_schema

EIGHT_BIT_ADAMW = "adamw_8bit"  # value of optim
REPORTERS = ("tensorboard", "wandb", "mlflow", "swanlab")  # each reporter requires the package of the same name
EVAL_LOSS = "eval_loss"
_COMPARES_EVALUATIONS_CEL = (
    "has(self.earlyStoppingPatience) || (has(self.loadBestModelAtEnd) && self.loadBestModelAtEnd)"
)
_IS_AUTO_CEL = "has(self.perDeviceTrainBatchSize) && type(self.perDeviceTrainBatchSize) == string"


class LrScaling(Model):
    """Scales the learning rates from a base batch size to the effective batch."""

    rule: Literal["linear", "sqrt"] = Field(
        description="Scale with the effective batch, or with its square root, as is usual for AdamW."
    )
    base_batch_size: int = Field(
        ge=1, le=16_777_216, description="Effective batch for which the learning rates were chosen."
    )


MicroBatch = Annotated[
    Annotated[int, Field(ge=1, le=65536)] | Literal["auto"],
    Field(
        json_schema_extra={
            "x-kubernetes-int-or-string": True,
            "pattern": f"^{AUTO}$",
            **build_validation_schema(
                [CelRule("type(self) != int || (self >= 1 && self <= 65536)", "must be auto, or 1 to 65536")]
            ),
        }
    ),
]


class Preflight(Model):
    """Checks before the first step, which take a few seconds. A fault fails the attempt, and its node is avoided."""

    enabled: bool = Field(
        default=True,
        description="Check that each GPU computes correctly, and measure the network between the ranks.",
    )
    min_inter_node_gbps: float | None = Field(
        default=None,
        gt=0,
        le=1_000_000,
        description="Required bandwidth between each two nodes in Gbit/s; less fails the attempt with NetworkFault.",
    )
    min_intra_node_gbps: float | None = Field(
        default=None,
        gt=0,
        le=1_000_000,
        description="Required bus bandwidth of an all-reduce within a node in Gbit/s.",
    )


class Training(ModelWithRules):
    """Batch, optimizer, schedule and checkpoints. Names are those of transformers.TrainingArguments."""

    per_device_train_batch_size: MicroBatch | None = Field(
        default=None,
        description="Samples per rank and forward pass (default 1). auto: the largest number that fits into memory and"
        " divides globalBatchSize, which is then required; gradientAccumulationSteps is derived.",
    )
    gradient_accumulation_steps: int | None = Field(
        default=None, ge=1, le=65536, description="Micro-batches per optimizer step and rank (default 1, or derived)."
    )
    global_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=16_777_216,
        description="Effective batch: perDeviceTrainBatchSize x gradientAccumulationSteps x ranks. "
        "If set, the product must be equal to it; a factor that is not set is derived.",
    )
    per_device_eval_batch_size: int | None = Field(
        default=None, ge=1, le=65536, description="Samples per rank in evaluation (default: as in training)."
    )
    average_tokens_across_devices: bool = Field(
        default=True, description="Average the loss over all tokens of the effective batch, instead of per rank."
    )
    learning_rate: float | None = Field(
        default=None,
        gt=0,
        le=10,
        description="Peak learning rate (default: 1e-4 with lora, 1e-5 without; for dpo a tenth of that).",
    )
    vision_learning_rate: float | None = Field(
        default=None, gt=0, le=10, description="Peak learning rate of the vision encoder (default: learningRate)."
    )
    aligner_learning_rate: float | None = Field(
        default=None,
        gt=0,
        le=10,
        description="Peak learning rate of the aligner between vision encoder and language model (default:"
        " learningRate).",
    )
    lr_scaling: LrScaling | None = Field(default=None, description="Scales the learning rates.")
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial"] = Field(
        default="cosine", description="Learning rate schedule."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps of linear warm-up from zero.")
    optim: Literal["adamw_torch_fused", "adamw_8bit"] = Field(
        default="adamw_torch_fused",
        description="Optimizer: AdamW with moments in float32, or in 8 bits by bitsandbytes, which saves 6 bytes per"
        " trained parameter. adamw_8bit excludes deepspeed and fsdp, and keeps the moments of embeddings in float32.",
    )
    weight_decay: float = Field(default=0.0, ge=0, le=1, description="Weight decay of AdamW.")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay rate of AdamW's mean of gradients.")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="Decay rate of AdamW's mean of squared gradients.")
    adam_epsilon: float = Field(
        default=1e-8, gt=0, le=1, description="Term that AdamW adds to the denominator of its update."
    )
    max_grad_norm: float = Field(
        default=1.0, ge=0, description="Maximum gradient norm for clipping; 0 disables clipping."
    )
    router_aux_loss_coef: float | None = Field(
        default=None,
        gt=0,
        le=10,
        description="Weight of the auxiliary loss that balances the experts of a mixture-of-experts model (default: no"
        " such loss; the model's config contains the weight of its pretraining).",
    )
    num_train_epochs: float | None = Field(default=None, gt=0, le=100_000, description="Epochs (default 3).")
    max_steps: int | None = Field(
        default=None, ge=1, description="Number of optimizer steps, instead of numTrainEpochs."
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass to save memory."
    )
    gradient_checkpointing_interval: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="With gradientCheckpointing: recompute every n-th layer only, which is faster and needs more memory"
        " (default: 1, all layers).",
    )
    torch_compile: bool = Field(
        default=False,
        description="Compile attention, MLP and norms of each layer of the language model with torch.compile, which"
        " fuses their operations into fewer kernels. Starting takes longer. Excludes deepspeed.",
    )
    seed: int = Field(default=42, ge=0, le=4_294_967_295, description="Random seed of weights, dropout and data order.")
    logging_steps: int = Field(default=1, ge=1, description="Optimizer steps between log entries.")
    report_to: tuple[Literal["tensorboard", "wandb", "mlflow", "swanlab", "none"], ...] | None = Field(
        default=None,
        min_length=1,
        max_length=4,
        description="Where metrics are reported besides the log (default: tensorboard, if installed, in"
        " logs/tensorboard of the output); the others need their package in the image and their settings in spec.env.",
    )
    save_steps: int = Field(default=100, ge=1, description="Optimizer steps between checkpoints.")
    save_total_limit: int = Field(
        default=2,
        ge=1,
        le=1000,
        description="Number of newest checkpoints to keep; older ones are deleted after a successful save.",
    )
    async_checkpoints: bool | None = Field(
        default=None,
        description="Whether training continues while a checkpoint is written, from a copy in host memory of the"
        " weights and optimizer states to save, divided by the ranks (default: true, but false with lora, whose"
        " checkpoints are small, and with optimizer states that are offloaded to host memory).",
    )
    eval_steps: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps between evaluations (default: only at the end); needs evaluation rows.",
    )
    load_best_model_at_end: bool = Field(
        default=False,
        description="Publish the weights of the best evaluation instead of those of the last step. Each new best"
        " evaluation writes a checkpoint, which is kept in addition to those of saveTotalLimit. Needs evalSteps.",
    )
    metric_for_best_model: Literal["eval_loss", "eval_rewards/accuracies", "eval_rewards/margins"] | None = Field(
        default=None,
        description="Metric that ranks evaluations (default: eval_loss). Lower is better for a loss, higher for the"
        " metrics of dpo.",
    )
    early_stopping_patience: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description="Consecutive evaluations without improvement after which training ends. Needs evalSteps.",
    )
    early_stopping_threshold: float | None = Field(
        default=None,
        ge=0,
        description="Minimum improvement over the best evaluation that counts (default: any).",
    )
    probe: bool = Field(
        default=False,
        description="Run the micro-batch with the highest memory use before the first step; the result stays the same.",
    )
    allow_mixed_hardware: bool = Field(
        default=False,
        description="Allow ranks with different GPUs, drivers or library versions; the slowest rank sets the speed.",
    )
    preflight: Preflight = Field(
        default=Preflight(), description="Checks of GPUs, clocks and network before the first step."
    )
    on_degraded: Literal["warn", "fail"] = Field(
        default="warn",
        description="What to do if the job would be slower or less accurate than its hardware allows: warn lists the"
        " causes in status.degraded, fail ends the job with the reason Degraded.",
    )
    ddp_timeout: int = Field(default=1800, ge=10, le=604_800, description="Timeout of collectives in seconds.")

    rules: ClassVar[tuple[CrossFieldRule["Training"], ...]] = (
        CrossFieldRule.from_cel_rule(
            "one length",
            lambda training: training.num_train_epochs is not None and training.max_steps is not None,
            CelRule(
                "!(has(self.numTrainEpochs) && has(self.maxSteps))",
                "numTrainEpochs and maxSteps exclude each other; set one of them",
            ),
        ),
        CrossFieldRule.from_cel_rule(
            "none is exclusive",
            lambda training: "none" in (training.report_to or ()) and len(training.report_to or ()) > 1,
            CelRule(
                "!has(self.reportTo) || self.reportTo.size() == 1 || !self.reportTo.exists(name, name == 'none')",
                "reportTo: none excludes all others; remove none, or the others",
            ),
        ),
        CrossFieldRule.from_cel_rule(
            "comparison needs evaluations",
            lambda training: training.tracks_best_evaluation and training.eval_steps is None,
            CelRule(
                f"!({_COMPARES_EVALUATIONS_CEL}) || has(self.evalSteps)",
                "loadBestModelAtEnd and earlyStoppingPatience compare evaluations, but without evalSteps there is only"
                " one, at the end; set evalSteps",
            ),
        ),
        CrossFieldRule.from_cel_rule(
            "metric needs comparison",
            lambda training: training.metric_for_best_model is not None and not training.tracks_best_evaluation,
            CelRule(
                f"!has(self.metricForBestModel) || {_COMPARES_EVALUATIONS_CEL}",
                "metricForBestModel is used only by loadBestModelAtEnd and earlyStoppingPatience; set one of them, or"
                " remove it",
            ),
        ),
        CrossFieldRule.from_cel_rule(
            "threshold needs early stopping",
            lambda training: training.early_stopping_threshold is not None and training.early_stopping_patience is None,
            CelRule(
                "!has(self.earlyStoppingThreshold) || has(self.earlyStoppingPatience)",
                "earlyStoppingThreshold requires earlyStoppingPatience; set both",
            ),
        ),
        CrossFieldRule.from_cel_rule(
            "interval needs gradient checkpointing",
            lambda training: (
                training.gradient_checkpointing_interval is not None and not training.gradient_checkpointing
            ),
            CelRule(
                "!has(self.gradientCheckpointingInterval)"
                " || (has(self.gradientCheckpointing) && self.gradientCheckpointing)",
                "gradientCheckpointingInterval requires gradientCheckpointing: true; set it, or remove the interval",
            ),
        ),
        CrossFieldRule.from_cel_rule(
            "scaling needs a rate",
            lambda training: training.lr_scaling is not None and training.learning_rate is None,
            CelRule(
                "!has(self.lrScaling) || has(self.learningRate)",
                "lrScaling scales learningRate, which must be the rate for baseBatchSize; set learningRate",
            ),
        ),
        CrossFieldRule.from_cel_rule(
            "auto needs globalBatchSize",
            lambda training: training.has_auto_batch_size and training.global_batch_size is None,
            CelRule(
                f"!({_IS_AUTO_CEL}) || has(self.globalBatchSize)",
                "perDeviceTrainBatchSize: auto needs globalBatchSize, so that the result does not depend on GPU"
                " memory; set it",
            ),
        ),
        CrossFieldRule.from_cel_rule(
            "auto sets gradientAccumulationSteps",
            lambda training: training.has_auto_batch_size and training.gradient_accumulation_steps is not None,
            CelRule(
                f"!({_IS_AUTO_CEL}) || !has(self.gradientAccumulationSteps)",
                "perDeviceTrainBatchSize: auto also chooses gradientAccumulationSteps; remove that, or set a number"
                " instead of auto",
            ),
        ),
    )

    @property
    def recomputation_interval(self) -> int | None:
        """n if the activations of every n-th layer are recomputed; None if none are."""
        return (self.gradient_checkpointing_interval or 1) if self.gradient_checkpointing else None

    @property
    def learning_rates_by_part(self) -> dict[str, float | None]:
        """Learning rates of the parts of a vision-language model, with the part names of model.freeze as keys."""
        return {"vision": self.vision_learning_rate, "aligner": self.aligner_learning_rate}

    @property
    def tracks_best_evaluation(self) -> bool:
        """Whether the trainer keeps track of the best evaluation."""
        return self.load_best_model_at_end or self.early_stopping_patience is not None

    @property
    def has_auto_batch_size(self) -> bool:
        """Whether the trainer chooses the micro-batch size."""
        return self.per_device_train_batch_size == AUTO
