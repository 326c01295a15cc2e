"""Specs that must be refused, with what the API server and what the models say. One table for both."""

from dataclasses import dataclass
from typing import Any

from testing.builders.jobs import command

Raw = dict[str, Any]


@dataclass(frozen=True)
class BadJob:
    """Fields laid over a valid spec (None removes one), and words that each of the two must say."""

    fields: Raw
    api_server: str
    models: str


def volume(name: str = "more", mount_path: str = "/more", **source: Raw) -> Raw:
    return {"name": name, "mountPath": mount_path, **(source or {"emptyDir": {}})}


BAD_JOBS: dict[str, BadJob] = {
    "unknown field": BadJob({"trainign": {}}, "trainign", "unknown field; did you mean spec.training?"),
    "a field in the words of Python": BadJob({"num_nodes": 2}, "num_nodes", "did you mean spec.numNodes?"),
    "unknown field deep down": BadJob({"lora": {"rank": 8}}, "rank", "spec.lora.rank: unknown field"),
    "wrong type": BadJob({"numNodes": "two"}, "numNodes", 'must be an integer, found "two"'),
    "zero nodes": BadJob({"numNodes": 0}, "greater than or equal to 1", "greater than or equal to 1, found 0"),
    "no model": BadJob({"model": None}, "model", "model"),
    "no method": BadJob({"sft": None}, "exactly one training method", "exactly one training method"),
    "two methods": BadJob({"dpo": {}}, "exactly one training method", "exactly one training method"),
    "an unknown loss": BadJob(
        {"sft": None, "dpo": {"lossType": "kto"}}, 'supported values: "sigmoid"', "'sigmoid', 'ipo'"
    ),
    "smoothing of a loss that has none": BadJob(
        {"sft": None, "dpo": {"labelSmoothing": 0.1}}, "belongs to lossType robust", "belongs to lossType robust"
    ),
    "robust without its smoothing": BadJob(
        {"sft": None, "dpo": {"lossType": "robust"}}, "belongs to lossType robust", "belongs to lossType robust"
    ),
    "half of the labels flipped": BadJob(
        {"sft": None, "dpo": {"lossType": "robust", "labelSmoothing": 0.5}}, "less than 0.5", "less than 0.5"
    ),
    "no rows at all": BadJob({"dataset": None}, "dataset is required", "dataset is required"),
    "no output": BadJob({"output": None}, "output is required", "output is required"),
    "a method and a command": BadJob({"command": {"script": "train.py"}}, "exactly one training method", "found 2"),
    "a command without a program": BadJob(command({}), "exactly one of script, exec", "exactly one of script, exec"),
    "a command of two programs": BadJob(
        command({"script": "train.py", "exec": ["swift"]}), "exactly one of script, exec", "exactly one of script, exec"
    ),
    "a command of no words": BadJob(
        command({"exec": []}), "exactly one of script, exec", "exactly one of script, exec"
    ),
    "arguments of a program": BadJob(
        command({"exec": ["swift"], "args": ["sft"]}), "arguments of script", "arguments of script"
    ),
    "a command without an image": BadJob(
        command({"script": "train.py"}, image=None), "image is required", "image is required"
    ),
    "a command beside a model": BadJob(
        command({"script": "train.py"}, model={"name": "m"}), "model is for the operator's own", "model is for the"
    ),
    "a command beside rows": BadJob(
        command({"script": "train.py"}, dataset={"train": [{"name": "d"}]}), "dataset is for the", "dataset is for the"
    ),
    "a command beside settings of the trainer": BadJob(
        command({"script": "train.py"}, training={}), "training is for the operator's own", "training is for the"
    ),
    "a command beside adapters": BadJob(
        command({"script": "train.py"}, lora={}), "lora is for the operator's own", "lora is for the"
    ),
    "a command that would overwrite": BadJob(
        command({"script": "train.py"}, output={"persistentVolumeClaim": {"claimName": "models"}, "overwrite": True}),
        "output.overwrite is for the operator's own",
        "output.overwrite is for the",
    ),
    "a command whose result would be pushed": BadJob(
        command(
            {"script": "train.py"},
            output={"persistentVolumeClaim": {"claimName": "models"}, "pushToHub": {"repo": "acme/support"}},
        ),
        "output.pushToHub is for the operator's own",
        "output.pushToHub is for the",
    ),
    "a repository without an owner": BadJob(
        {"output": {"persistentVolumeClaim": {"claimName": "models"}, "pushToHub": {"repo": "support"}}},
        "output.pushToHub.repo",
        "output.pushToHub.repo",
    ),
    "an adapter with a shape of another": BadJob(
        {"lora": {"adapter": "/data/adapter", "r": 4}}, "adapter has a shape of its", "adapter has a shape of its"
    ),
    "two ways to spread memory": BadJob(
        {"fsdp": {}, "deepspeed": {"preset": "zero2"}}, "deepspeed and fsdp exclude", "deepspeed and fsdp exclude"
    ),
    "4-bit weights, spread": BadJob(
        {"lora": {"quantization": "nf4"}, "deepspeed": {"preset": "zero3"}},
        "4-bit weights cannot be spread",
        "4-bit weights cannot be spread",
    ),
    "4-bit weights, spread by fsdp": BadJob(
        {"lora": {"quantization": "nf4"}, "fsdp": {}},
        "4-bit weights cannot be spread",
        "4-bit weights cannot be spread",
    ),
    "memory that grows from nowhere": BadJob(
        {"restartPolicy": {"maxMemory": "64Gi"}, "resources": {"limits": {"cpu": 1}}},
        "resources.limits.memory, which is not set",
        "resources.limits.memory, which is not set",
    ),
    "a probe of DeepSpeed": BadJob(
        {"training": {"probe": True}, "deepspeed": {"preset": "zero2"}},
        "training.probe: DeepSpeed keeps",
        "training.probe: DeepSpeed keeps",
    ),
    "bits that there are not": BadJob(
        {"lora": {"quantization": "int8"}}, 'supported values: "nf4"', "must be 'nf4', found"
    ),
    "a preset and a config": BadJob(
        {"deepspeed": {"preset": "zero2", "config": {"zero_optimization": {"stage": 2}}}},
        "either preset or config",
        "either preset or config",
    ),
    "an unknown preset": BadJob({"deepspeed": {"preset": "zero4"}}, 'supported values: "zero1"', "'zero1', 'zero2'"),
    "no rows": BadJob({"dataset": {"train": []}}, "at least 1 item", "at least 1 item"),
    "a sample that is no number": BadJob(
        {"dataset": {"train": [{"name": "/data/rows.jsonl#many"}]}}, "a path may hold no #", "a path may hold no #"
    ),
    "an empty sample": BadJob(
        {"dataset": {"train": [{"name": "/data/rows.jsonl#0"}]}}, "a path may hold no #", "a path may hold no #"
    ),
    "rows held out beside rows to evaluate on": BadJob(
        {"dataset": {"train": [{"name": "a"}], "eval": [{"name": "b"}], "splitDatasetRatio": 0.1}},
        "eval and splitDatasetRatio exclude each other",
        "eval and splitDatasetRatio exclude each other",
    ),
    "all rows held out": BadJob(
        {"dataset": {"train": [{"name": "a"}], "splitDatasetRatio": 1}}, "less than 1", "less than 1"
    ),
    "packs without a size": BadJob(
        {"dataset": {"train": [{"name": "a"}], "packing": True}}, "packing needs maxLength", "packing needs maxLength"
    ),
    "packs of pairs": BadJob(
        {"sft": None, "dpo": {}, "dataset": {"train": [{"name": "a"}], "packing": True, "maxLength": 64}},
        "packing works with sft alone",
        "packing works with sft alone",
    ),
    "an unknown scheduler": BadJob(
        {"training": {"lrSchedulerType": "cosin"}}, 'supported values: "linear", "cosine"', "'linear', 'cosine'"
    ),
    "images that cannot be": BadJob(
        {"model": {"name": "m", "minPixels": 1000, "maxPixels": 784}},
        "minPixels is more than",
        "minPixels is more than",
    ),
    "a part that no model has": BadJob(
        {"model": {"name": "m", "freeze": ["head"]}}, 'supported values: "vision", "aligner"', "'vision', 'aligner'"
    ),
    "a model with nothing to train": BadJob(
        {"model": {"name": "m", "freeze": ["vision", "aligner", "language"]}}, "at most 2 items", "at most 2 items"
    ),
    "a rate of zero": BadJob({"training": {"learningRate": 0}}, "greater than 0", "greater than 0"),
    "a batch that is not a multiple": BadJob(
        {"training": {"globalBatchSize": 7}}, "globalBatchSize is 7", "globalBatchSize 7 is not a multiple"
    ),
    "a batch that contradicts itself": BadJob(
        {"training": {"globalBatchSize": 8, "perDeviceTrainBatchSize": 3, "gradientAccumulationSteps": 2}},
        "is 3 x 2 x 4",
        "3 x 2 x 4 = 24",
    ),
    "a batch of auto that ranks do not divide": BadJob(
        {"training": {"globalBatchSize": 7, "perDeviceTrainBatchSize": "auto"}},
        "is 1 x 1 x 4",
        "globalBatchSize 7 is not a multiple",
    ),
    "auto without the sum": BadJob(
        {"training": {"perDeviceTrainBatchSize": "auto"}}, "auto needs globalBatchSize", "auto needs globalBatchSize"
    ),
    "auto with half of it said": BadJob(
        {"training": {"perDeviceTrainBatchSize": "auto", "globalBatchSize": 8, "gradientAccumulationSteps": 2}},
        "auto chooses gradientAccumulationSteps",
        "auto chooses gradientAccumulationSteps",
    ),
    "a size that is no number": BadJob(
        {"training": {"perDeviceTrainBatchSize": "max"}}, "should match '^auto$'", "must be an integer or 'auto', found"
    ),
    "a size of zero": BadJob(
        {"training": {"perDeviceTrainBatchSize": 0}}, "must be auto, or 1 to 65536", "greater than or equal to 1"
    ),
    "a batch that GPUs contradict": BadJob(
        {"nprocPerNode": None, "resources": {"limits": {"nvidia.com/gpu": 3}}, "training": {"globalBatchSize": 8}},
        "is 1 x 1 x 6",
        "ranks = 6",
    ),
    "epochs and steps": BadJob(
        {"training": {"numTrainEpochs": 1, "maxSteps": 10}}, "exclude each other", "exclude each other"
    ),
    "reporting to none and to another": BadJob(
        {"training": {"reportTo": ["none", "wandb"]}}, "none stands alone", "none stands alone"
    ),
    "evaluation without rows": BadJob(
        {"training": {"evalSteps": 10}}, "dataset.eval is empty", "dataset.eval is empty"
    ),
    "the best of one evaluation": BadJob({"training": {"loadBestModelAtEnd": True}}, "set evalSteps", "set evalSteps"),
    "patience with one evaluation": BadJob(
        {"training": {"earlyStoppingPatience": 3}}, "set evalSteps", "set evalSteps"
    ),
    "the best of evaluations without rows": BadJob(
        {"training": {"loadBestModelAtEnd": True, "evalSteps": 10}}, "dataset.eval is empty", "dataset.eval is empty"
    ),
    "a threshold of no patience": BadJob(
        {"training": {"earlyStoppingThreshold": 0.1}},
        "belongs to earlyStoppingPatience",
        "belongs to earlyStoppingPatience",
    ),
    "a metric that nothing goes by": BadJob(
        {"training": {"metricForBestModel": "eval_loss"}}, "metricForBestModel is what", "metricForBestModel is what"
    ),
    "an unknown metric": BadJob(
        {"training": {"metricForBestModel": "loss"}}, 'supported values: "eval_loss"', "'eval_loss', 'eval_rewards"
    ),
    "rewards without preferences": BadJob(
        {
            "dataset": {"train": [{"name": "a"}], "eval": [{"name": "b"}]},
            "training": {
                "evalSteps": 5,
                "loadBestModelAtEnd": True,
                "metricForBestModel": "eval_rewards/accuracies",
            },
        },
        "is measured with dpo alone",
        "is measured with dpo alone",
    ),
    "a scaled rate that nobody gave": BadJob(
        {"training": {"lrScaling": {"rule": "sqrt", "baseBatchSize": 16}}},
        "lrScaling scales learningRate",
        "lrScaling scales learningRate",
    ),
    "scaling from no batch": BadJob(
        {"training": {"learningRate": 0.1, "lrScaling": {"rule": "linear"}}}, "baseBatchSize", "baseBatchSize"
    ),
    "a rate of what is usually frozen": BadJob(
        {"training": {"visionLearningRate": 1e-5}}, "vision is frozen", "vision is frozen"
    ),
    "a rate of what is frozen": BadJob(
        {"model": {"name": "m", "freeze": ["aligner"]}, "training": {"alignerLearningRate": 1e-5}},
        "aligner is frozen",
        "aligner is frozen",
    ),
    "memory in a unit that is none": BadJob(
        {"resources": {"limits": {"memory": "4Gx"}}}, "must be a quantity", "must be a quantity"
    ),
    "less than no memory": BadJob(
        {"resources": {"limits": {"memory": "-4Gi"}}}, "must be a quantity", "must be a quantity"
    ),
    "a variable of the rendezvous": BadJob(
        {"env": [{"name": "RANK", "value": "0"}]}, "RANK is set by the operator", "RANK is set by the operator"
    ),
    "a variable of torchrun": BadJob(
        {"env": [{"name": "PET_NNODES", "value": "1"}]}, "PET_NNODES is set by the", "PET_NNODES is set by the"
    ),
    "a variable twice": BadJob(
        {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}, "uplicate", "A is given twice"
    ),
    "two volumes at one path": BadJob(
        {"volumes": [volume("a"), volume("b")]}, "mountPath is used twice", "mountPath /more is used twice"
    ),
    "two volumes of one name": BadJob(
        {"volumes": [volume("a", "/a"), volume("a", "/b")]}, "uplicate", "name a is used twice"
    ),
    "a volume of ours": BadJob({"volumes": [volume("output")]}, "operator's own", "operator's own"),
    "a path of ours": BadJob({"volumes": [volume(mount_path="/dev/shm/")]}, "operator's own", "operator's own"),
    "a volume without a source": BadJob(
        {"volumes": [{"name": "a", "mountPath": "/a"}]}, "exactly one volume source", "exactly one source"
    ),
    "a volume with two sources": BadJob(
        {"volumes": [volume(emptyDir={}, secret={"secretName": "s"})]},
        "exactly one volume source",
        "exactly one source",
    ),
    "a way out of the claim": BadJob(
        {"output": {"persistentVolumeClaim": {"claimName": "models"}, "subPath": "a/../../b"}},
        "must not contain '..'",
        "must not contain '..'",
    ),
    "a label of ours": BadJob(
        {"podTemplate": {"labels": {"finetune.dev/job-name": "other"}}}, "reserved for the operator", "is reserved"
    ),
}
