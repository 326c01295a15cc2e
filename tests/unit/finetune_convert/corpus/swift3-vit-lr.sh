NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 swift sft --model Qwen/Qwen2.5-VL-7B-Instruct --train_type full \
  --freeze_vit false --freeze_aligner false --vit_lr 1e-6 --aligner_lr 1e-5 --learning_rate 1e-5 \
  --dataset /data/vqa.jsonl --deepspeed zero3
