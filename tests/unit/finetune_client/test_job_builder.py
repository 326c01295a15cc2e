"""Tests of jobs that are built from Python arguments."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from finetune_client.async_client import AsyncClient
from finetune_client.errors import ClientError
from finetune_client.job_builder import Machines, Recipe, build_function_job, build_training_job, render_function
from finetune_client.manifest import InvalidManifest
from testing.fakes.job_api import NAMESPACE, JobApi, serve_jobs

OUTSIDE = 3


def print_sum(values: list[int], factor: float = 2.0) -> None:
    """Print the sum; everything that the function uses is imported inside of it."""
    import json

    print(json.dumps({"sum": sum(values) * factor}))


def use_outside() -> int:
    return OUTSIDE


def annotate(value: Any) -> None:
    pass


def decorate(function: Any) -> Any:
    return function


@decorate
def decorated() -> None:
    pass


def test_strings_stand_for_names() -> None:
    body = build_training_job(
        "first",
        Recipe("Qwen/Qwen2.5-7B-Instruct", "/data/train.jsonl", "models", lora={"r": 16}),
        Machines(nodes=2, gpus=8, volumes={"datasets": "/data"}, env={"HF_HOME": "/data/hf"}),
    )

    assert body["spec"] == {
        "model": {"name": "Qwen/Qwen2.5-7B-Instruct"},
        "dataset": {"train": [{"name": "/data/train.jsonl"}]},
        "output": {"persistentVolumeClaim": {"claimName": "models"}},
        "sft": {},
        "lora": {"r": 16},
        "numNodes": 2,
        "resources": {"limits": {"nvidia.com/gpu": 8}},
        "volumes": [{"name": "volume-0", "mountPath": "/data", "persistentVolumeClaim": {"claimName": "datasets"}}],
        "env": [{"name": "HF_HOME", "value": "/data/hf"}],
    }


def test_fields_are_accepted_in_snake_case_and_in_camel_case() -> None:
    training = {"learning_rate": 1e-4, "numTrainEpochs": 2}
    recipe = Recipe("m", "/d.jsonl", "models", method={"dpo": {"beta": 0.2}}, training=training)

    spec = build_training_job("first", recipe, Machines(spec={"restart_policy": {"maxRestarts": 0}}))["spec"]

    assert spec["training"] == {"learningRate": 1e-4, "numTrainEpochs": 2.0}
    assert spec["dpo"] == {"beta": 0.2}
    assert spec["restartPolicy"] == {"maxRestarts": 0}


@pytest.mark.parametrize(
    ("name", "recipe", "machines", "problem"),
    [
        ("first", Recipe("m", "/d", "o", method="ppo"), Machines(), r"spec\.ppo: unknown field"),
        ("first", Recipe("m", "/d", "o", training={"learnig_rate": 1}), Machines(), "did you mean spec.training.learn"),
        ("first", Recipe("m", "/d", "o"), Machines(nodes=0), r"spec\.numNodes: must be greater"),
        ("First", Recipe("m", "/d", "o"), Machines(), r"metadata\.name: First: must start with a-z"),
    ],
    ids=["method", "misspelled field", "nodes", "name"],
)
def test_invalid_arguments_are_reported_with_their_field(
    name: str, recipe: Recipe, machines: Machines, problem: str
) -> None:
    with pytest.raises(InvalidManifest, match=problem):
        build_training_job(name, recipe, machines)


def test_the_program_of_a_function_calls_it_with_its_arguments() -> None:
    manifest, config_map = build_function_job(
        "sum", print_sum, {"values": [1, 2], "factor": 0.5}, image="registry.example/torch:1", machines=Machines(gpus=2)
    )

    output = subprocess.run(
        [sys.executable, "-c", config_map["data"]["main.py"]], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(output) == {"sum": 1.5}
    assert manifest["spec"]["command"] == {"script": "/etc/finetune-function/main.py"}
    assert manifest["spec"]["volumes"][0]["configMap"] == {"name": config_map["metadata"]["name"]}


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (use_outside, {}, "use_outside uses OUTSIDE, which its pods do not have"),
        (annotate, {"value": 1}, "annotate uses Any, which its pods do not have"),
        (decorated, {}, "decorated has a decorator"),
        (print_sum, {"value": 1}, "print_sum: missing a required argument: 'values'"),
        (print_sum, {"values": {1, 2}}, "argument values is a set; expected strings"),
        (print_sum, {"values": [], "factor": float("nan")}, "argument factor is a float"),
        (print_sum, {"values": ["x" * 1_000_000]}, "exceed 900000 bytes"),
        (lambda: None, {}, "expected a function that is defined with def"),
        (len, {}, "len: expected a function that is defined with def"),
    ],
    ids=["global name", "annotation", "decorator", "signature", "set", "NaN", "too large", "lambda", "builtin"],
)
def test_a_function_that_cannot_run_in_a_pod_is_rejected(
    function: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ClientError, match=message):
        render_function(function, arguments)


def test_a_function_that_uses_a_local_variable_of_another_is_rejected() -> None:
    step = 2

    def increment() -> int:
        return step + 1

    with pytest.raises(ClientError, match="increment uses step"):
        render_function(increment, {})


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[JobApi]:
    async with serve_jobs(tmp_path, JobApi()) as api:
        yield api


async def test_a_function_job_starts_once_its_config_map_exists(api: JobApi, tmp_path: Path) -> None:
    async with AsyncClient(kubeconfig=str(tmp_path / "kubeconfig")) as client:
        await client.run_function("sum", print_sum, image="registry.example/torch:1", arguments={"values": [1]})

    kinds = [
        (request.resource.plural, (request.body or {}).get("spec", {}).get("suspend"))
        for request in api.requests
        if request.method == "PATCH"
    ]
    assert kinds == [("finetunejobs", True), ("configmaps", None), ("finetunejobs", False)]
    config_map = api.objects["configmaps", NAMESPACE, "sum-function"]
    assert config_map["metadata"]["ownerReferences"][0]["name"] == "sum"
