"""Command line of `make search`, which runs histories in parallel and prints shrunk counterexamples."""

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from testing.simulator.scenarios import SCENARIO_KINDS
from testing.simulator.search import Counterexample, SearchResult, explain, reduce_garbage_collection, search

CHUNK_SIZE = 50
PROGRESS_INTERVAL_SECONDS = 60.0

Chunk = tuple[str, range]


def main() -> int:
    """Run the search and exit with 1 if an invariant was violated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=100_000, help="in total, divided equally between the kinds")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one per core)")
    parser.add_argument("--start", type=int, default=1_000_000, help="first seed; `make test-simulation` begins at 0")
    parser.add_argument("--kinds", nargs="+", choices=SCENARIO_KINDS, default=tuple(SCENARIO_KINDS), metavar="KIND")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # the operator logs a warning for each injected fault
    started_at = time.monotonic()
    phases_by_kind: defaultdict[str, Counter[str]] = defaultdict(Counter)
    counterexamples: list[Counterexample] = []
    reported_at = started_at
    with multiprocessing.get_context("fork").Pool(options.workers, initializer=reduce_garbage_collection) as pool:
        chunks = _generate_seed_chunks(options.kinds, options.histories, options.start)
        for kind, result in pool.imap_unordered(_search_chunk, chunks):
            phases_by_kind[kind] += result.phases
            if result.counterexample is not None:
                counterexamples.append(result.counterexample)
                print(f"seed {result.counterexample.seed} of {kind} violates an invariant", flush=True)
            if time.monotonic() - reported_at > PROGRESS_INTERVAL_SECONDS:
                reported_at = time.monotonic()
                count = sum(phases.total() for phases in phases_by_kind.values())
                print(
                    f"{datetime.now(UTC):%H:%M:%S} {count} histories, {len(counterexamples)} violate an invariant",
                    flush=True,
                )
            if time.monotonic() - started_at > 60 * options.minutes:
                break
        pool.terminate()
    print(render_table(phases_by_kind, seconds=time.monotonic() - started_at, first_seed=options.start))
    print(f"{len(counterexamples)} of them violated an invariant" if counterexamples else "no invariant was violated")
    for counterexample in counterexamples:
        print(explain(counterexample))
    return 1 if counterexamples else 0


def render_table(phases_by_kind: dict[str, Counter[str]], *, seconds: float, first_seed: int) -> str:
    """Return a Markdown table that counts the histories of each kind by their final phase."""
    phases = sorted({phase for counter in phases_by_kind.values() for phase in counter})
    lines = [_format_row("kind", "histories", *phases), "| --- |" + " ---: |" * (len(phases) + 1)]
    lines += [
        _format_row(kind, counter.total(), *(counter[phase] for phase in phases))
        for kind, counter in sorted(phases_by_kind.items())
    ]
    count = sum(counter.total() for counter in phases_by_kind.values())
    summary = f"{count} histories from seed {first_seed} in {seconds:.0f} s"
    return "\n".join((*lines, "", summary))


def _format_row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _generate_seed_chunks(kinds: Sequence[str], histories: int, first_seed: int) -> Iterator[Chunk]:
    """Yield chunks of seeds, alternating between the kinds."""
    histories_per_kind = -(-histories // len(kinds))
    for first in range(first_seed, first_seed + histories_per_kind, CHUNK_SIZE):
        for kind in kinds:
            yield kind, range(first, min(first + CHUNK_SIZE, first_seed + histories_per_kind))


def _search_chunk(chunk: Chunk) -> tuple[str, SearchResult]:
    kind, seeds = chunk
    return kind, search(kind, seeds)


if __name__ == "__main__":
    sys.exit(main())
