"""Maps environment variables to fields of the job or to spec.env."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from finetune_convert.conversion import EntryEffect
from finetune_convert.job_draft import JobDraft
from finetune_convert.shell.words import Word

RESERVED_PREFIXES = ("PET_", "TORCHELASTIC_", "FINETUNE_")
_SHELL_VARIABLES = (
    "PS1",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "HOME",
    "USER",
    "SHELL",
    "CONDA_DEFAULT_ENV",
    "CONDA_PREFIX",
    "VIRTUAL_ENV",
)


def _to_bool(text: str) -> bool:
    return text.lower() in ("1", "true", "yes", "on")


@dataclass(frozen=True)
class FieldVariable:
    """A variable with a field in the job."""

    path: str
    convert: Callable[[str], object]


NETWORK_VARIABLES = {
    "NCCL_DEBUG": FieldVariable("network.nccl.debug", str.upper),
    "NCCL_IB_DISABLE": FieldVariable("network.nccl.ibDisable", _to_bool),
    "NCCL_P2P_DISABLE": FieldVariable("network.nccl.p2pDisable", _to_bool),
    "NCCL_SHM_DISABLE": FieldVariable("network.nccl.shmDisable", _to_bool),
    "NCCL_IB_HCA": FieldVariable("network.nccl.ibHca", str),
    "NCCL_IB_GID_INDEX": FieldVariable("network.nccl.ibGidIndex", int),
    "NCCL_SOCKET_IFNAME": FieldVariable("network.interface", str),
    "GLOO_SOCKET_IFNAME": FieldVariable("network.interface", str),
}
VISION_VARIABLES = {  # of ms-swift
    "MAX_PIXELS": FieldVariable("model.maxPixels", int),
    "MIN_PIXELS": FieldVariable("model.minPixels", int),
    "MAX_NUM": FieldVariable("model.maxTiles", int),
    "FPS": FieldVariable("model.videoFps", float),
    "FPS_MAX_FRAMES": FieldVariable("model.videoMaxFrames", int),
    "VIDEO_MAX_PIXELS": FieldVariable("model.videoMaxPixels", int),
}
_NO_FIELD = {"USE_OPENMIND_HUB": "this trainer reads the Hugging Face Hub and ModelScope; check the ids"}
_NO_FIELD |= dict.fromkeys(
    (
        "IMAGE_FACTOR",
        "SIZE_FACTOR",
        "MAX_RATIO",
        "VIDEO_MIN_PIXELS",
        "VIDEO_TOTAL_PIXELS",
        "FPS_MIN_FRAMES",
        "FRAME_FACTOR",
        "NFRAMES",
        "INPUT_SIZE",
        "IMAGE_MAX_TOKEN_NUM",
        "IMAGE_MIN_TOKEN_NUM",
        "VIDEO_MAX_TOKEN_NUM",
        "VIDEO_MIN_TOKEN_NUM",
        "VIDEO_SEGMENTS",
        "VIDEO_MAX_NUM",
        "MAX_SLICE_NUMS",
        "VIDEO_MAX_SLICE_NUMS",
        "MAX_NUM_FRAMES",
        "NUM_SEGMENTS",
        "SPATIAL_MERGE_SIZE",
    ),
    "this trainer has no such setting; images and videos are limited by model.maxPixels, maxTiles and video*",
)
_TRAINER_UNUSED = {
    "USE_HF": "it selects the hub of ids, see model.hub",
    "USE_MODELSCOPE_HUB": "it selects the hub of ids, see model.hub",
    "FORCE_TORCHRUN": "the operator starts one rank per GPU anyway",
    "DISABLE_VERSION_CHECK": "it is a setting of the original tool",
    "LLAMAFACTORY_VERBOSITY": "it is a setting of the original tool",
    "MODELSCOPE_CACHE": "downloads are cached on the output claim",
    "HF_HUB_CACHE": "downloads are cached on the output claim",
    "HF_HOME": "downloads are cached on the output claim",
    "TRANSFORMERS_CACHE": "downloads are cached on the output claim",
    "PYTHONPATH": "the trainer image has its own packages",
    "PATH": "the trainer image has its own programs",
    "LD_LIBRARY_PATH": "the trainer image has its own libraries",
    "ASCEND_LAUNCH_BLOCKING": "this trainer does not read it",
    "MEGATRON_LM_PATH": "this trainer does not use Megatron",
    "USE_MCA": "this trainer does not use Megatron",
    "ACCELERATE_USE_FSDP": "see fsdp",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "see fsdp",
}


def add_environment(
    draft: JobDraft, environment: Mapping[str, Word], *, handled: Iterable[str], for_trainer: bool
) -> None:
    """Add all variables that are not handled yet to the job, or an entry with the reason."""
    for name, word in environment.items():
        if name in handled or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            continue
        variable = NETWORK_VARIABLES.get(name) or (VISION_VARIABLES.get(name) if for_trainer else None)
        effect, reason = _explain_omission(name, for_trainer=for_trainer)
        if variable is not None:
            _set_field(draft, name, word, variable)
        elif effect is not None:
            draft.note(name, effect, reason, line=word.line)
        else:
            draft.add_env(name, word)


def _explain_omission(name: str, *, for_trainer: bool) -> tuple[EntryEffect | None, str]:
    """Return why a variable is not copied to the job; None if it is."""
    if name.startswith(RESERVED_PREFIXES):
        return EntryEffect.SAME, "the operator sets it for every pod"
    if name in _SHELL_VARIABLES:
        return EntryEffect.UNUSED, "it belongs to the shell of the original machine"
    if for_trainer and name in _NO_FIELD:
        return EntryEffect.CHANGED, _NO_FIELD[name]
    if for_trainer and name in _TRAINER_UNUSED:
        return EntryEffect.UNUSED, _TRAINER_UNUSED[name]
    return None, ""


def _set_field(draft: JobDraft, name: str, word: Word, variable: FieldVariable) -> None:
    before = draft.get(variable.path)
    try:
        value = None if word.unresolved else variable.convert(word.text)
    except ValueError:
        value = None
    if value is None or not is_valid_value(name, word.text):
        draft.note(
            name, EntryEffect.CHANGED, f"its value {word.text} is not valid for spec.{variable.path}", line=word.line
        )
    elif before not in (None, value):
        message = f"is {word.text}, but spec.{variable.path} is already {before}; one value is possible"
        draft.note(name, EntryEffect.CHANGED, message, line=word.line)
    else:
        draft.set(variable.path, value)
        draft.note(
            name,
            EntryEffect.MAPPED,
            f"is {str(value).lower() if isinstance(value, bool) else value}",
            field=variable.path,
            line=word.line,
        )


def is_valid_value(name: str, text: str) -> bool:
    """Return whether the field of a variable accepts the value."""
    match name:
        case "NCCL_DEBUG":
            return text.upper() in ("VERSION", "WARN", "INFO", "TRACE")
        case "NCCL_SOCKET_IFNAME" | "GLOO_SOCKET_IFNAME":
            return re.fullmatch(r"[=^]?[A-Za-z0-9_.,-]{1,256}", text) is not None
        case "NCCL_IB_GID_INDEX":
            return text.isdigit() and int(text) <= 255
        case "NCCL_IB_HCA":
            return len(text) <= 1024
        case "FPS":
            return 0 < float(text) <= 60
        case "MAX_NUM":
            return 1 <= int(text) <= 64
        case "FPS_MAX_FRAMES":
            return 1 <= int(text) <= 10_000
        case _ if name in VISION_VARIABLES:
            return 1 <= int(text) <= 1_000_000_000
        case _:
            return True
