"""report.html: what is on it, and that it needs nothing beside it."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from finetune_trainer.metrics.cross_rank import summarise
from finetune_trainer.metrics.html_report import Run, render, write_report
from finetune_trainer.metrics.svg_charts import Line, draw_bars, draw_lines
from finetune_trainer.metrics.throughput import Interval

GIB = 2**30
STEPS = 30
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

RUN = Run(
    title='default/<b>&"first"',
    job={"effective batch": "1 x 2 x 2 = 4", "dataset": {"train": [{"name": "/data/<train>.jsonl"}]}},
    history=[
        *(
            {
                "step": step,
                "loss": 3.0 / step,
                "learning_rate": 1e-4 * (1 - step / STEPS),
                "tokens_per_second": 1000.0 + step,
                "data_wait_share": 0.01,
            }
            for step in range(1, STEPS + 1)
        ),
        {"step": STEPS, "eval_loss": 1.5},
    ],
    lengths=np.array([3, 7, 7, 90]),
    measured=summarise([Interval(steps=1, peak_memory=GIB), Interval(steps=1, peak_memory=2 * GIB)], peak_flops=None),
    own_seconds=(0.5, 0.25),
    expected_memory=3 * GIB,
)
CHARTS = (
    "Loss",
    "Learning rate",
    "Throughput",
    "Waiting for data",
    "Peak memory per rank",
    "Own time of each rank",
    "Lengths of samples",
)


def figures(page: str) -> dict[str, ElementTree.Element]:
    """By heading; parsed as XML, which forgives nothing."""
    body = page.removeprefix("<!DOCTYPE html>\n").replace(' xmlns="http://www.w3.org/2000/svg"', "")
    found = ElementTree.fromstring(body).iter("figure")  # noqa: S314
    return {figure.findtext("h2") or "": figure for figure in found}


def marks(figure: ElementTree.Element) -> int:
    """Points and bars."""
    return len([*figure.iter("circle"), *figure.iter("rect")])


def test_every_chart_has_its_points_and_every_table_its_rows() -> None:
    found = figures(render(RUN))

    assert tuple(found) == (*CHARTS, "Job", "Environment")
    assert {name: marks(found[name]) for name in CHARTS} == {
        "Loss": STEPS + 1,
        "Learning rate": STEPS,
        "Throughput": STEPS,
        "Waiting for data": STEPS,
        "Peak memory per rank": 2,
        "Own time of each rank": 2,
        "Lengths of samples": 22,
    }
    assert "dashed: forecast, 3 GiB" in "".join(found["Peak memory per rank"].itertext())
    assert len([*found["Job"].iter("tr")]) == 2


def test_what_comes_from_the_job_is_text_and_no_markup() -> None:
    found = figures(render(RUN))

    assert "/data/<train>.jsonl" in "".join(found["Job"].itertext())
    assert "<b>" not in render(RUN)


def test_the_page_asks_for_nothing() -> None:
    page = render(RUN).replace("http://www.w3.org/2000/svg", "")

    assert re.findall(r"https?:|<script|<link|\bsrc=|url\(|@import", page) == []


def test_an_attempt_that_only_published_has_a_page_too() -> None:
    found = figures(render(replace(RUN, measured=None, own_seconds=(), history=[])))

    assert "nothing was measured" in "".join(found["Loss"].itertext())
    assert "nothing was measured" in "".join(found["Peak memory per rank"].itertext())
    assert marks(found["Lengths of samples"]) == 22


def test_a_long_run_is_thinned_and_keeps_its_last_point() -> None:
    points = tuple((float(step), float(step)) for step in range(10_000))

    drawn = draw_lines("Loss", [Line("training", points)], x_name="step")

    assert 300 < drawn.count("<circle") <= 402
    assert "training 9999: 9999" in drawn


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(((1.0, 2.0),), id="one point"),
        pytest.param(((1.0, 0.0), (2.0, 0.0)), id="zeros"),
        pytest.param(((1.0, -5.0), (2.0, -5.0)), id="the same"),
        pytest.param(((1.0, 1e-12), (2.0, 3e300)), id="far apart"),
        pytest.param(((1.0, float("nan")), (2.0, 3.0)), id="no number"),
    ],
)
def test_any_numbers_make_a_chart_within_its_frame(points: tuple[tuple[float, float], ...]) -> None:
    drawn = ElementTree.fromstring(draw_lines("Loss", [Line("training", points)], x_name="step"))  # noqa: S314

    circles = [element for element in drawn.iter() if element.tag.endswith("circle")]
    assert circles
    assert all(0 <= float(each.attrib["cx"]) <= 640 and 0 <= float(each.attrib["cy"]) <= 240 for each in circles)


def test_bars_without_height_stand_on_the_ground() -> None:
    drawn = draw_bars("Memory", [("rank 0", 0.0)])

    assert 'height="0.00"' in drawn


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    quiet = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    profile = f"--user-data-dir={page.parent / 'profile'}"
    offline = "--host-resolver-rules=MAP * ~NOTFOUND"
    command = (BROWSER, *quiet, profile, offline, "--enable-logging=stderr", *options, page.as_uri())
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="NO BROWSER HERE: install chromium to see report.html as its readers do")
def test_a_browser_shows_every_chart_and_complains_of_nothing(tmp_path: Path) -> None:
    write_report(RUN, tmp_path)
    page = tmp_path / "report.html"
    measure = """<script>addEventListener("load", () => { const seen = [...document.querySelectorAll("svg")].map(
      (svg) => [svg.getAttribute("aria-label"), [...svg.querySelectorAll("circle, rect")].filter(
        (mark) => mark.getBoundingClientRect().width > 0).length].join("=")).join(";");
      document.body.setAttribute("data-seen", seen + ";" + document.fonts.size); });</script></body>"""
    watched = tmp_path / "watched.html"
    watched.write_text(page.read_text().replace("</body>", measure))

    shown = browse(watched, "--dump-dom")

    seen: Any = re.search(r'data-seen="([^"]*)"', shown.stdout)
    counts = dict(pair.split("=") for pair in seen.group(1).split(";")[:-1])
    assert tuple(counts) == CHARTS
    assert all(int(count) >= 2 for count in counts.values()), counts
    assert ":CONSOLE" not in shown.stderr, shown.stderr


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="NO BROWSER HERE: install chromium to see report.html as its readers do")
def test_the_page_is_dark_where_the_reader_is(tmp_path: Path) -> None:
    """The background of a picture of each: white, and nearly black."""
    image = pytest.importorskip("PIL.Image")
    write_report(RUN, tmp_path)

    def corner(*options: str) -> int:
        picture = tmp_path / f"page{len(options)}.png"
        browse(tmp_path / "report.html", f"--screenshot={picture}", "--window-size=1400,1500", *options)
        red, *_ = image.open(picture).convert("RGB").getpixel((2, 2))
        return int(red)

    assert corner() == 255
    assert corner("--blink-settings=preferredColorScheme=0") < 60
