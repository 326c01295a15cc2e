NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 swift sft --model Qwen/Qwen2.5-7B --train_type full --packing true \
  --attn_impl flash_attention_2 --dataset /data/train.jsonl --use_liger_kernel true --streaming true --max_steps 500
