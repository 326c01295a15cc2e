swift sft --model Qwen/Qwen2.5-7B-Instruct --dataset /data/agent.jsonl --train_type lora --loss_scale hermes --agent_template hermes
