NPROC_PER_NODE=2 swift rlhf --rlhf_type dpo --model Qwen/Qwen2.5-7B-Instruct --train_type lora --dataset /data/pairs.jsonl --loss_type sigmoid --label_smoothing 0.1
