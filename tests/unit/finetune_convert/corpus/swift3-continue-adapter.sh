CUDA_VISIBLE_DEVICES=0 swift sft --model Qwen/Qwen2.5-7B-Instruct --train_type lora --adapters /data/adapters/first \
  --lora_rank 16 --dataset /data/train.jsonl --learning_rate 5e-5
