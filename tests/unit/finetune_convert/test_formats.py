"""Tests of single facts of the conversion of each tool."""

from typing import Any

import pytest

from finetune_convert.conversion import (
    Conversion,
    ConversionError,
    ConversionRequest,
    EntryEffect,
    JobForm,
    VolumeMount,
)
from finetune_convert.convert import convert

SWIFT = "NPROC_PER_NODE=2 swift sft --model Qwen/Qwen2.5-VL-7B --dataset /data/x.jsonl"
SWIFT_2 = SWIFT.replace("model", "model_id_or_path")
FACTORY = "model_name_or_path: a/b\nstage: sft\ndataset: /data/x.json\n"
AXOLOTL = "base_model: a/b\ndatasets: [{path: /data/x.jsonl, type: chat_template}]\nlearning_rate: 1e-4\n"


def convert_text(text: str, **fields: Any) -> Conversion:
    return convert(text, ConversionRequest(**fields))


def read_field(text: str, path: str, **fields: Any) -> Any:
    node: Any = convert_text(text, **fields).job["spec"]
    for part in path.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def find_effect(text: str, option: str, **fields: Any) -> EntryEffect:
    (effect,) = {entry.effect for entry in convert_text(text, **fields).entries if entry.option == option}
    return effect


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        pytest.param(SWIFT, "training.learningRate", 1e-4, id="ms-swift: rate of LoRA"),
        pytest.param(f"{SWIFT} --train_type full", "training.learningRate", 1e-5, id="ms-swift: full rate"),
        pytest.param(SWIFT, "training.gradientAccumulationSteps", 8, id="ms-swift: 16 samples per step"),
        pytest.param(f"{SWIFT} --train_type lora", "lora.loraDropout", 0.05, id="ms-swift: dropout"),
        pytest.param(f"{SWIFT} --train_type lora", "training.weightDecay", 0.1, id="ms-swift: weight decay"),
        pytest.param(f"{SWIFT} --train_type lora", "training.numTrainEpochs", 3, id="ms-swift 3: three epochs"),
        pytest.param(
            f"{SWIFT} --packing true --max_length 0", "dataset.maxLength", 4096, id="ms-swift: unlimited packs"
        ),
        pytest.param(SWIFT, "training.adamBeta2", 0.95, id="ms-swift: decay rate of squared gradients"),
        pytest.param(f"{AXOLOTL}adam_beta2: null\n", "training.adamBeta2", None, id="axolotl: AdamW of torch"),
        pytest.param(SWIFT_2, "training.numTrainEpochs", 1, id="ms-swift 2: one epoch"),
        pytest.param(SWIFT_2, "dataset.maxLength", 2048, id="ms-swift 2: length"),
        pytest.param(FACTORY, "training.learningRate", 5e-5, id="LLaMA-Factory: rate"),
        pytest.param(f"{FACTORY}lora_rank: 16\n", "lora.loraAlpha", 32, id="LLaMA-Factory: alpha is twice the rank"),
        pytest.param(FACTORY, "training.lrSchedulerType", "linear", id="LLaMA-Factory: schedule"),
        pytest.param(FACTORY, "dataset.overlong", "truncate", id="LLaMA-Factory: truncation"),
        pytest.param(AXOLOTL, "training.averageTokensAcrossDevices", False, id="axolotl: loss per rank"),
        pytest.param(AXOLOTL, "training.saveTotalLimit", 4, id="axolotl: four checkpoints"),
        pytest.param(AXOLOTL, "dataset.maxLength", 512, id="axolotl: length"),
    ],
)
def test_the_job_states_the_defaults_of_the_tool(text: str, path: str, value: object) -> None:
    assert read_field(text, path) == value


def test_axolotl_warms_up_over_three_percent_of_the_steps() -> None:
    text = f"{AXOLOTL}num_epochs: 2\nmicro_batch_size: 4\n"

    assert read_field(text, "training.warmupSteps", rows=4000) == 60  # 4000 / 4 x 2 steps
    assert read_field(text, "training.warmupSteps", rows=40_000) == 100
    assert find_effect(text, "warmup_steps") is EntryEffect.CHANGED


def test_without_a_number_of_ranks_ms_swift_divides_the_layers_and_the_job_shards_them() -> None:
    text = "CUDA_VISIBLE_DEVICES=0,1,2,3 swift sft --model a/b --dataset c/d --gradient_accumulation_steps 8"

    assert read_field(text, "fsdp") == {}
    assert read_field(text, "training.gradientAccumulationSteps") == 2
    assert read_field(f"{text} --deepspeed zero3", "fsdp") is None


def test_numbers_of_rows_in_the_names_of_datasets_convert_a_warm_up_ratio() -> None:
    text = "swift sft --model a/b --dataset c/d#600 e/f#1000 --train_type lora --warmup_ratio 0.1 --num_train_epochs 2"

    assert read_field(text, "training.warmupSteps") == 20  # 1600 rows / 16 x 2 epochs x 0.1
    assert read_field(text.replace("#600", ""), "training.warmupSteps") is None


def test_ranks_that_share_a_device_get_one_each() -> None:
    text = "CUDA_VISIBLE_DEVICES=0 NPROC_PER_NODE=2 swift sft --model a/b --dataset c/d"

    assert read_field(text, "resources.limits") == {"nvidia.com/gpu": 2}
    assert read_field(text, "nprocPerNode", form=JobForm.COMMAND) == 2


def test_an_effective_batch_that_is_not_possible_is_a_difference() -> None:
    text = "CUDA_VISIBLE_DEVICES=0,1,2,3 swift sft --model a/b --dataset c/d --gradient_accumulation_steps 6"

    assert find_effect(text, "gradient_accumulation_steps") is EntryEffect.CHANGED


@pytest.mark.parametrize(
    ("options", "path", "value"),
    [
        pytest.param("--quant_bits 4 --deepspeed zero3", "deepspeed.preset", "zero2", id="4 bits are not sharded"),
        pytest.param("--optim adamw_bnb_8bit --deepspeed zero2", "training.optim", "adamw_torch_fused", id="8 bits"),
        pytest.param("--vit_lr 1e-5", "training.visionLearningRate", None, id="the vision encoder is frozen"),
        pytest.param("--freeze_vit false --vit_lr 1e-5", "training.visionLearningRate", 1e-5, id="it is trained"),
        pytest.param("--adapters /data/a --lora_rank 64", "lora.r", None, id="an adapter has its own rank"),
        pytest.param("--max_steps 100 --warmup_ratio 0.1", "training.warmupSteps", 10, id="ratio of a number of steps"),
        pytest.param("--lora_target_modules ALL", "lora.targetModules", None, id="all linear layers are the default"),
        pytest.param("--target_modules q_proj v_proj", "lora.targetModules", ["q_proj", "v_proj"], id="modules"),
        pytest.param("--ddp_timeout 18000000", "training.ddpTimeout", 604_800, id="one week at most"),
        pytest.param("--deepspeed ds/z2_offload.json", "deepspeed.preset", "zero2_offload", id="name of a config"),
        pytest.param("--deepspeed ds.json", "deepspeed.preset", "zero2", id="unknown config"),
        pytest.param("--push_to_hub true --hub_model_id a/b", "output.pushToHub.hub", "modelscope", id="ModelScope"),
        pytest.param("--model_revision master", "model.hub", "modelscope", id="ids are those of ModelScope"),
        pytest.param("--use_hf true", "model.hub", None, id="ids are those of Hugging Face"),
    ],
)
def test_options_become_consistent_fields(options: str, path: str, value: object) -> None:
    assert read_field(f"{SWIFT} {options}", path) == value


@pytest.mark.parametrize(
    "options",
    [
        *("--train_type adalora", "--quant_bits 8 --quant_method bnb", "--modules_to_save lm_head"),
        *("--neftune_noise_alpha 5", "--system x", "--loss_scale react", "--sequence_parallel_size 2"),
        *("--lr_scheduler_type cosine_with_restarts", "--optim muon", "--truncation_strategy split"),
        *("--init_weights pissa",),
    ],
)
def test_what_the_trainer_does_not_have_runs_the_original_program(options: str) -> None:
    conversion = convert_text(f"{SWIFT} {options}")
    arguments = conversion.job["spec"]["command"]["exec"]

    assert arguments[: 2 + 4] == ["swift", "sft", "--model", "Qwen/Qwen2.5-VL-7B", "--dataset", "/data/x.jsonl"]
    assert set(options.split()) <= set(arguments)
    assert [entry for entry in conversion.select(EntryEffect.NOTE) if entry.option == "command"]


@pytest.mark.parametrize(
    "options", ["--train_type lora", "--init_weights true", "--sequence_parallel_size 1", "--loss_scale all"]
)
def test_what_the_trainer_does_anyway_does_not_need_the_original_program(options: str) -> None:
    assert read_field(f"{SWIFT} {options}", "command") is None


@pytest.mark.parametrize(
    ("variable", "path", "value"),
    [
        ("NCCL_DEBUG=INFO", "network.nccl.debug", "INFO"),
        ("NCCL_P2P_DISABLE=1", "network.nccl.p2pDisable", True),
        ("NCCL_SOCKET_IFNAME=eth0", "network.interface", "eth0"),
        ("MASTER_PORT=29400", "network.masterPort", 29400),
        ("MAX_PIXELS=100", "model.maxPixels", 100),
        ("NNODES=4", "numNodes", 4),
        ("FOO=bar", "env", [{"name": "FOO", "value": "bar"}]),
        ("PYTHONPATH=/x", "env", None),
    ],
)
def test_variables_become_fields(variable: str, path: str, value: object) -> None:
    assert read_field(f"{variable} {SWIFT}", path) == value


def test_different_interfaces_of_nccl_and_gloo_are_a_difference() -> None:
    text = f"NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth1 {SWIFT}"

    assert find_effect(text, "GLOO_SOCKET_IFNAME") is EntryEffect.CHANGED


@pytest.mark.parametrize(
    "text",
    [
        f"WANDB_API_KEY=0123456789 {SWIFT}",
        f"{SWIFT} --hub_token 0123456789",
        "HF_TOKEN=0123456789 torchrun train.py",
        "torchrun train.py --api-key 0123456789",
        "torchrun train.py --password=0123456789",
        "http_proxy=http://user:0123456789@proxy torchrun train.py",
        f"{FACTORY}hf_hub_token: '0123456789'\n",
        f"{AXOLOTL}comet_api_key: '0123456789'\n",
        f"huggingface-cli login --token 0123456789\n{SWIFT}",
        f"wandb login 0123456789\n{SWIFT}",
        f"if true; then export HF_TOKEN=0123456789; fi\n{SWIFT}",
    ],
)
def test_a_secret_is_neither_in_the_job_nor_in_an_entry(text: str) -> None:
    conversion = convert_text(text)

    assert "0123456789" not in str(conversion.job)
    assert "0123456789" not in str(conversion.entries)


@pytest.mark.parametrize("option", ["--pad_token x", "--max_new_tokens 5", "--tokenizer a/b", "--key_column id"])
def test_names_that_resemble_secrets_are_kept(option: str) -> None:
    assert read_field(f"torchrun train.py {option}", "command.args") == option.split()


def test_a_reference_in_an_argument_is_escaped() -> None:
    assert read_field("torchrun train.py '$(HOME)'", "command.args") == ["$$(HOME)"]


def test_commands_of_several_nodes_are_one_job() -> None:
    nodes = [f"NNODES=3 NODE_RANK={rank} MASTER_ADDR=10.0.0.1 {SWIFT}" for rank in range(3)]
    launched = [f"torchrun --nnodes 2 --node_rank {rank} --nproc_per_node 8 train.py" for rank in range(2)]

    assert read_field("\n".join(nodes), "numNodes") == 3
    assert read_field("\n".join(launched), "numNodes") == 2


def test_a_kubeflow_worker_that_differs_from_the_master_is_a_difference() -> None:
    replica = "{template: {spec: {containers: [{name: pytorch, image: IMAGE, command: [torchrun, a.py]}]}}}"
    lines = [
        "apiVersion: kubeflow.org/v1",
        "kind: PyTorchJob",
        "metadata: {name: a}",
        "spec:",
        "  pytorchReplicaSpecs:",
    ]
    lines += [f"    {name}: {replica.replace('IMAGE', name.lower())}" for name in ("Master", "Worker")]
    text = "\n".join(lines)

    assert find_effect(text, "pytorchReplicaSpecs.Worker") is EntryEffect.CHANGED
    assert read_field(text, "numNodes") == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("export HF_TOKEN=hf_0123456789abcdefgh 'open", "no valid shell text"),
        (f"{SWIFT} hf_0123456789abcdefgh", "looks like a secret"),
        ("torchrun train.py hf_0123456789abcdefgh", "looks like a secret"),
    ],
)
def test_a_secret_in_an_unexpected_place_is_an_error_that_does_not_contain_it(text: str, problem: str) -> None:
    with pytest.raises(ConversionError, match=problem) as error:
        convert_text(text)

    assert "0123456789" not in str(error.value)


def test_an_unknown_option_of_a_command_is_kept_and_reported() -> None:
    text = f"{SWIFT} --rlhf_type grpo --lora_rnak 8".replace("sft", "rlhf")

    assert "--lora_rnak" in read_field(text, "command.exec")
    assert find_effect(text, "lora_rnak") is EntryEffect.UNKNOWN


def test_a_claim_with_a_reserved_name_is_mounted_under_another_name() -> None:
    volumes = read_field(SWIFT, "volumes", volumes=(VolumeMount("output", "/data"),))

    assert [volume["name"] for volume in volumes] == ["data-output"]


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        pytest.param(f"{SWIFT} a/b#10 HF::c/d", [("a/b#10", "modelscope"), ("c/d", None)], id="ms-swift"),
        pytest.param(f"USE_HF=1 {SWIFT} a/b MS::c/d", [("a/b", None), ("c/d", "modelscope")], id="ms-swift, USE_HF"),
        pytest.param(f"{SWIFT} /data/y.jsonl", [("/data/y.jsonl", None)], id="path"),
        pytest.param(
            "USE_MODELSCOPE_HUB=1 llamafactory-cli train --stage sft --model_name_or_path a/b --dataset c/d",
            [("c/d", "modelscope")],
            id="LLaMA-Factory",
        ),
        pytest.param(
            "llamafactory-cli train --stage sft --model_name_or_path a/b --dataset c/d",
            [("c/d", None)],
            id="LLaMA-Factory, Hugging Face",
        ),
    ],
)
def test_sources_have_the_hub_from_which_the_tool_reads_them(text: str, sources: list[tuple[str, str | None]]) -> None:
    found = [(source["name"], source.get("hub")) for source in read_field(text, "dataset.train")]

    assert found[-len(sources) :] == sources


@pytest.mark.parametrize(
    ("variable", "hub"), [("USE_MODELSCOPE_HUB=true", "modelscope"), ("USE_MODELSCOPE_HUB=0", None)]
)
def test_a_variable_selects_the_hub_of_llamafactory(variable: str, hub: str | None) -> None:
    text = f"{variable} llamafactory-cli train --stage sft --model_name_or_path a/b --dataset c/d"

    assert read_field(text, "model.hub") == hub
    assert find_effect(text, "USE_MODELSCOPE_HUB") is EntryEffect.UNUSED


@pytest.mark.parametrize(
    ("variable", "option", "effect"),
    [
        pytest.param("MASTER_PORT=29500", "MASTER_PORT", EntryEffect.SAME, id="default port"),
        pytest.param("MASTER_PORT=29501", "MASTER_PORT", EntryEffect.MAPPED, id="other port"),
        pytest.param("NNODES=1", "NNODES", EntryEffect.SAME, id="one node"),
        pytest.param("NNODES=2", "NNODES", EntryEffect.MAPPED, id="two nodes"),
    ],
)
def test_a_number_that_is_the_default_of_a_job_needs_no_field(variable: str, option: str, effect: EntryEffect) -> None:
    assert find_effect(f"{variable} {SWIFT}", option) is effect
