"""Test that DeepSpeed starts without probing its compiled ops."""

import os
import subprocess
import sys

PROGRAM = """
import sys

sys.modules["setuptools"] = None  # the image does not contain it; probes of ops need it
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
from finetune_trainer.parallel.deepspeed_engine import init_deepspeed

init_deepspeed("gloo")
import deepspeed

probed = [name for name in deepspeed.ops.__compatible_ops__]
assert deepspeed.comm.is_initialized()
print("probed:", probed)
"""


def test_deepspeed_is_initialised_without_probing_its_ops() -> None:
    """DS_ACCELERATOR selects the ops of GPUs, of which DeepSpeed has most."""
    environment = os.environ | {"DS_ACCELERATOR": "cuda", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": os.pathsep.join(sys.path)}

    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=100
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "probed: []"
    assert "compatib" not in result.stdout + result.stderr
