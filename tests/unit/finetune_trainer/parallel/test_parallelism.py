"""Test the description of the parallelism of a spec."""

from finetune_trainer.parallel.parallelism import describe_parallelism
from testing.builders.jobs import parse_spec


def test_description_contains_the_backend_and_the_preset() -> None:
    assert describe_parallelism(parse_spec()) == "ddp"
    assert describe_parallelism(parse_spec(fsdp={})) == "fsdp2"
    assert describe_parallelism(parse_spec(deepspeed={"preset": "zero3"})) == "deepspeed zero3"
