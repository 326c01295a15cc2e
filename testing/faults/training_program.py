"""Training program for the fault matrix, whose ranks train in lockstep, save, resume and inject one fault.

Like a user's program, it has one process per node or, as a script, one per rank. It uses only the standard library.
The ranks synchronize with rank 0 at every step, as an all-reduce does, so that all ranks fail within one step after
a rank has died. The program trains until a file `finish` exists in the output folder.
"""

import argparse
import ctypes
import json
import mmap
import os
import signal
import socket
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path

RANK = int(os.environ.get("RANK", os.environ["NODE_RANK"]))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", os.environ["NNODES"]))
OUTPUT = Path(os.environ["FINETUNE_OUTPUT"])
SHARED_MEMORY = Path("/dev/shm/torch_1207")  # same pattern as torch's shared-memory files
MIB = b"x" * (1 << 20)
GO, STOP, FINISH = b".", b"s", b"f"
stop_requested = False


class DistBackendError(RuntimeError):
    """Stand-in with the name of the error that torch raises for a lost peer."""


class OutOfMemoryError(RuntimeError):
    """Stand-in with the name of torch's CUDA out-of-memory error."""


def main() -> None:
    options = read_options()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.ignore_sigterm else request_stop)
    sys.excepthook = print_traceback_like_torch
    peers = Peers(timeout_seconds=options.peer_timeout)
    last_step = load_step()
    for step in range(last_step + 1, 10**6):
        time.sleep(options.seconds)
        injects_fault = options.rank == RANK and int(os.environ["FINETUNE_ATTEMPT"]) < options.failing_attempts
        if options.fault and injects_fault and step == options.at:
            log(f"fault injected at {time.time()}")
            FAULTS[options.fault](options.mib)
        agreed_vote = peers.agree_on_vote(get_own_vote())
        if RANK == 0:
            log(f"step {step}")
            report_progress(step)
            if step % options.save_steps == 0 or agreed_vote != GO:
                save_step(step, seconds=options.save_seconds if agreed_vote == STOP else 0)
        if agreed_vote != GO:
            return wait_for_own_sigterm(agreed_vote)
    return None


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--at", type=int, default=25, help="the step in which the fault is injected")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--failing-attempts", type=int, default=1)
    parser.add_argument("--mib", type=int, default=0, help="how much memory or disk the fault uses")
    parser.add_argument("--seconds", type=float, default=0.1, help="duration of a step")
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--save-seconds", type=float, default=0, help="duration of a save after SIGTERM")
    parser.add_argument("--peer-timeout", type=float, default=60, help="seconds that a rank waits for its peers")
    parser.add_argument("--ignore-sigterm", action="store_true")
    return parser.parse_args()


def log(line: str) -> None:
    """Write a line atomically; print writes the newline separately, so lines of several ranks could be mixed."""
    os.write(1, f"{line}\n".encode())


def request_stop(_number: int, _frame: object) -> None:
    global stop_requested
    stop_requested = True


def get_own_vote() -> bytes:
    if stop_requested:
        return STOP
    return FINISH if RANK == 0 and (OUTPUT / "finish").exists() else GO


def wait_for_own_sigterm(agreed_vote: bytes) -> None:
    """Wait for SIGTERM on this node after another node got it, because exit 0 before SIGTERM would mean success."""
    deadline = time.monotonic() + 60
    while agreed_vote == STOP and not stop_requested and time.monotonic() < deadline:
        time.sleep(0.05)


class Peers:
    """Connections between rank 0 and all other ranks."""

    def __init__(self, *, timeout_seconds: float) -> None:
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1)
        self._timeout_seconds = timeout_seconds
        self._links = accept_peers(address[1]) if RANK == 0 else [connect(address)]
        for connection in self._links:
            connection.settimeout(timeout_seconds)

    def agree_on_vote(self, vote: bytes) -> bytes:
        """Return the common vote of all ranks: STOP if any rank must stop, else FINISH if requested, else GO."""
        try:
            if RANK != 0:
                self._links[0].sendall(vote)
                return receive_vote(self._links[0])
            votes = {vote, *(receive_vote(connection) for connection in self._links)}
            agreed_vote = next(vote for vote in (STOP, FINISH, GO) if vote in votes)
            for connection in self._links:
                connection.sendall(agreed_vote)
        except TimeoutError:
            raise DistBackendError(f"timed out waiting {self._timeout_seconds:.0f} s for a peer") from None
        except OSError as error:
            raise DistBackendError(f"Connection closed by peer ({error})") from None
        return agreed_vote


def accept_peers(port: int) -> list[socket.socket]:
    with socket.create_server(("", port)) as server:
        server.settimeout(90)
        return [server.accept()[0] for _ in range(WORLD_SIZE - 1)]


def connect(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(address, timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def receive_vote(connection: socket.socket) -> bytes:
    vote = connection.recv(1)
    if not vote:
        raise ConnectionError("end of stream")
    return vote


def load_step() -> int:
    """Return the step of the last save, or 0 if there is none."""
    path = OUTPUT / "saved.json"
    return int(json.loads(path.read_text())["step"]) if path.exists() else 0


def save_step(step: int, *, seconds: float) -> None:
    time.sleep(seconds)
    temporary_file = OUTPUT / "saved.tmp"
    with temporary_file.open("w") as file:
        json.dump({"step": step}, file)
        file.flush()
        os.fsync(file.fileno())  # otherwise the file may be empty after a failure of the file system
    temporary_file.replace(OUTPUT / "saved.json")


def report_progress(step: int) -> None:
    """Report progress as described in docs/user-guide/command.md; ignore failures."""
    body = {"trainerStatus": {"metrics": [{"name": "current_step", "value": str(step)}]}}
    token = Path(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read_text()
    url, headers = os.environ["KUBEFLOW_TRAINER_SERVER_URL"], {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310
    try:
        urllib.request.urlopen(request, timeout=5).close()  # noqa: S310
    except OSError as error:
        log(f"not reported: {error}")


def print_traceback_like_torch(error_type: type[BaseException], error: BaseException, traceback_object: object) -> None:
    """Print an uncaught exception with the rank before every line, as torch.distributed does."""
    text = "".join(traceback.format_exception(error))
    sys.stderr.write("".join(f"[rank{RANK}]: {line}\n" for line in text.splitlines()))
    sys.stderr.flush()


def raise_value_error(_mib: int) -> None:
    raise ValueError("row 1207 has no label")


def raise_cuda_oom(_mib: int) -> None:
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.65 GiB")


def raise_ecc_error(_mib: int) -> None:
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def raise_port_in_use(_mib: int) -> None:
    raise OSError(98, "Address already in use")


def raise_connection_reset(_mib: int) -> None:
    raise ConnectionResetError(104, "Connection reset by peer")


def exit_42(_mib: int) -> None:
    sys.exit(42)


def segfault(_mib: int) -> None:
    ctypes.string_at(0)


def hang(_mib: int) -> None:
    time.sleep(3600)


def allocate_memory(mib: int) -> None:
    """Allocate memory and write to it; otherwise the kernel only reserves address space."""
    blocks = [bytearray(MIB) for _ in range(mib)]
    log(f"holding {len(blocks)} MiB")


def fill_shared_memory(mib: int) -> None:
    """Write a file to /dev/shm; if this fails, raise an error with torch's message, which contains the file name."""
    try:
        write_file(SHARED_MEMORY, mib)
    except OSError as error:
        raise RuntimeError(
            f"unable to write to file </{SHARED_MEMORY.name}>: {error.strerror} ({error.errno})"
        ) from None
    finally:
        SHARED_MEMORY.unlink()


def map_shared_memory(mib: int) -> None:
    with SHARED_MEMORY.open("wb+") as file:
        file.truncate(mib << 20)
        with mmap.mmap(file.fileno(), mib << 20) as mapped:
            for offset in range(0, mib << 20, mmap.PAGESIZE):
                mapped[offset] = 1
    SHARED_MEMORY.unlink()


def fill_scratch(mib: int) -> None:
    write_file(Path("/scratch/shard-0"), mib)


def fill_and_wait(mib: int) -> None:
    """Fill the volume and wait until the kubelet evicts the pod or the kernel kills the process."""
    fill_scratch(mib)
    hang(mib)


def write_file(path: Path, mib: int) -> None:
    with path.open("wb") as file:
        for _ in range(mib):
            file.write(MIB)


FAULTS: dict[str, Callable[[int], None]] = {
    "cuda-oom": raise_cuda_oom,
    "disk": fill_scratch,
    "ecc": raise_ecc_error,
    "exception": raise_value_error,
    "exit-42": exit_42,
    "fill": fill_and_wait,
    "hang": hang,
    "link": raise_connection_reset,
    "memory": allocate_memory,
    "port-in-use": raise_port_in_use,
    "segfault": segfault,
    "shm": fill_shared_memory,
    "shm-mmap": map_shared_memory,
}

if __name__ == "__main__":
    main()
