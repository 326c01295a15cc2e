NPROC_PER_NODE=8 swift sft --model Qwen/Qwen3-8B --tuner_type full --fsdp fsdp2 --dataset /data/a.jsonl --enable_thinking false
