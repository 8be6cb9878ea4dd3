"""From flags to the configuration of an instance, without a look at a checkpoint or the machine."""

from __future__ import annotations

from typing import Any

from baton.launch.limits import OptionError
from baton.launch.options.cluster import ClusterOptions
from baton.launch.options.engine import EngineOptions, cost_parts
from baton.launch.options.flag import parse_bytes
from baton.protocol.config import CostModel, InstanceConfig, Speculation

_GROUP_SIZE = 64
"""Inputs that share a scale, where nothing else is said."""
AUTO_STEP_TOKENS = 2048
"""Of a step at most, where their number is chosen."""


def instance_config(options: EngineOptions | None = None, **resolved: Any) -> InstanceConfig:
    """The flags of an instance, and `resolved`: fields of `InstanceConfig` that depend on something else.

    Tests and benchmarks take the flags' defaults, without drafts, and give what they need to be otherwise.
    """
    options = options or EngineOptions(speculation="off")
    cluster = ClusterOptions()  # (`cluster_options.configure` has those that were given)
    memory = options.kv_cache_memory_bytes
    fields: dict[str, Any] = {
        "model": "",
        "executor": options.executor,
        "model_impl": options.model_impl,
        "device": "cpu",
        "dtype": "bfloat16",
        "quantization": options.quantization,
        "quantization_group_size": options.quantization_group_size,
        "quantize_head": options.quantize_head or (8 if _in_groups(options) else 16),
        "tensor_parallel_size": options.tensor_parallel_size,
        "block_size": options.block_size,
        "kv_cache_dtype": None if options.kv_cache_dtype == "auto" else options.kv_cache_dtype,
        "num_blocks": options.num_gpu_blocks_override,
        "kv_cache_memory_bytes": memory and parse_bytes("--kv-cache-memory-bytes", memory),
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "attention_backend": options.attention_backend,
        "enforce_eager": options.enforce_eager,
        "deterministic": options.deterministic,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": _most_tokens(options),
        "auto_step_tokens": options.max_num_batched_tokens == "auto",
        "itl_target_s": _seconds(options.itl_target),
        "ttft_target_s": _seconds(options.ttft_target),
        "max_waiting": options.max_waiting,
        "admission_headroom": options.admission_headroom,
        "enable_prefix_caching": options.enable_prefix_caching,
        "speculation": _drafts(options),
        "overlap_steps": _overlaps(options),
        "num_threads": options.num_threads,
        "step_timeout_s": options.step_timeout,
        "startup_timeout_s": options.startup_timeout,
        "simulated_cost": CostModel(*cost_parts(options.simulated_cost or "0")),
        "weight_cache": options.weight_cache,
        "weight_cache_verify": options.weight_cache_verify,
        "record": options.record,
        "record_max_bytes": parse_bytes("--record-max-bytes", options.record_max_bytes),
        "log_level": options.log_level,
        "log_format": options.log_format,
        "transfer": cluster.transfer,
        "transfer_checksums": cluster.transfer_checksums,
        "transfer_encryption": cluster.transfer_encryption == "on",
        "max_preparing": cluster.max_preparing,
        "lease_s": cluster.kv_lease,
    }
    if "max_num_batched_tokens" in resolved:  # a number: as with the flag
        fields["auto_step_tokens"] = False
    fields |= resolved
    if fields["quantization_group_size"] is None and fields["quantization"] != "int8":
        fields["quantization_group_size"] = _GROUP_SIZE
    return InstanceConfig(**fields)


def _overlaps(options: EngineOptions) -> bool:
    """Raises `OptionError` where steps that overlap are wanted and cannot be."""
    if options.overlap_steps == "off":
        return False
    given = options.speculation not in (None, "off") or options.speculative_config is not None
    if options.overlap_steps == "auto":
        return options.executor == "torch" and options.device == "cuda" and not given
    if options.executor != "simulated" and options.device != "cuda":
        raise OptionError(
            "--overlap-steps on: only with --device cuda or --executor simulated; leave it away"
        )
    if given:
        raise OptionError(
            "--overlap-steps on: a step with drafts needs the last one's tokens; leave "
            "--speculation or --overlap-steps away"
        )
    return True


def _drafts(options: EngineOptions) -> Speculation | None:
    """None where steps overlap: what is drafted comes after the last token."""
    if _overlaps(options):
        return None
    return Speculation(**options.wanted) if options.wanted else None


def _in_groups(options: EngineOptions) -> bool:
    """Whether a checkpoint in floating point is quantized in groups."""
    return options.quantization == "int4" or (
        options.quantization == "int8" and options.quantization_group_size is not None
    )


def _most_tokens(options: EngineOptions) -> int:
    """Of a step: at least one for each sequence."""
    given = options.max_num_batched_tokens
    return max(AUTO_STEP_TOKENS, options.max_num_seqs) if given == "auto" else given


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
