cd /workspace/minimind/trainer
torchrun --nproc_per_node 2 train_dpo.py --epochs 2 --batch_size 4 --data_path /data/dpo.jsonl --save_dir ../out
