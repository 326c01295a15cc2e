llamafactory-cli train examples/train_lora/llama3_lora_sft.yaml learning_rate=1e-5
