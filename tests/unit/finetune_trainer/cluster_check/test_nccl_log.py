"""Test which network is read from NCCL's log."""

from pathlib import Path

import pytest

from finetune_trainer.cluster_check.nccl_log import enable_nccl_log, read_network

LINES = "node0:924:924 [5] NCCL INFO cudaDriverVersion 12010\nnode0:924:1145 [0] NCCL INFO NET/IB : No device found.\n"


@pytest.mark.parametrize(
    ("line", "network"),
    [
        pytest.param("node0:924:1145 [0] NCCL INFO Using network Socket\n", "Socket", id="sockets"),
        pytest.param("node0:924:1145 [0] NCCL INFO Using network IB\n", "IB", id="InfiniBand"),
        pytest.param("node0:924:1145 [0] NCCL INFO Assigned NET plugin Socket to comm\n", "Socket", id="newer text"),
        pytest.param("", "", id="unknown"),
    ],
)
def test_network_is_read_from_the_log(tmp_path: Path, line: str, network: str) -> None:
    log = tmp_path / "log"
    log.write_text(LINES + line)

    assert read_network(log) == network


def test_missing_log_is_an_unknown_network(tmp_path: Path) -> None:
    assert read_network(tmp_path / "missing") == ""
    assert read_network(None) == ""


def test_nccl_logs_to_a_file_of_the_rank(tmp_path: Path) -> None:
    environment: dict[str, str] = {}

    assert enable_nccl_log(tmp_path, 3, environment) == tmp_path / "3-nccl.log"
    assert environment["NCCL_DEBUG_FILE"] == str(tmp_path / "3-nccl.log")


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"])
def test_logging_of_the_user_is_kept(tmp_path: Path, name: str) -> None:
    environment = {name: "WARN"}

    assert enable_nccl_log(tmp_path, 0, environment) is None
    assert environment == {name: "WARN"}
