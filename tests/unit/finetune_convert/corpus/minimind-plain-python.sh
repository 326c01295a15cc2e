python train_full_sft.py --epochs 2 --use_wandb
