"""Settings of all suites: property tests have no time limit per example, because CI machines differ in speed."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
