swift sft --model Qwen/Qwen2.5-7B-Instruct --dataset /data/chat.jsonl --train_type lora --loss_scale last_round --truncation_strategy right --max_length 4096 --strict true
