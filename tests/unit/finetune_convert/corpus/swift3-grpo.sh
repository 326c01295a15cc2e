CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct \
  --reward_funcs accuracy format --use_vllm true --vllm_mode colocate --dataset AI-MO/NuminaMath-TIR#5000 \
  --num_generations 8 --train_type lora --output_dir output --deepspeed zero2
