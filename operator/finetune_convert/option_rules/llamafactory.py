"""Rules for the options of LLaMA-Factory."""

from finetune_convert.mapping.converters import (
    bounded_float,
    bounded_int,
    off_if_zero,
    to_attention,
    to_beta,
    to_bool,
    to_epsilon,
    to_optimizer,
    to_scheduler,
    to_timeout,
)
from finetune_convert.mapping.rules import Fixed, NeedsProgram, Rule, ToField, ToSecret, Unused, group

_MODEL = "this trainer loads the model as its config describes it"
_ROWS = "this trainer reads the rows as they are"
_KERNEL = "it affects speed and memory, not the result; this trainer computes the loss in tiles"
_OPTIMIZER = "this trainer has AdamW"
_INFERENCE = "this trainer trains and does not generate text"
_LOGGING = "it affects only logs"
_PIXELS = ToField("model.maxPixels", off_if_zero(bounded_int(1, 1_000_000_000)))

RULES: dict[str, Rule] = {
    # model
    "flash_attn": ToField("model.attnImplementation", to_attention),
    "image_max_pixels": _PIXELS,
    "image_min_pixels": ToField("model.minPixels", off_if_zero(bounded_int(1, 1_000_000_000))),
    "video_fps": ToField("model.videoFps", bounded_float(0, 60, open_low=True)),
    "video_maxlen": ToField("model.videoMaxFrames", bounded_int(1, 10_000)),
    "video_max_pixels": ToField("model.videoMaxPixels", off_if_zero(bounded_int(1, 1_000_000_000))),
    **group(
        NeedsProgram("this trainer has no such setting for media"),
        "video_min_pixels image_do_pan_and_scan crop_to_patches use_audio_in_video audio_sampling_rate",
    ),
    **group(
        NeedsProgram(_MODEL),
        "rope_scaling shift_attn mixture_of_depths resize_vocab add_tokens add_special_tokens init_special_tokens"
        " new_special_tokens_config train_from_scratch upcast_layernorm upcast_lmhead_output model_max_length"
        " device_map compute_dtype block_diag_attn",
    ),
    **group(
        Unused("it is a setting of the original program"),
        "cache_dir use_fast_tokenizer split_special_tokens low_cpu_mem_usage use_kv_cache offload_folder use_v1_kernels"
        " trust_remote_code infer_backend infer_dtype print_param_status adapter_folder",
    ),
    # method and adapters
    "lora_rank": ToField("lora.r", bounded_int(1, 4096), stated=True, ours=8),
    "lora_dropout": ToField("lora.loraDropout", bounded_float(0, 0.999), stated=True, ours=0.0),
    "use_rslora": ToField("lora.useRslora", to_bool),
    "use_dora": ToField("lora.useDora", to_bool),
    **group(NeedsProgram("this trainer has one learning rate for all adapter matrices"), "loraplus_lr_ratio"),
    **group(NeedsProgram("adapters start as peft initialises them"), "pissa_init pissa_convert"),
    **group(
        Unused("the option belongs to another method"),
        "loraplus_lr_embedding pissa_iter oft_* module_dropout freeze_trainable_* freeze_extra_modules galore_*"
        " apollo_* badam_* kto_* ppo_* simpo_gamma pref_bco_weight reward_model* asft_alpha eaft_alpha ld_alpha",
    ),
    **group(
        NeedsProgram(_OPTIMIZER),
        "use_galore use_apollo use_badam use_adam_mini use_muon optim_args optim_target_modules use_llama_pro use_kt",
    ),
    "kt_*": Unused("only use_kt uses it"),
    **group(NeedsProgram("this trainer has the usual cross entropy"), "use_dft_loss use_asft_loss use_eaft_loss"),
    **group(
        NeedsProgram("this trainer does not use Megatron or other parallel backends"),
        "use_mca use_hyper_parallel hyper_parallel_args",
    ),
    "pref_beta": ToField("dpo.beta", bounded_float(0, 100, open_low=True)),
    "pref_ftx": ToField("dpo.rpoAlpha", off_if_zero(bounded_float(0, 100))),
    **group(
        NeedsProgram("the reference model is the initial policy"),
        "ref_model ref_model_adapters ref_model_quantization_bit",
    ),
    # rows
    **group(
        NeedsProgram(f"{_ROWS}; change the rows instead"),
        "default_system tool_format interleave_probs media_dir preserve_thinking tokenized_path",
    ),
    "mix_strategy": NeedsProgram("this trainer draws the rows that name#N states", off=("concat",)),
    **group(
        Unused("all rows are read and tokenised once before the first step"),
        "overwrite_cache preprocessing_num_workers preprocessing_batch_size streaming buffer_size"
        " data_shared_file_system data_seed ignore_data_skip remove_unused_columns ignore_pad_token_for_loss"
        " length_column_name",
    ),
    "disable_shuffling": Fixed(False, "rows are shuffled in each epoch", needs_program=True),
    "eval_on_each_dataset": Unused("the evaluation rows are evaluated together"),
    # optimisation
    "lr_scheduler_type": ToField("training.lrSchedulerType", to_scheduler, stated=True, ours="cosine"),
    "lr_scheduler_kwargs": NeedsProgram("this trainer's schedules have no parameters"),
    "weight_decay": ToField("training.weightDecay", bounded_float(0, 1)),
    "max_grad_norm": ToField("training.maxGradNorm", bounded_float(0, 1e9)),
    "adam_beta1": ToField("training.adamBeta1", to_beta),
    "adam_beta2": ToField("training.adamBeta2", to_beta),
    "adam_epsilon": ToField("training.adamEpsilon", to_epsilon),
    "optim": ToField("training.optim", to_optimizer),
    "moe_aux_loss_coef": ToField("training.routerAuxLossCoef", off_if_zero(bounded_float(0, 10))),
    **group(
        NeedsProgram("this trainer does not smooth labels, and adds no noise"),
        "label_smoothing_factor neftune_noise_alpha",
    ),
    "average_tokens_across_devices": ToField("training.averageTokensAcrossDevices", to_bool),
    **group(
        Unused(_KERNEL),
        "use_unsloth use_unsloth_gc enable_liger_kernel use_liger_kernel liger_kernel_config torch_compile* tf32"
        " torch_empty_cache_steps use_reentrant_gc gradient_checkpointing_kwargs use_cache",
    ),
    "auto_find_batch_size": NeedsProgram("set perDeviceTrainBatchSize: auto with globalBatchSize"),
    "full_determinism": Unused("the order of samples and the losses are deterministic anyway"),
    "seed": ToField("training.seed", bounded_int(0, 4_294_967_295)),
    **group(Unused("model.torchDtype sets the precision"), "fp16_full_eval bf16_full_eval"),
    **group(NeedsProgram("this trainer computes in the dtype of the model"), "fp8"),
    "fp8_*": Unused("only fp8 uses it"),
    # distributed
    "ddp_timeout": ToField("training.ddpTimeout", to_timeout),
    **group(
        Unused("the operator configures the process group"),
        "ddp_backend ddp_find_unused_parameters ddp_broadcast_buffers ddp_bucket_cap_mb ddp_static_graph local_rank"
        " accelerator_config parallelism_config master_addr master_port ray_num_workers ray_init_kwargs",
    ),
    "use_cpu": NeedsProgram("this trainer runs on GPUs, or on CPUs without any"),
    # logs and files
    "logging_steps": ToField(
        "training.loggingSteps", lambda value: bounded_int(1)(max(1, value)) if value else None, stated=True, ours=1
    ),
    "save_total_limit": ToField(
        "training.saveTotalLimit", lambda value: None if value is None else bounded_int(1, 1000)(value)
    ),
    **group(
        Unused("the output claim contains checkpoints, result and logs: spec.output"),
        "output_dir logging_dir overwrite_output_dir run_name project plot_loss",
    ),
    **group(
        Unused("it affects only how files are saved"),
        "save_on_each_node save_only_model enable_jit_checkpoint restore_callback_states_from_checkpoint export_*",
    ),
    **group(
        Unused(_LOGGING),
        "logging_* log_* disable_tqdm debug include_* skip_memory_metrics prediction_loss_only do_train do_eval"
        " do_predict label_names compute_accuracy enable_torch_profiler profiler_* profile_modules",
    ),
    "dataloader_num_workers": ToField("dataset.numWorkers", bounded_int(0, 64)),
    **group(
        Unused("the data loader of this trainer needs no such setting"),
        "dataloader_* train_sampling_strategy",
    ),
    **group(Unused("the result is uploaded once, at the end"), "hub_strategy hub_always_push hub_revision"),
    **group(ToSecret("HF_TOKEN"), "hub_token hf_hub_token"),
    "ms_hub_token": ToSecret("MODELSCOPE_API_TOKEN"),
    **group(ToSecret(None), "om_hub_token swanlab_lark_secret swanlab_lark_webhook_url"),
    "swanlab_api_key": ToSecret("SWANLAB_API_KEY"),
    **group(Unused("set the variables of the reporter in spec.env"), "swanlab_* trackio_*"),
    **group(
        Unused("evaluation computes the loss"),
        "eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_use_gather_object"
        " batch_eval_metrics predict_with_generate eval_num_beams",
    ),
    **group(
        Unused(_INFERENCE),
        "vllm_* sglang_* max_new_tokens max_length temperature top_k top_p repetition_penalty length_penalty num_beams"
        " do_sample generation_* sortish_sampler skip_special_tokens",
    ),
}
