"""Every setting of vLLM has been looked at: it is refused, or it leaves alone what a log-probability means."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from forge_core.config import ConfigError, load_config, validate_for_training
from forge_core.config.vllm_fields import engine_arguments, sampling_parameters, vllm_folder
from forge_core.config.vllm_keys import (
    BIASING,
    BIASING_ARGS,
    ENGINE_ARGS,
    OPAQUE,
    OTHER_MODEL,
    SAMPLING_PARAMS,
    UNREACHED,
)
from forge_core.generation.vllm import REASONS
from tests.config.test_run_gate import GOOD, VLLM, refusal

ACCEPT = "rollout.allow_truncated_sampling=true"
# What the user may set as he likes: speed, memory, logs, kinds of input that Forge does not have, when to stop. It
# changes neither the distribution that is sampled from, nor what a log-probability means, nor whose weights they are.
FREE_ENGINE_ARGS = """
    enable_return_routed_experts return_sampling_mask served_model_name enable_prompt_embeds tokenizer_mode
    allowed_local_media_path allowed_media_domains download_dir safetensors_load_strategy
    safetensors_prefetch_num_threads safetensors_prefetch_block_size kv_cache_dtype cudagraph_capture_sizes
    max_cudagraph_capture_size ir_op_priority distributed_executor_backend distributed_timeout_seconds
    cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus decode_context_parallel_size
    dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_backend
    enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter moe_backend
    linear_backend sparse_indexer_topk_backend all2all_backend enable_elastic_ep elastic_ep_max_dp_size enable_dbo
    ubatch_size dbo_decode_token_threshold dp_sync_interval dbo_prefill_token_threshold
    disable_nccl_for_dp_synchronization eplb_config enable_eplb expert_placement_strategy
    max_parallel_loading_workers block_size enable_prefix_caching prefix_caching_hash_algo
    prefix_cache_retention_interval disable_sliding_window disable_cascade_attn cpu_offload_gb
    cpu_offload_params offload_num_in_group offload_prefetch_step offload_params
    gpu_memory_utilization kv_cache_memory_bytes max_num_batched_tokens max_num_scheduled_tokens
    long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_seqs max_num_active_seqs max_logprobs
    use_fp64_gumbel enable_trace_replay aggregate_engine_logging hf_token model_class_overrides quantization
    quantization_config allow_deprecated_quantization enforce_eager disable_custom_all_reduce
    enable_shm_tensor_arena language_model_only limit_mm_per_prompt enable_mm_embeds interleave_mm_strings
    media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm
    mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype
    mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin renderer_num_workers
    skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb
    mm_device_do_normalize enable_lora max_loras max_lora_rank fully_sharded_loras max_cpu_loras lora_dtype
    lora_target_modules enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format
    enable_moe_shared_loras max_lora_cls_labels ray_workers_use_nsight num_gpu_blocks_override
    enable_chunked_prefill disable_chunked_mm_input scheduler_reserve_full_isl prefill_schedule_interval watermark
    disable_hybrid_kv_cache_manager structured_outputs_config aux_output_config reasoning_parser
    reasoning_parser_plugin speculative_config spec_method spec_model spec_tokens show_hidden_metrics_for_version
    otlp_traces_endpoint collect_detailed_traces per_request_spec_decode_metrics kv_cache_metrics
    kv_cache_metrics_sample custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing
    enable_mfu_metrics enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose
    enable_mm_processor_stats scheduler_cls pooler_config compilation_config attention_config engram_config
    mamba_config kernel_config enable_flashinfer_autotune worker_cls worker_extension_cls profiler_config log_level
    kv_events_config ec_manager_config reasoning_config sleep_mode_offload_cudagraph sleep_preserve_parameter_names
    enable_cumem_allocator enable_nccl_comm_suspend model_impl attention_backend kv_cache_dtype_skip_layers
    mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size prefix_match_unit mamba_cache_mode
    enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm mamba_backend mamba_ssu_algorithm
    enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds additional_config use_tqdm_on_load
    pt_load_map_location async_scheduling stream_interval swa_bounded_replay
    optimization_level performance_mode fault_tolerance_config enable_fault_tolerance kv_offloading_size
    kv_offloading_backend shutdown_timeout fail_on_environ_validation gdn_prefill_backend
    kda_prefill_backend kda_decode_backend enable_log_requests
"""
FREE_SAMPLING_PARAMS = """
    stop stop_token_ids ignore_eos skip_special_tokens spaces_between_special_tokens include_stop_str_in_output
    stream_interval skip_reading_prefix_cache repetition_detection routed_experts_prompt_start
"""


@pytest.mark.parametrize(
    ("known", "tables"),
    [
        (engine_arguments, [ENGINE_ARGS, OTHER_MODEL, OPAQUE, BIASING_ARGS, UNREACHED, FREE_ENGINE_ARGS.split()]),
        (sampling_parameters, [SAMPLING_PARAMS, BIASING, FREE_SAMPLING_PARAMS.split()]),
    ],
)
def test_every_setting_of_the_installed_vllm_is_in_one_table(known: Any, tables: list[Any]) -> None:
    """One that a new vLLM brings: read what it does, and put it into a table of ``vllm_keys.py``, or among the free."""
    named = [name for table in tables for name in table]
    assert sorted(named) == sorted(set(named)), "no setting is in two tables"
    assert set(known()) <= set(named), set(known()) - set(named)


@pytest.mark.parametrize("name", OTHER_MODEL)
def test_other_weights_than_the_policys_are_refused(name: str) -> None:
    problem = refusal(*VLLM, f"generator.engine_args.{name}=dummy")
    assert problem.startswith(f"generator.engine_args.{name}: engines load the verified files of the policy")
    assert "leave it out, and set model" in problem


@pytest.mark.parametrize("setting", ["offload_group_size=4", "offload_backend=prefetch"])
def test_weights_that_a_swap_does_not_reach_are_refused(setting: str) -> None:
    problem = refusal(*VLLM, f"generator.engine_args.{setting}")
    key, value = setting.split("=")
    assert problem.startswith(f"generator.engine_args.{key}: is {value}, but new weights do not reach")
    assert "leave it out, and divide a model that is too large for one GPU with services.generator.procs" in problem


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("sampling_params.trace_decode_token_ids=[1, 2]", "sampling_params.trace_decode_token_ids", "[1, 2]"),
        ("sampling_params.watermarking=true", "sampling_params.watermarking", "True"),
        ("sampling_params.extra_args={bias: 3}", "sampling_params.extra_args", "{'bias': 3}"),
        ("sampling_params.structured_outputs={regex: a}", "sampling_params.structured_outputs", "{'regex': 'a'}"),
        ("engine_args.logits_processors=['m:C']", "engine_args.logits_processors", "['m:C']"),
        ("engine_args.watermark_config={key: 1}", "engine_args.watermark_config", "{'key': 1}"),
        ("engine_args.diffusion_config={}", "engine_args.diffusion_config", "{}"),
        (
            "engine_args.speculative_config={method: ngram, rejection_sample_method: synthetic}",
            "engine_args.speculative_config.rejection_sample_method",
            "synthetic",
        ),
    ],
)
def test_sampling_from_another_distribution_is_refused_or_accepted_by_name(setting: str, key: str, value: str) -> None:
    problem = refusal(*VLLM, f"generator.{setting}")
    assert problem.startswith(f"generator.{key}: is {value}, which biases the importance ratio: leave it out")
    assert ACCEPT in problem
    assert validate_for_training(load_config(GOOD, [*VLLM, f"generator.{setting}", ACCEPT]), gpus=0) == []


@pytest.mark.parametrize(
    "setting",
    [
        "sampling_params={watermarking: false, thinking_token_budget: -1, extra_args: {}, logit_bias: null}",
        "engine_args={logits_processors: [], watermark_config: null}",
        "engine_args.speculative_config={method: ngram, num_speculative_tokens: 2}",
        "engine_args={offload_backend: auto, offload_group_size: 0}",
        "engine_args={quantization: fp8, cpu_offload_params: [a], compilation_config: {level: 3}, cpu_offload_gb: 1}",
        "sampling_params={stop: x, stop_token_ids: null, repetition_detection: {max_pattern_size: 3, min_count: 2}}",
    ],
)
def test_what_changes_no_distribution_passes(setting: str) -> None:
    assert validate_for_training(load_config(GOOD, [*VLLM, f"generator.{setting}"]), gpus=0) == []


@pytest.mark.parametrize(
    ("setting", "taken"),
    [
        ("sampling_params.stop=5", "is 5, but vLLM takes str | list[str] | None: give that, or leave it out"),
        ("sampling_params.stop=[a, 5]", "str | list[str] | None"),
        ("sampling_params.stop_token_ids=['x']", "list[int] | None"),
        ("sampling_params.ignore_eos=1", "bool"),
        ("sampling_params.repetition_detection=5", "max_pattern_size, min_pattern_size, min_count"),
        ("sampling_params.repetition_detection={max_patern_size: 3}", "max_pattern_size"),
        ("sampling_params.repetition_detection={min_count: many}", "min_count"),
        ("engine_args.max_num_seqs=many", "is 'many', but vLLM takes int | None"),
        ("engine_args.gpu_memory_utilization=true", "float"),
        ("engine_args.enforce_eager='yes'", "bool"),
        ("engine_args.speculative_config=ngram", "dict[str, Any] | None"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_type(setting: str, taken: str) -> None:
    problem = refusal(*VLLM, f"generator.{setting}")
    assert problem.startswith(f"generator.{setting.split('=')[0]}: is ")
    assert taken in problem


def test_a_wrong_type_is_refused_even_where_bias_is_accepted() -> None:
    with pytest.raises(ConfigError, match=r"logit_bias: is 3, but vLLM takes dict\[int, float\] \| None"):
        validate_for_training(load_config(GOOD, [*VLLM, "generator.sampling_params.logit_bias=3", ACCEPT]), gpus=0)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("prefill_context_parallel_size", "services.generator.procs"),
        ("data_parallel_rank", "services.generator.num_replicas"),
        ("override_generation_config", "generator.sampling_params"),
        ("nnodes", "leave it out"),
        ("max_num_queued_reqs", "leave it out"),
        ("kv_sharing_fast_prefill", "leave it out"),
    ],
)
def test_what_forge_decides_names_the_key_that_does(name: str, remedy: str) -> None:
    assert remedy in refusal(*VLLM, f"generator.engine_args.{name}=2")


@pytest.mark.parametrize(
    ("mode", "refused"), [("FULL", True), ("full", True), ("2", True), ("FULL_AND_PIECEWISE", False)]
)
def test_graphs_of_whole_steps_that_compute_something_else_are_refused(mode: str, refused: bool) -> None:
    text = f"generator.engine_args.compilation_config.cudagraph_mode={mode}"
    if refused:
        assert "FULL_DECODE_ONLY" in refusal(*VLLM, text)
    else:
        validate_for_training(load_config(GOOD, [*VLLM, text]), gpus=0)


def test_every_reason_of_the_installed_vllm_to_end_a_response_has_one_of_ours() -> None:
    folder = vllm_folder()
    assert folder is not None
    tree = ast.parse((folder / "v1" / "engine" / "__init__.py").read_text(encoding="utf-8"))
    (reasons,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FINISH_REASON_STRINGS"
    )
    assert set(reasons) <= set(REASONS)
