CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 \
swift rlhf \
    --rlhf_type dpo \
    --model Qwen/Qwen2.5-7B-Instruct \
    --train_type lora \
    --dataset hjh0119/shareAI-Llama3-DPO-zh-en-emoji \
    --beta 0.1 --rpo_alpha 0.1 \
    --learning_rate 1e-4 \
    --gradient_accumulation_steps 8 \
    --deepspeed zero2
