CUDA_VISIBLE_DEVICES=0 swift sft --model Qwen/Qwen2.5-32B-Instruct --train_type lora \
  --quant_method bnb --quant_bits 4 --bnb_4bit_compute_dtype bfloat16 --torch_dtype bfloat16 \
  --dataset /data/train.jsonl --max_length 2048
