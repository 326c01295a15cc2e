python3 -m torch.distributed.launch --nproc_per_node=2 --use_env main.py --lr 0.1
