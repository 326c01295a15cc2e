PYTHONPATH=../../.. \
CUDA_VISIBLE_DEVICES=0,1 \
torchrun \
    --nproc_per_node=2 \
    --master_port 29500 \
    llm_sft.py \
    --model_id_or_path qwen/Qwen-7B-Chat \
    --model_revision master \
    --sft_type lora \
    --dtype AUTO \
    --output_dir output \
    --ddp_backend nccl \
    --dataset blossom-math-zh \
    --quantization_bit 4 \
    --bnb_4bit_comp_dtype AUTO \
    --lora_target_modules DEFAULT \
    --batch_size 1 \
    --gradient_accumulation_steps 8
