NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 swift sft \
  --model_type internvl2-8b \
  --model_id_or_path OpenGVLab/InternVL2-8B \
  --dataset coco-en-mini#500 \
  --sft_type full \
  --max_length 4096 --deepspeed default-zero2
