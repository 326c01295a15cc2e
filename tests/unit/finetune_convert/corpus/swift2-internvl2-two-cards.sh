CUDA_VISIBLE_DEVICES=0,1 swift sft \
  --model_type internvl2-26b \
  --dataset /data/vqa.jsonl \
  --max_length 4096
