"""Detects the kind of an input by its contents."""

import re
from collections.abc import Mapping
from typing import Any

from finetune_api.yaml_documents import InvalidYaml, load_yaml
from finetune_convert.conversion import ConversionError, InputKind, Tree

_LLAMAFACTORY_KEYS = ("stage", "finetuning_type", "model_name_or_path", "cutoff_len", "lora_target", "dataset_dir")
_AXOLOTL_KEYS = ("base_model", "sequence_len", "micro_batch_size", "num_epochs", "val_set_size", "sample_packing", "rl")
KUBEFLOW_KINDS = ("PyTorchJob", "TrainJob")


def load_documents(text: str) -> list[Any]:
    """Return the documents of a YAML text; of repeated keys the last one counts, as for the tools.

    Raises: ConversionError if it is not YAML, or too large
    """
    try:
        return load_yaml(text, refuses_repeated_keys=False)
    except InvalidYaml as error:
        raise ConversionError(str(error)) from error


def find_lines(text: str) -> dict[str, int]:
    """Return the line of each top-level key of a YAML text."""
    lines = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if match := re.match(r"([A-Za-z_][\w.-]*)\s*:(\s|$)", line):
            lines[match[1]] = number
    return lines


def find_mapping(text: str) -> list[Tree] | None:
    """Return the mappings of a YAML text, or None if the text does not consist of YAML mappings."""
    if not text.lstrip().startswith("{") and not re.search(r"^[A-Za-z_][\w.-]*\s*:(\s|$)", text, re.MULTILINE):
        return None
    try:
        documents = [document for document in load_documents(text) if document is not None]
    except ConversionError:
        if re.search(r"^(apiVersion|base_model|model_name_or_path|stage)\s*:", text, re.MULTILINE):
            raise
        return None
    return documents if documents and all(isinstance(document, dict) for document in documents) else None


def detect_source(mappings: list[Tree] | None) -> InputKind | None:
    """Return the kind of an input from its YAML mappings; None without them, for shell text.

    Raises: ConversionError for YAML of an unknown kind
    """
    if mappings is None:
        return None
    kinds = [str(mapping.get("kind")) for mapping in mappings]
    if any(kind in KUBEFLOW_KINDS for kind in kinds):
        return InputKind.KUBEFLOW
    (first, *_) = mappings
    if "kind" in first and "apiVersion" in first:
        raise ConversionError(f"kind: expected PyTorchJob or TrainJob, found {', '.join(kinds)}")
    scores = {source: _count_keys(first, keys) for source, keys in _KEYS.items()}
    best = max(scores, key=lambda source: scores[source])
    if not scores[best]:
        found = ", ".join(map(str, list(first)[:5]))
        raise ConversionError(
            f"the YAML is no config of LLaMA-Factory or axolotl, and no PyTorchJob or TrainJob; found {found}"
        )
    return best


_KEYS = {InputKind.AXOLOTL: _AXOLOTL_KEYS, InputKind.LLAMAFACTORY: _LLAMAFACTORY_KEYS}


def _count_keys(mapping: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    return sum(key in mapping for key in keys)
