NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 swift rlhf --rlhf_type dpo --model Qwen/Qwen3-8B --tuner_type full \
  --dataset /data/pairs.jsonl --loss_type robust --label_smoothing 0.1 --deepspeed zero3 --split_dataset_ratio 0.02
