"""Property tests: whatever options are given, none is lost, and the job is valid."""

import contextlib
import json
import shlex

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune_convert.conversion import Conversion, ConversionError, ConversionRequest, InputKind, JobForm
from finetune_convert.convert import convert, find_problems
from finetune_convert.mapping.trainer_conversion import NOT_CONVERTED
from finetune_convert.option_table import Option, OptionTable, load_table

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FORMS = tuple(JobForm)
FIXED = [
    *("model", "model_id_or_path", "dataset", "rlhf_type", "model_name_or_path", "base_model", "datasets", "stage"),
    *("rl",),
]
NUMBERS = ("0", "1", "2", "8", "100", "0.1", "1e-4", "0.5", "-1")
WORDS = ("abc", "zero3", "linear", "/data/x", "a/b", "none")


def build_values(option: Option) -> st.SearchStrategy[str]:
    """Return plausible values of an option by its type, as text."""
    kinds: list[str] = [str(choice) for choice in option.choices if not isinstance(choice, bool)]
    if option.is_flag:
        kinds += ["true", "false"]
    if "int" in option.type or "float" in option.type:
        kinds += [number for number in NUMBERS if "float" in option.type or number.lstrip("-").isdigit()]
    if "str" in option.type or "Any" in option.type:
        kinds += [word for word in WORDS if "revision" not in option.name or not word.startswith("/")]
    return st.sampled_from(kinds or ["abc"])


def build_options(table: OptionTable) -> st.SearchStrategy[dict[str, str]]:
    names = sorted({option.name for option in table.options.values()} - set(FIXED))
    chosen = st.lists(st.sampled_from(names), unique=True, max_size=10)
    return chosen.flatmap(lambda keys: st.fixed_dictionaries({key: build_values(table.options[key]) for key in keys}))


def try_convert(text: str, **fields: object) -> Conversion | None:
    """Return the conversion, or None for an error of the input; an invalid job fails the test."""
    try:
        return convert(text, ConversionRequest(**fields))  # type: ignore[arg-type]
    except ConversionError as error:
        if any("converted job is not valid" in problem for problem in error.problems):
            raise
        return None


def assert_nothing_is_lost(conversion: Conversion, names: set[str]) -> None:
    listed = {entry.option.lstrip("-").replace("-", "_") for entry in conversion.entries}

    assert names <= listed
    assert [entry.option for entry in conversion.entries if entry.message == NOT_CONVERTED] == []
    assert find_problems(conversion.job) == ()


@pytest.mark.parametrize(
    ("version", "command", "form"),
    [  # every pair of two values
        (version, command, FORMS[(version + number) % 2])
        for version in (2, 3, 4)
        for number, command in enumerate(("sft", "pt", "rlhf"))
    ],
)
@QUICK
@given(data=st.data())
def test_no_option_of_ms_swift_is_lost(data: st.DataObject, version: int, command: str, form: JobForm) -> None:
    options = data.draw(build_options(load_table(f"swift-{version}")))
    model = "--model_id_or_path" if version == 2 else "--model"
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    text = f"NPROC_PER_NODE=2 swift {command} {model} Qwen/Qwen2.5-VL-7B --dataset /data/x.jsonl {shlex.join(words)}"
    conversion = try_convert(text, tool_version=version, form=form)

    if conversion is not None:
        assert_nothing_is_lost(conversion, set(options))


@pytest.mark.parametrize("form", JobForm)
@pytest.mark.parametrize("stage", ["sft", "dpo"])
@QUICK
@given(options=build_options(load_table("llamafactory")))
def test_no_option_of_llamafactory_is_lost(options: dict[str, str], stage: str, form: JobForm) -> None:
    lines = [f"{name}: {value}" for name, value in options.items()]
    text = "\n".join(["model_name_or_path: a/b-vl", f"stage: {stage}", "dataset: /data/x.json", *lines])
    conversion = try_convert(text, form=form)

    if conversion is not None and form is JobForm.TRAINER:
        assert_nothing_is_lost(conversion, set(options))


@pytest.mark.parametrize("method", ["", "rl: dpo\n"], ids=["sft", "dpo"])
@QUICK
@given(options=build_options(load_table("axolotl")))
def test_no_option_of_axolotl_is_lost(options: dict[str, str], method: str) -> None:
    lines = [f"{name}: {value}" for name, value in {"learning_rate": "1e-4", **options}.items()]
    rows = "datasets: [{path: /data/x.jsonl, type: chat_template}]"
    text = "\n".join(["base_model: a/b", rows, *lines, method])
    conversion = try_convert(text, form=JobForm.TRAINER)

    if conversion is not None:
        assert_nothing_is_lost(conversion, set(options))


@QUICK
@given(
    words=st.lists(st.sampled_from(["--a", "--b=1", "c", "$(date)", "-1", "--hf_token", "x.json", "/d/e"]), max_size=12)
)
def test_every_argument_of_a_script_is_in_the_command(words: list[str]) -> None:
    conversion = try_convert(f"torchrun --nproc_per_node 2 train.py {' '.join(words)}")

    assert conversion is not None or "$(date)" in words
    if conversion is not None:
        assert len(conversion.job["spec"]["command"].get("args", [])) == len(words)


@QUICK
@given(text=st.text(max_size=200))
def test_any_text_is_converted_or_refused(text: str) -> None:
    try_convert(text)
    for kind in InputKind:
        try_convert(text, source=kind)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["a", "", "8", "/x", "pytorch", "None"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "x"]), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(
    [
        *("metadata", "spec", "name", "pytorchReplicaSpecs", "Master", "Worker", "replicas", "template"),
        *("containers", "command", "env", "volumes", "volumeMounts", "resources", "limits", "runPolicy"),
        *("nprocPerNode", "trainer", "numNodes", "args"),
    ]
)


@pytest.mark.parametrize("kind", ["PyTorchJob", "TrainJob"])
@QUICK
@given(data=st.data())
def test_any_manifest_is_converted_or_refused(data: st.DataObject, kind: str) -> None:
    tree = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=4))
    container = {"command": ["torchrun", "a.py"], **data.draw(st.dictionaries(KEYS, tree, max_size=4))}
    pod = {"spec": {"containers": [container]}}
    spec = {"pytorchReplicaSpecs": {"Worker": {"template": pod, **data.draw(st.dictionaries(KEYS, tree, max_size=3))}}}
    trainer = {"command": ["torchrun", "a.py"], **data.draw(st.dictionaries(KEYS, tree, max_size=4))}
    manifest = {"apiVersion": "x/v1", "kind": kind, "metadata": {"name": "a"}, "spec": {"trainer": trainer, **spec}}
    with contextlib.suppress(ConversionError):
        convert(json.dumps(manifest, indent=1), ConversionRequest(source=InputKind.KUBEFLOW))


@pytest.mark.parametrize("steps", ["0.5", "100"])
def test_warmup_ratio_that_steps_override_is_listed(steps: str) -> None:
    command = f"swift sft --model a/b --dataset /data/x.jsonl --max_steps 10 --warmup_ratio 0 --warmup_steps {steps}"
    conversion = try_convert(command, tool_version=4)

    assert conversion is not None
    assert_nothing_is_lost(conversion, {"warmup_ratio", "warmup_steps"})


def test_negative_warmup_is_refused() -> None:
    command = "swift sft --model a/b --dataset /data/x.jsonl --max_steps 10 --warmup_steps -1"

    with pytest.raises(ConversionError) as error:
        convert(command, ConversionRequest(tool_version=4))

    assert error.value.problems == ("warmup_steps: -1 is out of range",)
