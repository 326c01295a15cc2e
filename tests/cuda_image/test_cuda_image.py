"""Build the trainer image with torch for CUDA, and examine it without a GPU (`make test-image-cuda`)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import testing.cuda_image.probe
from lockfile import read_locks
from testing.cluster.host.cache import Cache
from testing.cuda_image.build import build_cuda_image, explain_missing_requirement

PROVIDED_BY_DRIVER = {"libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1"}
# Plugins of NCCL and NVSHMEM for other networks and launchers, which NCCL opens only if an administrator adds them.
OPTIONAL = {
    "libnccl-net.so": "network plugin, such as aws-ofi-nccl for EFA",
    "libnccl-gin.so": "network plugin",
    "libgdrapi.so": "GDRCopy, which needs a kernel module of the host",
    "libgdrapi.so.2": "GDRCopy, which needs a kernel module of the host",
    "libmpi.so.40": "NVSHMEM started by MPI",
    "libpmix.so.2": "NVSHMEM started by PMIx",
    "liboshmem.so.40": "NVSHMEM started by OpenSHMEM",
    "libfabric.so.1": "NVSHMEM over libfabric",
    "libucs.so.0": "NVSHMEM over UCX",
    "libucp.so.0": "NVSHMEM over UCX",
}


@pytest.fixture(scope="module")
def probed() -> Iterator[dict[str, Any]]:
    """Build the image once, run the probe in it as its user, and print size and versions."""
    if reason := explain_missing_requirement():
        pytest.skip(reason)
    with build_cuda_image(Cache.from_environment()) as image:
        output = image.run_python(Path(testing.cuda_image.probe.__file__).read_text())
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
        print(f"\nsize {image.size}; versions {result['versions']}; torch {result['torch']}")
        print(f"shared libraries that NCCL may open: {result['nccl_libraries']}")
        yield result


def test_libraries_are_imported_in_their_locked_versions(probed: dict[str, Any]) -> None:
    locked = {package.name: package.version for package in read_locks(("trainer", "torch"))}
    compared = {name: version for name, version in probed["versions"].items() if name in locked}

    assert len(compared) >= 7
    assert {name: version.partition("+")[0] for name, version in compared.items()} == {n: locked[n] for n in compared}


def test_programs_run_as_the_user_of_the_image(probed: dict[str, Any]) -> None:
    assert probed["user"] == 1000


def test_every_library_that_nccl_opens_is_found_or_belongs_to_the_driver(probed: dict[str, Any]) -> None:
    found = {name for name, is_found in probed["nccl_libraries"].items() if is_found}
    versioned = {name.partition(".so")[0] for name in found}  # NCCL also tries libibverbs.so without its version
    missing = {
        name
        for name in probed["nccl_libraries"].keys() - found - PROVIDED_BY_DRIVER - OPTIONAL.keys()
        if not (name.endswith(".so") and name.removesuffix(".so") in versioned)
    }

    assert {"libibverbs.so.1", "libmlx5.so.1"} <= found
    assert missing == set()


def test_rdma_drivers_of_mellanox_and_bitsandbytes_for_this_cuda_are_opened(probed: dict[str, Any]) -> None:
    assert len(probed["opened"]) == 2
    assert all(probed["opened"].values()), probed["opened"]
    assert probed["dmabuf"], "GPUDirect RDMA without a kernel module needs ibv_reg_dmabuf_mr"


def test_dependencies_of_all_shared_libraries_are_resolved(probed: dict[str, Any]) -> None:
    unresolved = dict(probed["unresolved"])
    [examined] = unresolved.pop("examined")
    missing = {name for names in unresolved.values() for name in names}

    assert int(examined) >= 50
    assert missing - PROVIDED_BY_DRIVER - OPTIONAL.keys() == set(), unresolved


def test_a_c_extension_is_compiled_by_the_user_of_the_image(probed: dict[str, Any]) -> None:
    assert probed["compiled"] == {"stub": True, "driver": True}


def test_deepspeed_starts_without_warnings_although_the_image_has_no_setuptools(probed: dict[str, Any]) -> None:
    assert probed["build_tools"] == {"pip": False, "setuptools": False}
    assert probed["deepspeed_output"] == ""


def test_torch_is_built_for_the_gpus_that_the_documentation_lists(probed: dict[str, Any]) -> None:
    assert probed["torch"]["cuda"].startswith("13.")
    assert {"sm_75", "sm_80", "sm_90", "sm_100"} <= set(probed["torch"]["architectures"])
