"""Finds rotary embeddings whose frequencies depend on the longest row of a forward pass (decisions/538)."""

from collections.abc import Mapping
from typing import NamedTuple

from transformers import PretrainedConfig


class SwitchingRope(NamedTuple):
    """Rotary embeddings with other frequencies if the longest row of a forward pass exceeds a limit."""

    kind: str  # longrope, dynamic, ...
    limit: int  # tokens

    @property
    def is_dynamic(self) -> bool:
        """Whether the frequencies also depend on earlier forward passes."""
        return self.kind != "longrope"


def find_switching_rope(config: PretrainedConfig) -> SwitchingRope | None:
    """Return the first rotary embeddings of this kind of the text part; None if it has none."""
    text_config = config.get_text_config()
    parameters = getattr(text_config, "rope_parameters", None) or {}
    for each in (parameters, *parameters.values()):  # of all layers, or by type of layer
        kind = str(each.get("rope_type", "")) if isinstance(each, Mapping) else ""
        if kind == "longrope":
            return SwitchingRope(kind, int(each["original_max_position_embeddings"]))
        if "dynamic" in kind:
            return SwitchingRope(kind, int(text_config.max_position_embeddings))
    return None
