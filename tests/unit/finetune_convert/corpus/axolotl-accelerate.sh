accelerate launch --num_processes 8 --num_machines 2 -m axolotl.cli.train config.yml
