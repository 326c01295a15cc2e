"""What the variables of a job file may choose in local mode, where the trainer has the files and tokens of the user.

A job with a command is code of its author, and is not limited. Any other job runs the trainer, which the user has
installed: its variables must not replace that code, nor send a credential of the user to another server.
"""

import os
import re
import site
from collections.abc import Mapping
from pathlib import Path

from finetune_api.v1alpha1.job import FineTuneJobSpec
from finetune_cli.errors import BadInput

# Interpreters, linkers, compilers and plugins, and the files and folders where programs look for code and settings.
_CODE = re.compile(
    r"(?!PYTORCH_\w*ALLOC_CONF|SSL_CERT_)("
    r"(PYTHON|LD_|DYLD_|OPENSSL_|TRITON_|TORCHINDUCTOR_|GIT_|SSH_|NVCC|CMAKE|MAKE|INTEL_LIBITTNOTIFY)\w*"
    r"|\w*(PATH|HOME|DIRS?|DIRECTORY|FILE(NAME)?S?|CONFIG|CONF|FLAGS|PLUGINS?|PRELOAD|LIB|LIBRARY|LIBRARIES|KERNELS)"
    r"|(\w*_)?(CC|CXX|CPP|LD|AR|COMPILER|EXECUTABLE|COMMAND|CMD|BIN|CREDENTIALS|NETRC|MODULES_CACHE)"
    r"|CUDACXX|CUDAHOSTCXX|BASH_ENV|ENV|SHELL|EDITOR|VISUAL|PAGER|BROWSER|MPLBACKEND)",
    re.IGNORECASE,
)
# Servers, proxies, and the certificates that prove who a server is; names that match _CODE are none of these.
_DESTINATION = re.compile(
    r"(?!UCX_)((\w*_)?(ENDPOINT|URL|URI|HOST|DOMAIN|SERVER|PROXY|ADDR|ADDRESS|API_BASE|SPACE_ID|CERTS?|SSL|TLS)(_\w*)?"
    r"|\w*CA_BUNDLE|\w*INSECURE\w*|HOSTALIASES|LOCALDOMAIN|RES_OPTIONS)",
    re.IGNORECASE,
)
_CREDENTIAL = re.compile(
    r"\w*(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|KEY)S?\d*(_\w*)?|(\w*_)?(PAT|AUTH|COOKIES?|NETRC)(_\w*)?",
    re.IGNORECASE,
)
SAFE_PATH = {"PYTHONSAFEPATH": "1"}  # Python imports nothing from the working directory


def find_destinations(spec: FineTuneJobSpec, own_variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the job's variables that choose where requests go.

    own_variables: environment of the user. A variable of the job that has the same value there is not returned.

    Raises:
        BadInput: Variables of the job choose which code or files the trainer uses.
    """
    literals = {each.name: each.value or "" for each in spec.env if each.value_from is None}
    changed = [name for name, value in literals.items() if own_variables.get(name) != value]
    if code := [name for name in changed if _CODE.fullmatch(name)]:
        advice = "chooses code or files of this machine; remove it, or add --trust if you trust the job file"
        raise BadInput(*(f"spec.env: {name}: {advice}" for name in code))
    return tuple(name for name in changed if _DESTINATION.fullmatch(name))


def withhold_credentials(spec: FineTuneJobSpec, own_variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the user without tokens and passwords, and without what the job takes from Secrets."""
    from_secrets = {each.name for each in spec.env if each.value_from is not None}
    return {
        name: value
        for name, value in own_variables.items()
        if name not in from_secrets and not _CREDENTIAL.fullmatch(name)
    }


def hide_credential_files(own_variables: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return the variables by which programs find no token and no password in a file of the user.

    home: an empty folder. Downloaded models and packages in the user's home directory are still found.
    """
    cache = own_variables.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "PYTHONUSERBASE": site.getuserbase(),
        "HF_HOME": own_variables.get("HF_HOME") or f"{cache}/huggingface",
        "HF_TOKEN_PATH": os.devnull,
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "NETRC": os.devnull,
    }
