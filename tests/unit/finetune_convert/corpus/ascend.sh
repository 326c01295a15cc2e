ASCEND_RT_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=4 swift sft --model Qwen/Qwen2.5-7B-Instruct --dataset /data/a.jsonl --train_type lora
