"""Test the FSDP config of a spec."""

from finetune_trainer.parallel.fsdp import build_fsdp_config
from testing.builders.jobs import parse_spec


def test_fsdp_config_selects_version_2() -> None:
    config = build_fsdp_config(parse_spec(fsdp={"reshardAfterForward": False}))

    assert config is not None
    assert (config["version"], config["reshard_after_forward"], config["cpu_offload"]) == (2, False, False)
    assert build_fsdp_config(parse_spec()) is None
