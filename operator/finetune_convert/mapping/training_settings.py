"""Converts settings of the transformers Trainer that depend on each other, such as batch and schedule."""

import math
import re
from dataclasses import dataclass
from typing import Any

from finetune_convert.conversion import EntryEffect
from finetune_convert.launch.topology import Topology
from finetune_convert.mapping.converters import bounded_int, read_number, read_value, to_bool, to_float
from finetune_convert.mapping.rules import Options, Unconvertible
from finetune_convert.mapping.trainer_conversion import TrainerConversion

MAX_BATCH_FACTOR = 65536


@dataclass(frozen=True)
class SettingNames:
    """Names of the settings in a tool; of several names, the first one that is in the input counts."""

    micro_batch: tuple[str, ...] = ("per_device_train_batch_size",)
    eval_batch: tuple[str, ...] = ("per_device_eval_batch_size",)
    accumulation: tuple[str, ...] = ("gradient_accumulation_steps",)
    epochs: tuple[str, ...] = ("num_train_epochs",)
    max_steps: tuple[str, ...] = ("max_steps",)
    warmup_steps: tuple[str, ...] = ("warmup_steps",)
    warmup_ratio: tuple[str, ...] = ("warmup_ratio",)
    eval_strategy: tuple[str, ...] = ("eval_strategy",)
    eval_steps: tuple[str, ...] = ("eval_steps",)
    save_strategy: tuple[str, ...] = ("save_strategy",)
    save_steps: tuple[str, ...] = ("save_steps",)
    early_stopping: tuple[str, ...] = ("early_stopping_patience",)


@dataclass
class TrainerSettings:
    """Conversion of these settings for one input."""

    conversion: TrainerConversion
    names: SettingNames
    topology: Topology

    def __post_init__(self) -> None:
        self.draft, self.options, self.tool = self.conversion.draft, self.conversion.options, self.conversion.tool
        self.note, self.state = self.conversion.note, self.conversion.state

    @property
    def job_ranks(self) -> int:
        """Ranks of the job of our own trainer: one per device."""
        return self.topology.nodes * max(self.topology.devices, self.topology.ranks_per_node)

    def add_batch(self, *, default_accumulation: Any = None) -> None:
        """Set the batch, so that the effective batch is that of the input.

        default_accumulation: accumulation steps if the tool computes them, else its default
        """
        micro = _read_count(self.options, self.names.micro_batch) or 1
        accumulation = _read_count(self.options, self.names.accumulation) or default_accumulation or 1
        if self.topology.ranks == self.job_ranks:
            self.state(self.names.micro_batch, "training.perDeviceTrainBatchSize", micro)
            self.state(self.names.accumulation, "training.gradientAccumulationSteps", accumulation)
        else:
            self._redistribute_batch(micro, accumulation)
        evaluation = _read_count(self.options, self.names.eval_batch)
        if evaluation:
            self.state(self.names.eval_batch, "training.perDeviceEvalBatchSize", evaluation)
        else:
            self.note(self.names.eval_batch, EntryEffect.SAME, "as in training")

    def _redistribute_batch(self, micro: int, accumulation: int) -> None:
        """Divide the effective batch of fewer ranks by the ranks of the job."""
        effective, ranks = micro * accumulation * self.topology.ranks, self.job_ranks
        new_micro = micro if effective % (ranks * micro) == 0 else 1
        new_accumulation = max(1, effective // (ranks * new_micro))
        path = "training.gradientAccumulationSteps"
        self.draft.set("training.perDeviceTrainBatchSize", new_micro)
        self.draft.set(path, new_accumulation)
        result = new_micro * new_accumulation * ranks
        names = (*self.names.micro_batch, *self.names.accumulation)
        if result == effective:
            message = f"the effective batch stays {effective}: {new_micro} x {new_accumulation} x {ranks} ranks"
            self.note(names, EntryEffect.MAPPED, message, path)
            if not self.options.has(*names):
                self.draft.note("batch", EntryEffect.NOTE, message, field=path)
        else:
            message = f"an effective batch of {effective} is not possible with {ranks} ranks; it is {result}"
            self.note(names, EntryEffect.CHANGED, message, path)
            self.draft.note("batch", EntryEffect.CHANGED, message, field=path)

    @property
    def effective_batch(self) -> int:
        """Samples per optimizer step of the job."""
        training = self.draft.spec.get("training", {})
        factors = (training.get("perDeviceTrainBatchSize", 1), training.get("gradientAccumulationSteps", 1))
        return int(factors[0]) * int(factors[1]) * self.job_ranks

    def count_steps(self, epochs: float = 1.0) -> int | None:
        """Return the optimizer steps of some epochs; None if the number of rows is unknown."""
        rows = self.draft.request.rows or self._count_sampled_rows()
        if rows is None or self.draft.get("dataset.packing"):
            return None
        return max(1, math.ceil(rows / self.effective_batch * epochs))

    def _count_sampled_rows(self) -> int | None:
        """Return the training rows if each source states a number, as name#500 does."""
        dataset = self.draft.spec.get("dataset", {})
        numbers = [str(source["name"]).partition("#")[2] for source in dataset.get("train", [])]
        if not numbers or not all(numbers):
            return None
        held_out = float(dataset.get("splitDatasetRatio", 0))
        return round(sum(map(int, numbers)) * (1 - held_out))

    def add_schedule(self) -> None:
        """Set the length of the training and its warm-up."""
        steps = int(read_number(self.options, *self.names.max_steps))
        if steps > 0:
            self.state(self.names.max_steps, "training.maxSteps", steps)
            self.note(self.names.epochs, EntryEffect.UNUSED, "max_steps overrides it")
        else:
            self.note(self.names.max_steps, EntryEffect.SAME, "the number of steps follows from the epochs")
            epochs = read_number(self.options, *self.names.epochs, default=3)
            if not 0 < epochs <= 100_000:
                raise Unconvertible(f"{self.names.epochs[-1]}: {epochs} is out of range")
            self.state(self.names.epochs, "training.numTrainEpochs", int(epochs) if epochs == int(epochs) else epochs)
        self._add_warmup(max(0, steps))

    def _add_warmup(self, max_steps: int) -> None:
        path = "training.warmupSteps"
        warmup = read_number(self.options, *self.names.warmup_steps)
        ratio = read_number(self.options, *self.names.warmup_ratio)
        if warmup < 0:
            raise Unconvertible(f"{self.names.warmup_steps[-1]}: {warmup:g} is out of range")
        if warmup:
            self.note(self.names.warmup_ratio, EntryEffect.UNUSED, "warmup_steps overrides it")
        if warmup >= 1:
            self.state(self.names.warmup_steps, path, int(warmup))
            return
        names = self.names.warmup_steps if warmup else self.names.warmup_ratio
        self.note(self.names.warmup_steps if not warmup else (), EntryEffect.SAME, "no warm-up in steps")
        ratio = warmup or ratio
        if not ratio:
            self.note(self.names.warmup_ratio, EntryEffect.SAME, "no warm-up", path)
            return
        epochs = self.draft.get("training.numTrainEpochs")
        total = max_steps or self.count_steps(float(str(epochs or 1)))
        if total:
            steps = math.ceil(total * ratio)
            self.draft.set(path, steps)
            self._note_or_state(names, EntryEffect.MAPPED, f"{ratio:g} of {total} steps are {steps} steps", path)
        else:
            message = (
                f"a warm-up over {ratio:g} of the steps depends on the number of rows; state it with --rows N, or set"
                " training.warmupSteps"
            )
            self._note_or_state(names, EntryEffect.CHANGED, message, path)

    def _note_or_state(self, names: tuple[str, ...], effect: EntryEffect, message: str, path: str) -> None:
        if self.options.has(*names):
            self.note(names, effect, message, path)
        else:
            effect = EntryEffect.DEFAULT if effect is EntryEffect.MAPPED else effect
            self.draft.note(
                self.conversion.find_name(names), effect, f"the default of {self.tool}: {message}", field=path
            )

    def add_evaluation(self, *, default_strategy: str | None) -> None:
        """Set evaluation steps; without evaluation rows the options have no effect.

        default_strategy: of the tool, if the input has none: steps, epoch or no
        """
        strategy = str(self.options.get_first(*self.names.eval_strategy) or default_strategy or "no").lower()
        dataset = self.draft.spec.get("dataset", {})
        has_rows = bool(dataset.get("eval")) or "splitDatasetRatio" in dataset
        names = (*self.names.eval_strategy, *self.names.eval_steps)
        if strategy == "no":
            for key in ("eval", "splitDatasetRatio"):
                if dataset.pop(key, None) is not None:
                    self.draft.note(
                        key, EntryEffect.UNUSED, "the evaluation strategy is no, so evaluation rows are not used"
                    )
        if strategy == "no" or not has_rows:
            reason = "there is no evaluation" if strategy == "no" else "there are no evaluation rows"
            self.note(names, EntryEffect.UNUSED, reason)
            return
        steps = self._find_interval(strategy, self.options.get_first(*self.names.eval_steps))
        if steps is None and strategy == "steps":
            steps = self._find_interval("steps", self.options.get_first(*self.names.save_steps))
        if steps is None:
            message = (
                "evaluations are counted in steps; without --rows N there is one, at the end: set training.evalSteps"
            )
            self.note(names, EntryEffect.CHANGED, message)
            return
        self.draft.set("training.evalSteps", steps)
        self._note_or_state(names, EntryEffect.MAPPED, f"every {steps} steps", "training.evalSteps")

    def _find_interval(self, strategy: str, steps: Any) -> int | None:
        """Return an interval in steps, also of a fraction of all steps and of an epoch."""
        if strategy == "epoch":
            return self.count_steps()
        number = to_float(steps or 0)
        if number >= 1:
            return int(number)
        if not 0 < number < 1:
            return None
        training = self.draft.spec.get("training", {})
        total = training.get("maxSteps") or self.count_steps(training.get("numTrainEpochs", 1))
        return max(1, math.ceil(total * number)) if total else None

    def add_checkpoints(self) -> None:
        """Set the interval of checkpoints, which does not affect the result."""
        strategy = str(self.options.get_first(*self.names.save_strategy) or "steps").lower()
        steps = self._find_interval(strategy, self.options.get_first(*self.names.save_steps))
        if strategy in ("steps", "epoch") and steps:
            self.draft.set("training.saveSteps", steps)
            self._note_or_state(self.names.save_steps, EntryEffect.MAPPED, f"every {steps} steps", "training.saveSteps")
            self.note(
                self.names.save_strategy, EntryEffect.MAPPED, f"{strategy}: every {steps} steps", "training.saveSteps"
            )
        else:
            message = "checkpoints are counted in steps; every 100 by default, for restarts: see training.saveSteps"
            self.note((*self.names.save_strategy, *self.names.save_steps), EntryEffect.UNUSED, message)

    def add_best_model(self) -> None:
        """Set the selection of the best evaluation, and early stopping."""
        has_steps = self.draft.get("training.evalSteps") is not None
        best = to_bool(self.options.get("load_best_model_at_end"))
        stop_after = int(read_number(self.options, *self.names.early_stopping))
        names = ("load_best_model_at_end", *self.names.early_stopping, "metric_for_best_model", "greater_is_better")
        if (best or stop_after > 0) and not has_steps:
            self.note(
                names, EntryEffect.CHANGED, "it needs evaluation rows and training.evalSteps; add both to the job"
            )
            return
        if best:
            self.draft.set("training.loadBestModelAtEnd", True)
            self.note(("load_best_model_at_end",), EntryEffect.TAKEN, "", "training.loadBestModelAtEnd")
        else:
            self.note(("load_best_model_at_end",), EntryEffect.SAME, "the result contains the last weights")
        if 0 < stop_after <= 100_000:
            self.state(self.names.early_stopping, "training.earlyStoppingPatience", stop_after)
        else:
            self.note(self.names.early_stopping, EntryEffect.SAME, "no early stopping")
        self._add_metric(best or stop_after > 0)
        self.note(("greater_is_better",), EntryEffect.SAME, "it follows from the metric")

    def _add_metric(self, is_used: bool) -> None:
        metric = (
            str(self.options.given["metric_for_best_model"].value) if self.options.has("metric_for_best_model") else ""
        )
        name = metric if metric.startswith("eval_") else f"eval_{metric}"
        path = "training.metricForBestModel"
        if not is_used:
            self.note(("metric_for_best_model",), EntryEffect.UNUSED, "nothing compares evaluations", path)
        elif name == "eval_loss":
            self.note(("metric_for_best_model",), EntryEffect.SAME, "the evaluation loss decides", path)
        elif name in ("eval_rewards/accuracies", "eval_rewards/margins") and "dpo" in self.draft.spec:
            self.draft.set(path, name)
            self.note(("metric_for_best_model",), EntryEffect.MAPPED, f"is {name}", path)
        elif metric:
            self.note(
                ("metric_for_best_model",),
                EntryEffect.CHANGED,
                f"{metric}: this trainer compares the loss and rewards",
                path,
            )

    def add_upload(self, *, push: tuple[str, ...], repo: tuple[str, ...], private: tuple[str, ...], hub: str) -> None:
        """Set the repository to which the result is uploaded."""
        names = (*push, *repo, *private)
        should_push = to_bool(self.options.get_first(*push)) if push else self.options.has(*repo)
        name = str(self.options.get_first(*repo) or "")
        if not should_push:
            self.note(names, EntryEffect.SAME if push else EntryEffect.UNUSED, "nothing is uploaded")
            return
        path = "output.pushToHub"
        if not re.fullmatch(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+", name) or len(name) > 96:
            self.note(
                names, EntryEffect.CHANGED, "uploads need a repository owner/name; set output.pushToHub.repo", path
            )
            return
        is_private = to_bool(self.options.get_first(*private)) if private else False
        self.draft.set(path, {"hub": hub, "repo": name, "private": is_private})
        variable = "HF_TOKEN" if hub == "huggingface" else "MODELSCOPE_API_TOKEN"
        self.note(names, EntryEffect.MAPPED, "the result is uploaded once, at the end", path)
        if not any(entry["name"] == variable for entry in self.draft.spec.get("env", [])):
            self.draft.add_secret(names[0], variable)


def _read_count(options: Options, names: tuple[str, ...]) -> int | None:
    if options.get_first(*names) in (None, "auto", False):
        return None
    return read_value(options, bounded_int(1, MAX_BATCH_FACTOR), *names)
