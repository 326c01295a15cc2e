"""Program that runs in the trainer image: import the libraries, resolve shared libraries, compile C, print JSON.

It uses only the standard library before it imports the libraries that it examines.
"""

import contextlib
import ctypes
import importlib
import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
MODULES = (
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "deepspeed",
    "bitsandbytes",
    "peft",
    "finetune_trainer.train",
)
STUB = """
#include <Python.h>
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "stub", 0, -1, 0};
PyMODINIT_FUNC PyInit_stub(void) { return PyModule_Create(&definition); }
"""


def main() -> None:
    """Print one JSON object; the last line of the output, because libraries print messages at import."""
    versions = {name: getattr(importlib.import_module(name), "__version__", "") for name in MODULES}
    results = {
        "user": os.getuid(),
        "versions": versions,
        "torch": describe_torch(),
        "build_tools": {name: can_import(name) for name in ("pip", "setuptools")},
        "nccl_libraries": {name: can_open(name) for name in list_opened_libraries(find_library("libnccl.so.2"))},
        "opened": {path.name: can_open(str(path)) for path in list_required_libraries()},
        "dmabuf": can_open("libibverbs.so.1") and hasattr(ctypes.CDLL("libibverbs.so.1"), "ibv_reg_dmabuf_mr"),
        "unresolved": find_unresolved_libraries(("torch", "nvidia")),
        "compiled": {"stub": compile_stub(), "driver": compile_triton_driver()},
        "deepspeed_output": start_deepspeed(),
    }
    print(json.dumps(results))


def describe_torch() -> dict[str, object]:
    torch = sys.modules["torch"]
    return {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "architectures": torch.cuda.get_arch_list(),
    }


def can_import(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def find_library(name: str) -> Path:
    return next(SITE_PACKAGES.glob(f"nvidia/**/{name}"))


def list_opened_libraries(library: Path) -> list[str]:
    """Return the names of shared libraries in the text of a library, which it may open by dlopen."""
    names = re.findall(rb"lib[A-Za-z0-9_+-]+\.so(?:\.\d+)*", library.read_bytes())
    return sorted({name.decode() for name in names})


def list_required_libraries() -> list[Path]:
    """Return libraries that a job with RDMA or 4-bit weights opens: the driver of Mellanox NICs, and bitsandbytes."""
    cuda = "".join(sys.modules["torch"].version.cuda.split("."))
    return [
        *Path("/usr/lib").glob("*/libibverbs/libmlx5-rdmav*.so"),
        *SITE_PACKAGES.glob(f"bitsandbytes/*_cuda{cuda}.so"),
    ]


def can_open(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def find_unresolved_libraries(packages: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the missing dependencies of all shared libraries of the packages.

    A dependency that another package contains is not missing: torch loads those libraries before their users.
    """
    files = [path for name in packages for path in (SITE_PACKAGES / name).rglob("*.so*") if path.is_file()]
    present = {path.name for path in files}
    unresolved = {}
    for path in sorted({path.resolve() for path in files}):
        lines = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout.splitlines()
        missing = {line.split()[0] for line in lines if "not found" in line} - present
        if missing:
            unresolved[path.name] = sorted(missing)
    return {"examined": [str(len(files))], **unresolved}


def compile_stub() -> bool:
    """Compile and import a C extension with the function that Triton uses for its launchers."""
    from triton.runtime.build import compile_module_from_src

    return bool(compile_module_from_src(STUB, "stub").__name__ == "stub")


def compile_triton_driver() -> bool:
    """Compile Triton's own interface to the CUDA driver, without linking it, because libcuda belongs to the driver."""
    backend = SITE_PACKAGES / "triton" / "backends" / "nvidia"
    folders = (sysconfig.get_path("include"), str(backend / "include"))
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "driver.o"
        includes = [f"-I{folder}" for folder in folders]
        subprocess.run(["gcc", "-c", backend / "driver.c", *includes, "-o", output], check=True)
        return output.stat().st_size > 0


def start_deepspeed() -> str:
    """Initialise DeepSpeed in one rank and return what it prints."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        importlib.import_module("finetune_trainer.parallel.deepspeed_engine").init_deepspeed("gloo")
    dist.destroy_process_group()
    return output.getvalue()


if __name__ == "__main__":
    main()
