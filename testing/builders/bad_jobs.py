"""Invalid specs, with the error messages expected from the API server and from the pydantic models."""

from dataclasses import dataclass

from testing.builders.jobs import RawBody, command


@dataclass(frozen=True)
class BadJob:
    """Changes that make a valid spec invalid (None removes a field), with a substring of each error message.

    `api_server_error` is None if the API server accepts the job, because CEL cannot check the rule.
    """

    fields: RawBody
    api_server_error: str | None
    model_error: str


def build_volume(name: str = "more", mount_path: str = "/more", **source: RawBody) -> RawBody:
    return {"name": name, "mountPath": mount_path, **(source or {"emptyDir": {}})}


TRAIN = {"train": [{"name": "/data/train.jsonl"}]}

BAD_JOBS: dict[str, BadJob] = {
    "unknown field": BadJob({"trainign": {}}, "trainign", "unknown field; did you mean spec.training?"),
    "snake_case field": BadJob({"num_nodes": 2}, "num_nodes", "did you mean spec.numNodes?"),
    "unknown nested field": BadJob({"lora": {"rank": 8}}, "rank", "spec.lora.rank: unknown field"),
    "wrong type": BadJob({"numNodes": "two"}, "numNodes", 'must be an integer, found "two"'),
    "zero nodes": BadJob({"numNodes": 0}, "greater than or equal to 1", "greater than or equal to 1, found 0"),
    "reserved chat template variable": BadJob(
        {"dataset": {**TRAIN, "chatTemplateKwargs": {"tokenize": True}}},
        None,
        "spec.dataset.chatTemplateKwargs: tokenize: is set by the trainer; remove it",
    ),
    "chat template variable with a list": BadJob(
        {"dataset": {**TRAIN, "chatTemplateKwargs": {"documents_": ["a"]}}},
        None,
        "documents_: must be a boolean, a number or a string",
    ),
    "long chat template variables": BadJob(
        {"dataset": {**TRAIN, "chatTemplateKwargs": {"a": "x" * 5000}}}, None, "must have at most 4096 characters"
    ),
    "too many chat template variables": BadJob(
        {"dataset": {**TRAIN, "chatTemplateKwargs": {f"v{number}": 1 for number in range(17)}}},
        "at most 16",
        "at most 16",
    ),
    "no model": BadJob({"model": None}, "model is required", "model is required"),
    "no method": BadJob({"sft": None}, "exactly one training method", "exactly one training method"),
    "two methods": BadJob({"dpo": {}}, "exactly one training method", "exactly one training method"),
    "unknown dpo loss": BadJob(
        {"sft": None, "dpo": {"lossType": "kto"}}, 'supported values: "sigmoid"', "'sigmoid', 'ipo'"
    ),
    "labelSmoothing without the robust loss": BadJob(
        {"sft": None, "dpo": {"labelSmoothing": 0.1}}, "requires lossType robust", "requires lossType robust"
    ),
    "robust loss without labelSmoothing": BadJob(
        {"sft": None, "dpo": {"lossType": "robust"}}, "requires lossType robust", "requires lossType robust"
    ),
    "labelSmoothing of 0.5": BadJob(
        {"sft": None, "dpo": {"lossType": "robust", "labelSmoothing": 0.5}}, "less than 0.5", "less than 0.5"
    ),
    "no dataset": BadJob({"dataset": None}, "dataset is required", "dataset is required"),
    "no output": BadJob({"output": None}, "output is required", "output is required"),
    "method and command": BadJob({"command": {"script": "train.py"}}, "exactly one training method", "found 2"),
    "command without script or exec": BadJob(command({}), "exactly one of script, exec", "exactly one of script, exec"),
    "command with script and exec": BadJob(
        command({"script": "train.py", "exec": ["swift"]}), "exactly one of script, exec", "exactly one of script, exec"
    ),
    "empty exec": BadJob(command({"exec": []}), "exactly one of script, exec", "exactly one of script, exec"),
    "args with exec": BadJob(
        command({"exec": ["swift"], "args": ["sft"]}), "args belong to script", "args belong to script"
    ),
    "command without image": BadJob(
        command({"script": "train.py"}, image=None), "image is required", "image is required"
    ),
    "command with model": BadJob(
        command({"script": "train.py"}, model={"name": "m"}),
        "model applies to the operator's trainer",
        "model applies to the",
    ),
    "command with dataset": BadJob(
        command({"script": "train.py"}, dataset={"train": [{"name": "d"}]}),
        "dataset applies to the",
        "dataset applies to the",
    ),
    "command with training": BadJob(
        command({"script": "train.py"}, training={}),
        "training applies to the operator's trainer",
        "training applies to the",
    ),
    "command with lora": BadJob(
        command({"script": "train.py"}, lora={}), "lora applies to the operator's trainer", "lora applies to the"
    ),
    **{
        f"command with {backend}": BadJob(
            command({"script": "train.py"}, **{backend: fields}),
            f"{backend} applies to the operator's trainer",
            f"{backend} applies to the",
        )
        for backend, fields in (("deepspeed", {"preset": "zero2"}), ("fsdp", {}))
    },
    "command with output.overwrite": BadJob(
        command({"script": "train.py"}, output={"persistentVolumeClaim": {"claimName": "models"}, "overwrite": True}),
        "output.overwrite applies to the operator's trainer",
        "output.overwrite applies to the",
    ),
    "command with output.pushToHub": BadJob(
        command(
            {"script": "train.py"},
            output={"persistentVolumeClaim": {"claimName": "models"}, "pushToHub": {"repo": "acme/support"}},
        ),
        "output.pushToHub applies to the operator's trainer",
        "output.pushToHub applies to the",
    ),
    "pushToHub repository without owner": BadJob(
        {"output": {"persistentVolumeClaim": {"claimName": "models"}, "pushToHub": {"repo": "support"}}},
        "output.pushToHub.repo",
        "output.pushToHub.repo",
    ),
    "adapter with rank of its own": BadJob(
        {"lora": {"adapter": "/data/adapter", "r": 4}}, "adapter brings its own rank", "adapter brings its own rank"
    ),
    "deepspeed and fsdp": BadJob(
        {"fsdp": {}, "deepspeed": {"preset": "zero2"}}, "deepspeed and fsdp exclude", "deepspeed and fsdp exclude"
    ),
    "4-bit weights with zero3": BadJob(
        {"lora": {"quantization": "nf4"}, "deepspeed": {"preset": "zero3"}},
        "4-bit weights cannot be sharded",
        "4-bit weights cannot be sharded",
    ),
    "4-bit weights with fsdp": BadJob(
        {"lora": {"quantization": "nf4"}, "fsdp": {}},
        "4-bit weights cannot be sharded",
        "4-bit weights cannot be sharded",
    ),
    "4-bit weights with stage 3 in deepspeed.config": BadJob(
        {"lora": {"quantization": "nf4"}, "deepspeed": {"config": {"zero_optimization": {"stage": 3}}}},
        None,
        "4-bit weights cannot be sharded",
    ),
    "maxMemory below the memory limit": BadJob(
        {"restartPolicy": {"maxMemory": "8Gi"}, "resources": {"limits": {"memory": "16Gi"}}},
        None,
        "maxMemory (8Gi) is less than resources.limits.memory (16Gi)",
    ),
    "maxMemory without a memory limit": BadJob(
        {"restartPolicy": {"maxMemory": "64Gi"}, "resources": {"limits": {"cpu": 1}}},
        "resources.limits.memory, which is not set",
        "resources.limits.memory, which is not set",
    ),
    "probe with deepspeed": BadJob(
        {"training": {"probe": True}, "deepspeed": {"preset": "zero2"}},
        "training.probe: gradients inside DeepSpeed",
        "training.probe: gradients inside DeepSpeed",
    ),
    "unknown quantization": BadJob(
        {"lora": {"quantization": "int8"}}, 'supported values: "nf4"', "must be 'nf4', found"
    ),
    "deepspeed preset and config": BadJob(
        {"deepspeed": {"preset": "zero2", "config": {"zero_optimization": {"stage": 2}}}},
        "either preset or config",
        "either preset or config",
    ),
    "unknown deepspeed preset": BadJob(
        {"deepspeed": {"preset": "zero4"}}, 'supported values: "zero1"', "'zero1', 'zero2'"
    ),
    "empty train list": BadJob({"dataset": {"train": []}}, "at least 1 item", "at least 1 item"),
    "revision of a path": BadJob(
        {"model": {"name": "/models/base", "revision": "v1.0"}},
        "only a model on the Hub has revisions",
        "only a model on the Hub has revisions",
    ),
    "non-numeric sample size": BadJob(
        {"dataset": {"train": [{"name": "/data/rows.jsonl#many"}]}},
        "a path must not contain #",
        "a path must not contain #",
    ),
    "sample size of zero": BadJob(
        {"dataset": {"train": [{"name": "/data/rows.jsonl#0"}]}},
        "a path must not contain #",
        "a path must not contain #",
    ),
    "eval and splitDatasetRatio": BadJob(
        {"dataset": {"train": [{"name": "a"}], "eval": [{"name": "b"}], "splitDatasetRatio": 0.1}},
        "eval and splitDatasetRatio exclude each other",
        "eval and splitDatasetRatio exclude each other",
    ),
    "splitDatasetRatio of 1": BadJob(
        {"dataset": {"train": [{"name": "a"}], "splitDatasetRatio": 1}}, "less than 1", "less than 1"
    ),
    "packing without maxLength": BadJob(
        {"dataset": {"train": [{"name": "a"}], "packing": True}}, "packing needs maxLength", "packing needs maxLength"
    ),
    "packing with dpo": BadJob(
        {"sft": None, "dpo": {}, "dataset": {"train": [{"name": "a"}], "packing": True, "maxLength": 64}},
        "packing works only with sft",
        "packing works only with sft",
    ),
    "unknown scheduler": BadJob(
        {"training": {"lrSchedulerType": "cosin"}}, 'supported values: "linear", "cosine"', "'linear', 'cosine'"
    ),
    "minPixels above maxPixels": BadJob(
        {"model": {"name": "m", "minPixels": 1000, "maxPixels": 784}},
        "minPixels is more than",
        "minPixels is more than",
    ),
    "vision fields of text training": BadJob(
        {"model": {"name": "m", "textOnly": True, "maxPixels": 784, "freeze": []}},
        "textOnly trains no images and videos; remove",
        "textOnly trains no images and videos; remove freeze, maxPixels",
    ),
    "more tiles than an image can have": BadJob(
        {"model": {"name": "m", "maxTiles": 65}}, "less than or equal to 64", "less than or equal to 64"
    ),
    "unknown model part to freeze": BadJob(
        {"model": {"name": "m", "freeze": ["head"]}}, 'supported values: "vision", "aligner"', "'vision', 'aligner'"
    ),
    "all model parts frozen": BadJob(
        {"model": {"name": "m", "freeze": ["vision", "aligner", "language"]}}, "at most 2 items", "at most 2 items"
    ),
    "learning rate of zero": BadJob({"training": {"learningRate": 0}}, "greater than 0", "greater than 0"),
    "globalBatchSize not divisible by the ranks": BadJob(
        {"training": {"globalBatchSize": 7}}, "globalBatchSize is 7", "globalBatchSize 7 is not a multiple"
    ),
    "inconsistent batch sizes": BadJob(
        {"training": {"globalBatchSize": 8, "perDeviceTrainBatchSize": 3, "gradientAccumulationSteps": 2}},
        "is 3 x 2 x 4",
        "3 x 2 x 4 = 24",
    ),
    "automatic batch not divisible by the ranks": BadJob(
        {"training": {"globalBatchSize": 7, "perDeviceTrainBatchSize": "auto"}},
        "is 1 x 1 x 4",
        "globalBatchSize 7 is not a multiple",
    ),
    "automatic batch without globalBatchSize": BadJob(
        {"training": {"perDeviceTrainBatchSize": "auto"}}, "auto needs globalBatchSize", "auto needs globalBatchSize"
    ),
    "automatic batch with gradientAccumulationSteps": BadJob(
        {"training": {"perDeviceTrainBatchSize": "auto", "globalBatchSize": 8, "gradientAccumulationSteps": 2}},
        "auto also chooses gradientAccumulationSteps",
        "auto also chooses gradientAccumulationSteps",
    ),
    "non-numeric batch size": BadJob(
        {"training": {"perDeviceTrainBatchSize": "max"}}, "should match '^auto$'", "must be an integer or 'auto', found"
    ),
    "batch size of zero": BadJob(
        {"training": {"perDeviceTrainBatchSize": 0}}, "must be auto, or 1 to 65536", "greater than or equal to 1"
    ),
    "globalBatchSize not divisible by the GPUs": BadJob(
        {"nprocPerNode": None, "resources": {"limits": {"nvidia.com/gpu": 3}}, "training": {"globalBatchSize": 8}},
        "is 1 x 1 x 6",
        "ranks = 6",
    ),
    "globalBatchSize not divisible by the GPUs of another vendor": BadJob(
        {"nprocPerNode": None, "resources": {"limits": {"amd.com/gpu": 3}}, "training": {"globalBatchSize": 8}},
        None,
        "ranks = 6",
    ),
    "device of an unknown kind without nprocPerNode": BadJob(
        {"nprocPerNode": None, "resources": {"limits": {"example.com/npu": 4}}},
        None,
        "resources.limits: the number of ranks for example.com/npu is unknown",
    ),
    "TPUs": BadJob(
        {"resources": {"limits": {"google.com/tpu": 4}}},
        None,
        "resources.limits: google.com/tpu: TPUs are not supported",
    ),
    "device that the trainer cannot use": BadJob(
        {"resources": {"limits": {"habana.ai/gaudi": 2}}},
        None,
        "resources.limits: habana.ai/gaudi: the operator's trainer runs on NVIDIA and AMD GPUs",
    ),
    "several MIG slices per node": BadJob(
        {"nprocPerNode": None, "resources": {"limits": {"nvidia.com/mig-1g.10gb": 2}}},
        None,
        "resources.limits: nvidia.com/mig-1g.10gb is 2 for 2 ranks per node, but CUDA shows one MIG slice",
    ),
    "several ranks on a time-sliced GPU": BadJob(
        {"nprocPerNode": 2, "resources": {"limits": {"nvidia.com/gpu.shared": 1}}},
        None,
        "resources.limits: nvidia.com/gpu.shared is 1 for 2 ranks per node, but several time slices",
    ),
    "resource claims without nprocPerNode": BadJob(
        {
            "nprocPerNode": None,
            "podTemplate": {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "four-gpus"}]},
            "resources": {"claims": [{"name": "gpus"}], "limits": {"cpu": 32, "memory": "256Gi"}},
        },
        "podTemplate.resourceClaims: the number of ranks for the claimed devices is unknown",
        "podTemplate.resourceClaims: the number of ranks for the claimed devices is unknown",
    ),
    "resource claims and a network resource without nprocPerNode": BadJob(
        {
            "nprocPerNode": None,
            "podTemplate": {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "four-gpus"}]},
            "resources": {"claims": [{"name": "gpus"}], "limits": {"rdma/hca": 1}},
        },
        None,
        "podTemplate.resourceClaims: the number of ranks for the claimed devices is unknown",
    ),
    "numTrainEpochs and maxSteps": BadJob(
        {"training": {"numTrainEpochs": 1, "maxSteps": 10}}, "exclude each other", "exclude each other"
    ),
    "reportTo none with another tracker": BadJob(
        {"training": {"reportTo": ["none", "wandb"]}}, "none excludes all others", "none excludes all others"
    ),
    "evalSteps without evaluation rows": BadJob(
        {"training": {"evalSteps": 10}}, "dataset.eval is empty", "dataset.eval is empty"
    ),
    "loadBestModelAtEnd without evalSteps": BadJob(
        {"training": {"loadBestModelAtEnd": True}}, "set evalSteps", "set evalSteps"
    ),
    "earlyStoppingPatience without evalSteps": BadJob(
        {"training": {"earlyStoppingPatience": 3}}, "set evalSteps", "set evalSteps"
    ),
    "loadBestModelAtEnd without evaluation rows": BadJob(
        {"training": {"loadBestModelAtEnd": True, "evalSteps": 10}}, "dataset.eval is empty", "dataset.eval is empty"
    ),
    "gradientCheckpointingInterval without gradientCheckpointing": BadJob(
        {"training": {"gradientCheckpointingInterval": 2}},
        "requires gradientCheckpointing: true",
        "requires gradientCheckpointing: true",
    ),
    "asyncCheckpoints with lora": BadJob(
        {"training": {"asyncCheckpoints": True}}, "written synchronously", "written synchronously"
    ),
    "torchCompile with deepspeed": BadJob(
        {"training": {"torchCompile": True}, "deepspeed": {"preset": "zero2"}},
        "replace deepspeed by fsdp",
        "replace deepspeed by fsdp",
    ),
    "adamw_8bit with fsdp": BadJob(
        {"training": {"optim": "adamw_8bit"}, "fsdp": {}},
        "cannot be sharded over ranks",
        "cannot be sharded over ranks",
    ),
    "earlyStoppingThreshold without earlyStoppingPatience": BadJob(
        {"training": {"earlyStoppingThreshold": 0.1}},
        "requires earlyStoppingPatience",
        "requires earlyStoppingPatience",
    ),
    "unused metricForBestModel": BadJob(
        {"training": {"metricForBestModel": "eval_loss"}},
        "metricForBestModel is used only",
        "metricForBestModel is used only",
    ),
    "unknown metric": BadJob(
        {"training": {"metricForBestModel": "loss"}}, 'supported values: "eval_loss"', "'eval_loss', 'eval_rewards"
    ),
    "reward metric without dpo": BadJob(
        {
            "dataset": {"train": [{"name": "a"}], "eval": [{"name": "b"}]},
            "training": {
                "evalSteps": 5,
                "loadBestModelAtEnd": True,
                "metricForBestModel": "eval_rewards/accuracies",
            },
        },
        "exist only with dpo",
        "exist only with dpo",
    ),
    "lrScaling without learningRate": BadJob(
        {"training": {"lrScaling": {"rule": "sqrt", "baseBatchSize": 16}}},
        "lrScaling scales learningRate",
        "lrScaling scales learningRate",
    ),
    "lrScaling without baseBatchSize": BadJob(
        {"training": {"learningRate": 0.1, "lrScaling": {"rule": "linear"}}}, "baseBatchSize", "baseBatchSize"
    ),
    "learning rate of the frozen vision tower": BadJob(
        {"training": {"visionLearningRate": 1e-5}}, "vision is frozen", "vision is frozen"
    ),
    "learning rate of a frozen aligner": BadJob(
        {"model": {"name": "m", "freeze": ["aligner"]}, "training": {"alignerLearningRate": 1e-5}},
        "aligner is frozen",
        "aligner is frozen",
    ),
    "unknown memory unit": BadJob(
        {"resources": {"limits": {"memory": "4Gx"}}}, "must be a quantity", "must be a quantity"
    ),
    "negative memory": BadJob(
        {"resources": {"limits": {"memory": "-4Gi"}}}, "must be a quantity", "must be a quantity"
    ),
    "reserved rendezvous variable": BadJob(
        {"env": [{"name": "RANK", "value": "0"}]}, "RANK is set by the operator", "RANK is set by the operator"
    ),
    "reserved torchrun variable": BadJob(
        {"env": [{"name": "PET_NNODES", "value": "1"}]}, "PET_NNODES is set by the", "PET_NNODES is set by the"
    ),
    "duplicate variable": BadJob(
        {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}, "uplicate", "A is given twice"
    ),
    "Kueue without a queue": BadJob(
        {"scheduling": {"provider": "Kueue"}}, "queueName is required", "queueName is required with provider Kueue"
    ),
    "PodGroup with a queue": BadJob(
        {"scheduling": {"provider": "PodGroup", "queueName": "gpus"}},
        "the provider has no queues",
        "scheduling: queueName: provider PodGroup has no queues; remove it",
    ),
    "topology with Volcano": BadJob(
        {"scheduling": {"provider": "Volcano", "schedulingConstraints": {"topology": [{"key": "example.com/rack"}]}}},
        "the provider has no topology by label",
        "schedulingConstraints.topology: provider Volcano has no topology by label; remove it",
    ),
    "preferred topology with PodGroup": BadJob(
        {
            "scheduling": {
                "provider": "PodGroup",
                "schedulingConstraints": {"topology": [{"key": "example.com/rack", "mode": "Preferred"}]},
            }
        },
        "the provider supports only the mode Required",
        "schedulingConstraints.topology[0].mode: provider PodGroup supports only Required",
    ),
    "label of the queue beside scheduling": BadJob(
        {
            "scheduling": {"queueName": "gpus"},
            "podTemplate": {"labels": {"kueue.x-k8s.io/queue-name": "others"}},
        },
        "podTemplate.labels: the labels with the prefix kueue.x-k8s.io/ are set by scheduling; remove them",
        "podTemplate.labels: kueue.x-k8s.io/queue-name is set by scheduling; remove it",
    ),
    "two volumes with one mountPath": BadJob(
        {"volumes": [build_volume("a"), build_volume("b")]}, "mountPath is used twice", "mountPath /more is used twice"
    ),
    "two volumes with one name": BadJob(
        {"volumes": [build_volume("a", "/a"), build_volume("a", "/b")]}, "uplicate", "name a is used twice"
    ),
    "reserved volume name": BadJob(
        {"volumes": [build_volume("output")]}, "volumes: the names output, config", "name output is reserved"
    ),
    "reserved mountPath": BadJob(
        {"volumes": [build_volume(mount_path="/dev/shm/")]},
        "volumes: the mount paths /,",
        "mountPath /dev/shm is reserved",
    ),
    "two volumes whose mountPaths differ by a slash": BadJob(
        {"volumes": [build_volume("a", "/a"), build_volume("b", "/a/")]}, None, "mountPath /a is used twice"
    ),
    "volume without source": BadJob(
        {"volumes": [{"name": "a", "mountPath": "/a"}]}, "exactly one volume source", "exactly one source"
    ),
    "volume with two sources": BadJob(
        {"volumes": [build_volume(emptyDir={}, secret={"secretName": "s"})]},
        "exactly one volume source",
        "exactly one source",
    ),
    "subPath outside of the claim": BadJob(
        {"output": {"persistentVolumeClaim": {"claimName": "models"}, "subPath": "a/../../b"}},
        "must not contain '..'",
        "must not contain '..'",
    ),
    "reserved label": BadJob(
        {"podTemplate": {"labels": {"finetune.dev/job-name": "other"}}},
        "podTemplate.labels: the prefix finetune.dev/ is reserved",
        "podTemplate.labels: finetune.dev/job-name is reserved",
    ),
    "reserved annotation": BadJob(
        {"podTemplate": {"annotations": {"finetune.dev/spec": "other"}}},
        "podTemplate.annotations: the prefix finetune.dev/ is reserved",
        "podTemplate.annotations: finetune.dev/spec is reserved",
    ),
    "label with a prefix that ends with the reserved one": BadJob(
        {"podTemplate": {"labels": {"my.finetune.dev/team": "a"}}}, None, "my.finetune.dev/team is reserved"
    ),
    "gate of Kueue beside scheduling": BadJob(
        {
            "scheduling": {"queueName": "gpus"},
            "podTemplate": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]},
        },
        "podTemplate.schedulingGates: gates with the prefix kueue.x-k8s.io/ are set by Kueue because of scheduling;"
        " remove them",
        "podTemplate.schedulingGates: kueue.x-k8s.io/admission is set by Kueue",
    ),
    "scheduling gate without a qualified name": BadJob(
        {"podTemplate": {"schedulingGates": [{"name": "acme/"}]}}, "should match", "match pattern"
    ),
    "two scheduling gates with one name": BadJob(
        {"podTemplate": {"schedulingGates": [{"name": "a"}, {"name": "a"}]}}, "uplicate", "a is given twice"
    ),
    "hostNetwork without room for the status port": BadJob(
        {"podTemplate": {"hostNetwork": True}, "network": {"masterPort": 65535, "interface": "eth0"}},
        "network.masterPort: with podTemplate.hostNetwork, the status port is the one after it",
        "network.masterPort: with podTemplate.hostNetwork, the status port is the one after it",
    ),
    "hostNetwork on several nodes without an interface": BadJob(
        {"podTemplate": {"hostNetwork": True}},
        "podTemplate.hostNetwork: set network.interface",
        "podTemplate.hostNetwork: set network.interface",
    ),
    "resource claim without a source": BadJob(
        {"podTemplate": {"resourceClaims": [{"name": "gpus"}]}},
        "exactly one of resourceClaimName, resourceClaimTemplateName",
        "exactly one of resourceClaimName, resourceClaimTemplateName",
    ),
    "resource claim with two sources": BadJob(
        {
            "podTemplate": {
                "resourceClaims": [{"name": "g", "resourceClaimName": "a", "resourceClaimTemplateName": "b"}]
            }
        },
        "exactly one of resourceClaimName, resourceClaimTemplateName",
        "exactly one of resourceClaimName, resourceClaimTemplateName",
    ),
    "claim of the container that the pod does not have": BadJob(
        {
            "podTemplate": {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "two-gpus"}]},
            "resources": {"claims": [{"name": "gpu"}]},
        },
        "resources.claims: gpu is not in podTemplate.resourceClaims",
        "resources.claims: gpu is not in podTemplate.resourceClaims",
    ),
    "two claims of the container with one name": BadJob(
        {
            "podTemplate": {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "two-gpus"}]},
            "resources": {"claims": [{"name": "gpus", "request": "a"}, {"name": "gpus", "request": "b"}]},
        },
        "uplicate",
        "gpus is given twice",
    ),
    "minDomains of a preferred spread": BadJob(
        {
            "podTemplate": {
                "topologySpreadConstraints": [
                    {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway", "minDomains": 2}
                ]
            }
        },
        "minDomains works only with whenUnsatisfiable DoNotSchedule",
        "minDomains works only with whenUnsatisfiable DoNotSchedule",
    ),
    "spread constraint without a maximum": BadJob(
        {
            "podTemplate": {
                "topologySpreadConstraints": [{"topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway"}]
            }
        },
        "maxSkew",
        "topologySpreadConstraints[0].maxSkew: is required",
    ),
    "two equal spread constraints": BadJob(
        {
            "podTemplate": {
                "topologySpreadConstraints": [
                    {"maxSkew": skew, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"} for skew in (1, 2)
                ]
            }
        },
        "uplicate",
        "rack, DoNotSchedule is given twice",
    ),
}
