swift sft \
    --model Qwen/Qwen2.5-7B-Instruct \
    --dataset /data/a.jsonl \
    # --train_type full \
    --train_type lora
