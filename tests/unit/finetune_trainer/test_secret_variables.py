"""Tests that ranks without trackers and downloads keep no secrets."""

import os
import subprocess
import sys

import pytest

ENV = {
    "FINETUNE_HIDDEN_ENV": "HF_TOKEN,DATABASE",
    "HF_TOKEN": "hub-token-1",
    "WANDB_API_KEY": "tracker-key-1",
    "DATABASE": "database-value-1",
    "HOME": "/home/trainer",
    "PATH": os.environ["PATH"],
    "PYTHONPATH": os.pathsep.join(sys.path),
}
PROGRAM = """
import ctypes, os
from finetune_trainer import secret_variables
secret_variables.forget_secrets(is_loaded={is_loaded})
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
print([libc.getenv(name) for name in (b"WANDB_API_KEY", b"HOME")])
print(open("/proc/self/environ").read())
print(dict(os.environ))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc exists on Linux only")
@pytest.mark.parametrize(
    ("is_loaded", "kept"),
    [
        pytest.param(False, {"hub-token-1", "database-value-1"}, id="at the start"),
        pytest.param(True, set(), id="after the model is loaded"),
    ],
)
def test_secrets_are_neither_in_the_environment_nor_in_proc(is_loaded: bool, kept: set[str]) -> None:
    program = PROGRAM.format(is_loaded=is_loaded)

    output = subprocess.run([sys.executable, "-c", program], env=ENV, check=True, capture_output=True, text=True).stdout

    assert output.startswith("[None, b'/home/trainer']")
    values = {"hub-token-1", "tracker-key-1", "database-value-1"}
    assert {value for value in values if output.count(value) == 2} == kept
    assert not [value for value in values - kept if value in output]
