CUDA_VISIBLE_DEVICES=0 swift sft --model Qwen/Qwen2.5-7B-Instruct --train_type lora --dataset /data/train.jsonl \
  --resume_from_checkpoint output/vx-xxx/checkpoint-100
