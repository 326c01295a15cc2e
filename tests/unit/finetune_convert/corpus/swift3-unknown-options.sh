swift sft --model Qwen/Qwen2.5-7B-Instruct --dataset /data/a.jsonl --train_type lora --lora_rnak 16 --learning-rate 2e-4 --per_device_train_batch 2 stray
