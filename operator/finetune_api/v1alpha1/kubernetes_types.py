"""Structural schemas of the Kubernetes types that a job contains unchanged (decisions/411).

The schemas contain every field of the pinned Kubernetes release. A test compares them with its OpenAPI document. Python
passes these objects through to the pods, so that a job which an older CRD accepted continues to run, and checks only
the names of objects in a job that has not begun.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo

from finetune_api.v1alpha1.base import has_begun
from finetune_api.v1alpha1.name_types import LABEL_PATTERN, SUBDOMAIN_PATTERN, check_name

Schema = dict[str, Any]

_BOOLEAN: Schema = {"type": "boolean"}
_INTEGER: Schema = {"type": "integer"}
_QUANTITY: Schema = {"type": ["integer", "string"], "x-kubernetes-int-or-string": True, "maxLength": 64}


def _text(max_length: int = 253) -> Schema:
    return {"type": "string", "maxLength": max_length}


_OBJECT_NAME: Schema = {**_text(), "pattern": SUBDOMAIN_PATTERN}
_DNS_LABEL: Schema = {**_text(63), "pattern": LABEL_PATTERN}


def _list(items: Schema, max_items: int) -> Schema:
    return {"type": "array", "items": items, "maxItems": max_items}


def _build_object(kubernetes_type: str, required: tuple[str, ...] = (), /, **fields: Schema) -> Schema:
    properties = {
        name: {**schema, "description": f"Field {name} of {kubernetes_type}, as in a pod."}
        for name, schema in fields.items()
    }
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": list(required)} if required else schema


def _build_key_selector(kubernetes_type: str) -> Schema:
    return _build_object(kubernetes_type, ("key",), name=_OBJECT_NAME, key=_text(), optional=_BOOLEAN)


_KEYS_TO_PATHS = _list(_build_object("KeyToPath", ("key", "path"), key=_text(), path=_text(512), mode=_INTEGER), 64)
_LABEL_KEY = _text(317)
_SELECTOR_FIELDS = {"key": _LABEL_KEY, "operator": _text(64), "values": _list(_text(), 32)}
_NODE_REQUIREMENTS = _list(_build_object("NodeSelectorRequirement", ("key", "operator"), **_SELECTOR_FIELDS), 8)
_NODE_SELECTOR_TERM = _build_object(
    "NodeSelectorTerm", matchExpressions=_NODE_REQUIREMENTS, matchFields=_NODE_REQUIREMENTS
)
_LABEL_SELECTOR = _build_object(
    "LabelSelector",
    matchExpressions=_list(_build_object("LabelSelectorRequirement", ("key", "operator"), **_SELECTOR_FIELDS), 8),
    matchLabels={"type": "object", "additionalProperties": _text(63), "maxProperties": 16},
)
_POD_AFFINITY_TERM = _build_object(
    "PodAffinityTerm",
    ("topologyKey",),
    labelSelector=_LABEL_SELECTOR,
    matchLabelKeys=_list(_LABEL_KEY, 16),
    mismatchLabelKeys=_list(_LABEL_KEY, 16),
    namespaceSelector=_LABEL_SELECTOR,
    namespaces=_list(_DNS_LABEL, 16),
    topologyKey=_LABEL_KEY,
)
_WEIGHTED_TERM = _build_object(
    "WeightedPodAffinityTerm", ("weight", "podAffinityTerm"), weight=_INTEGER, podAffinityTerm=_POD_AFFINITY_TERM
)
_PREFERRED_NODES = _build_object(
    "PreferredSchedulingTerm", ("weight", "preference"), weight=_INTEGER, preference=_NODE_SELECTOR_TERM
)
_NODE_SELECTOR = _build_object("NodeSelector", ("nodeSelectorTerms",), nodeSelectorTerms=_list(_NODE_SELECTOR_TERM, 8))


def _build_pod_affinity(kubernetes_type: str) -> Schema:
    return _build_object(
        kubernetes_type,
        preferredDuringSchedulingIgnoredDuringExecution=_list(_WEIGHTED_TERM, 8),
        requiredDuringSchedulingIgnoredDuringExecution=_list(_POD_AFFINITY_TERM, 8),
    )


_PROFILE_FIELDS = {"localhostProfile": _text(512), "type": _text(64)}
_SECURITY_FIELDS = {
    "appArmorProfile": _build_object("AppArmorProfile", ("type",), **_PROFILE_FIELDS),
    "runAsGroup": _INTEGER,
    "runAsNonRoot": _BOOLEAN,
    "runAsUser": _INTEGER,
    "seLinuxOptions": _build_object("SELinuxOptions", level=_text(), role=_text(), type=_text(), user=_text()),
    "seccompProfile": _build_object("SeccompProfile", ("type",), **_PROFILE_FIELDS),
    "windowsOptions": _build_object(
        "WindowsSecurityContextOptions",
        gmsaCredentialSpec=_text(4096),
        gmsaCredentialSpecName=_text(),
        hostProcess=_BOOLEAN,
        runAsUserName=_text(),
    ),
}
_CAPABILITIES = _build_object("Capabilities", add=_list(_text(64), 64), drop=_list(_text(64), 64))

# schemas by the name of the type in the Kubernetes API
SCHEMAS: dict[str, Schema] = {
    "EnvVarSource": _build_object(
        "EnvVarSource",
        configMapKeyRef=_build_key_selector("ConfigMapKeySelector"),
        fieldRef=_build_object("ObjectFieldSelector", ("fieldPath",), apiVersion=_text(), fieldPath=_text(512)),
        fileKeyRef=_build_object(
            "FileKeySelector",
            ("volumeName", "path", "key"),
            key=_text(),
            optional=_BOOLEAN,
            path=_text(512),
            volumeName=_DNS_LABEL,
        ),
        resourceFieldRef=_build_object(
            "ResourceFieldSelector", ("resource",), containerName=_DNS_LABEL, divisor=_QUANTITY, resource=_text()
        ),
        secretKeyRef=_build_key_selector("SecretKeySelector"),
    ),
    "ConfigMapVolumeSource": _build_object(
        "ConfigMapVolumeSource", defaultMode=_INTEGER, items=_KEYS_TO_PATHS, name=_OBJECT_NAME, optional=_BOOLEAN
    ),
    "SecretVolumeSource": _build_object(
        "SecretVolumeSource", defaultMode=_INTEGER, items=_KEYS_TO_PATHS, optional=_BOOLEAN, secretName=_OBJECT_NAME
    ),
    "EmptyDirVolumeSource": _build_object("EmptyDirVolumeSource", medium=_text(64), sizeLimit=_QUANTITY),
    "NFSVolumeSource": _build_object(
        "NFSVolumeSource", ("server", "path"), path=_text(1024), readOnly=_BOOLEAN, server=_text()
    ),
    "ImageVolumeSource": _build_object("ImageVolumeSource", reference=_text(512), pullPolicy=_text(64)),
    "HostPathVolumeSource": _build_object("HostPathVolumeSource", ("path",), path=_text(1024), type=_text(64)),
    "Affinity": _build_object(
        "Affinity",
        nodeAffinity=_build_object(
            "NodeAffinity",
            preferredDuringSchedulingIgnoredDuringExecution=_list(_PREFERRED_NODES, 8),
            requiredDuringSchedulingIgnoredDuringExecution=_NODE_SELECTOR,
        ),
        podAffinity=_build_pod_affinity("PodAffinity"),
        podAntiAffinity=_build_pod_affinity("PodAntiAffinity"),
    ),
    "PodSecurityContext": _build_object(
        "PodSecurityContext",
        **_SECURITY_FIELDS,
        fsGroup=_INTEGER,
        fsGroupChangePolicy=_text(64),
        seLinuxChangePolicy=_text(64),
        supplementalGroups=_list(_INTEGER, 64),
        supplementalGroupsPolicy=_text(64),
        sysctls=_list(_build_object("Sysctl", ("name", "value"), name=_text(), value=_text()), 32),
    ),
    "SecurityContext": _build_object(
        "SecurityContext",
        **_SECURITY_FIELDS,
        allowPrivilegeEscalation=_BOOLEAN,
        capabilities=_CAPABILITIES,
        privileged=_BOOLEAN,
        procMount=_text(64),
        readOnlyRootFilesystem=_BOOLEAN,
    ),
}


def _check_names(value: Any, schema: Schema, path: str = "") -> None:
    """Raise ValueError if a text in a JSON value does not have the pattern of the schema."""
    if isinstance(value, dict):
        for name, child in value.items():
            _check_names(child, schema.get("properties", {}).get(name, {}), f"{path}{name}: ")
    elif isinstance(value, list):
        for item in value:
            _check_names(item, schema.get("items", {}), path)
    elif isinstance(value, str) and "pattern" in schema:
        try:
            check_name(value, schema["pattern"])
        except ValueError as error:
            raise ValueError(f"{path}{error}") from None


def _check(schema: Schema) -> AfterValidator:
    def check(value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if not has_begun(info):
            _check_names(value, schema)
        return value

    return AfterValidator(check)


EnvVarSource = Annotated[
    dict[str, Any], Field(json_schema_extra=SCHEMAS["EnvVarSource"]), _check(SCHEMAS["EnvVarSource"])
]
ConfigMapSource = Annotated[
    dict[str, Any], Field(json_schema_extra=SCHEMAS["ConfigMapVolumeSource"]), _check(SCHEMAS["ConfigMapVolumeSource"])
]
SecretSource = Annotated[
    dict[str, Any], Field(json_schema_extra=SCHEMAS["SecretVolumeSource"]), _check(SCHEMAS["SecretVolumeSource"])
]
EmptyDirSource = Annotated[dict[str, Any], Field(json_schema_extra=SCHEMAS["EmptyDirVolumeSource"])]
NfsSource = Annotated[dict[str, Any], Field(json_schema_extra=SCHEMAS["NFSVolumeSource"])]
HostPathSource = Annotated[dict[str, Any], Field(json_schema_extra=SCHEMAS["HostPathVolumeSource"])]
ImageSource = Annotated[dict[str, Any], Field(json_schema_extra=SCHEMAS["ImageVolumeSource"])]
LabelSelector = Annotated[dict[str, Any], Field(json_schema_extra=_LABEL_SELECTOR)]
Affinity = Annotated[dict[str, Any], Field(json_schema_extra=SCHEMAS["Affinity"]), _check(SCHEMAS["Affinity"])]
PodSecurityContext = Annotated[dict[str, Any], Field(json_schema_extra=SCHEMAS["PodSecurityContext"])]
SecurityContext = Annotated[dict[str, Any], Field(json_schema_extra=SCHEMAS["SecurityContext"])]
