CUDA_VISIBLE_DEVICES=0 swift sft --model Qwen/Qwen2.5-7B-Instruct --quant_method bnb --quant_bits 8 --dataset train.jsonl --train_type lora
