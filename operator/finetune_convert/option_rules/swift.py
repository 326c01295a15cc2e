"""Rules for the options of ms-swift 2.x, 3.x and 4.x; a name means the same in all versions that have it."""

from finetune_convert.mapping.converters import (
    bounded_float,
    bounded_int,
    choice,
    off_if_zero,
    to_attention,
    to_beta,
    to_bool,
    to_dtype,
    to_epsilon,
    to_optimizer,
    to_reporters,
    to_scheduler,
    to_timeout,
    to_whole_alpha,
)
from finetune_convert.mapping.rules import (
    Fixed,
    NeedsCheck,
    NeedsProgram,
    Rule,
    ToField,
    ToSecret,
    Unused,
    group,
)

_SAMPLING = "this trainer trains and does not generate text"
_OTHER_TUNER = "this trainer has LoRA and full fine-tuning"
_LOADER = "the data loader of this trainer needs no such setting"
_LOGGING = "it affects only logs"
_SAVING = "it affects only how files are saved"
_KERNEL = "it affects speed and memory, not the result; this trainer computes the loss in tiles"
_DDP = "the operator configures the process group"
_ROWS = "this trainer reads the rows as they are"
_METHOD = "only other methods than sft and dpo use it"
_RUNTIME = "it is a setting of the original program"
_MODEL = "this trainer loads the model as its config describes it"
_PARALLEL = "this trainer has no sequence parallelism"

RULES: dict[str, Rule] = {
    # model
    **group(ToField("model.torchDtype", to_dtype), "torch_dtype dtype"),
    "attn_impl": ToField("model.attnImplementation", to_attention),
    "use_flash_attn": ToField(
        "model.attnImplementation",
        choice({True: "flash_attention_2", False: None, None: None}, "is neither true nor false"),
    ),
    "max_pixels": ToField("model.maxPixels", off_if_zero(bounded_int(1, 1_000_000_000))),
    **group(
        NeedsProgram("this trainer freezes only whole parts: model.freeze"),
        "freeze_parameters freeze_parameters_ratio freeze_parameters_regex trainable_parameters"
        " trainable_parameters_regex additional_trainable_parameters",
    ),
    **group(
        NeedsProgram(_MODEL),
        "rope_scaling max_model_len new_special_tokens num_labels problem_type init_strategy device_map max_memory"
        " device_map_config device_max_memory experts_impl rescale_image norm_bbox device_map_config_path",
    ),
    "task_type": NeedsProgram("this trainer trains causal language models", off=("causal_lm",)),
    "model_kwargs": NeedsProgram("set pixels, tiles and frames in spec.model"),
    **group(
        Unused(_RUNTIME),
        "local_repo_path check_model check_model_is_latest ignore_args_error model_cache_dir download_mode"
        " load_args load_data_args use_swift_lora logprobs top_logprobs ckpt_dir",
    ),
    **group(
        NeedsProgram("this trainer has no plug-ins"),
        "custom_register_path external_plugins custom_dataset_info callbacks",
    ),
    **group(
        NeedsProgram("this trainer has its own loss and optimizer"), "loss_name optimizer mrl_dims metric eval_metric"
    ),
    # adapters
    "lora_rank": ToField("lora.r", bounded_int(1, 4096), stated=True, ours=8),
    "lora_alpha": ToField("lora.loraAlpha", to_whole_alpha, stated=True, ours=32),
    **group(
        ToField("lora.loraDropout", bounded_float(0, 0.999)),
        "lora_dropout_p",
    ),
    "lora_dropout": ToField("lora.loraDropout", bounded_float(0, 0.999), stated=True, ours=0.0),
    **group(
        NeedsProgram("this trainer takes names of modules"),
        "target_regex lora_target_regex target_parameters modules_to_save lora_modules_to_save",
    ),
    "use_rslora": ToField("lora.useRslora", to_bool),
    "use_dora": ToField("lora.useDora", to_bool),
    **group(
        Fixed("none", "this trainer trains no biases with LoRA", needs_program=True), "lora_bias lora_bias_trainable"
    ),
    "lora_dtype": Unused("adapters are trained in float32"),
    **group(
        NeedsProgram("adapters start as peft initialises them", off=("true", True)), "init_weights init_lora_weights"
    ),
    **group(
        NeedsProgram("this trainer has one learning rate for all adapter matrices"), "lorap_lr_ratio lora_lr_ratio"
    ),
    "tuner_backend": NeedsProgram("this trainer uses peft", off=("peft",)),
    **group(
        Unused(f"{_OTHER_TUNER}; the option belongs to another tuner"),
        "lora_ga_* fourier_* boft_* vera_* adapter_act adapter_length adalora_* ia3_* llamapro_* reft_*"
        " galore_* lisa_step_interval hqq_* ",
    ),
    **group(NeedsProgram("this trainer has AdamW"), "use_galore lisa_activated_layers"),
    **group(
        Unused("matrices are multiplied in model.torchDtype"),
        "bnb_4bit_compute_dtype bnb_4bit_comp_dtype bnb_4bit_quant_storage",
    ),
    # rows
    **group(
        NeedsProgram(f"{_ROWS}; change the rows instead"),
        "system columns model_name model_author response_prefix interleave_prob cached_dataset cached_val_dataset"
        " self_cognition_sample train_dataset_mix_ratio train_dataset_sample val_dataset_sample"
        " is_binary_loss_scale preserve_thinking decision_*",
    ),
    **group(
        NeedsCheck("the chat template of the model's tokenizer is used; check that it is the same"),
        "template template_type tools_prompt agent_template",
    ),
    **group(
        Unused("the chat template of the model's tokenizer is used"),
        "template_backend stop_words padding_side add_non_thinking_prefix disable_ignore_empty_think",
    ),
    **group(
        Unused("all rows are read and tokenised once before the first step"),
        "lazy_tokenize preprocess_num_proc dataset_num_proc load_from_cache_file streaming streaming_* "
        " shuffle_buffer_size packing_num_proc packing_strategy dataset_seed data_seed stopping_strategy"
        " disable_auto_column_mapping train_dataset_mix_ds val_dataset_shuffle ignore_data_skip"
        " check_dataset_strategy test_oom_error remove_unused_columns",
    ),
    **group(
        Fixed(True, "rows are shuffled in each epoch", needs_program=True), "dataset_shuffle train_dataloader_shuffle"
    ),
    "loss_scale_config_path": Unused("only use_loss_scale uses it"),
    "padding_free": Unused("attention without padding is used if the model supports it: model.attnImplementation"),
    **group(NeedsProgram(_PARALLEL, off=(1,)), "sequence_parallel_size sequence_parallel tp pp deepspeed_autotp_size"),
    "train_backend": NeedsProgram("this trainer does not use Megatron", off=("transformers",)),
    "min_lr": Unused("only Megatron uses it"),
    # optimisation
    "vit_lr": ToField("training.visionLearningRate", bounded_float(0, 10, open_low=True)),
    "aligner_lr": ToField("training.alignerLearningRate", bounded_float(0, 10, open_low=True)),
    "lr_scheduler_type": ToField("training.lrSchedulerType", to_scheduler, stated=True, ours="cosine"),
    "lr_scheduler_kwargs": NeedsProgram("this trainer's schedules have no parameters"),
    "weight_decay": ToField("training.weightDecay", bounded_float(0, 1), stated=True, ours=0.0),
    "max_grad_norm": ToField("training.maxGradNorm", bounded_float(0, 1e9)),
    "adam_beta1": ToField("training.adamBeta1", to_beta, stated=True, ours=0.9),
    "adam_beta2": ToField("training.adamBeta2", to_beta, stated=True, ours=0.999),
    "adam_epsilon": ToField("training.adamEpsilon", to_epsilon, stated=True, ours=1e-8),
    "optim": ToField("training.optim", to_optimizer),
    **group(NeedsProgram("this trainer has AdamW"), "optim_args optim_target_modules adafactor"),
    "router_aux_loss_coef": ToField("training.routerAuxLossCoef", off_if_zero(bounded_float(0, 10))),
    "label_smoothing_factor": NeedsProgram("this trainer does not smooth labels for sft"),
    **group(
        NeedsProgram("this trainer adds no noise to embeddings"), "neftune_noise_alpha neftune_alpha neftune_backend"
    ),
    **group(NeedsProgram("this trainer has the usual cross entropy"), "enable_dft_loss enable_channel_loss"),
    "average_tokens_across_devices": ToField("training.averageTokensAcrossDevices", to_bool),
    "gradient_checkpointing": ToField(
        "training.gradientCheckpointing", lambda value: value is None or to_bool(value), stated=True, ours=False
    ),
    **group(
        Unused("training.gradientCheckpointing covers all parts"),
        "vit_gradient_checkpointing vit_use_gc gradient_checkpointing_kwargs",
    ),
    **group(
        Unused(_KERNEL),
        "use_liger_kernel use_liger liger_kernel_config use_logits_to_keep torch_compile* tf32 torchdynamo"
        " torch_empty_cache_steps jit_mode_eval use_cache",
    ),
    "full_determinism": Unused("the order of samples and the losses are deterministic anyway"),
    "seed": ToField("training.seed", bounded_int(0, 4_294_967_295)),
    "auto_find_batch_size": NeedsProgram("set perDeviceTrainBatchSize: auto with globalBatchSize"),
    **group(NeedsProgram("the length of the training is num_train_epochs or max_steps"), "max_epochs"),
    "acc_strategy": Unused("it affects only the reported accuracy"),
    **group(NeedsProgram("this trainer computes in the dtype of the model: model.torchDtype"), "fp16 bf16"),
    **group(
        Unused("model.torchDtype sets the precision"),
        "fp16_backend fp16_opt_level half_precision_backend fp16_full_eval bf16_full_eval",
    ),
    # distributed
    "ddp_timeout": ToField("training.ddpTimeout", to_timeout),
    **group(
        Unused(_DDP),
        "ddp_backend ddp_find_unused_parameters ddp_broadcast_buffers ddp_bucket_cap_mb ddp_static_graph"
        " local_rank accelerator_config parallelism_config zero_hpz_partition_size ds3_gather_for_generation"
        " fsdp_min_num_params fsdp_num fsdp_transformer_layer_cls_to_wrap model_layer_cls_name"
        " metric_warmup_step mp_parameters acc_steps gpu_memory_fraction",
    ),
    **group(NeedsProgram("this trainer runs on GPUs, or on CPUs without any"), "use_cpu no_cuda use_mps_device tpu_*"),
    **group(NeedsProgram("the operator starts the ranks without Ray"), "use_ray ray_exp_name ray_scope device_groups"),
    # logs, files and reports
    "logging_steps": ToField("training.loggingSteps", lambda value: bounded_int(1)(max(1, value)), stated=True, ours=1),
    "report_to": ToField("training.reportTo", to_reporters),
    "save_total_limit": ToField(
        "training.saveTotalLimit", lambda value: None if value in (None, -1) else bounded_int(1, 1000)(value)
    ),
    **group(
        Unused("the output claim contains checkpoints, result and logs: spec.output"),
        "output_dir logging_dir add_version add_output_dir_suffix create_checkpoint_symlink overwrite_output_dir"
        " run_name project",
    ),
    **group(
        Unused(_SAVING),
        "save_safetensors safe_serialization save_on_each_node save_only_model only_save_model max_shard_size"
        " use_flash_ckpt enable_jit_checkpoint restore_callback_states_from_checkpoint",
    ),
    **group(
        Unused(_LOGGING),
        "logging_* log_* disable_tqdm debug include_* skip_memory_metrics prediction_loss_only do_train do_eval"
        " do_predict past_index length_column_name label_names",
    ),
    "dataloader_num_workers": ToField("dataset.numWorkers", bounded_int(0, 64)),
    **group(
        Unused(_LOADER),
        "dataloader_* group_by_length train_sampling_strategy use_legacy_prediction_loop enable_npu_model_patch",
    ),
    **group(
        Unused("the result is uploaded once, at the end"),
        "hub_strategy push_hub_strategy hub_always_push hub_revision push_to_hub_model_id push_to_hub_organization",
    ),
    **group(ToSecret("HF_TOKEN"), "hub_token push_to_hub_token"),
    **group(ToSecret("SWANLAB_API_KEY"), "swanlab_token"),
    **group(ToSecret(None), "swanlab_secret swanlab_webhook_url"),
    **group(Unused("set the variables of the reporter in spec.env"), "swanlab_* trackio_*"),
    # evaluation and generation
    **group(
        Unused("evaluation computes the loss"),
        "eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_use_gather_object"
        " batch_eval_metrics eval_use_evalscope eval_dataset eval_dataset_args eval_limit eval_generation_config"
        " extra_eval_args predict_with_generate",
    ),
    **group(
        Unused(_SAMPLING),
        "max_new_tokens temperature top_k top_p repetition_penalty num_beams do_sample stream generation_*"
        " sortish_sampler",
    ),
    # rlhf
    "beta": ToField("dpo.beta", lambda value: None if value is None else bounded_float(0, 100, open_low=True)(value)),
    "rpo_alpha": ToField("dpo.rpoAlpha", off_if_zero(bounded_float(0, 100)), stated=True),
    **group(
        NeedsProgram("the reference model is the initial policy"),
        "ref_model ref_adapters ref_model_type ref_model_id_or_path ref_model_revision",
    ),
    **group(NeedsProgram("this trainer has one dpo loss"), "loss_weights ld_alpha"),
    **group(
        Unused(_METHOD),
        "vllm_* reward_* teacher_* rlsd_* fipo_* chord_* rollout_* cosine_* cpo_alpha simpo_gamma desirable_weight"
        " undesirable_weight num_ppo_epochs whiten_rewards kl_coef cliprange cliprange_value vf_coef gamma lam"
        " num_mini_batches local_rollout_forward_batch_size num_sample_generations response_length"
        " missing_eos_penalty num_generations num_generations_eval num_iterations max_completion_length discopop_tau"
        " center_rewards_coefficient sft_alpha lmbda seq_kd gkd_* offload_* sdar_* min_p epsilon epsilon_high delta"
        " use_vllm async_generate sleep_level move_model_batches steps_per_generation dynamic_sample"
        " max_resample_times overlong_filter soft_* repetition_* sync_ref_model ref_model_* structured_outputs_regex"
        " multi_turn_scheduler max_turns completion_length_limit_scope importance_sampling_level advantage_*"
        " kl_in_reward scale_rewards tau_* real_tau top_entropy_quantile off_policy_* enable_flattened_weight_sync"
        " wandb_log_unique_prompts gym_env use_gym_env",
    ),
}
