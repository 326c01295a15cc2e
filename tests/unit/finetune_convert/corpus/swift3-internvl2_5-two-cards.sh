# InternVL2.5 on two cards, LoRA
CUDA_VISIBLE_DEVICES=0,1 \
NPROC_PER_NODE=2 \
MAX_NUM=6 \
swift sft \
    --model OpenGVLab/InternVL2_5-8B \
    --dataset /data/vqa.jsonl \
    --train_type lora \
    --torch_dtype bfloat16 \
    --freeze_vit true \
    --freeze_aligner false \
    --lora_rank 16 --lora_alpha 64 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 8 \
    --max_length 8192 \
    --deepspeed zero2
