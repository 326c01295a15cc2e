"""Builder of the job identity that is stored in an output folder."""

from finetune_trainer.checkpoint.output_folder import Identity


def identity(*, uid: str = "ours", name: str = "", attempt: int = 0, fingerprint: str = "f1") -> Identity:
    return Identity(uid=uid, namespace="default", name=name or f"job-{uid}", attempt=attempt, fingerprint=fingerprint)
