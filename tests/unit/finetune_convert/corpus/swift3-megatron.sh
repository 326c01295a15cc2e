PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' NPROC_PER_NODE=8 CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
megatron sft --load Qwen2.5-7B-Instruct-mcore --dataset /data/train.jsonl --tensor_model_parallel_size 2 --save megatron_output/q
