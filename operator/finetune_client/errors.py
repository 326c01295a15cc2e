"""Errors of the client; each message names the object and the remedy."""


class ClientError(Exception):
    """Raised if a request fails; `status` is the HTTP status of the API server, None if it did not respond."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class JobFailed(ClientError):
    """Raised if a job has failed, or has ended without reaching a state; the message contains the cause."""


class WaitTimeout(ClientError):
    """Raised if a job does not reach a state in time; the job itself is not affected."""
