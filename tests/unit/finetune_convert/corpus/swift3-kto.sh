swift rlhf --rlhf_type kto --model Qwen/Qwen2.5-7B-Instruct --train_type lora --dataset AI-ModelScope/ultrafeedback-binarized-preferences-cleaned-kto --output_dir output
