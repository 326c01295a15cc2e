#!/bin/bash
set -ex
# environment
source /opt/conda/etc/profile.d/conda.sh
conda activate swift
pip install ms-swift -U
cd /workspace/ms-swift
MODEL=Qwen/Qwen2.5-7B-Instruct
DATA="/data/train.jsonl"
LR=${LR:-2e-4}
ARGS="--lora_rank 16 --lora_alpha 32"
OUT=output/$(date +%Y%m%d)
export HF_ENDPOINT=https://hf-mirror.com HF_TOKEN=hf_aaaaaaaaaaaaaaaaaaaaaaaa
nohup swift sft --model $MODEL --train_type lora --dataset "$DATA" --learning_rate $LR $ARGS --output_dir $OUT \
  > train.log 2>&1 &
swift infer --adapters output/last
