deepspeed --num_gpus=8 --num_nodes=2 --hostfile hostfile --master_port 9901 finetune.py --deepspeed ds_config.json --output_dir /mnt/out
