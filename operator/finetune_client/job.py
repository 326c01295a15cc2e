"""A job as the API server stores it, with its parsed metadata and status."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from pydantic import ValidationError

from finetune_api.schema.validation_errors import explain_invalid_fields
from finetune_api.v1alpha1.job import KIND, FineTuneJob, FineTuneJobSpec, ObjectMeta
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import AttemptRecord, Condition, JobStatus, Phase
from finetune_client.errors import ClientError
from finetune_client.job_html import render_job_html
from finetune_operator.names import API_VERSION
from finetune_operator.observation.ownership import RawBody


@dataclass(frozen=True)
class Job:
    """A job of the cluster at one point in time.

    The spec is parsed on demand, so that a job whose spec another release wrote can be listed, suspended and deleted.
    """

    body: RawBody = field(repr=False, compare=False)
    metadata: ObjectMeta
    status: JobStatus

    @classmethod
    def parse(cls, body: RawBody) -> Self:
        """Parse an object of the API server.

        Raises:
            ClientError: The object has another kind, or metadata or status are not those of a FineTuneJob.
        """
        found = (body.get("apiVersion"), body.get("kind"))
        if found != (API_VERSION, KIND):
            raise ClientError(f"expected a {KIND} of {API_VERSION}, found a {found[1]} of {found[0]}")
        try:
            metadata = ObjectMeta.model_validate(body.get("metadata") or {}, extra="ignore")
            status = JobStatus.model_validate(body.get("status") or {}, extra="ignore")
        except ValidationError as error:
            name = (body.get("metadata") or {}).get("name")
            raise ClientError(f"finetunejob {name}: {'; '.join(explain_invalid_fields(error))}") from error
        return cls(body, metadata, status)

    def _repr_html_(self) -> str:
        """Return the representation in a notebook."""
        return render_job_html(self.metadata, self.status)

    @property
    def name(self) -> str:
        """Name of the job, metadata.name."""
        return self.metadata.name

    @property
    def namespace(self) -> str:
        """Namespace of the job, metadata.namespace."""
        return self.metadata.namespace

    @cached_property
    def spec(self) -> FineTuneJobSpec:
        """The spec with the defaults with which the job began.

        Raises:
            ClientError: This version cannot parse the spec.
        """
        try:
            return FineTuneJob.parse(self.body).spec
        except ValidationError as error:
            raise ClientError(f"finetunejob {self.name}: {'; '.join(explain_invalid_fields(error))}") from error

    @property
    def phase(self) -> Phase | None:
        """One-word summary of the state; None before the operator has processed the job."""
        return self.status.phase

    @property
    def is_finished(self) -> bool:
        """Whether the job is Complete or Failed, after which its status does not change."""
        return self.status.completion_time is not None

    @property
    def attempt(self) -> AttemptRecord | None:
        """Record of the newest attempt."""
        return self.status.attempts[-1] if self.status.attempts else None

    def find_condition(self, condition_type: str) -> Condition | None:
        """Return the condition with this type."""
        return next((each for each in self.status.conditions if each.type == condition_type), None)

    @property
    def failure(self) -> Condition | None:
        """The condition Failed of a failed job."""
        condition = self.find_condition("Failed")
        return condition if condition is not None and condition.status == "True" else None


def find_reason(name: str) -> Reason | None:
    """Return the reason with this name; None for a reason of a newer release."""
    return Reason(name) if name in list(Reason) else None
