"""Manifests of one attempt: golden files of three jobs, then single properties."""

from typing import Any

import pytest

from finetune_api.v1alpha1.job import FineTuneJobSpec
from finetune_operator import names
from finetune_operator.plan.manifests import (
    GRACE_SECONDS,
    LOST_NODE_SECONDS,
    Manifest,
    build_children,
    build_environment,
)
from finetune_operator.plan.run_plan import RunPlan, plan_run
from finetune_operator.settings import Settings
from testing.builders.golden import assert_golden
from testing.builders.jobs import SETTINGS, UID, command, job
from testing.builders.pod_security import restricted_violations

NOT_READY = "node.kubernetes.io/not-ready"
UNREACHABLE = "node.kubernetes.io/unreachable"

EVERYTHING: dict[str, Any] = {
    "numNodes": 1,
    "nprocPerNode": None,
    "image": "registry.example/mine:2",
    "imagePullPolicy": "Always",
    "imagePullSecrets": [{"name": "registry"}, {"name": "mirror"}],
    "resources": {
        "limits": {"cpu": "9", "memory": "16Gi", "nvidia.com/gpu": 4},
        "requests": {"cpu": "8500m", "memory": "12Gi"},
    },
    "env": [
        {"name": "HF_HOME", "value": "/models/hub"},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
    ],
    "volumes": [
        {"name": "data", "mountPath": "/data", "persistentVolumeClaim": {"claimName": "datasets"}, "readOnly": True},
        {"name": "models", "mountPath": "/models", "subPath": "team/a", "nfs": {"server": "nfs.example", "path": "/m"}},
        {"name": "templates", "mountPath": "/templates", "configMap": {"name": "chat-templates", "optional": True}},
        {"name": "keys", "mountPath": "/keys", "secret": {"secretName": "hub", "defaultMode": 288}, "readOnly": True},
        {"name": "scratch", "mountPath": "/scratch", "emptyDir": {}},
        {"name": "disk", "mountPath": "/disk", "hostPath": {"path": "/mnt/nvme", "type": "Directory"}},
    ],
    "output": {"persistentVolumeClaim": {"claimName": "models"}, "subPath": "team/bert"},
    "network": {
        "masterPort": 29400,
        "interface": "ib0",
        "nccl": {"debug": "INFO", "ibDisable": False, "p2pDisable": True, "ibHca": "mlx5_0", "ibGidIndex": 3},
    },
    "podTemplate": {
        "labels": {"team": "a", "app.kubernetes.io/managed-by": "helm"},
        "annotations": {"example.com/why": "because"},
        "nodeSelector": {"gpu": "h100"},
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "tolerations": [
            {"key": "gpu", "operator": "Equal", "value": "h100", "effect": "NoSchedule"},
            {"key": NOT_READY, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5},
        ],
        "priorityClassName": "urgent",
        "schedulerName": "bin-packer",
        "runtimeClassName": "nvidia",
        "serviceAccountName": "trainer",
        "securityContext": {"runAsUser": 4000, "fsGroup": 4000},
        "containerSecurityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
    },
}


def run_of(*, attempt: int = 0, settings: Settings = SETTINGS, **fields: Any) -> RunPlan:
    return plan_run(job(**fields), attempt=attempt, settings=settings)


def pods_of(run: RunPlan) -> list[Manifest]:
    pods = [child for child in build_children(run) if child["kind"] == "Pod"]
    assert len(pods) == run.spec.num_nodes
    return pods


def first_pod(**fields: Any) -> Manifest:
    return pods_of(run_of(**fields))[0]


def container(**fields: Any) -> Manifest:
    trainer: Manifest = first_pod(**fields)["spec"]["containers"][0]
    return trainer


def variables(**fields: Any) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in container(**fields)["env"]}


def tolerations(*given: dict[str, Any]) -> dict[str, int | None]:
    """Return tolerationSeconds by taint key, as in the pod manifest."""
    tolerations_of_pod = first_pod(podTemplate={"tolerations": list(given)})["spec"]["tolerations"]
    assert len({toleration["key"] for toleration in tolerations_of_pod}) == len(tolerations_of_pod)
    return {toleration["key"]: toleration.get("tolerationSeconds") for toleration in tolerations_of_pod}


def test_manifests_of_a_minimal_job_equal_the_golden_file() -> None:
    assert_golden("two-nodes", build_children(run_of(attempt=1)))


def test_manifests_of_a_job_with_all_fields_equal_the_golden_file() -> None:
    assert_golden("everything", build_children(run_of(**EVERYTHING)))


def test_manifests_of_a_command_equal_the_golden_file() -> None:
    program = {"script": "train_dpo.py", "args": ["--batch_size", "4"], "workingDir": "/workspace/trainer"}
    assert_golden("command", build_children(run_of(**command(program))))


def test_the_config_map_of_a_command_contains_the_supervisor() -> None:
    _, config_map, first, *_ = build_children(run_of(**command({"exec": ["swift", "sft"]})))

    [trainer] = first["spec"]["containers"]
    [(name, content)] = config_map["binaryData"].items()
    assert (trainer["image"], content) == ("registry.example/minimind:1", SETTINGS.supervisor)
    assert trainer["command"] == ["python3", f"{names.CONFIG_DIR}/{name}"]
    assert "initContainers" not in first["spec"]


def test_the_config_map_of_a_training_job_contains_no_supervisor() -> None:
    assert "binaryData" not in build_children(run_of())[1]


def test_a_command_without_output_has_no_output_volume_and_variables() -> None:
    fields = command({"script": "train.py"}, output=None)
    pod = first_pod(**fields)["spec"]
    assert "output" not in {volume["name"] for volume in pod["volumes"]}
    assert names.OUTPUT_DIR not in {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert "FINETUNE_OUTPUT" not in variables(**fields)
    assert not [name for name, value in variables(**fields).items() if value.startswith(names.OUTPUT_DIR)]


def test_an_attempt_has_a_service_a_config_map_and_a_pod_per_node() -> None:
    kinds = [child["kind"] for child in build_children(run_of(numNodes=3))]
    assert kinds == ["Service", "ConfigMap", "Pod", "Pod", "Pod"]


def test_attempts_share_only_the_name_of_the_service() -> None:
    first, second = ({(c["kind"], c["metadata"]["name"]) for c in build_children(run_of(attempt=n))} for n in (0, 1))
    assert first & second == {("Service", "bert")}


def test_every_child_has_an_owner_reference_to_the_job() -> None:
    for child in build_children(run_of()):
        [owner] = child["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == ("FineTuneJob", "bert", UID, True)
        assert child["metadata"]["labels"][names.JOB_UID] == UID


def test_the_service_selects_the_pods_of_every_attempt_before_they_are_ready() -> None:
    service = build_children(run_of())[0]["spec"]
    for attempt in (0, 7):
        for pod in pods_of(run_of(attempt=attempt)):
            assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["publishNotReadyAddresses"]


@pytest.mark.parametrize("fields", [pytest.param({}, id="minimal"), pytest.param(EVERYTHING, id="everything")])
def test_the_config_map_contains_the_planned_spec(fields: dict[str, Any]) -> None:
    run = run_of(**fields)
    text = build_children(run)[1]["data"]["job.json"]
    assert FineTuneJobSpec.model_validate_json(text) == run.spec
    assert "maxGradNorm" not in text  # fields the user left out keep the defaults of the trainer


@pytest.mark.parametrize("fields", [pytest.param({}, id="minimal"), pytest.param(EVERYTHING, id="everything")])
def test_variables_that_torchrun_sets_are_not_in_the_pod(fields: dict[str, Any]) -> None:
    variable_names = variables(**fields).keys()
    assert {"MASTER_ADDR", "NODE_RANK"} <= variable_names
    assert variable_names.isdisjoint({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"})


def test_pet_variables_equal_those_of_the_trainer() -> None:
    run = run_of()
    for node in run.nodes:
        environment = build_environment(run, node)
        torchrun_variables = {
            name.removeprefix("PET_"): value for name, value in environment.items() if name.startswith("PET_")
        }
        assert torchrun_variables.keys() == {"NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"}
        assert torchrun_variables.items() <= environment.items()
        assert torchrun_variables["NODE_RANK"] == str(node.node_rank)


def test_torchrun_stops_within_the_grace_period() -> None:
    pod = first_pod()
    assert pod["spec"]["terminationGracePeriodSeconds"] == GRACE_SECONDS
    assert int(variables()["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < GRACE_SECONDS


def test_a_variable_of_the_user_replaces_the_default_one() -> None:
    variable_names = [variable["name"] for variable in container(**EVERYTHING)["env"]]
    assert len(variable_names) == len(set(variable_names))
    assert variables(**EVERYTHING)["HF_HOME"] == "/models/hub"


@pytest.mark.parametrize(
    ("limits", "nproc", "threads"),
    [
        pytest.param({}, 2, "1", id="no limit: default of torchrun"),
        pytest.param({"cpu": "8"}, 2, "4", id="divided evenly"),
        pytest.param({"cpu": 7}, 2, "3", id="rounded down"),
        pytest.param({"cpu": "1500m"}, 4, "1", id="at least one"),
    ],
)
def test_omp_threads_are_the_cpu_limit_per_rank(limits: dict[str, Any], nproc: int, threads: str) -> None:
    assert variables(resources={"limits": limits}, nprocPerNode=nproc)["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("limits", "size"),
    [
        pytest.param({}, 2 * 1024**3, id="no memory limit"),
        pytest.param({"memory": "16Gi"}, 8 * 1024**3, id="half the memory limit"),
        pytest.param({"memory": 1001}, 500, id="whole bytes"),
    ],
)
def test_the_size_of_shared_memory_is_limited(limits: dict[str, Any], size: int) -> None:
    volumes = first_pod(resources={"limits": limits})["spec"]["volumes"]
    [shm] = [volume for volume in volumes if volume["name"] == "shm"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": str(size)}


def test_lost_kubernetes_nodes_are_tolerated_for_a_minute() -> None:
    assert tolerations() == {NOT_READY: LOST_NODE_SECONDS, UNREACHABLE: LOST_NODE_SECONDS}


def test_a_toleration_of_the_user_replaces_the_default() -> None:
    toleration = {"key": UNREACHABLE, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
    assert tolerations(toleration) == {UNREACHABLE: 5, NOT_READY: LOST_NODE_SECONDS}


def test_a_toleration_of_every_taint_adds_no_default() -> None:
    toleration = {"operator": "Exists"}
    assert first_pod(podTemplate={"tolerations": [toleration]})["spec"]["tolerations"] == [toleration]


def test_a_toleration_of_another_effect_keeps_the_default() -> None:
    toleration = {"key": NOT_READY, "operator": "Exists", "effect": "NoSchedule"}
    tolerations_of_pod = first_pod(podTemplate={"tolerations": [toleration]})["spec"]["tolerations"]
    assert [(toleration["key"], toleration["effect"]) for toleration in tolerations_of_pod] == [
        (NOT_READY, "NoSchedule"),
        (NOT_READY, "NoExecute"),
        (UNREACHABLE, "NoExecute"),
    ]


def test_an_empty_security_context_of_the_user_is_kept() -> None:
    pod_spec = first_pod(podTemplate={"securityContext": {}, "containerSecurityContext": {}})["spec"]
    assert (pod_spec["securityContext"], pod_spec["containers"][0]["securityContext"]) == ({}, {})


def test_labels_of_the_operator_override_those_of_the_user() -> None:
    labels = first_pod(**EVERYTHING)["metadata"]["labels"]
    assert (labels["team"], labels[names.MANAGED_BY]) == ("a", names.MANAGER)


@pytest.mark.parametrize(
    ("nccl", "variable"),
    [
        pytest.param({"ibDisable": True}, ("NCCL_IB_DISABLE", "1"), id="true is 1"),
        pytest.param({"p2pDisable": False}, ("NCCL_P2P_DISABLE", "0"), id="false is 0"),
        pytest.param({"ibGidIndex": 3}, ("NCCL_IB_GID_INDEX", "3"), id="number"),
    ],
)
def test_nccl_booleans_become_numbers(nccl: dict[str, Any], variable: tuple[str, str]) -> None:
    assert variable in variables(network={"nccl": nccl}).items()


def test_unset_fields_are_not_in_the_manifest() -> None:
    spec, trainer = first_pod()["spec"], container()
    assert not {"nodeSelector", "affinity", "priorityClassName", "imagePullSecrets", "serviceAccountName"} & spec.keys()
    assert not {"resources", "imagePullPolicy"} & trainer.keys()


def test_pods_conform_to_the_restricted_pod_security_standard() -> None:
    for fields in ({}, command({"script": "train.py"})):
        for pod in pods_of(run_of(**fields)):
            assert restricted_violations(pod) == ()


def test_only_fields_of_the_user_violate_the_restricted_standard() -> None:
    assert restricted_violations(first_pod(**EVERYTHING)) == (
        "volume models: nfs",
        "volume disk: hostPath",
        "allowPrivilegeEscalation is not false",
        "capabilities.drop lacks ALL",
        "capabilities.add",
        "runAsNonRoot is not true",
        "seccompProfile is not RuntimeDefault",
    )
