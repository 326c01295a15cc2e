NPROC_PER_NODE=8 swift pt --model_type qwen1half-7b --dataset chinese-c4#100 --num_train_epochs 1 --sft_type full --deepspeed default-zero3 --output_dir output --lazy_tokenize true
