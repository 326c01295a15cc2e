"""Tests of the progress in the lines that training programs print."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_supervisor.messages import TrainingProgress
from finetune_supervisor.status.progress_lines import ProgressLines

BAR = " 12%|█▏        | 12/100 [00:10<01:20,  1.1it/s]"
LOSS = "{'loss': 1.5, 'learning_rate': 5e-05, 'epoch': 0.1}"


def read(*lines: str) -> TrainingProgress | None:
    """Return the progress after these lines."""
    progress_lines = ProgressLines()
    for line in lines:
        progress_lines.read(line)
    return progress_lines.progress


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param(BAR, TrainingProgress(12, total_steps=100, eta_seconds=80), id="bar without description"),
        pytest.param(f"Train: {BAR}", TrainingProgress(12, total_steps=100, eta_seconds=80), id="training bar"),
        pytest.param(
            "  0%|          | 0/100 [00:00<?, ?it/s]", TrainingProgress(0, total_steps=100), id="unknown remaining time"
        ),
        pytest.param(
            " 12%|#2        | 12/100 [1:00:10<26:01:20, 301.00s/it]",
            TrainingProgress(12, total_steps=100, eta_seconds=93_680),
            id="hours",
        ),
        pytest.param(LOSS, TrainingProgress(loss=1.5, learning_rate=5e-05, epoch=0.1), id="numbers"),
        pytest.param(
            "{'loss': '1.5', 'grad_norm': '2', 'learning_rate': '5e-05', 'epoch': '0.1'}",
            TrainingProgress(loss=1.5, grad_norm=2.0, learning_rate=5e-05, epoch=0.1),
            id="numbers as text",
        ),
        pytest.param(
            f"[INFO|2026-11-27 05:59:49] callbacks.py:307 >> {LOSS}",
            TrainingProgress(loss=1.5, learning_rate=5e-05, epoch=0.1),
            id="log line",
        ),
        pytest.param(
            '{"loss": 1.5, "epoch": 0.1, "global_step/max_steps": "12/100", "remaining_time": "1h 0m 5s"}',
            TrainingProgress(12, total_steps=100, loss=1.5, epoch=0.1, eta_seconds=3605),
            id="steps in a dict",
        ),
        pytest.param("{'eval_loss': 1.25, 'epoch': 1.0}", TrainingProgress(eval_loss=1.25, epoch=1.0), id="evaluation"),
        pytest.param(
            "1|25|Loss: 1.54:   3%|▎         | 25/800 [00:50<25:50,  2.00s/it]",
            TrainingProgress(25, epoch=25 / 800, loss=1.54),
            id="torchtune without the number of epochs",
        ),
        pytest.param(
            "Epoch:[2/3](50/100), loss: 0.3008, logits_loss: 0.2, aux_loss: 0.1, lr: 0.00000123, epoch_time: 2.0min",
            TrainingProgress(150, total_steps=300, epoch=1.5, loss=0.3008, learning_rate=1.23e-06, eta_seconds=360),
            id="MiniMind, whose steps and remaining time are those of an epoch",
        ),
        pytest.param(f"[rank0]:{BAR}", TrainingProgress(12, total_steps=100, eta_seconds=80), id="prefix of rank 0"),
    ],
)
def test_line_contains_progress(line: str, expected: TrainingProgress) -> None:
    progress = read(line)

    assert progress is not None
    assert {**vars(progress), "from_log": None} == vars(expected)
    assert progress.from_log


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("Map:  40%|████      | 400/1000 [00:01<00:01, 300.00 examples/s]", id="datasets"),
        pytest.param("Loading checkpoint shards:  50%|█████     | 1/2 [00:01<00:01,  1.00s/it]", id="weights"),
        pytest.param("Downloading shards: 100%|██████████| 2/2 [00:01<00:00,  1.00it/s]", id="download"),
        pytest.param("model.safetensors:  41%|████▏     | 412M/988M [00:05<00:07, 80.0MB/s]", id="bytes"),
        pytest.param("Tokenizing train dataset:  40%|████      | 4/10 [00:01<00:01, 3.00 examples/s]", id="TRL"),
        pytest.param("Val:  60%|██████    | 3/5 [00:00<00:00, 23.58it/s]", id="evaluation of ms-swift"),
        pytest.param("  0%|          | 0/5 [00:00<?, ?it/s]\x1b[A", id="bar below the training bar"),
        pytest.param("{'learning_rate': 1e-4, 'epoch': 3, 'batch_size': 4}", id="configuration"),
        pytest.param("{'loss': 'sigmoid', 'epoch': 3}", id="name of a loss"),
        pytest.param("{'train_runtime': 6.4, 'train_loss': 3.6, 'epoch': 2.0}", id="summary"),
        pytest.param(f"[rank1]:{BAR}", id="another rank"),
        pytest.param(f"[default3]:{LOSS}", id="another rank of torchrun --tee"),
        pytest.param("12it [00:10, 1.1it/s]", id="bar without a total"),
    ],
)
def test_line_contains_no_training_progress(line: str) -> None:
    assert read(line) is None


def test_loss_identifies_the_training_bar() -> None:
    other_bar = " 90%|█████████ | 9/10 [00:10<00:01,  1.1it/s]"

    progress = read(other_bar, BAR, LOSS, other_bar)

    assert progress is not None
    assert (progress.step, progress.total_steps, progress.loss) == (12, 100, 1.5)
    assert read(other_bar) == TrainingProgress(9, total_steps=10, eta_seconds=1, from_log=True)


def test_second_training_of_a_program_replaces_the_first() -> None:
    second_bar = " 10%|█         | 1/10 [00:10<00:01,  1.1it/s]"

    progress = read(BAR, LOSS, second_bar, LOSS, second_bar)

    assert progress is not None
    assert (progress.step, progress.total_steps) == (1, 10)


def test_torchtune_prints_the_number_of_epochs_in_its_configuration() -> None:
    progress = read("epochs: 3", "2|900|Loss: 1.5:  12%|█▎        | 100/800 [01:00<07:00,  1.66it/s]")

    assert progress is not None
    assert (progress.step, progress.total_steps, progress.epoch) == (900, 2400, 1.125)
    assert progress.eta_seconds == 420 * 1500 // 700


@given(
    st.lists(
        st.text()
        | st.from_regex(r"(Train: )?\d*%\|[#|]*\| ?\d*/\d* \[[\d:]*<[\d:?]*", fullmatch=True)
        | st.from_regex(r"Epoch:\[\d*/\d*\]\(\d*/\d*\), loss: [\d.e+-]*, epoch_time: [\d.e+-]*min", fullmatch=True)
        | st.from_regex(
            r"\{'loss': '?[\d.einfa+-]*'?, 'epoch': [\d.e+-]*, 'remaining_time': '[\d dhms]*'", fullmatch=True
        )
        | st.from_regex(r"\d*\|\d*\|Loss: [\d.e+-]*:  1%\|\| \d*/\d* \[\d*<\d*", fullmatch=True)
    )
)
def test_no_line_raises_an_exception(lines: list[str]) -> None:
    progress = read(*lines)

    assert progress is None or 0 <= progress.step < 2**63


@pytest.mark.parametrize("unit", ["%|", "%|#| 1/1 [", "'loss': 1", "Epoch:[", "1|1|Loss: ", "0", " ", "loss: ", "{"])
def test_time_of_a_long_line_grows_linearly(unit: str) -> None:
    def measure(size: int) -> float:
        line = unit * (size // len(unit))
        started_at = time.process_time()
        read(line)
        return time.process_time() - started_at

    assert min(measure(400_000) for _ in range(3)) < 40 * max(min(measure(40_000) for _ in range(3)), 1e-3)
