"""Where what was learned goes."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from finetune_api.v1alpha1.base import Model
from finetune_api.v1alpha1.pod_types import PersistentVolumeClaimSource, RelativePath


class PushToHub(Model):
    """A repository that takes the result, with a token from a Secret in spec.env that may write there."""

    hub: Literal["huggingface", "modelscope"] = Field(
        default="huggingface",
        description="The Hugging Face Hub, with HF_TOKEN, or ModelScope, with MODELSCOPE_API_TOKEN.",
    )
    repo: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+$", max_length=96)] = Field(
        description="owner/name; made if it is not there."
    )
    private: bool = Field(default=True, description="Of a repository that is made: only its owner sees it.")


class Output(Model):
    """Where checkpoints and the result are written: <subPath>/{checkpoints,result,logs}."""

    persistent_volume_claim: PersistentVolumeClaimSource = Field(
        description="The claim; for more than one node it must be ReadWriteMany."
    )
    sub_path: RelativePath | None = Field(
        default=None, description="Folder of this job inside the claim (default: <namespace>/<name>)."
    )
    overwrite: bool = Field(default=False, description="Replace what another job left in that folder.")
    push_to_hub: PushToHub | None = Field(
        default=None, description="Also upload the result, before the job is Complete."
    )
