FORCE_TORCHRUN=1 NNODES=2 NODE_RANK=0 MASTER_ADDR=192.168.0.1 MASTER_PORT=29500 CUDA_VISIBLE_DEVICES=0,1,2,3 llamafactory-cli train \
    --stage sft --do_train True --model_name_or_path Qwen/Qwen2.5-7B-Instruct --preprocessing_num_workers 16 \
    --finetuning_type lora --template qwen --flash_attn auto --dataset_dir data --dataset identity,alpaca_en_demo \
    --cutoff_len 2048 --learning_rate 5e-05 --num_train_epochs 3.0 --max_samples 100000 --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 --lr_scheduler_type cosine --max_grad_norm 1.0 --logging_steps 5 --save_steps 100 \
    --warmup_steps 0 --packing False --report_to none --output_dir saves/Qwen2.5-7B/lora/train --bf16 True --plot_loss True \
    --ddp_timeout 180000000 --include_num_input_tokens_seen True --optim adamw_torch --lora_rank 8 --lora_alpha 16 \
    --lora_dropout 0 --lora_target all
