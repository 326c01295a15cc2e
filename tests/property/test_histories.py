"""Whatever happens to a job, its operator, its nodes and the way between them: what holds in every history.

Set FINETUNE_EXAMPLES to search longer than the default does.
"""

import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.simulator.checks import check_history, check_undisturbed
from support.simulator.history import Scenario
from support.simulator.scenarios import failing_nodes, operator_troubles, scenarios, stale_caches

EXAMPLES = int(os.environ.get("FINETUNE_EXAMPLES", "250"))

searching = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example),
)


@searching
@given(scenarios(), st.data())
def test_one_operator_keeps_every_promise(scenario: Scenario, data: st.DataObject) -> None:
    check_history(scenario, data)


@searching
@given(stale_caches() | failing_nodes(), st.data())
def test_stale_caches_and_late_evidence_mislead_nobody(scenario: Scenario, data: st.DataObject) -> None:
    check_history(scenario, data)


@searching
@given(scenarios(takeovers=True), st.data())
def test_operators_that_all_believe_they_lead_never_publish_twice(scenario: Scenario, data: st.DataObject) -> None:
    check_history(scenario, data)


@searching
@given(operator_troubles(), st.data())
def test_trouble_of_the_operator_never_reaches_the_training(scenario: Scenario, data: st.DataObject) -> None:
    check_undisturbed(scenario, data)
