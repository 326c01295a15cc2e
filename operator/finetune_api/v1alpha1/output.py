"""Defines spec.output: the volume for checkpoints and results, and a Hub repository for uploads."""

from typing import Annotated

from pydantic import Field, StringConstraints

from finetune_api.v1alpha1.base import HubName, Model
from finetune_api.v1alpha1.name_types import HUB_ID_PATTERN
from finetune_api.v1alpha1.pod_types import PersistentVolumeClaimSource, RelativePath


class PushToHub(Model):
    """A repository to upload the result to; needs a token with write access from a Secret in spec.env."""

    hub: HubName = Field(
        default="huggingface",
        description="The Hugging Face Hub, with HF_TOKEN, or ModelScope, with MODELSCOPE_API_TOKEN.",
    )
    repo: Annotated[str, StringConstraints(pattern=HUB_ID_PATTERN, max_length=96)] = Field(
        description="owner/name; created if it does not exist."
    )
    private: bool = Field(default=True, description="Create the repository as private.")


class Output(Model):
    """Location of checkpoints and the result: <subPath>/{checkpoints,result,logs}."""

    persistent_volume_claim: PersistentVolumeClaimSource = Field(
        description="The claim; it must be ReadWriteMany if the job has more than one node."
    )
    sub_path: RelativePath | None = Field(
        default=None, description="Folder of this job inside the claim (default: <namespace>/<name>)."
    )
    overwrite: bool = Field(default=False, description="Replace the output of another job after the first checkpoint.")
    push_to_hub: PushToHub | None = Field(
        default=None, description="Also upload the result, before the job is Complete."
    )
