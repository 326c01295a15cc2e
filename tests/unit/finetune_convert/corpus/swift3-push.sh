swift sft --model Qwen/Qwen2.5-7B-Instruct --dataset /data/chat.jsonl --train_type lora --push_to_hub true --hub_model_id acme/support --hub_token ms-0123456789 --hub_private_repo true
