"""Recognises secrets by the names and values of variables and options, so that they are never copied."""

import re

_SECRET_NAME = re.compile(
    r"(^|[_-])(api_?key|access_?key(_?id)?|secret(_?(access_?)?key)?|password|passwd|credentials?|private_?key"
    r"|(auth|access|api|hub|hf|hf_hub|huggingface|ms|modelscope|swanlab|wandb|bearer|github|om_hub|sdk)_?token|token)$",
    re.IGNORECASE,
)
_NO_SECRETS = ("pad_token", "eos_token", "bos_token", "unk_token", "image_token", "video_token", "stop_token")
_SECRET_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_[A-Za-z0-9_]{16,}"
    r"|\bAKIA[A-Z0-9]{12,}|://[^/\s:@]+:[^/\s@]+@|\beyJ[A-Za-z0-9_-]{20,}\.|-----BEGIN [A-Z ]*PRIVATE KEY"
)
_ASSIGNMENT = re.compile(r"([\w-]*[A-Za-z])(=|\s+|:\s*)([^\s'\"]+)")
_NO_VALUES = ("", "true", "false", "none", "null", "1", "0")


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable or option contains a secret."""
    name = name.lstrip("-").replace("-", "_")
    if name.lower() in _NO_SECRETS:
        return _SECRET_VALUE.search(value) is not None
    has_secret_name = _SECRET_NAME.search(name) is not None and value.lower() not in _NO_VALUES
    return has_secret_name or _SECRET_VALUE.search(value) is not None


def contains_secret(text: str) -> bool:
    """Return whether a part of the text has the form of a token, a key, or an address with a password."""
    return _SECRET_VALUE.search(text) is not None


def name_variable(option: str) -> str:
    """Return the environment variable for the value of an option, such as HUB_TOKEN for --hub_token."""
    return re.sub(r"\W", "_", option.lstrip("-")).upper()


def redact(text: str) -> str:
    """Return the text without values that look like secrets, or follow the name of one."""

    def replace(match: re.Match[str]) -> str:
        name, separator, value = match.groups()
        is_named = _SECRET_NAME.search(name.replace("-", "_")) and any(letter.isdigit() for letter in value)
        return f"{name}{separator}***" if is_named else match[0]

    return _SECRET_VALUE.sub("***", _ASSIGNMENT.sub(replace, text))
