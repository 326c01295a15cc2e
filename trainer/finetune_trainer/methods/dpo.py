"""Direct preference optimisation (arXiv 2305.18290) and its relatives, averaged over the whole effective batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from finetune_api.v1alpha1.methods import Dpo
from finetune_trainer.data.chat_template import Renderer, Sample
from finetune_trainer.data.token_dataset import IGNORED, Features
from finetune_trainer.data_sources.preferences import parse_preference
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.methods.sft import predict, target_losses
from finetune_trainer.model.lora import REFERENCE, TRAINED
from finetune_trainer.parallel.reference_model import spread_frozen
from finetune_trainer.training.base_trainer import ExactTrainer, Parts


@dataclass(frozen=True)
class Answers:
    """What a model thinks of a micro-batch: the log-probability of each chosen and each rejected answer, (pairs,)."""

    chosen: torch.Tensor
    rejected: torch.Tensor


@dataclass(frozen=True)
class Pairs:
    """The policy's answers beside the reference's, and how many tokens each answer has; fillers have none."""

    policy: Answers
    reference: Answers
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor

    @property
    def chosen_ratio(self) -> torch.Tensor:
        return self.policy.chosen - self.reference.chosen

    @property
    def rejected_ratio(self) -> torch.Tensor:
        return self.policy.rejected - self.reference.rejected

    @property
    def margin(self) -> torch.Tensor:
        return self.chosen_ratio - self.rejected_ratio


def _sigmoid(pairs: Pairs, dpo: Dpo) -> torch.Tensor:
    return -logsigmoid(dpo.beta * pairs.margin)


def _hinge(pairs: Pairs, dpo: Dpo) -> torch.Tensor:
    """SLiC (arXiv 2305.10425) with the ratios of DPO."""
    return torch.relu(1 - dpo.beta * pairs.margin)


def _ipo(pairs: Pairs, dpo: Dpo) -> torch.Tensor:
    """IPO (arXiv 2310.12036, equation 17) on means per token, as its authors ran it."""
    chosen = pairs.chosen_ratio / pairs.chosen_tokens.clamp(min=1)
    rejected = pairs.rejected_ratio / pairs.rejected_tokens.clamp(min=1)
    return (chosen - rejected - 1 / (2 * dpo.beta)) ** 2


def _robust(pairs: Pairs, dpo: Dpo) -> torch.Tensor:
    """Unbiased where a share of the labels, `labelSmoothing`, is flipped (arXiv 2403.00409)."""
    flipped = dpo.label_smoothing or 0.0
    right, wrong = logsigmoid(dpo.beta * pairs.margin), logsigmoid(-dpo.beta * pairs.margin)
    return (flipped * wrong - (1 - flipped) * right) / (1 - 2 * flipped)


LOSSES: dict[str, Callable[[Pairs, Dpo], torch.Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "robust": _robust,
}


def render_pair(renderer: Renderer, row: Row) -> tuple[Sample, ...]:
    """The chosen sequence and the rejected one."""
    preference = parse_preference(row)
    return renderer.render(preference.chosen), renderer.render(preference.rejected)


class DpoTrainer(ExactTrainer):
    """Its units are pairs; with `rpoAlpha` the chosen answers' tokens too, for the term of SFT."""

    def __init__(self, parts: Parts) -> None:
        assert parts.spec.dpo is not None
        self._dpo = parts.spec.dpo
        super().__init__(parts)
        self._reference = spread_frozen(parts.reference, self.accelerator) if parts.reference is not None else None

    def count(self, batch: Features) -> tuple[float, ...]:
        chosen, _ = _targets(batch["labels"]).sum(dim=1).chunk(2)
        pairs = float((chosen > 0).sum())
        return (pairs, float(chosen.sum())) if self._dpo.rpo_alpha else (pairs,)

    def summed_losses(self, model: torch.nn.Module, batch: Features) -> tuple[torch.Tensor, ...]:
        with torch.no_grad(), self._as_reference() as reference:
            before = answer(reference, batch)
        policy = answer(model, batch)
        chosen_tokens, rejected_tokens = _targets(batch["labels"]).sum(dim=1).chunk(2)
        pairs = Pairs(policy, before, chosen_tokens, rejected_tokens)
        real = chosen_tokens > 0
        self._tell(pairs, real)
        losses = (LOSSES[self._dpo.loss_type](pairs, self._dpo)[real].sum(),)
        return (*losses, -self._dpo.rpo_alpha * policy.chosen.sum()) if self._dpo.rpo_alpha else losses

    @contextmanager
    def _as_reference(self) -> Iterator[torch.nn.Module]:
        """The frozen copy of the model or of its adapter, or the model without one; never with dropout."""
        if self._reference is not None:
            yield self._reference
            return
        bare = self.model
        training = bare.training
        bare.eval()
        learn = [parameter for parameter in bare.parameters() if parameter.requires_grad]
        if REFERENCE in bare.peft_config:
            bare.set_adapter(REFERENCE, inference_mode=True)
            _let_learn(learn)
            yield bare
            bare.set_adapter(TRAINED)
        else:
            with bare.disable_adapter():
                _let_learn(learn)
                yield bare
        bare.train(training)

    def _tell(self, pairs: Pairs, real: torch.Tensor) -> None:
        chosen, rejected = self._dpo.beta * pairs.chosen_ratio[real], self._dpo.beta * pairs.rejected_ratio[real]
        self.tally(
            real.sum(),
            {
                "rewards/chosen": chosen.sum(),
                "rewards/rejected": rejected.sum(),
                "rewards/margins": (chosen - rejected).sum(),
                "rewards/accuracies": (chosen > rejected).sum(),
                "logps/chosen": pairs.policy.chosen[real].sum(),
                "logps/rejected": pairs.policy.rejected[real].sum(),
            },
        )


def _let_learn(parameters: Sequence[torch.nn.Parameter]) -> None:
    """peft freezes an adapter that is not asked, and FSDP2 gathers for ever as it finds weights in its first pass."""
    for parameter in parameters:
        parameter.requires_grad = True


def answer(model: torch.nn.Module, batch: Features) -> Answers:
    """Log-probabilities of the answers of a micro-batch whose first half are the chosen and second the rejected."""
    logits = predict(model, batch)
    targets = _targets(batch["labels"])
    sums = torch.zeros(len(targets), device=logits.device)
    sums = sums.index_add(0, targets.nonzero()[:, 0], -target_losses(logits, batch["labels"]))
    return Answers(*sums.chunk(2))


def _targets(labels: torch.Tensor) -> torch.Tensor:
    return labels[:, 1:] != IGNORED
