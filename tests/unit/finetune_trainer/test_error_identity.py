"""Tests that an error has the same verdict in every process and thread of a rank as in its main thread."""

import errno
import inspect
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler
from torch.utils.data import Dataset

from finetune_api.batch import Batch
from finetune_operator.failures.rules import judge_node
from finetune_operator.failures.verdict import Verdict
from finetune_operator.observation.pods import observe_pod
from finetune_supervisor.failures.rank_failures import RankFailure, find_first_failure, read_failures
from finetune_supervisor.judge import FinishedNode, judge
from finetune_supervisor.launch.child_process import ProcessOutput
from finetune_supervisor.messages import TerminationMessage
from finetune_supervisor.status.node_reporter import NodeReporter
from finetune_supervisor.stop_request import StopRequest
from finetune_trainer import errors
from finetune_trainer.checkpoint.checkpoints import Checkpoints
from finetune_trainer.checkpoint.output_folder import OutputFolder
from finetune_trainer.data import process_pool
from finetune_trainer.data.batch_sampler import BatchSampler, build_dataloader
from finetune_trainer.data.collator import Collator, SequenceLayout
from finetune_trainer.data.epoch_order import Item, RowOrder
from finetune_trainer.data.late_skips import LateSkips
from finetune_trainer.data.micro_batch import MicroBatch, TargetTokens
from finetune_trainer.data.process_pool import map_in_order
from finetune_trainer.data.token_dataset import Features
from finetune_trainer.data_sources.media import MediaItem, Modality
from finetune_trainer.distributed.heartbeat_writer import HeartbeatWriter
from finetune_trainer.metrics.recorder_threads import RecorderThreads
from finetune_trainer.storage_faults import _IO_FAILED, FILE_FAILED, raise_storage_faults
from finetune_trainer.training.checkpoint_saver import CheckpointPart, CheckpointSaver
from finetune_trainer.vision import video_frames
from finetune_trainer.vision.processor import _translate_media_errors
from testing.builders.jobs import finished_pod, job
from testing.builders.nodes import node


class CallbackError(OSError):
    """Error that pickle cannot restore, because its arguments are not those of its constructor."""

    def __init__(self, number: int, *, callback: Callable[[], None]) -> None:
        super().__init__(number, os.strerror(number), "a.jpg")
        self.callback = callback


def raise_bad_row(number: int, kind: type[Exception] = errors.DatasetError) -> None:
    try:
        raise OSError(number, os.strerror(number))
    except OSError as error:
        raise kind("rows.jsonl line 4: image 3.jpg cannot be read") from error


def build_errors() -> dict[str, Callable[[], None]]:
    """Return functions that raise, by description: each error class, each storage errno, and errors of other kinds."""

    def raising(build: Callable[..., BaseException], *arguments: object, **options: object) -> Callable[[], None]:
        def fail() -> None:
            raise build(*arguments, **options)

        return fail

    classes = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.TrainerError)]
    assert len(classes) >= 20
    assert len(_IO_FAILED) >= 6
    functions = {cls.__name__: raising(cls, "rows.jsonl line 4: what was found") for cls in classes}
    for number in (*_IO_FAILED, errno.ENOSPC, errno.ENOMEM, errno.EACCES):
        name = errno.errorcode[number]
        functions[name] = raising(OSError, number, os.strerror(number), "/data/3.jpg")
        functions[f"{name} without a file"] = raising(OSError, number, os.strerror(number))
        functions[f"{name} as a cause"] = partial(raise_bad_row, number)
        functions[f"{name}, not picklable"] = raising(CallbackError, number, callback=lambda: None)
    return functions | {
        "several lines": raising(ValueError, f"{'context ' * 200}\n[Errno 5] Input/output error\n    ^^^^^^"),
        "EIO as a cause of another OSError": partial(raise_bad_row, errno.EIO, OSError),
        "ETIMEDOUT, not picklable": raising(CallbackError, errno.ETIMEDOUT, callback=lambda: None),
        "CUDA": raising(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB"),
        "memory": raising(MemoryError),
        "key": raising(KeyError, "labels"),
        "unicode": raising(UnicodeDecodeError, "utf-8", b"\xff", 0, 1, "invalid start byte"),
        "local class": raising(type("LocalError", (Exception,), {}), "it cannot be pickled"),
    }


ERRORS = build_errors()
NO_STOP = StopRequest(grace_seconds=60)


def find_verdict(run: Callable[[], object], folder: Path) -> tuple[str, str, str, str]:
    """Run a function as the main program of a rank; return error type, reason, action and message of the verdict."""
    folder.mkdir(parents=True)
    observed = node(folder, output=None)
    path = observed.run_folder.error_files / "ranks" / "attempt_0" / "0" / "error.json"
    path.parent.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        try:
            with raise_storage_faults():
                run()
        except Exception as error:
            ErrorHandler().record_exception(error)
    failure = find_first_failure(read_failures(observed.run_folder))
    assert failure is not None, "the error was lost"
    verdict = judge_failure(failure, observed)
    return failure.error_type, verdict.reason.value, verdict.action.value, verdict.message


def judge_failure(failure: RankFailure, observed: Any) -> Verdict:
    finished_node = FinishedNode(observed, TerminationMessage(), 1, time.time(), NO_STOP, failures=(failure,))
    NodeReporter(observed, ProcessOutput(None)).write_final_message(judge(finished_node))
    pod = finished_pod(job(), 0, message=observed.termination_log.read_text())
    observation = observe_pod(pod, is_tombstone=False)
    assert observation is not None
    return judge_node(observation.evidence)


class FailingRows(Dataset[tuple[Features, ...]]):
    """Rows that raise the error with their index."""

    def __init__(self, functions: Sequence[Callable[[], None]]) -> None:
        self._functions = functions

    def __getitem__(self, index: Item) -> tuple[Features, ...]:
        assert isinstance(index, int)
        self._functions[index]()
        return ({"input_ids": torch.zeros(1, dtype=torch.int64), "labels": torch.zeros(1, dtype=torch.int64)},)


def load_in_worker(functions: Sequence[Callable[[], None]]) -> Iterator[Any]:
    sampler = BatchSampler(RowOrder(np.ones(len(functions), dtype=np.int64), seed=None), Batch(1, 1, 1), rank=0)
    collate = Collator(0, SequenceLayout())
    return iter(build_dataloader(FailingRows(functions), sampler, collate, skips=LateSkips(), worker_count=1))


def tokenize_in_pool(fail: Callable[[], None]) -> None:
    list(map_in_order(lambda item: fail() if item == 3 else item, range(8), processes=2))


def save_in_thread(fail: Callable[[], None], output: OutputFolder) -> None:
    saver = CheckpointSaver(Checkpoints(output, keep_last=2))

    def write_files(_folder: Path) -> list[Path]:
        fail()
        return []

    saver.start(CheckpointPart(1, write_files, None, staging_seconds=0.0))
    saver.wait()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pool, "_MIN_ITEMS", 2)
    monkeypatch.setattr(process_pool, "_CHUNK_ITEMS", 2)


def test_a_loader_worker_keeps_the_identity_of_every_error(tmp_path: Path) -> None:
    loader = load_in_worker(list(ERRORS.values()))

    for name, fail in ERRORS.items():
        expected = find_verdict(fail, tmp_path / "main" / name)
        assert find_verdict(lambda: next(loader), tmp_path / "worker" / name) == expected, name


@pytest.mark.parametrize("name", ERRORS)
def test_the_tokenizing_pool_keeps_the_identity_of_an_error(name: str, tmp_path: Path) -> None:
    expected = find_verdict(ERRORS[name], tmp_path / "main")

    assert find_verdict(lambda: tokenize_in_pool(ERRORS[name]), tmp_path / "pool") == expected


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", ERRORS)
def test_the_saver_thread_keeps_the_identity_of_an_error(name: str, tmp_path: Path, output: OutputFolder) -> None:
    """The error is translated where files are written, as in the main thread."""

    def save_in_main_thread() -> None:
        Checkpoints(output, keep_last=2).stage(1, lambda _: ERRORS[name]() or [])

    expected = find_verdict(save_in_main_thread, tmp_path / "main")
    assert find_verdict(lambda: save_in_thread(ERRORS[name], output), tmp_path / "thread") == expected


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_a_tracker_is_one_warning(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heartbeat = HeartbeatWriter(tmp_path, rank=0, local_rank=0)
    tracker = SimpleNamespace(on_train_begin=lambda *_, **__: None, on_train_end=lambda *_, **__: None)
    tracker.on_log = lambda *_, **__: ERRORS[name]()
    recorder: Any = RecorderThreads({"wandb": tracker}, heartbeat)

    recorder.on_train_begin(None, None, None)
    for _ in range(3):
        recorder.on_log(None, None, None, logs={})
    recorder.on_train_end(None, None, None)

    assert [degradation.reason for degradation in heartbeat.degraded] == ["NotRecorded"]
    assert capsys.readouterr().out.count("warning: wandb is incomplete") == 1


@pytest.mark.parametrize("number", FILE_FAILED)
def test_a_storage_fault_in_a_decoding_thread_is_no_bad_video(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads of ffmpeg report errors by their number."""
    monkeypatch.setattr(av, "open", lambda *_, **__: av.error.err_check(-number))
    monkeypatch.setattr(video_frames, "open_data_file", lambda _: BytesIO())

    def decode() -> None:
        video = MediaItem(path="a.mp4", modality=Modality.VIDEO)
        with _translate_media_errors("rows.jsonl line 4", video), video_frames._open_video(video):
            pass

    *verdict, message = find_verdict(decode, tmp_path / "ffmpeg")
    assert verdict == ["StorageFault", "StorageFault", "Restart"]
    assert "rows.jsonl line 4: video a.mp4 cannot be read: " in message


class FailingFile(BytesIO):
    """A video file whose content cannot be read; the threads of ffmpeg pass the error to the caller of av.open."""

    def __init__(self, fail: Callable[[], None]) -> None:
        super().__init__()
        self._fail = fail

    def read(self, _size: int | None = -1) -> bytes:
        self._fail()
        raise AssertionError


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_while_a_video_is_decoded_keeps_its_identity(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is translated where images and videos are read, as in the main thread."""
    monkeypatch.setattr(video_frames, "open_data_file", lambda _: FailingFile(ERRORS[name]))
    video = MediaItem(path="a.mp4", modality=Modality.VIDEO)

    def read() -> None:
        with _translate_media_errors("rows.jsonl line 4", video):
            ERRORS[name]()

    def decode() -> None:
        with _translate_media_errors("rows.jsonl line 4", video), video_frames._open_video(video):
            pass

    assert find_verdict(decode, tmp_path / "decoding") == find_verdict(read, tmp_path / "main")


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.ENOMEM, "HostOutOfMemory"), (errno.ENOSPC, "DiskFull"), (errno.EMFILE, "UserCodeError")],
)
def test_a_lack_of_resources_is_no_bad_image(number: int, reason: str, tmp_path: Path) -> None:
    def read() -> None:
        with _translate_media_errors("rows.jsonl line 4", MediaItem(path="a.jpg")):
            raise OSError(number, os.strerror(number), "a.jpg")

    assert find_verdict(read, tmp_path / "rank")[1] == reason


@pytest.mark.parametrize("number", [errno.EACCES, errno.ELOOP, errno.EINVAL, errno.ENAMETOOLONG])
def test_an_error_about_the_file_itself_is_a_bad_row(number: int) -> None:
    with pytest.raises(errors.DatasetError), _translate_media_errors("rows.jsonl line 4", MediaItem(path="a.jpg")):
        raise OSError(number, os.strerror(number), "a.jpg")


KILLED = [
    pytest.param(signal.SIGKILL, "HostOutOfMemory", id="SIGKILL"),
    pytest.param(signal.SIGBUS, "SharedMemoryExhausted", id="SIGBUS"),
    pytest.param(signal.SIGSEGV, "RankCrashed", id="SIGSEGV"),
    pytest.param(signal.SIGABRT, "RankCrashed", id="SIGABRT"),
    pytest.param(signal.SIGUSR1, "RankKilled", id="another signal"),
]


@pytest.mark.parametrize(("number", "reason"), KILLED)
@pytest.mark.parametrize("child", ["loader worker", "tokenizing pool"])
def test_a_killed_child_has_the_verdict_of_its_signal(
    child: str, number: signal.Signals, reason: str, tmp_path: Path
) -> None:
    def kill() -> None:
        os.kill(os.getpid(), number)

    def run() -> None:
        list(load_in_worker([kill])) if child == "loader worker" else tokenize_in_pool(kill)

    assert find_verdict(run, tmp_path / "child")[1] == reason


class Unsendable:
    """Part of a micro-batch whose serialization fails, as that of a tensor with a full /dev/shm."""

    def __reduce__(self) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_error_while_a_batch_is_sent_is_raised() -> None:
    """Python only prints errors of the thread that sends the batches of a worker, and the rank would wait for ever."""
    no_targets = TargetTokens(*[torch.zeros(0)] * 3)
    sampler = BatchSampler(RowOrder(np.ones(1, dtype=np.int64), seed=None), Batch(1, 1, 1), rank=0)
    loader = build_dataloader(
        FailingRows([lambda: None]),
        sampler,
        lambda _: MicroBatch({"pixel_values": Unsendable()}, no_targets, (), ()),
        skips=LateSkips(),
        worker_count=1,
    )

    with pytest.raises(OSError, match="No space left on device"):
        next(iter(loader))


def test_an_error_of_a_batch_that_is_not_used_is_not_raised() -> None:
    """The loader reads ahead; after the last step, nobody waits for its batches."""
    loader = load_in_worker([lambda: None, ERRORS["EIO"], lambda: os._exit(1)])

    next(loader)
    del loader
