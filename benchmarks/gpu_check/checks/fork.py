"""Checks the state of the launcher before it forks, and that a fork can compute.

It imports only the standard library, because libraries that are imported here would change the state.
"""

import json
import os
import signal
import time
from pathlib import Path

from benchmarks.gpu_check.context import CheckContext, require
from finetune_supervisor import contract

_FORK_TIMEOUT_SECONDS = 30


def check_fork(context: CheckContext) -> None:
    """Import the trainer as the launcher does, and compute on the device in a fork."""
    spec_file = context.scratch / "fork-spec.json"
    context.record(threads_without_libraries=list_threads())
    spec_file.write_text(json.dumps({"sft": {}}))
    os.environ |= {contract.CONFIG: str(spec_file), "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "4"}
    from finetune_supervisor.launch.preload import can_fork_safely
    from finetune_trainer import entrypoint

    started_at = time.monotonic()
    entrypoint.prepare()
    import torch

    context.record(import_seconds=time.monotonic() - started_at, native_threads=list_threads())
    context.record(libcuda_loaded="libcuda.so" in Path("/proc/self/maps").read_text())
    is_available = torch.cuda.is_available()
    is_initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    context.record(cuda_available=is_available, cuda_initialized=is_initialized)
    require(is_available == context.on_gpu, f"torch.cuda.is_available() is {is_available} before the fork")
    require(can_fork_safely(), "the launcher would not fork, but start a new interpreter for each rank")
    result = compute_in_fork(context.on_gpu)
    context.record(computed_in_fork=result)
    require(result == "ok", f"a fork cannot compute: {result}")


def list_threads() -> list[str]:
    """Return the names of all native threads of this process."""
    return sorted((task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir())


def compute_in_fork(on_gpu: bool) -> str:
    """Multiply matrices on CPU and, if there is one, on the GPU in a fork; return `ok` or the error."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(_FORK_TIMEOUT_SECONDS)  # a deadlock of native threads ends the fork
        try:
            import torch

            for device in ("cpu", "cuda") if on_gpu else ("cpu",):
                ones = torch.ones(1024, 1024, device=device)
                assert (ones @ ones).sum().item() == 2**30, device
            os.write(writer, b"ok")
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}"[:500].encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as output:
        result = output.read().decode()
    _, status = os.waitpid(pid, 0)
    return result or f"ended with {os.waitstatus_to_exitcode(status)} after at most {_FORK_TIMEOUT_SECONDS} s"
