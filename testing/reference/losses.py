"""Losses by their formulas, from the logits of one row at a time."""

import math
from collections.abc import Sequence

import torch

from testing.reference.chat import TokenSequence
from testing.reference.combination import Combination

LABEL_SMOOTHING = 0.2  # of the robust loss


def sum_weighted_losses(logits: torch.Tensor, sequence: TokenSequence) -> torch.Tensor:
    """Return the weighted sum of the cross entropy of the learned tokens. logits: (seq, vocab)."""
    log_probabilities = torch.log_softmax(logits.float(), dim=-1)
    terms = [
        -weight * log_probabilities[position - 1, sequence.ids[position]]
        for position, weight in enumerate(sequence.weights)
        if weight
    ]
    return torch.stack(terms).sum()


def compute_preference_loss(
    options: Combination, ratios: Sequence[torch.Tensor], token_counts: Sequence[int]
) -> torch.Tensor:
    """Return the loss of a pair.

    ratios: log-probability of the chosen and of the rejected completion, minus that of the reference model.
    """
    margin = ratios[0] - ratios[1]
    match options.loss_type:
        case "sigmoid":  # DPO, arXiv 2305.18290, equation 7
            return -torch.log(torch.sigmoid(options.beta * margin))
        case "hinge":  # SLiC, arXiv 2305.10425, equation 1, with the log-ratios of DPO and margin 1 / beta
            return torch.clamp(1 - options.beta * margin, min=0)
        case "ipo":  # arXiv 2310.12036, equation 17, with mean log-ratios per token as in its authors' experiments
            means = [ratio / count for ratio, count in zip(ratios, token_counts, strict=True)]
            return (means[0] - means[1] - 1 / (2 * options.beta)) ** 2
        case "robust":  # arXiv 2403.00409, equation 12, with the fraction of swapped preferences as epsilon
            kept, swapped = (-torch.log(torch.sigmoid(sign * options.beta * margin)) for sign in (1, -1))
            return ((1 - LABEL_SMOOTHING) * kept - LABEL_SMOOTHING * swapped) / (1 - 2 * LABEL_SMOOTHING)
    raise ValueError(options.loss_type)


def compute_router_loss(logits_by_layer: Sequence[torch.Tensor], experts_per_token: int) -> torch.Tensor:
    """Return the auxiliary loss of the tokens of a micro-batch, each logits (tokens, experts).

    Switch Transformers, arXiv 2101.03961, equations 4 to 6; as in transformers, the tokens of all layers are averaged
    together, and a token counts for each of its experts.
    """
    probabilities = torch.cat(list(logits_by_layer)).float().softmax(dim=-1)
    chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(experts_per_token, dim=-1).indices, 1.0)
    return probabilities.shape[-1] * (chosen.mean(dim=0) * probabilities.mean(dim=0)).sum()


def compute_norm(gradients: Sequence[torch.Tensor]) -> float:
    """Return the Euclidean norm of all gradients together, in float64."""
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
