"""Derives nodes, ranks and devices of a job from launchers, variables and the number of pasted commands."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from finetune_convert.conversion import ConversionError, ConversionRequest, Entry, EntryEffect
from finetune_convert.job_draft import JobDraft
from finetune_convert.launch.launchers import BY_OPERATOR, Launch
from finetune_convert.shell.commands import ShellCommand
from finetune_convert.shell.words import Word

DEVICE_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": None,  # the resource of the request
    "HIP_VISIBLE_DEVICES": "amd.com/gpu",
    "ROCR_VISIBLE_DEVICES": "amd.com/gpu",
    "ASCEND_RT_VISIBLE_DEVICES": "huawei.com/Ascend910",
    "ASCEND_VISIBLE_DEVICES": "huawei.com/Ascend910",
    "MLU_VISIBLE_DEVICES": "cambricon.com/mlu",
}
NODE_VARIABLES = ("NODE_RANK", "RANK", "MACHINE_RANK", "MASTER_ADDR", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
_RANK_OPTIONS = ("node_rank", "machine_rank", "master_addr", "main_process_ip", "rdzv_endpoint")
_COUNT_VARIABLES = {"NPROC_PER_NODE": "ranks_per_node", "NNODES": "nodes", "MASTER_PORT": "master_port"}
_COUNT_FIELDS = {"NPROC_PER_NODE": "resources.limits", "NNODES": "numNodes", "MASTER_PORT": "network.masterPort"}
_SET_BY_OPERATOR = ("NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
DEFAULT_PORT, MIN_PORT, MAX_PORT = 29500, 1024, 65535
_NOT_NEEDED = {  # field that the job does not state -> reason
    "network.masterPort": f"{BY_OPERATOR}; without network.masterPort, the port is {DEFAULT_PORT}",
    "numNodes": "a job has one node without numNodes",
}
MAX_NODES, MAX_RANKS = 1000, 64


@dataclass(frozen=True)
class Topology:
    """Nodes, devices of a node, and ranks of a node as in the input."""

    nodes: int
    devices: int
    ranks_per_node: int
    resource: str

    @property
    def ranks(self) -> int:
        """Number of ranks of all nodes."""
        return self.nodes * self.ranks_per_node


def merge_node_commands(commands: Sequence[ShellCommand]) -> tuple[ShellCommand, int]:
    """Return the command of node 0 and the number of commands that differ only in the rank of their node.

    Raises: ConversionError if the commands differ in anything else
    """
    by_key: dict[tuple[object, ...], list[ShellCommand]] = {}
    for command in commands:
        by_key.setdefault(_build_key(command), []).append(command)
    if len(by_key) > 1:
        lines = ", ".join(str(group[0].line) for group in by_key.values())
        raise ConversionError(f"lines {lines}: these commands start different trainings; paste one training at a time")
    (group,) = by_key.values()
    return group[0], len(group)


def _build_key(command: ShellCommand) -> tuple[object, ...]:
    """Return everything of a command but the rank and address of its node."""
    words, skip = [], False
    for word in command.words:
        name, equals, _ = word.text.lstrip("-").partition("=")
        if skip:
            skip = False
        elif word.text.startswith("-") and name.replace("-", "_") in _RANK_OPTIONS:
            skip = not equals
        else:
            words.append(word.text)
    variables = sorted((name, word.text) for name, word in command.environment.items() if name not in NODE_VARIABLES)
    return (tuple(words), tuple(variables))


def read_variables(launch: Launch, environment: Mapping[str, Word]) -> tuple[str | None, set[str]]:
    """Read the variables of the launcher into the launch; return the device resource and the names that were read."""
    handled: set[str] = set()
    resource: str | None = None
    for name, word in environment.items():
        if name in DEVICE_VARIABLES:
            handled.add(name)
            resource = DEVICE_VARIABLES[name] or resource
            _count_visible(launch, name, word)
        elif name in _COUNT_VARIABLES:
            handled.add(name)
            _read_count(launch, name, word)
        elif name in _SET_BY_OPERATOR:
            handled.add(name)
            launch.entries.append(Entry(name, EntryEffect.SAME, BY_OPERATOR, line=word.line))
    return resource, handled


def _count_visible(launch: Launch, name: str, word: Word) -> None:
    ids = [part for part in word.text.split(",") if part.strip()]
    if word.unresolved:
        message = f"its value {word.text} is only known to a shell; set the GPUs per node with --gpus"
        launch.entries.append(Entry(name, EntryEffect.EDIT, message, line=word.line))
    elif launch.devices is None and ids and ids[0] != "-1":
        launch.devices = len(ids)
        message = f"the number of devices per node is {len(ids)}; Kubernetes chooses which"
        launch.entries.append(Entry(name, EntryEffect.MAPPED, message, "resources.limits", word.line))
    else:
        launch.entries.append(Entry(name, EntryEffect.SAME, "Kubernetes chooses the devices", line=word.line))


def _read_count(launch: Launch, name: str, word: Word) -> None:
    attribute = _COUNT_VARIABLES[name]
    if word.text in ("gpu", "auto"):
        launch.entries.append(Entry(name, EntryEffect.SAME, "one rank per device", line=word.line))
    elif word.unresolved or not word.text.isdigit():
        message = f"its value {word.text} is not a number in this text; use --gpus or --nodes, or edit the job"
        launch.entries.append(Entry(name, EntryEffect.EDIT, message, line=word.line))
    else:
        if getattr(launch, attribute) is None:
            setattr(launch, attribute, int(word.text))
        launch.entries.append(Entry(name, EntryEffect.MAPPED, f"is {word.text}", _COUNT_FIELDS[name], word.line))


def resolve_topology(
    launch: Launch, *, request: ConversionRequest, pasted_nodes: int, resource: str | None, ranks_fill_devices: bool
) -> Topology:
    """Return nodes, devices and ranks, with entries for what is assumed.

    ranks_fill_devices: whether the tool starts one rank per device without a number of ranks.
    """
    nodes = request.nodes or launch.nodes or pasted_nodes
    if pasted_nodes > 1 and launch.nodes not in (None, pasted_nodes):
        message = f"{pasted_nodes} commands are pasted, but the number of nodes is {launch.nodes}; that number is used"
        launch.entries.append(Entry("NNODES", EntryEffect.NOTE, message))
    per_node = launch.ranks_per_node
    if per_node is None and launch.ranks is not None:
        per_node = math.ceil(launch.ranks / nodes)
    devices = request.gpus or launch.devices or per_node
    if devices is None:
        devices = 1
        message = "the input contains no number of GPUs; one is assumed: set it with --gpus"
        launch.entries.append(Entry("GPUs", EntryEffect.EDIT, message, "resources.limits"))
    ranks = per_node or (devices if ranks_fill_devices or request.gpus else 1)
    problems = tuple(_find_problems(nodes, devices, ranks))
    if problems:
        raise ConversionError(*problems)
    return Topology(nodes, devices, ranks, resource or request.gpu_resource)


def _find_problems(nodes: int, devices: int, ranks: int) -> Iterable[str]:
    for name, count, limit in (("nodes", nodes, MAX_NODES), ("GPUs", devices, MAX_RANKS), ("ranks", ranks, MAX_RANKS)):
        if not 1 <= count <= limit:
            yield f"the number of {name} must be from 1 to {limit}, found {count}"


def add_topology(draft: JobDraft, topology: Topology, launch: Launch) -> None:
    """Set numNodes, resources and the port of the job."""
    if topology.nodes > 1:
        draft.set("numNodes", topology.nodes)
    draft.set("resources", {"limits": {topology.resource: topology.devices}})
    port = launch.master_port
    if port is not None and port != DEFAULT_PORT:
        if MIN_PORT <= port <= MAX_PORT:
            draft.set("network.masterPort", port)
        else:
            draft.note("MASTER_PORT", EntryEffect.CHANGED, f"port {port} is not allowed; {DEFAULT_PORT} is used")
    draft.entries += [_explain_default(entry, draft) for entry in launch.entries]


def _explain_default(entry: Entry, draft: JobDraft) -> Entry:
    """Return the entry of a number with the reason if the job does not state it, because it is the default."""
    reason = _NOT_NEEDED.get(entry.field or "")
    if reason is None or entry.effect is not EntryEffect.MAPPED or draft.get(str(entry.field)) is not None:
        return entry
    return replace(entry, effect=EntryEffect.SAME, field=None, message=reason)
