CUDA_VISIBLE_DEVICES=0,1,2,3 axolotl train examples/llama-3/lora-1b.yml --learning-rate 1e-4
