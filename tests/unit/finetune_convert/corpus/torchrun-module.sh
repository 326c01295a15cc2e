torchrun --standalone --nproc_per_node=8 -m nanochat.train -- --depth 20
