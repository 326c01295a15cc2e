"""Reads the options of torchrun, accelerate and deepspeed, and returns the program that they start."""

from collections.abc import Callable
from dataclasses import dataclass, field

from finetune_convert.conversion import ConversionError, Entry, EntryEffect
from finetune_convert.shell.words import Word

BY_OPERATOR = "the operator sets it for every pod"
RESTARTS = "restarts are those of spec.restartPolicy"


@dataclass
class Launch:
    """How a program is started; None means that the input contains no number."""

    program: tuple[Word, ...]
    launcher: str = ""  # empty without a launcher
    is_module: bool = False  # the program is a Python module instead of a file
    nodes: int | None = None
    ranks_per_node: int | None = None
    ranks: int | None = None  # of all nodes
    devices: int | None = None  # visible devices of a node
    master_port: int | None = None
    kept_options: tuple[str, ...] = ()  # options of the launcher that change the training
    environment: dict[str, Word] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)


_Setter = Callable[[Launch, Word], None]


def _take_number(field_name: str) -> _Setter:
    def set_number(launch: Launch, word: Word) -> None:
        text = word.text.partition(":")[0]
        if word.unresolved or not text.isdigit():
            message = f"its value {word.text} is not a number in this text; use --nodes, --gpus or edit the job"
            launch.entries.append(Entry(field_name, EntryEffect.EDIT, message, line=word.line))
            return
        setattr(launch, field_name, int(text))

    return set_number


def _count_devices(launch: Launch, word: Word) -> None:
    """Count the devices of a list such as 0,1 or localhost:0,1."""
    ids = [part for part in word.text.rpartition(":")[2].split(",") if part]
    if not word.unresolved and ids and word.text != "all":
        launch.devices = len(ids)


def _set_threads(launch: Launch, word: Word) -> None:
    launch.environment["OMP_NUM_THREADS"] = word


@dataclass(frozen=True)
class _LauncherOption:
    """An option of a launcher: what it sets, and the reason if it sets nothing."""

    apply: _Setter | None = None
    reason: str = ""
    field: str = ""
    has_value: bool = True
    is_kept: bool = False


_NODES = _LauncherOption(_take_number("nodes"), field="numNodes")
_RANKS_PER_NODE = _LauncherOption(_take_number("ranks_per_node"), field="resources.limits")
_PORT = _LauncherOption(_take_number("master_port"), field="network.masterPort")
_SET_BY_OPERATOR = _LauncherOption(reason=BY_OPERATOR)
_FLAG = _LauncherOption(reason=BY_OPERATOR, has_value=False)
_KEPT = _LauncherOption(is_kept=True)
_KEPT_FLAG = _LauncherOption(is_kept=True, has_value=False)
_IGNORED = _LauncherOption(reason="the operator starts the ranks without it")
_IGNORED_FLAG = _LauncherOption(reason="the operator starts the ranks without it", has_value=False)

_TORCHRUN = {
    "nproc_per_node": _RANKS_PER_NODE,
    "nnodes": _NODES,
    "master_port": _PORT,
    **dict.fromkeys(
        ("node_rank", "master_addr", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"), _SET_BY_OPERATOR
    ),
    **dict.fromkeys(("standalone", "use_env"), _FLAG),
    **dict.fromkeys(("max_restarts", "monitor_interval"), _LauncherOption(reason=RESTARTS)),
    **dict.fromkeys(("start_method", "role", "log_dir", "redirects", "tee", "local_addr", "r", "t"), _IGNORED),
    **dict.fromkeys(("local_ranks_filter", "logs_specs", "numa_binding", "signals_to_handle"), _IGNORED),
    **dict.fromkeys(("no_python", "run_path"), _IGNORED_FLAG),
}
_ACCELERATE = {
    "num_machines": _NODES,
    "num_processes": _LauncherOption(_take_number("ranks"), field="resources.limits"),
    "main_process_port": _PORT,
    "gpu_ids": _LauncherOption(_count_devices, field="resources.limits"),
    "num_cpu_threads_per_process": _LauncherOption(_set_threads, field="env"),
    **dict.fromkeys(("machine_rank", "main_process_ip", "rdzv_backend", "rdzv_conf", "rdzv_id"), _SET_BY_OPERATOR),
    **dict.fromkeys(("same_network", "multi_gpu"), _FLAG),
    **dict.fromkeys(("max_restarts", "monitor_interval"), _LauncherOption(reason=RESTARTS)),
    **dict.fromkeys(("log_dir", "role", "tee"), _IGNORED),
    **dict.fromkeys(("use_deepspeed", "use_fsdp", "use_megatron_lm", "cpu", "no_python"), _KEPT_FLAG),
}
_DEEPSPEED = {
    "num_gpus": _RANKS_PER_NODE,
    "num_nodes": _NODES,
    "master_port": _PORT,
    "include": _LauncherOption(_count_devices, field="resources.limits"),
    **dict.fromkeys(
        ("master_addr", "hostfile", "node_rank", "launcher", "launcher_args", "ssh_port"), _SET_BY_OPERATOR
    ),
    **dict.fromkeys(("exclude", "autotuning", "elastic_training", "bind_core_list"), _IGNORED),
    **dict.fromkeys(
        ("no_local_rank", "no_ssh", "no_ssh_check", "save_pid", "force_multi", "bind_cores_to_rank"), _FLAG
    ),
}
_SHORT = {"m": "module", "n": "num_processes", "i": "include", "e": "exclude", "H": "hostfile"}


def unwrap(words: tuple[Word, ...]) -> Launch:
    """Return the program behind its launcher, or the words themselves without one."""
    name = words[0].text.rpartition("/")[2]
    texts = [word.text for word in words[:3]]
    if name == "torchrun":
        return _read_options("torchrun", words[1:], _TORCHRUN)
    if name.startswith("python") and texts[1:2] == ["-m"] and texts[2:] and texts[2].startswith("torch.distributed."):
        return _read_options("torchrun", words[3:], _TORCHRUN)
    if name == "accelerate" and texts[1:2] == ["launch"]:
        return _read_options("accelerate", words[2:], _ACCELERATE)
    if name in ("deepspeed", "ds") and len(words) > 1:
        launch = _read_options("deepspeed", words[1:], _DEEPSPEED)
        message = "deepspeed passes it to the script; the operator sets only the variable LOCAL_RANK"
        launch.entries.append(Entry("--local_rank", EntryEffect.NOTE, message))
        return launch
    return Launch(words)


def _read_options(launcher: str, words: tuple[Word, ...], known: dict[str, _LauncherOption]) -> Launch:
    launch = Launch((), launcher)
    index = 0
    while index < len(words) and words[index].text.startswith("-"):
        word = words[index]
        name, equals, attached = word.text.lstrip("-").partition("=")
        name = _SHORT.get(name, name).replace("-", "_")
        index += 1
        if name == "module":
            launch.is_module = True
            if equals:
                launch.program = (Word(attached, word.line),)
            continue
        option = known.get(name)
        has_value = option.has_value if option else _seems_to_have_value(words[index : index + 1])
        value = None
        if equals:
            value = Word(attached, word.line, word.unresolved)
        elif has_value and index < len(words):
            value, index = words[index], index + 1
        _apply_option(launch, word, value, option or (_KEPT if launcher == "accelerate" else None))
    launch.program = (*launch.program, *words[index:])
    if not launch.program:
        raise ConversionError(
            f"line {words[0].line if words else 1}: {launcher} starts no script; paste the whole command"
        )
    return launch


def _seems_to_have_value(following: tuple[Word, ...]) -> bool:
    """Return whether an unknown option has a value: not if the script follows."""
    return bool(following) and not following[0].text.startswith("-") and not following[0].text.endswith(".py")


def _apply_option(launch: Launch, word: Word, value: Word | None, option: _LauncherOption | None) -> None:
    name = word.text.partition("=")[0]
    if option is None:
        launch.entries.append(
            Entry(name, EntryEffect.UNKNOWN, f"{launch.launcher} has no such option that is known here", line=word.line)
        )
    elif option.is_kept:
        launch.kept_options += (name, *([value.text] if value else ()))
        launch.entries.append(Entry(name, EntryEffect.TAKEN, line=word.line, field="command.exec"))
    elif option.apply and value:
        option.apply(launch, value)
        launch.entries.append(Entry(name, EntryEffect.MAPPED, f"is {value.text}", option.field, word.line))
    else:
        launch.entries.append(Entry(name, EntryEffect.SAME, option.reason, line=word.line))
