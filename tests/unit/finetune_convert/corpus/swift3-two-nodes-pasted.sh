# node 0
nproc_per_node=8
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
NNODES=2 \
NODE_RANK=0 \
MASTER_ADDR=127.0.0.1 \
MASTER_PORT=29501 \
NPROC_PER_NODE=$nproc_per_node \
swift sft \
    --model Qwen/Qwen2.5-72B-Instruct \
    --train_type full \
    --dataset /mnt/nas/train.jsonl \
    --deepspeed zero3_offload \
    --gradient_accumulation_steps $((32 / nproc_per_node / 2)) \
    --max_length 4096

# node 1
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
NNODES=2 \
NODE_RANK=1 \
MASTER_ADDR=192.168.1.10 \
MASTER_PORT=29501 \
NPROC_PER_NODE=$nproc_per_node \
swift sft \
    --model Qwen/Qwen2.5-72B-Instruct \
    --train_type full \
    --dataset /mnt/nas/train.jsonl \
    --deepspeed zero3_offload \
    --gradient_accumulation_steps $((32 / nproc_per_node / 2)) \
    --max_length 4096
