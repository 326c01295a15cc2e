"""Records which kernel of torch's scaled dot product attention (SDPA) is selected for which shapes."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend

_Key = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, bool]


class AttentionRecorder:
    """Replaces torch's SDPA function by one that records the selected kernel of every new shape."""

    def __init__(self) -> None:
        self._attend: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention
        self._kernels: dict[_Key, str] = {}

    def install(self) -> None:
        """Record all later calls in this process."""
        torch.nn.functional.scaled_dot_product_attention = self._record_and_attend  # type: ignore[assignment]

    def uninstall(self) -> None:
        torch.nn.functional.scaled_dot_product_attention = self._attend

    def clear(self) -> None:
        self._kernels.clear()

    def describe(self) -> str:
        """Return the kernels, each with the number of different shapes, such as `flash: 14 shapes`."""
        counts = Counter(self._kernels.values())
        return ", ".join(f"{name}: {count} shape{'s' if count > 1 else ''}" for name, count in sorted(counts.items()))

    def _record_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        if type(query) is not torch.Tensor or query.is_meta:  # a call of the memory forecast
            return self._attend(query, key, value, attn_mask, dropout_p, is_causal, **options)
        shape = (tuple(query.shape), tuple(key.shape), tuple(attn_mask.shape) if attn_mask is not None else None)
        if (*shape, is_causal) not in self._kernels:
            chosen = torch._fused_sdp_choice(query, key, value, attn_mask, dropout_p, is_causal, **options)
            name = SDPBackend(chosen).name.lower().removesuffix("_attention")
            self._kernels[*shape, is_causal] = f"{name} with mask" if attn_mask is not None else name
        return self._attend(query, key, value, attn_mask, dropout_p, is_causal, **options)
