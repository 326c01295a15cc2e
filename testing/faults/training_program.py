"""What trains in the fault matrix: ranks that step together, save, go on from what was saved, and do one thing wrong.

It stands for a program of the user's own: standard library only, one process per node or, as a script, per rank.
Ranks meet at rank 0, as an all-reduce would: who dies is missed by all within one step. It trains until a file `finish`
appears in the output.
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
SHARED_MEMORY = Path("/dev/shm/torch_1207")  # named as torch names its own
MIB = b"x" * (1 << 20)
GO, STOP, FINISH = b".", b"s", b"f"
asked_to_stop = False


class DistBackendError(RuntimeError):
    """What torch raises of a peer that is gone."""


class OutOfMemoryError(RuntimeError):
    """torch's, by name."""


def main() -> None:
    options = read_options()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.ignore_sigterm else note_stop)
    sys.excepthook = print_as_torch_does
    peers = Peers(patience_seconds=options.patience)
    first = load_step()
    for step in range(first + 1, 10**6):
        time.sleep(options.seconds)
        fails = options.rank == RANK and int(os.environ["FINETUNE_ATTEMPT"]) < options.failing_attempts
        if options.fault and fails and step == options.at:
            say(f"fault strikes at {time.time()}")
            FAULTS[options.fault](options.mib)
        agreed = peers.agree(own_word())
        if RANK == 0:
            say(f"step {step}")
            report(step)
            if step % options.save_steps == 0 or agreed != GO:
                save_step(step, seconds=options.save_seconds if agreed == STOP else 0)
        if agreed != GO:
            return leave(agreed)
    return None


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--at", type=int, default=25, help="the step before whose end the fault strikes")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--failing-attempts", type=int, default=1)
    parser.add_argument("--mib", type=int, default=0, help="how much memory or disk the fault takes")
    parser.add_argument("--seconds", type=float, default=0.1, help="of a step")
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--save-seconds", type=float, default=0, help="of a save after SIGTERM")
    parser.add_argument("--patience", type=float, default=60, help="seconds that a rank waits for its peers")
    parser.add_argument("--ignore-sigterm", action="store_true")
    return parser.parse_args()


def say(line: str) -> None:
    """In one piece: print writes the end of the line by itself, and what the supervisor says may come between."""
    os.write(1, f"{line}\n".encode())


def note_stop(_number: int, _frame: object) -> None:
    global asked_to_stop
    asked_to_stop = True


def own_word() -> bytes:
    if asked_to_stop:
        return STOP
    return FINISH if RANK == 0 and (OUTPUT / "finish").exists() else GO


def leave(agreed: bytes) -> None:
    """A drain asks one node only; the others are asked a moment later, and an end before that would be a success."""
    deadline = time.monotonic() + 60
    while agreed == STOP and not asked_to_stop and time.monotonic() < deadline:
        time.sleep(0.05)


class Peers:
    """Every rank's connection to rank 0, and rank 0's to all."""

    def __init__(self, *, patience_seconds: float) -> None:
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1)
        self._patience_seconds = patience_seconds
        self._links = accept(address[1]) if RANK == 0 else [connect(address)]
        for link in self._links:
            link.settimeout(patience_seconds)

    def agree(self, word: bytes) -> bytes:
        """GO, unless any rank says otherwise; STOP wins, because it comes with a deadline."""
        try:
            if RANK != 0:
                self._links[0].sendall(word)
                return receive(self._links[0])
            said = {word, *(receive(link) for link in self._links)}
            agreed = next(word for word in (STOP, FINISH, GO) if word in said)
            for link in self._links:
                link.sendall(agreed)
        except TimeoutError:
            raise DistBackendError(f"timed out waiting {self._patience_seconds:.0f} s for a peer") from None
        except OSError as error:
            raise DistBackendError(f"Connection closed by peer ({error})") from None
        return agreed


def accept(port: int) -> list[socket.socket]:
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


def receive(link: socket.socket) -> bytes:
    word = link.recv(1)
    if not word:
        raise ConnectionError("end of stream")
    return word


def load_step() -> int:
    """Of the last save; 0 if there is none."""
    path = OUTPUT / "saved.json"
    return int(json.loads(path.read_text())["step"]) if path.exists() else 0


def save_step(step: int, *, seconds: float) -> None:
    time.sleep(seconds)
    beside = OUTPUT / "saved.tmp"
    beside.write_text(json.dumps({"step": step}))
    beside.replace(OUTPUT / "saved.json")


def report(step: int) -> None:
    """As docs/user-guide/command.md has it. An answer that does not come is no failure."""
    body = {"trainerStatus": {"metrics": [{"name": "current_step", "value": str(step)}]}}
    token = Path(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read_text()
    url, headers = os.environ["KUBEFLOW_TRAINER_SERVER_URL"], {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310
    try:
        urllib.request.urlopen(request, timeout=5).close()  # noqa: S310
    except OSError as error:
        say(f"not reported: {error}")


def print_as_torch_does(kind: type[BaseException], error: BaseException, stack: object) -> None:
    """torch.distributed puts the rank before every line of what it could not catch."""
    told = "".join(traceback.format_exception(error))
    sys.stderr.write("".join(f"[rank{RANK}]: {line}\n" for line in told.splitlines()))
    sys.stderr.flush()


def raise_value_error(_mib: int) -> None:
    raise ValueError("row 1207 has no label")


def raise_cuda_oom(_mib: int) -> None:
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.65 GiB")


def raise_ecc(_mib: int) -> None:
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def raise_port_in_use(_mib: int) -> None:
    raise OSError(98, "Address already in use")


def lose_link(_mib: int) -> None:
    raise ConnectionResetError(104, "Connection reset by peer")


def exit_42(_mib: int) -> None:
    sys.exit(42)


def segfault(_mib: int) -> None:
    ctypes.string_at(0)


def hang(_mib: int) -> None:
    time.sleep(3600)


def take_memory(mib: int) -> None:
    """Written to, or the kernel would only promise it."""
    held = [bytearray(MIB) for _ in range(mib)]
    say(f"holding {len(held)} MiB")


def fill_shm(mib: int) -> None:
    """In torch's words: Python's own name no file."""
    try:
        write_file(SHARED_MEMORY, mib)
    except OSError as error:
        raise RuntimeError(
            f"unable to write to file </{SHARED_MEMORY.name}>: {error.strerror} ({error.errno})"
        ) from None
    finally:
        SHARED_MEMORY.unlink()


def map_shm(mib: int) -> None:
    with SHARED_MEMORY.open("wb+") as file:
        file.truncate(mib << 20)
        with mmap.mmap(file.fileno(), mib << 20) as mapped:
            for offset in range(0, mib << 20, mmap.PAGESIZE):
                mapped[offset] = 1
    SHARED_MEMORY.unlink()


def fill_scratch(mib: int) -> None:
    write_file(Path("/scratch/shard-0"), mib)


def fill_and_wait(mib: int) -> None:
    """Until the kubelet has measured it, or the kernel found somebody to kill."""
    fill_scratch(mib)
    hang(mib)


def write_file(path: Path, mib: int) -> None:
    with path.open("wb") as file:
        for _ in range(mib):
            file.write(MIB)


FAULTS: dict[str, Callable[[int], None]] = {
    "cuda-oom": raise_cuda_oom,
    "disk": fill_scratch,
    "ecc": raise_ecc,
    "exception": raise_value_error,
    "exit-42": exit_42,
    "fill": fill_and_wait,
    "hang": hang,
    "link": lose_link,
    "memory": take_memory,
    "port-in-use": raise_port_in_use,
    "segfault": segfault,
    "shm": fill_shm,
    "shm-mmap": map_shm,
}

if __name__ == "__main__":
    main()
