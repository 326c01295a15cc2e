NPROC_PER_NODE=8 CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 swift pt --model Qwen/Qwen2.5-7B --train_type full \
  --dataset swift/chinese-c4 --streaming true --max_steps 10000 --deepspeed zero3 --output_dir output --packing true --max_length 8192
