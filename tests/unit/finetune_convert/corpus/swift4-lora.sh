CUDA_VISIBLE_DEVICES=0 \
swift sft \
    --model Qwen/Qwen3-4B-Instruct-2507 \
    --tuner_type lora \
    --dataset 'AI-ModelScope/alpaca-gpt4-data-en#1000' \
    --torch_dtype bfloat16 \
    --learning_rate 1e-4 \
    --warmup_ratio 0.05 \
    --max_steps 200
