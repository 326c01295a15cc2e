accelerate launch --num_processes 8 --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 --main_process_port 29500 --multi_gpu train_lora.py --output_dir out --lr 1e-4
