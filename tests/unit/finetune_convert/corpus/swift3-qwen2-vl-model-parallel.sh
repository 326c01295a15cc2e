# two cards without NPROC_PER_NODE: the layers are divided
CUDA_VISIBLE_DEVICES=0,1 \
MAX_PIXELS=1003520 \
swift sft \
    --model Qwen/Qwen2-VL-7B-Instruct \
    --dataset 'AI-ModelScope/LaTeX_OCR#20000' \
    --train_type lora \
    --freeze_vit true \
    --gradient_accumulation_steps 16 \
    --num_train_epochs 1
