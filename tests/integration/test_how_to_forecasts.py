"""Compare the memory forecasts of the how-to pages with the program, for the published dimensions of the models.

The tokenizers are those of tiny models: a forecast depends on the number of tokens and not on their ids.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import (
    GotOcr2ImageProcessorPil,
    InternVLConfig,
    InternVLVisionConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
)
from typer.testing import CliRunner

from finetune_cli.app import app
from testing.builders.job_files import write_yaml
from testing.models import tiny_vision

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "how-to"
QWEN2_7B: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}


QWEN2_1_5B: dict[str, Any] = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


def build_7b(folder: Path) -> None:
    """Write the config of Qwen2.5-7B-Instruct."""
    save(Qwen2Config(**QWEN2_7B, vocab_size=152064), folder)


def build_1_5b(folder: Path) -> None:
    """Write the config of Qwen2.5-1.5B-Instruct."""
    save(Qwen2Config(**QWEN2_1_5B, vocab_size=151936), folder)


def build_qwen2_vl(folder: Path) -> None:
    """Write the config, a tokenizer and the image processor of Qwen2-VL-7B-Instruct."""
    tokenizer = tiny_vision.build_tokenizer("qwen2_vl")
    tokenizer.save_pretrained(folder)
    names = ("vision_start", "vision_end", "image_pad", "video_pad")
    start, end, image, video = tokenizer.convert_tokens_to_ids([f"<|{name}|>" for name in names])
    ids = {"vision_start_token_id": start, "vision_end_token_id": end, "image_token_id": image, "video_token_id": video}
    tower = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "hidden_size": 3584, "mlp_ratio": 4, "patch_size": 14}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text = {**QWEN2_7B, "vocab_size": 152064, "rope_parameters": rope}
    save(Qwen2VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **ids), folder)
    Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 12_845_056}).save_pretrained(folder)


def build_internvl(folder: Path) -> None:
    """Write the config, a tokenizer and the image processor of InternVL3-8B-hf."""
    tokenizer = tiny_vision.build_tokenizer("internvl")
    tokenizer.save_pretrained(folder)
    tower = InternVLVisionConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        image_size=[448, 448],
        patch_size=[14, 14],
        attention_bias=True,
    )
    image = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    text = Qwen2Config(**QWEN2_7B, vocab_size=151674)
    sizes = {"image_token_id": image, "image_seq_length": 256, "tie_word_embeddings": False}
    save(InternVLConfig(vision_config=tower, text_config=text, **sizes), folder)
    GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, max_patches=12).save_pretrained(folder)


def save(config: PretrainedConfig, folder: Path) -> None:
    config.dtype = "bfloat16"
    config.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "example", "build_model", "gpu"),
    [
        pytest.param("batch-size", "internvl", build_internvl, "rtx4090-24g", id="InternVL3-8B"),
        pytest.param("multi-node", "qwen2-vl", build_qwen2_vl, None, id="Qwen2-VL-7B"),
    ],
)
def test_forecast_of_how_to_page_is_the_output_of_the_program(
    page: str, example: str, build_model: Callable[[Path], None], gpu: str | None, tmp_path: Path
) -> None:
    forecast = run_estimate(example, build_model, gpu, tmp_path)

    assert f"```\n{forecast}```" in (PAGES / f"{page}.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "example", "build_model"),
    [
        pytest.param("data-parallel", "one-node-four-gpus", build_7b, id="Qwen2.5-7B"),
        pytest.param("dpo", "dpo", build_1_5b, id="Qwen2.5-1.5B"),
    ],
)
def test_last_lines_of_forecast_in_how_to_page_are_the_output_of_the_program(
    page: str, example: str, build_model: Callable[[Path], None], tmp_path: Path
) -> None:
    forecast = run_estimate(example, build_model, "rtx4090-24g", tmp_path)
    verdicts = forecast.rpartition("\n\n")[2].strip()

    assert verdicts.startswith("rtx4090-24g: ")
    assert verdicts in (PAGES / f"{page}.md").read_text()


def run_estimate(example: str, build_model: Callable[[Path], None], gpu: str | None, folder: Path) -> str:
    """Return the output of `finetune estimate` for an example whose model is in a folder."""
    model = folder / "model"
    build_model(model)
    job = yaml.safe_load((ROOT / "manifests" / "examples" / f"{example}.yaml").read_text())
    name = job["spec"]["model"]["name"]
    job["spec"]["model"]["name"] = str(model)
    path = write_yaml(folder, job)
    result = CliRunner().invoke(app, ["estimate", str(path), *(["--gpu", gpu] if gpu else [])])
    return result.stdout.replace(str(model), name)
