accelerate launch --config_file accelerate_configs/deepspeed_zero3.yaml --num_processes=8 examples/scripts/sft.py --model_name_or_path Qwen/Qwen2-0.5B --output_dir out
