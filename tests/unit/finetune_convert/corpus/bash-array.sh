GPUS_PER_NODE=8
TRAIN_ARGS=(
    --lr 1e-4
    --data "/data/a b.jsonl"
)
torchrun --nproc_per_node $GPUS_PER_NODE train.py "${TRAIN_ARGS[@]}"
