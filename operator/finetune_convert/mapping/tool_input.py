"""Defines what the formats have in common: the options of the input and how its program is started."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from finetune_api.v1alpha1.job import MAX_JOB_NAME
from finetune_api.v1alpha1.name_types import JOB_NAME_PATTERN
from finetune_convert.conversion import ConversionError, ConversionRequest, Entry, EntryEffect, JobForm
from finetune_convert.job_draft import JobDraft
from finetune_convert.launch.environment import add_environment
from finetune_convert.launch.launchers import Launch
from finetune_convert.launch.topology import DEVICE_VARIABLES, Topology, add_topology, read_variables, resolve_topology
from finetune_convert.mapping.rules import Given, Rule, ToSecret, Unused, find_rule
from finetune_convert.shell.words import Word

_VISION_NAME = re.compile(
    r"(?<![a-z])(vl|vision|llava|internvl|minicpm-v|omni|ovis|pixtral|gemma-?3|mllm|multimodal)", re.IGNORECASE
)
_OTHER_VENDORS = ("huawei", "cambricon")


@dataclass
class ToolInput:
    """A training command, or a config, with its launcher, environment and entries so far."""

    request: ConversionRequest
    launch: Launch
    environment: dict[str, Word] = field(default_factory=dict)
    directory: Word | None = None
    pasted_nodes: int = 1
    entries: list[Entry] = field(default_factory=list)


def build_name(*parts: str) -> str:
    """Return a valid job name made of words such as a model and a method."""
    text = "-".join(part.rstrip("/").rpartition("/")[2] for part in parts if part)
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    name = name if name[:1].isalpha() else f"job-{name}".rstrip("-")
    return name[:MAX_JOB_NAME].rstrip("-")


def start_draft(source: ToolInput, name: str) -> JobDraft:
    """Return an empty job with the entries of the input.

    Raises: ConversionError if the requested name is invalid
    """
    name = source.request.name or name
    if not re.fullmatch(JOB_NAME_PATTERN, name) or len(name) > MAX_JOB_NAME:
        raise ConversionError(
            f"--name: {name}: expected at most {MAX_JOB_NAME} characters of a-z, 0-9 and '-', starting with a-z"
        )
    return JobDraft(source.request, name, entries=list(source.entries))


def place_on_nodes(draft: JobDraft, source: ToolInput, *, for_trainer: bool, ranks_fill_devices: bool) -> Topology:
    """Set nodes, devices, network and environment of the job, and return its topology."""
    resource, handled = read_variables(source.launch, source.environment)
    topology = resolve_topology(
        source.launch,
        request=source.request,
        pasted_nodes=source.pasted_nodes,
        resource=resource,
        ranks_fill_devices=ranks_fill_devices,
    )
    if for_trainer and topology.ranks_per_node > topology.devices:
        message = f"{topology.ranks_per_node} ranks share {topology.devices} devices; this trainer has one rank per GPU"
        draft.note("GPUs", EntryEffect.EDIT, message, field="resources.limits")
        topology = replace(topology, devices=topology.ranks_per_node)
    add_topology(draft, topology, source.launch)
    environment = {**source.environment, **source.launch.environment}
    add_environment(draft, environment, handled=handled, for_trainer=for_trainer)
    return topology


def is_vision_model(*names: str | None) -> bool:
    """Return whether the name of a model is that of a vision-language model."""
    return any(_VISION_NAME.search(name) for name in names if name)


def find_device_reasons(source: ToolInput) -> list[str]:
    """Return why our own trainer cannot use the devices of the input."""
    names = [name for name in source.environment if (DEVICE_VARIABLES.get(name) or "nvidia").startswith(_OTHER_VENDORS)]
    return [f"{name}: this trainer runs on GPUs" for name in names]


def choose_form(request: ConversionRequest, reasons: Sequence[str], *, is_possible: bool, what: str) -> JobForm:
    """Return whether our own trainer or the original program runs.

    reasons: why the original program is needed. is_possible: whether our trainer has the method at all.
    Raises: ConversionError if the requested form is impossible
    """
    if request.form is JobForm.TRAINER and not is_possible:
        raise ConversionError(f"--form trainer: {what}; use --form command")
    return request.form or (JobForm.COMMAND if reasons or not is_possible else JobForm.TRAINER)


def explain_program(source: ToolInput, reasons: Sequence[str]) -> None:
    """Add an entry for each reason why the original program runs; without a reason the user has requested it."""
    why = reasons or ["requested by --form command"]
    source.entries += [Entry("command", EntryEffect.NOTE, f"the original program runs: {reason}") for reason in why]


def check_unresolved(given: Iterable[Given], rules: Mapping[str, Rule]) -> None:
    """Check that no option with an effect depends on a value that only a shell can compute. Raises: ConversionError"""
    problems = [
        f"line {option.line}: --{option.name}: {option.unresolved} is only known to a shell; replace it with its value"
        for option in given
        if option.unresolved and not isinstance(find_rule(rules, option.name), Unused | ToSecret)
    ]
    if problems:
        raise ConversionError(*problems)
