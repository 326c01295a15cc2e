"""Rules for the keys of axolotl's config."""

from finetune_convert.mapping.converters import (
    bounded_float,
    bounded_int,
    off_if_zero,
    to_beta,
    to_bool,
    to_epsilon,
    to_optimizer,
    to_scheduler,
    to_timeout,
)
from finetune_convert.mapping.rules import Fixed, NeedsProgram, Rule, ToField, ToSecret, Unused, group

_MODEL = "this trainer loads the model as its config describes it"
_KERNEL = "it affects speed and memory, not the result; this trainer computes the loss in tiles"
_ROWS = "this trainer reads the rows as they are"
_METHOD = "only other methods than sft and dpo use it"
_PEFT = "adapters are those of peft with a rank, scaling, dropout and modules"

RULES: dict[str, Rule] = {
    # model
    **group(
        NeedsProgram(_MODEL),
        "base_model_config cls_model_config overrides_of_model_config overrides_of_model_kwargs rope_scaling"
        " resize_token_embeddings_to_32x mean_resizing_embeddings shrink_embeddings embeddings_skip_upcast"
        " reinit_weights tokens added_tokens_overrides fix_untrained_tokens gptq model_quantization_config"
        " model_quantization_config_kwargs quantize_moe_experts use_onebitllms num_labels reward_model"
        " process_reward_model scaling_softmax* s2_attention use_pose pose_* llama4_linearized_experts"
        " experts_implementation image_size image_resize_algorithm freeze_mm_modules unfrozen_parameters"
        " device_map max_memory gpu_memory_limit world_size device",
    ),
    **group(
        Unused("it follows from the model's files"),
        "type_of_model tokenizer_* is_falcon_derived_model is_llama_derived_model is_mistral_derived_model"
        " is_qwen_derived_model processor_type processor_kwargs trust_remote_code axolotl_config_path",
    ),
    **group(NeedsProgram("this trainer has no plug-ins"), "trainer_cls"),
    # method and adapters
    "lora_dropout": ToField("lora.loraDropout", lambda value: bounded_float(0, 0.999)(value or 0)),
    "peft_use_rslora": ToField("lora.useRslora", to_bool),
    "peft_use_dora": ToField("lora.useDora", to_bool),
    **group(
        NeedsProgram(_PEFT),
        "peft peft_* lora_modules_to_save lora_rank_pattern lora_alpha_pattern lora_target_parameters"
        " lora_fan_in_fan_out loraplus_lr_ratio relora",
    ),
    **group(
        Unused("the option belongs to another method"),
        "loraplus_lr_embedding relora_* lisa_layers_attribute lisa_step_interval jagged_restart_warmup_steps"
        " jagged_restart_anneal_steps qgalore_* dion_* lora_on_cpu merge_lora merge_method",
    ),
    **group(
        NeedsProgram("this trainer has AdamW"), "lisa_n_layers jagged_restart_steps optim_args optim_target_modules"
    ),
    "bnb_config_kwargs": NeedsProgram("this trainer quantizes to NF4 with double quantization"),
    **group(
        Unused(_METHOD),
        "orpo_alpha kto_* cpo_alpha simpo_gamma trl vllm ebft center_rewards_coefficient max_prompt_len eaft_*"
        " dpo_generate_during_eval",
    ),
    **group(NeedsProgram("this trainer has one dpo loss"), "dpo_loss_weights dpo_norm_loss dpo_use_weighting"),
    "precompute_ref_log_probs": ToField("dpo.precomputeRefLogProbs", to_bool),
    **group(NeedsProgram("this trainer has the usual cross entropy"), "use_eaft"),
    # rows
    **group(
        NeedsProgram(f"{_ROWS}; change the rows instead"),
        "default_system_message chat_template_jinja role_boundaries eot_tokens dataset_exact_deduplication"
        " min_sample_len dataset_shard_* curriculum_sampling skip_prepare_dataset",
    ),
    **group(
        Unused("all rows are read and tokenised once before the first step"),
        "dataset_prepared_path num_dataset_shards_to_save dataset_num_proc dataset_processes dataset_keep_in_memory"
        " push_dataset_to_hub shuffle_before_merging_datasets preprocess_iterable streaming streaming_* is_preprocess"
        " pretrain_* pretraining_sample_concatenation sample_packing_* multipack_real_batches batch_flattening"
        " pad_to_sequence_len pad_to_multiple_of eval_sample_packing eval_sequence_len max_packed_sequence_len"
        " total_num_tokens total_supervised_tokens remove_unused_columns dpo_padding_free",
    ),
    "shuffle_merged_datasets": Fixed(True, "rows are shuffled in each epoch", needs_program=True),
    # optimisation
    "optimizer": ToField("training.optim", to_optimizer),
    "lr_scheduler": ToField("training.lrSchedulerType", to_scheduler),
    **group(
        NeedsProgram("this trainer's schedules have no parameters"),
        "lr_scheduler_kwargs cosine_min_lr_ratio cosine_constant_lr_ratio lr_div_factor lr_quadratic_warmup",
    ),
    **group(
        NeedsProgram("this trainer has learning rates for the vision encoder and aligner only"),
        "lr_groups embedding_lr embedding_lr_scale",
    ),
    "weight_decay": ToField("training.weightDecay", lambda value: bounded_float(0, 1)(value or 0)),
    "max_grad_norm": ToField(
        "training.maxGradNorm", lambda value: None if value is None else bounded_float(0, 1e9)(value)
    ),
    "adam_beta1": ToField("training.adamBeta1", to_beta),
    "adam_beta2": ToField("training.adamBeta2", to_beta),
    "adam_epsilon": ToField("training.adamEpsilon", to_epsilon),
    **group(Unused("only other optimizers use it"), "adam_beta3 adam_epsilon2 torchdistx_path"),
    "seed": ToField("training.seed", lambda value: None if value is None else bounded_int(0, 4_294_967_295)(value)),
    **group(NeedsProgram("this trainer adds no noise to embeddings"), "neftune_noise_alpha noisy_embedding_alpha"),
    **group(
        Unused(_KERNEL),
        "tf32 torch_compile* flash_attn_* flash_optimum flex_attn_compile_kwargs fused_attn_kernel"
        " gemma4_hybrid_attn_impl"
        " large_head_attention sdpa_varlen lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel"
        " chunked_cross_entropy* tiled_mlp* use_kernels low_cpu_mem_usage dpo_use_liger_kernel dpo_use_logits_to_keep"
        " gradient_checkpointing_kwargs selective_checkpointing gc_steps gc_collect_steps torch_empty_cache_steps"
        " activation_offloading layer_offloading ple_cpu_offload experimental_skip_move_to_device deepcompile"
        " fp32_norms fp32_norm_classes",
    ),
    **group(NeedsProgram("this trainer computes in the dtype of the model"), "fp8 fp8_config qat quantization"),
    "fp8_enable_fsdp_float8_all_gather": Unused("only fp8 uses it"),
    "auto_find_batch_size": NeedsProgram("set perDeviceTrainBatchSize: auto with globalBatchSize"),
    # distributed
    "ddp_timeout": ToField("training.ddpTimeout", lambda value: None if value is None else to_timeout(value)),
    **group(
        Unused("the operator configures the process group"),
        "ddp ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters local_rank accelerator_config"
        " fsdp_version fsdp_final_state_dict_type qlora_sharded_model_loading ring_attn_func heads_k_stride"
        " ray_run_name ray_num_workers resources_per_worker",
    ),
    **group(
        NeedsProgram("this trainer has no such parallelism", off=(1,)),
        "sequence_parallel_degree context_parallel_size tensor_parallel_size dp_shard_size dp_replicate_size",
    ),
    "use_ray": NeedsProgram("the operator starts the ranks without Ray"),
    # logs and files
    "logging_steps": ToField("training.loggingSteps", off_if_zero(bounded_int(1))),
    **group(
        Unused("the output claim contains checkpoints, result and logs: spec.output"),
        "output_dir save_safetensors save_only_model save_first_step auto_resume_from_checkpoints hub_strategy"
        " hub_revision"
        " dynamic_checkpoint",
    ),
    **group(
        Unused("it affects only logs"),
        "include_* profiler_* loss_watchdog_* strict otel_* use_otel_metrics gradio_* wandb_log_model"
        " wandb_watch comet_mode"
        " comet_online comet_project_name comet_workspace comet_experiment_config hf_mlflow_log_artifacts trackio_*"
        " hf_use_auth_token",
    ),
    **group(ToSecret(None), "comet_api_key comet_experiment_key"),
    **group(
        Unused("evaluation computes the loss"),
        "eval_table_size eval_max_new_tokens eval_causal_lm_metrics do_causal_lm_eval do_bench_eval"
        " bench_dataset bench_split"
        " generate_samples generation_* num_generation_samples",
    ),
    "dataloader_num_workers": ToField("dataset.numWorkers", bounded_int(0, 64)),
    **group(Unused("the data loader of this trainer needs no such setting"), "dataloader_* group_by_length"),
}
