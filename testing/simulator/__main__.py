"""`make search`: histories by the million, in several processes; what breaks a promise is explained at the end."""

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime

from testing.simulator.scenarios import KINDS
from testing.simulator.search import Finding, Found, explain, search

PIECE = 200
TOLD_EVERY_SECONDS = 60.0

Piece = tuple[str, range]


def main() -> int:
    """Exit code 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=100_000, help="in all, an equal share of each kind")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one per core)")
    parser.add_argument(
        "--start", type=int, default=1_000_000, help="the first seed; `make test-simulation` begins at 0"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # troubles are the subject, and the operator warns of each
    began = time.monotonic()
    ends: defaultdict[str, Counter[str]] = defaultdict(Counter)
    findings: list[Finding] = []
    told = began
    with multiprocessing.get_context("fork").Pool(options.workers, initializer=_collect_seldom) as pool:
        for kind, found in pool.imap_unordered(_search, _pieces(options.histories, options.start)):
            ends[kind] += found.phases
            if found.finding is not None:
                findings.append(found.finding)
                print(f"seed {found.finding.seed} of {kind} breaks a promise", flush=True)
            if time.monotonic() - told > TOLD_EVERY_SECONDS:
                told = time.monotonic()
                count = sum(phases.total() for phases in ends.values())
                print(f"{datetime.now(UTC):%H:%M:%S} {count} histories, {len(findings)} break a promise", flush=True)
            if time.monotonic() - began > 60 * options.minutes:
                break
        pool.terminate()
    print(render_table(ends, seconds=time.monotonic() - began, first_seed=options.start))
    print(f"{len(findings)} of them broke a promise" if findings else "every promise was kept")
    for finding in findings:
        print(explain(finding))
    return 1 if findings else 0


def render_table(ends: dict[str, Counter[str]], *, seconds: float, first_seed: int) -> str:
    """How many histories of each kind, and how they ended."""
    phases = sorted({phase for counted in ends.values() for phase in counted})
    lines = [_row("kind", "histories", *phases), "| --- |" + " ---: |" * (len(phases) + 1)]
    lines += [_row(kind, seen.total(), *(seen[phase] for phase in phases)) for kind, seen in sorted(ends.items())]
    count = sum(counted.total() for counted in ends.values())
    said = f"{count} histories from seed {first_seed} in {seconds:.0f} s"
    return "\n".join((*lines, "", said))


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _pieces(histories: int, start: int) -> Iterator[Piece]:
    """Of all kinds in turn."""
    each = -(-histories // len(KINDS))
    for first in range(start, start + each, PIECE):
        for kind in KINDS:
            yield kind, range(first, min(first + PIECE, start + each))


def _search(piece: Piece) -> tuple[str, Found]:
    kind, seeds = piece
    return kind, search(kind, seeds)


def _collect_seldom() -> None:
    gc.freeze()  # what was imported stays, and a history is soon over: looking for garbage less often is 6 % faster
    gc.set_threshold(50_000)


if __name__ == "__main__":
    sys.exit(main())
