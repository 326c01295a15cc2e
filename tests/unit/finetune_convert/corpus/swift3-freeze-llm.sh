NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1 swift sft --model OpenGVLab/InternVL3-8B --train_type full --freeze_llm true --freeze_vit true --freeze_aligner false --dataset /data/caption.jsonl
