"""Removes secret variables from a rank that does not need them any more."""

import ctypes
import os
import re

from finetune_supervisor.failures.redact import SECRET_NAMES, list_secret_variables

_HUB_NAMES = re.compile("^(HF|HUGGING_?FACE|MODELSCOPE)_", re.IGNORECASE)


def forget_secrets(*, is_loaded: bool) -> None:
    """Remove secret variables from the environment, and their values from /proc/PID/environ.

    is_loaded: False to keep those that loading may need: tokens of hubs, and secrets without the name of a key.
    """
    get_address = ctypes.CDLL(None).getenv
    get_address.restype = ctypes.c_void_p
    for name in list_secret_variables(os.environ):
        if is_loaded or (SECRET_NAMES.search(name) and not _HUB_NAMES.match(name)):
            if address := get_address(os.fsencode(name)):
                ctypes.memset(address, 0, len(ctypes.string_at(address)))
            del os.environ[name]
