nproc_per_node=4
CUDA_VISIBLE_DEVICES=0,1,2,3 \
NPROC_PER_NODE=$nproc_per_node \
swift sft \
    --model Qwen/Qwen2.5-7B-Instruct \
    --train_type lora \
    --dataset /data/train.jsonl \
    --val_dataset /data/valid.jsonl \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps $(expr 32 / $nproc_per_node) \
    --eval_steps 100 --save_steps 200 \
    --max_steps 1000 --warmup_ratio 0.03 \
    --deepspeed zero2
