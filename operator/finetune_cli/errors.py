"""Exit codes of the commands, and the error for input that the user has to correct."""

EXIT_OK = 0
EXIT_FAILED = 1  # the job has failed, or does not fit
EXIT_BAD_INPUT = 2  # same as typer's exit code for an invalid flag
EXIT_CLUSTER = 3  # the API server rejected the request or did not respond
EXIT_TIMEOUT = 4  # the job did not reach the state in time
EXIT_INTERRUPTED = 130


class BadInput(Exception):
    """Raised for invalid input; each problem is one line with file or flag, field and remedy."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
