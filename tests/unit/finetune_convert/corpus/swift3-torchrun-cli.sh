torchrun \
    --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=10.0.0.1 --master_port=29500 \
    swift/cli/sft.py \
    --model Qwen/Qwen2.5-14B-Instruct \
    --dataset /data/train.jsonl \
    --train_type lora --deepspeed zero3
