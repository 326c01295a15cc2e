python -m torch.distributed.run --nproc_per_node=4 --nnodes=1 --rdzv_backend=c10d --rdzv_endpoint=localhost:0 pretrain.py --config=configs/a.yaml --hf_token=hf_bbbbbbbbbbbbbbbbbbbbbbbb
