NPROC_PER_NODE=8 swift rlhf --rlhf_type dpo --model /data/models/Qwen2.5-7B --train_type full --dataset /data/pairs.jsonl \
  --loss_type ipo --beta 0.05 --deepspeed zero3 --max_length 4096
