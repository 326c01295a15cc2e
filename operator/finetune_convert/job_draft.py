"""Collects the spec of the job that a conversion produces, and the entries about it."""

from dataclasses import dataclass, field

from finetune_convert.conversion import ConversionRequest, Entry, EntryEffect, Tree
from finetune_convert.secret_values import is_secret
from finetune_convert.shell.words import Word

API_VERSION, KIND = "finetune.dev/v1alpha1", "FineTuneJob"
DEFAULT_OUTPUT_CLAIM = "models"
MAX_ENV_VALUE = 32_768


@dataclass
class JobDraft:
    """A job under construction; `secret_name` is the Secret that it refers to."""

    request: ConversionRequest
    name: str
    spec: Tree = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)

    @property
    def secret_name(self) -> str:
        """Name of the Secret with all secrets of the job."""
        return f"{self.name}-secrets"

    def set(self, path: str, value: object) -> None:
        """Set a field such as training.learningRate."""
        *parents, last = path.split(".")
        node = self.spec
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value

    def get(self, path: str) -> object:
        """Return a field, or None if it is not set."""
        node: object = self.spec
        for part in path.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    def note(
        self, option: str, effect: EntryEffect, message: str, *, field: str | None = None, line: int | None = None
    ) -> None:
        """Add an entry about an option; it has no line if the conversion added the option."""
        self.entries.append(Entry(option, effect, message, field, line or None))

    def add_env(self, name: str, word: Word) -> None:
        """Add an environment variable with a literal value; a secret refers to the Secret instead."""
        if is_secret(name, word.text):
            self.add_secret(name, name, line=word.line)
        elif word.unresolved:
            self.note(
                name,
                EntryEffect.CHANGED,
                f"its value {word.text} is only known to a shell; set it in spec.env",
                line=word.line,
            )
        elif len(word.text) > MAX_ENV_VALUE:
            self.note(name, EntryEffect.CHANGED, "its value is too long for spec.env; use a ConfigMap", line=word.line)
        else:
            self._set_env({"name": name, "value": word.text})
            self.note(name, EntryEffect.TAKEN, "", field="env", line=word.line)

    def add_secret(self, option: str, variable: str, *, line: int | None = None) -> None:
        """Add an environment variable whose value is in the Secret of the job.

        line: of the value in the input; None if the input does not contain it
        """
        reference = {"secretKeyRef": {"name": self.secret_name, "key": variable}}
        self._set_env({"name": variable, "valueFrom": reference})
        reason = "the job needs it" if line is None else "the value is not copied"
        command = f"kubectl create secret generic {self.secret_name} --from-literal={variable}=..."
        message = f"{reason}; create it with: {command}"
        self.note(option, EntryEffect.SECRET, message, field="env", line=line)

    def _set_env(self, variable: Tree) -> None:
        kept = [other for other in self.spec.get("env", []) if other["name"] != variable["name"]]
        self.spec["env"] = [*kept, variable]

    def add_output(self) -> None:
        """Set the claim for checkpoints and the result."""
        claim = self.request.output_claim
        if claim is None:
            claim = DEFAULT_OUTPUT_CLAIM
            message = f"claim {claim} is assumed for checkpoints and the result; name yours with --output-claim"
            self.note("output", EntryEffect.EDIT, message, field="output.persistentVolumeClaim.claimName")
        self.set("output.persistentVolumeClaim.claimName", claim)
