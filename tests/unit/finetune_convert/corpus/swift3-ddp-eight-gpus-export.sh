export NPROC_PER_NODE=8
export OMP_NUM_THREADS=8
export NCCL_DEBUG=INFO
export NCCL_IB_DISABLE=1
export NCCL_SOCKET_IFNAME=eth0
export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567
swift sft --model Qwen/Qwen3-8B --train_type full --use_hf true --dataset tatsu-lab/alpaca \
  --deepspeed zero3 --learning_rate 1e-5 --per_device_train_batch_size 1 --gradient_accumulation_steps 2 \
  --report_to wandb --attn_impl flash_attn --packing true --max_length 8192 --save_only_model true \
  --split_dataset_ratio 0.01 --num_train_epochs 2 --warmup_steps 20
