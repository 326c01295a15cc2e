"""Test the content of report.html, and that the page loads no external resources."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from finetune_trainer.metrics.step_meter import MeasuredInterval
from finetune_trainer.metrics.throughput import summarise_ranks
from finetune_trainer.report.attempt_history import AttemptEnding, RankTime
from finetune_trainer.report.html_report import ReportData, render_report, write_report
from finetune_trainer.report.svg_charts import Line, draw_bars, draw_lines
from testing.builders.run_summary import HISTORY, SUMMARY

GIB = 2**30
STEPS = 30
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

DATA = ReportData(
    title='default/<b>&"first"',
    job={"effective batch": "1 x 2 x 2 = 4", "dataset": {"train": [{"name": "/data/<train>.jsonl"}]}},
    log_history=[
        *(
            {
                "step": step,
                "loss": 3.0 / step,
                "learning_rate": 1e-4 * (1 - step / STEPS),
                "tokens_per_second": 1000.0 + step,
                "data_wait_share": 0.01,
                "scaling_efficiency": 0.9,
            }
            for step in range(1, STEPS + 1)
        ),
        {"step": STEPS, "eval_loss": 1.5},
    ],
    lengths=np.array([3, 7, 7, 90]),
    summary=SUMMARY,
    last_interval=summarise_ranks(
        [MeasuredInterval(steps=1, peak_bytes=GIB), MeasuredInterval(steps=1, peak_bytes=2 * GIB)], peak_flops=None
    ),
    own_step_seconds=(0.5, 0.25),
)
CHARTS = (
    "Loss",
    "Learning rate",
    "Throughput",
    "Scaling efficiency and GPU utilization",
    "Waiting for data",
    "Peak memory per rank",
    "Own time of each rank",
    "Lengths of samples",
)


def parse_figures(page: str) -> dict[str, ElementTree.Element]:
    """Return the figures of the page by heading; the XML parser accepts well-formed pages only."""
    body = page.removeprefix("<!DOCTYPE html>\n").replace(' xmlns="http://www.w3.org/2000/svg"', "")
    figures = ElementTree.fromstring(body).iter("figure")  # noqa: S314
    return {figure.findtext("h2") or "": figure for figure in figures}


def count_marks(figure: ElementTree.Element) -> int:
    """Count the points and bars of a chart."""
    return len([*figure.iter("circle"), *figure.iter("rect")])


def test_charts_contain_all_points_and_tables_all_rows() -> None:
    figures = parse_figures(render_report(DATA))

    assert tuple(figures) == (*CHARTS, "Job", "Environment")
    assert {name: count_marks(figures[name]) for name in CHARTS} == {
        "Loss": STEPS + 1,
        "Learning rate": STEPS,
        "Throughput": STEPS,
        "Scaling efficiency and GPU utilization": STEPS,
        "Waiting for data": STEPS,
        "Peak memory per rank": 2,
        "Own time of each rank": 2,
        "Lengths of samples": 22,
    }
    assert "dashed: forecast, 3 GiB" in "".join(figures["Peak memory per rank"].itertext())
    assert len([*figures["Job"].iter("tr")]) == 2


def read_summary(page: str) -> str:
    """Return the text of the summary, which is the first element after the heading."""
    body = page.removeprefix("<!DOCTYPE html>\n").replace(' xmlns="http://www.w3.org/2000/svg"', "")
    elements = list(ElementTree.fromstring(body)[1])  # noqa: S314
    assert [element.tag for element in elements] == ["h1", "section", "main"]
    return "\n".join(elements[1].itertext())


def test_the_report_opens_with_outcome_batch_evaluation_memory_and_use_of_gpus() -> None:
    summary = read_summary(render_report(DATA))

    for fact in (
        SUMMARY.outcome,
        "2 h 5 min",
        SUMMARY.batch,
        "eval_loss 1.5 at step 30",
        "2.00 GiB, 67% of the forecast of 3.00 GiB",
        "4 GPU-hours: ",
        "useful 3.17 (79%)",
        "starting 0.5 (12%)",
        "lost 0.333 (8%)",
    ):
        assert fact in summary


def test_the_summary_lists_what_ended_each_attempt_and_what_the_next_one_changed() -> None:
    summary = read_summary(render_report(DATA))

    for text in (
        "0 to 12",
        "node 1, rank 1: OutOfMemoryError",
        "CUDA out of memory <on> GPU 0",
        "10 to 30",
        "batch: 2 x 1 x 2 = 4 → 1 x 2 x 2 = 4",
        "1 attempt(s) ended before they recorded anything",
    ):
        assert text in summary


def test_the_summary_of_a_run_without_records_has_no_times() -> None:
    summary = read_summary(render_report(replace(DATA, summary=replace(SUMMARY, history=None, on_gpu=False))))

    assert SUMMARY.outcome in summary
    assert "hours" not in summary
    assert "Restarts" not in summary


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"history": None}, id="no records"),
        pytest.param({"peak_bytes": None, "forecast_bytes": None}, id="no step"),
        pytest.param({"outcome": "a\x1b[31m\x00 \ud83d <b> & \uffff"}, id="characters that XML forbids"),
        pytest.param({"best_evaluation": None, "on_gpu": False}, id="no evaluation"),
    ],
)
@pytest.mark.parametrize("seconds", [0.0, 0.5, 1e9])
def test_the_page_is_xml_in_every_state_of_a_job(changes: dict[str, Any], seconds: float) -> None:
    attempts = tuple(
        replace(each, time=RankTime(seconds, seconds / 3, 0.0), ending=AttemptEnding("a\x07", "]]>\x0b"))
        for each in HISTORY.attempts
    )
    summary = replace(SUMMARY, **{"history": replace(HISTORY, attempts=attempts), **changes})
    page = render_report(replace(DATA, title="a\x00", summary=summary))

    ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))  # noqa: S314  our own page
    page.encode()


def test_chart_without_data_is_left_out() -> None:
    entries = [
        {key: value for key, value in entry.items() if key != "scaling_efficiency"} for entry in DATA.log_history
    ]

    assert "Scaling efficiency" not in render_report(replace(DATA, log_history=entries))


def test_job_values_are_escaped_in_html() -> None:
    figures = parse_figures(render_report(DATA))

    assert "/data/<train>.jsonl" in "".join(figures["Job"].itertext())
    assert "<b>" not in render_report(DATA)


def test_page_references_no_external_resources() -> None:
    page = render_report(DATA).replace("http://www.w3.org/2000/svg", "")

    assert re.findall(r"https?:|<script|<link|\bsrc=|url\(|@import", page) == []


def test_report_of_an_attempt_without_steps_has_no_measurements() -> None:
    figures = parse_figures(render_report(replace(DATA, last_interval=None, own_step_seconds=(), log_history=[])))

    assert "nothing was measured" in "".join(figures["Loss"].itertext())
    assert "nothing was measured" in "".join(figures["Peak memory per rank"].itertext())
    assert count_marks(figures["Lengths of samples"]) == 22


def test_long_line_is_downsampled_and_keeps_its_last_point() -> None:
    points = tuple((float(step), float(step)) for step in range(10_000))

    chart = draw_lines("Loss", [Line("training", points)], x_name="step")

    assert 300 < chart.count("<circle") <= 402
    assert "training 9999: 9999" in chart


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(((1.0, 2.0),), id="one point"),
        pytest.param(((1.0, 0.0), (2.0, 0.0)), id="zeros"),
        pytest.param(((1.0, -5.0), (2.0, -5.0)), id="equal values"),
        pytest.param(((1.0, 1e-12), (2.0, 3e300)), id="values of very different magnitude"),
        pytest.param(((1.0, float("nan")), (2.0, 3.0)), id="NaN"),
    ],
)
def test_all_points_are_inside_the_chart(points: tuple[tuple[float, float], ...]) -> None:
    chart = ElementTree.fromstring(draw_lines("Loss", [Line("training", points)], x_name="step"))  # noqa: S314

    circles = [element for element in chart.iter() if element.tag.endswith("circle")]
    assert circles
    assert all(0 <= float(circle.attrib["cx"]) <= 640 and 0 <= float(circle.attrib["cy"]) <= 240 for circle in circles)


def test_bar_with_value_zero_has_no_height() -> None:
    chart = draw_bars("Memory", [("rank 0", 0.0)])

    assert 'height="0.00"' in chart


def run_browser(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    quiet_flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    profile = f"--user-data-dir={page.parent / 'profile'}"
    offline_flags = "--host-resolver-rules=MAP * ~NOTFOUND"
    command = (BROWSER, *quiet_flags, profile, offline_flags, "--enable-logging=stderr", *options, page.as_uri())
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="NO BROWSER: install chromium to test report.html in a browser")
def test_browser_renders_every_chart_without_console_messages(tmp_path: Path) -> None:
    write_report(DATA, tmp_path)
    page = tmp_path / "report.html"
    script = """<script>addEventListener("load", () => { const visible = [...document.querySelectorAll("svg")].map(
      (svg) => [svg.getAttribute("aria-label"), [...svg.querySelectorAll("circle, rect")].filter(
        (mark) => mark.getBoundingClientRect().width > 0).length].join("=")).join(";");
      document.body.setAttribute("data-visible", visible + ";" + document.fonts.size); });</script></body>"""
    instrumented_page = tmp_path / "instrumented.html"
    instrumented_page.write_text(page.read_text().replace("</body>", script))

    browser = run_browser(instrumented_page, "--dump-dom")

    match: Any = re.search(r'data-visible="([^"]*)"', browser.stdout)
    counts = dict(pair.split("=") for pair in match.group(1).split(";")[:-1])
    assert tuple(counts) == ("GPU-hours by use", *CHARTS)
    assert all(int(count) >= 2 for count in counts.values()), counts
    assert ":CONSOLE" not in browser.stderr, browser.stderr


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="NO BROWSER: install chromium to test report.html in a browser")
def test_page_follows_the_color_scheme_of_the_browser(tmp_path: Path) -> None:
    """The background of a screenshot is white in light mode and nearly black in dark mode."""
    image = pytest.importorskip("PIL.Image")
    write_report(DATA, tmp_path)

    def read_corner_red_value(*options: str) -> int:
        screenshot = tmp_path / f"page{len(options)}.png"
        run_browser(tmp_path / "report.html", f"--screenshot={screenshot}", "--window-size=1400,1500", *options)
        red, *_ = image.open(screenshot).convert("RGB").getpixel((2, 2))
        return int(red)

    assert read_corner_red_value() == 255
    assert read_corner_red_value("--blink-settings=preferredColorScheme=0") < 60
