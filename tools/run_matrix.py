"""Run end-to-end tests on other Kubernetes versions and on clusters with IPv6, one cluster after the other.

On each other version of Kubernetes, the tests with the marker `versions` run; on an IPv6-only and on a dual-stack
cluster of the default version, those with the marker `ip_family`. `make test` runs all tests on IPv4 except these and
those with the marker `long`.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from run_tests import REPORTS, SuiteResult, format_counts, render_summary, run_pytest
from testing.cluster.host.addresses import IpFamily
from testing.cluster.host.cache import Cache
from testing.cluster.host.commands import HarnessError
from testing.cluster.host.versions import OTHER_KUBERNETES, PINNED
from testing.cluster.images.go_build import build_all
from testing.cluster.throwaway import ThrowawayCluster

CLUSTER_NAME = "matrix"


@dataclass(frozen=True)
class MatrixCluster:
    """A cluster on which the tests with a marker run."""

    kubernetes: str
    ip_family: IpFamily
    marker: str

    @property
    def title(self) -> str:
        """Version of Kubernetes, with the IP family unless that is IPv4."""
        return self.kubernetes if self.ip_family is IpFamily.IPV4 else f"{self.kubernetes}-{self.ip_family}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that select this cluster for the end-to-end tests."""
        return {
            "CLUSTER": "throwaway",
            "CLUSTER_NAME": CLUSTER_NAME,
            "CLUSTER_KUBERNETES": self.kubernetes,
            "CLUSTER_IP_FAMILY": self.ip_family,
        }


CLUSTERS = (
    *(MatrixCluster(version, IpFamily.IPV4, "versions") for version in OTHER_KUBERNETES),
    *(MatrixCluster(PINNED.kubernetes, family, "ip_family") for family in (IpFamily.IPV6, IpFamily.DUAL)),
)


def main() -> int:
    """Run all selected clusters, even after a failure; return exit code 1 if a test fails or a build stops."""
    parser = argparse.ArgumentParser(description=__doc__)
    titles = [cluster.title for cluster in CLUSTERS]
    parser.add_argument("--only", default="", help=f"clusters to run, separated by commas: {', '.join(titles)}")
    only = [title for title in parser.parse_args().only.split(",") if title]
    if unknown := sorted({*only} - {*titles}):
        parser.error(f"--only {','.join(unknown)}: expected some of {', '.join(titles)}")
    results = [run_cluster(cluster) for cluster in CLUSTERS if not only or cluster.title in only]
    report = "\n".join((*render_table(results), "", *render_summary(results)))
    print(f"\n{report}", flush=True)
    (REPORTS / "matrix.txt").write_text(report + "\n")
    return 0 if all(result.passed for result in results) else 1


def run_cluster(cluster: MatrixCluster) -> SuiteResult:
    """Build the programs of a cluster, and run its tests; without a build, the result has no tests."""
    try:
        build_all(Cache.from_environment(), replace(PINNED, kubernetes=cluster.kubernetes))
        return run_pytest(
            cluster.title,
            *("--timeout=900", "-m", cluster.marker, "tests/e2e"),
            environment=cluster.environment,
        )
    except HarnessError as error:
        print(f"{cluster.title}: {error}", flush=True)
        return SuiteResult(cluster.title, passed=False, seconds=0.0)
    finally:
        ThrowawayCluster.from_name(CLUSTER_NAME).down()


def render_table(results: Sequence[SuiteResult]) -> Iterator[str]:
    """Yield the lines of a table of test modules and clusters."""
    modules = sorted({case.module for result in results for case in result.cases})
    rows = [
        ["", *(result.name for result in results)],
        *(
            [module, *(format_counts(count_outcomes(result, module)) or "-" for result in results)]
            for module in modules
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def count_outcomes(result: SuiteResult, module: str) -> Counter[str]:
    """Return the number of test cases of a module by outcome."""
    return Counter(case.outcome for case in result.cases if case.module == module)


if __name__ == "__main__":
    sys.exit(main())
