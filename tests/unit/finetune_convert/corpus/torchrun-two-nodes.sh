NODE_RANK=${NODE_RANK:-0}
DISTRIBUTED_ARGS="
    --nproc_per_node 8 \
    --nnodes 2 \
    --node_rank $NODE_RANK \
    --master_addr 10.0.0.1 \
    --master_port 6001
"
torchrun $DISTRIBUTED_ARGS finetune.py \
    --model_name_or_path Qwen/Qwen-7B-Chat \
    --data_path data.json \
    --bf16 True \
    --output_dir output_qwen \
    --deepspeed finetune/ds_config_zero3.json
