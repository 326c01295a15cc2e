"""Direct preference optimization (arXiv 2305.18290) and variants of its loss, averaged over the effective batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import logsigmoid
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune_api.v1alpha1.methods import Dpo
from finetune_trainer.data.load import SampleDataset
from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.methods.reference_logps import ReferenceDataset, ReferenceLogps
from finetune_trainer.model.adapter_switch import AdapterSwitch
from finetune_trainer.parallel.reference_model import prepare_reference_model
from finetune_trainer.training.base_trainer import GlobalMeanTrainer
from finetune_trainer.training.router_loss import RouterLossTerm, count_router_units
from finetune_trainer.training.token_losses import RouterLossReceiver, compute_target_losses
from finetune_trainer.training.trainer_inputs import TrainerInputs


@dataclass(frozen=True)
class SequenceLogps:
    """Log-probabilities of the chosen and the rejected completions of a micro-batch, each (pairs,)."""

    chosen: torch.Tensor
    rejected: torch.Tensor


@dataclass(frozen=True)
class PairLogps:
    """Log-probabilities of the policy and the reference model, and target token counts, each (pairs,).

    Fillers have token counts of 0.
    """

    policy: SequenceLogps
    reference: SequenceLogps
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor

    @property
    def chosen_logratios(self) -> torch.Tensor:
        """Policy minus reference log-probabilities of the chosen completions, (pairs,)."""
        return self.policy.chosen - self.reference.chosen

    @property
    def rejected_logratios(self) -> torch.Tensor:
        """Policy minus reference log-probabilities of the rejected completions, (pairs,)."""
        return self.policy.rejected - self.reference.rejected

    @property
    def margins(self) -> torch.Tensor:
        """Chosen minus rejected log-ratios, (pairs,)."""
        return self.chosen_logratios - self.rejected_logratios


def _compute_sigmoid_loss(pairs: PairLogps, dpo: Dpo) -> torch.Tensor:
    return -logsigmoid(dpo.beta * pairs.margins)


def _compute_hinge_loss(pairs: PairLogps, dpo: Dpo) -> torch.Tensor:
    """Compute the hinge loss of SLiC (arXiv 2305.10425) from the log-ratios of DPO."""
    return torch.relu(1 - dpo.beta * pairs.margins)


def _compute_ipo_loss(pairs: PairLogps, dpo: Dpo) -> torch.Tensor:
    """Compute the IPO loss (arXiv 2310.12036, equation 17) from the mean log-ratios per token, like its authors."""
    chosen = pairs.chosen_logratios / pairs.chosen_tokens.clamp(min=1)
    rejected = pairs.rejected_logratios / pairs.rejected_tokens.clamp(min=1)
    return (chosen - rejected - 1 / (2 * dpo.beta)) ** 2


def _compute_robust_loss(pairs: PairLogps, dpo: Dpo) -> torch.Tensor:
    """Compute the robust DPO loss (arXiv 2403.00409), unbiased if a fraction `labelSmoothing` of pairs is flipped."""
    flip_rate = dpo.label_smoothing or 0.0
    correct, flipped = logsigmoid(dpo.beta * pairs.margins), logsigmoid(-dpo.beta * pairs.margins)
    return (flip_rate * flipped - (1 - flip_rate) * correct) / (1 - 2 * flip_rate)


LOSSES: dict[str, Callable[[PairLogps, Dpo], torch.Tensor]] = {
    "sigmoid": _compute_sigmoid_loss,
    "hinge": _compute_hinge_loss,
    "ipo": _compute_ipo_loss,
    "robust": _compute_robust_loss,
}


class DpoTrainer(GlobalMeanTrainer):
    """Trainer for DPO; its loss units are pairs.

    With `rpoAlpha`, the loss includes the SFT loss of the chosen completions, whose loss units are target tokens; with
    `routerAuxLossCoef`, the router loss, whose loss units are tokens.
    """

    def __init__(self, inputs: TrainerInputs) -> None:
        assert inputs.plan.spec.dpo is not None
        self._dpo = inputs.plan.spec.dpo
        super().__init__(inputs)
        reference = inputs.reference_model
        self._reference = None if reference is None else prepare_reference_model(reference, self.accelerator)
        self._adapter_switch: AdapterSwitch | None = None
        self._reference_logps = ReferenceLogps()
        if self._dpo.precompute_ref_log_probs:
            self.add_callback(_PrecomputeReferenceCallback(self))

    def count_loss_units(self, batch: MicroBatch) -> tuple[float, ...]:
        """Return the number of pairs and of the loss units of further terms, without fillers."""
        chosen_counts = batch.target_counts[: len(batch.target_counts) // 2]
        pairs = float(sum(count > 0 for count in chosen_counts))
        sft_units = (float(sum(chosen_counts)),) if self._dpo.rpo_alpha else ()
        return (pairs, *sft_units, *count_router_units(self.inputs.plan.spec.training, batch))

    def sum_losses(self, model: torch.nn.Module, batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        """Return the summed preference loss and, if the spec requests them, weighted SFT loss and router loss."""
        reference = self._get_reference_logps(batch)
        router_loss = RouterLossTerm(self.inputs.plan.spec.training, batch, is_training=model.training)
        policy = compute_sequence_logps(model, batch, receive_router_loss=router_loss.receiver)
        pairs = PairLogps(policy, reference, *_count_sequence_targets(batch).chunk(2))
        is_pair = pairs.chosen_tokens > 0  # fillers have no target tokens
        self._accumulate_pair_metrics(pairs, is_pair)
        preference_loss = _sum_where(is_pair, LOSSES[self._dpo.loss_type](pairs, self._dpo))
        sft_losses = (-self._dpo.rpo_alpha * policy.chosen.sum(),) if self._dpo.rpo_alpha else ()
        return (preference_loss, *sft_losses, *router_loss.sums)

    @property
    def train_samples(self) -> SampleDataset:
        """Training dataset, with the log-probabilities of the reference model once they are precomputed."""
        return ReferenceDataset(super().train_samples, self._reference_logps, "train")

    @property
    def eval_samples(self) -> SampleDataset:
        """Evaluation dataset, with the log-probabilities of the reference model once they are precomputed."""
        return ReferenceDataset(super().eval_samples, self._reference_logps, "eval")

    def precompute_reference(self) -> None:
        """Compute the log-probabilities of the reference model for all rows, and release a separate model."""

        def compute(batch: MicroBatch) -> torch.Tensor:
            logps = self._get_reference_logps(self._prepare_inputs(batch))
            return torch.stack((logps.chosen, logps.rejected), dim=1)

        self._reference_logps.prepare(self.inputs, compute, worker_count=self.args.dataloader_num_workers)
        self._reference = None
        self.inputs = replace(self.inputs, reference_model=None)

    def _get_reference_logps(self, batch: MicroBatch) -> SequenceLogps:
        """Return the precomputed log-probabilities of a micro-batch, or compute them."""
        if batch.reference_logps is not None:
            return SequenceLogps(*batch.reference_logps.chunk(2))
        with torch.no_grad(), self._use_reference_model() as reference_model:
            return compute_sequence_logps(reference_model, batch)

    @contextmanager
    def _use_reference_model(self) -> Iterator[torch.nn.Module]:
        """Yield the reference model, with dropout disabled.

        The reference model is a frozen copy of the model, the model with the reference adapter, or the model without
        adapters.
        """
        if self._reference is not None:
            yield self._reference
            return
        if self._adapter_switch is None:  # created once the model is wrapped for its preset
            self._adapter_switch = AdapterSwitch(self.model)
        with self._adapter_switch.use_reference():
            yield self.model

    def _accumulate_pair_metrics(self, pairs: PairLogps, is_pair: torch.Tensor) -> None:
        chosen_rewards = self._dpo.beta * pairs.chosen_logratios
        rejected_rewards = self._dpo.beta * pairs.rejected_logratios
        self.accumulate_metrics(
            is_pair.sum(),
            {
                name: _sum_where(is_pair, values)
                for name, values in (
                    ("rewards/chosen", chosen_rewards),
                    ("rewards/rejected", rejected_rewards),
                    ("rewards/margins", chosen_rewards - rejected_rewards),
                    ("rewards/accuracies", chosen_rewards > rejected_rewards),
                    ("logps/chosen", pairs.policy.chosen),
                    ("logps/rejected", pairs.policy.rejected),
                )
            },
        )


class _PrecomputeReferenceCallback(TrainerCallback):  # type: ignore[misc]
    """Precomputes the log-probabilities of the reference model before the checks of the first training pass."""

    def __init__(self, trainer: DpoTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, _args: TrainingArguments, _state: TrainerState, _control: TrainerControl, **_: Any
    ) -> None:
        self._trainer.precompute_reference()


def compute_sequence_logps(
    model: torch.nn.Module, batch: MicroBatch, *, receive_router_loss: RouterLossReceiver | None = None
) -> SequenceLogps:
    """Return the sum of the log-probabilities of the target tokens of each sequence.

    The first half of the batch contains the chosen sequences, the second half the rejected ones.
    Source: DPO, arXiv 2305.18290, equation 7.
    """
    losses = compute_target_losses(model, batch, receive_router_loss=receive_router_loss)
    sums = torch.zeros(len(batch.lengths), device=losses.device)
    sums = sums.index_add(0, batch.targets.sequences, -losses)
    return SequenceLogps(*sums.chunk(2))


def _count_sequence_targets(batch: MicroBatch) -> torch.Tensor:
    """Return the number of target tokens of each sequence, (sequences,), without waiting for the GPU."""
    sequences = batch.targets.sequences
    return torch.zeros(len(batch.lengths), device=sequences.device).index_add(
        0, sequences, torch.ones_like(sequences, dtype=torch.float32)
    )


def _sum_where(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the sum of the values where the mask is True; unlike an index, the mask needs no wait for the GPU."""
    return torch.where(mask, values, 0).sum()
