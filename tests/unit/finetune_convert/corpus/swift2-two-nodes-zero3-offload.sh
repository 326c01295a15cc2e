# node0
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 NNODES=2 NODE_RANK=0 MASTER_ADDR=127.0.0.1 NPROC_PER_NODE=8 swift sft --model_type qwen1half-32b-chat --sft_type full --dataset /nas/blossom.jsonl --deepspeed zero3-offload --output_dir output
# node1
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 NNODES=2 NODE_RANK=1 MASTER_ADDR=xxx.xxx.xxx.xxx NPROC_PER_NODE=8 swift sft --model_type qwen1half-32b-chat --sft_type full --dataset /nas/blossom.jsonl --deepspeed zero3-offload --output_dir output
