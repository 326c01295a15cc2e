"""Trains a combination by definition: one row per forward pass, no padding, losses by formula, torch's AdamW."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from testing.reference import model as models
from testing.reference.chat import TokenSequence, render_row
from testing.reference.combination import Combination
from testing.reference.families import SWITCHING
from testing.reference.job import JobFiles, read_row
from testing.reference.losses import compute_norm, compute_preference_loss, compute_router_loss, sum_weighted_losses
from testing.reference.record import Record, RecordedBatch
from testing.reference.schedules import compute_epoch, compute_rate, count_steps

# margin of rewards below which rounding decides which completion wins
TIES = {"float32": 1e-4, "bfloat16": 0.1}

TokenRow = tuple[TokenSequence, ...]  # one sequence, or the chosen and the rejected one
RouterLogits = list[Sequence[torch.Tensor]]  # by row and layer
Losses = dict[str, torch.Tensor]  # summed losses by term


@dataclass(frozen=True)
class ReferenceOutcome:
    """What a training must log: values by name for each step and for the evaluation; and the logits of its result."""

    steps: list[dict[str, float]]
    evaluation: dict[str, float]
    logits: torch.Tensor
    problems: list[str]


class ReferenceTraining:
    """State of a training by definition."""

    def __init__(self, options: Combination, record: Record, files: JobFiles, initial_adapter: Path) -> None:
        self.options, self.record = options, record
        self.policy = models.load_policy(options, files.model, files.adapter, initial_adapter)
        self.reference = models.load_reference(options, files.model, files.adapter) if options.is_dpo else None
        self.tokenizer = models.load_tokenizer(files.model)
        self.optimizer = models.build_optimizer(self.policy, options)
        self.problems: list[str] = []

    def run(self) -> ReferenceOutcome:
        """Train all steps, and evaluate."""
        total = count_steps(self.options, self.record.items_per_epoch)
        if sorted(self.record.steps) != list(range(1, total + 1)):
            self.problems.append(f"steps {sorted(self.record.steps)} were trained, expected {total}")
        steps = [self._train_step(number, total) for number in sorted(self.record.steps)]
        evaluation = {} if self.options.evaluation == "none" else self._evaluate()
        return ReferenceOutcome(steps, evaluation, models.compute_probe_logits(self.policy), self.problems)

    def _train_step(self, number: int, total_steps: int) -> dict[str, float]:
        """Run a step, and return what it logs."""
        options, ranks = self.options, self.record.steps[number]
        units = [self._count_units(batches) for batches in ranks]
        total = self._count_units(itertools.chain.from_iterable(ranks))
        metrics, loss = Counter[str](), 0.0
        for batches, own in zip(ranks, units, strict=True):
            divisors = {term: len(ranks) * count for term, count in own.items()} if options.mean_per_rank else total
            for batch in batches:
                terms = [value / divisors[term] for term, value in self._sum_losses(batch, metrics).items()]
                if terms:  # otherwise the micro-batch contains fillers only
                    torch.stack(terms).sum().backward()  # type: ignore[no-untyped-call]
                loss += sum(map(float, terms))
        gradients = [each.grad for _, each in models.iterate_trained(self.policy) if each.grad is not None]
        norm, rate = compute_norm(gradients), compute_rate(options, step=number, total_steps=total_steps)
        if 0 < options.max_norm < norm:  # torch.nn.utils.clip_grad_norm_
            for gradient in gradients:
                gradient *= options.max_norm / (norm + 1e-6)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": rate,
            "epoch": compute_epoch(options, step=number, items=self.record.items_per_epoch),
            **{name: value / total["pairs"] for name, value in metrics.items()},
        }

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        units, losses, metrics = self._count_units(self.record.evaluation), Counter[str](), Counter[str]()
        for batch in self.record.evaluation:
            losses.update({term: float(loss) for term, loss in self._sum_losses(batch, metrics).items()})
        # the router loss is a means of training, and not evaluated
        means = {"loss": sum(loss / units[term] for term, loss in losses.items() if term != "router")}
        means |= {name: value / units["pairs"] for name, value in metrics.items()}
        return {f"eval_{name}": value for name, value in means.items()}

    def _count_units(self, batches: Iterable[RecordedBatch]) -> Counter[str]:
        """Return the loss units of micro-batches by term: weights of targets, or pairs and targets of chosen ones."""
        units = Counter[str]()
        for row in itertools.chain.from_iterable(map(self._render, batches)):
            if self.options.is_dpo:
                units.update({"pairs": 1, "chosen": row[0].target_count})
            else:
                units.update({"tokens": sum(row[0].weights)})
            units.update({"router": sum(len(sequence.ids) for sequence in row)})
        return units

    def _render(self, batch: RecordedBatch) -> list[TokenRow]:
        rows = (render_row(read_row(origin), self.tokenizer, self.options) for origin in batch.origins)
        return [row for row in rows if row is not None]

    def _sum_losses(self, batch: RecordedBatch, metrics: Counter[str]) -> Losses:
        """Return the summed losses of a micro-batch by term, and add the rewards of its pairs to the metrics."""
        rows, router_logits, losses = self._render(batch), RouterLogits(), Losses()
        self._check_counts(batch, rows)
        if self.options.family in SWITCHING:  # a row has the frequencies of the longest one of its micro-batch
            rows = [tuple(each.extend(max(batch.lengths)) for each in row) for row in rows]
        for row in rows:
            for term, loss in self._compute_row_losses(row, metrics, router_logits).items():
                losses[term] = losses[term] + loss if term in losses else loss
        if router_logits:
            layers = [torch.cat(layer) for layer in zip(*router_logits, strict=True)]
            tokens = sum(len(sequence.ids) for row in rows for sequence in row)
            loss = compute_router_loss(layers, self.policy.config.num_experts_per_tok)
            losses["router"] = self.options.router_coefficient * tokens * loss  # type: ignore[operator]
        return losses

    def _compute_row_losses(self, row: TokenRow, metrics: Counter[str], router_logits: RouterLogits) -> Losses:
        policy = [sum_weighted_losses(self._compute_logits(self.policy, each, router_logits), each) for each in row]
        if self.reference is None:
            return {"tokens": policy[0]}
        with torch.no_grad():
            initial = [sum_weighted_losses(self._compute_logits(self.reference, each, []), each) for each in row]
        ratios = [before - now for before, now in zip(initial, policy, strict=True)]
        chosen, rejected = (self.options.beta * float(ratio) for ratio in ratios)
        tie = TIES[self.options.dtype]
        values = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected}
        values |= {"rewards/accuracies": float(chosen > rejected), "ties": float(abs(chosen - rejected) < tie)}
        values |= {"logps/chosen": -float(policy[0]), "logps/rejected": -float(policy[1])}
        metrics.update(values)
        loss = compute_preference_loss(self.options, ratios, [each.target_count for each in row])
        return {"pairs": loss, **({"chosen": self.options.rpo_alpha * policy[0]} if self.options.rpo_alpha else {})}

    def _compute_logits(self, model: Any, sequence: TokenSequence, router_logits: RouterLogits) -> torch.Tensor:
        has_router = self.options.router_coefficient is not None
        with models.use_autocast(self.options.dtype):
            options = {"output_router_logits": True} if has_router else {}
            outputs = model(input_ids=torch.tensor([sequence.ids]), use_cache=False, **options)
        if has_router:
            router_logits.append(outputs.router_logits)
        logits: torch.Tensor = outputs.logits[0]
        return logits

    def _check_counts(self, batch: RecordedBatch, rows: Sequence[TokenRow]) -> None:
        """Compare the numbers of tokens and of learned tokens with those of the trainer; fillers have one and none."""
        ordered = [row[index] for index in range(2 if self.options.is_dpo else 1) for row in rows]
        expected = [(len(each.ids), each.target_count) for each in ordered]
        found = [pair for pair in zip(batch.lengths, batch.targets, strict=True) if pair[1]]
        if found != expected:
            self.problems.append(f"tokens and targets {found}, expected {expected} of {batch.origins}")


def list_usable_rows(options: Combination, files: JobFiles) -> Iterator[str]:
    """Yield the origins of the rows that are not left out."""
    tokenizer = models.load_tokenizer(files.model)
    for file in (*files.sources, files.evaluation):
        for number in range(1, len(file.read_text().splitlines()) + 1):
            if render_row(read_row(origin := f"{file} line {number}"), tokenizer, options) is not None:
                yield origin
