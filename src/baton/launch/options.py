"""From what a user typed to what the processes need: every default is resolved here, once.

`ServeOptions` holds the flags as given (None: not given).  `make_plan` looks at the checkpoint and the
machine and returns a `Plan`: the configuration of one instance, and what the gateway has to know of
the model.  A wrong combination is an `OptionError` with one line that names the flag and the fix.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.gateway.served_model import ServedModel
from baton.launch.limits import MAX_SECONDS, OptionError, check_range
from baton.model.config import ModelConfig, UnsupportedModel
from baton.model.files import check_files, has_tokenizer
from baton.model.fingerprint import fingerprint
from baton.model.generation_config import read_generation_config
from baton.model.hub import EMBEDDED_MODEL, resolve_model
from baton.protocol.config import CostModel, Dtype, InstanceConfig

DtypeFlag = Literal["auto", "bfloat16", "float16", "float32"]
_DTYPE_NAMES = {"half": "float16", "float": "float32"}


@dataclass(frozen=True)
class ServeOptions:
    """The flags of `baton serve` and the arguments of `LLM`, as given."""

    model: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    served_model_name: tuple[str, ...] = ()
    dtype: str = "auto"
    quantization: Literal["int8"] | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_waiting: int = 1024
    block_size: int = 32
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | str | None = None
    tensor_parallel_size: int = 1
    admission_headroom: int | None = None
    enable_prefix_caching: bool = True
    generation_config: str = "auto"
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    seed: int | None = None
    executor: Literal["torch", "simulated"] = "torch"
    simulated_cost: CostModel = CostModel()
    simulated_real_time: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_threads: int | None = None
    step_timeout: float = 120.0
    """Seconds."""
    startup_timeout: float = 600.0
    """Seconds."""
    record: str | None = None
    record_max_bytes: int | str = "1GiB"
    log_level: str = "info"


@dataclass(frozen=True)
class Plan:
    """What `make_plan` resolved."""

    instance: InstanceConfig
    served: ServedModel
    architecture: str


def make_plan(options: ServeOptions) -> Plan:
    """Resolves every default.

    Raises `OptionError`, or `ModelNotFound` / `UnsupportedModel` / `LoadError` for the model's files.
    """
    directory = resolve_model(options.model, revision=options.revision)
    tokenizer = _tokenizer_directory(options.tokenizer, directory)
    model = ModelConfig.from_directory(directory)
    if options.executor == "torch":
        check_files(directory)
    generation = read_generation_config(
        directory, model.vocab_size, sampling=options.generation_config == "auto"
    )
    _check_ranges(options)
    max_model_len = _max_model_len(options, model)
    if options.executor == "torch":
        _check_tensor_parallel(options, model)
    device = _device(options)
    instance = InstanceConfig(
        model=str(directory),
        max_model_len=max_model_len,
        executor=options.executor,
        device=device,
        dtype=_dtype(options.dtype, model.dtype, device),
        quantization=_quantization(options, device),
        tensor_parallel_size=options.tensor_parallel_size,
        block_size=options.block_size,
        num_blocks=options.num_gpu_blocks_override,
        kv_cache_memory_bytes=_size("--kv-cache-memory-bytes", options.kv_cache_memory_bytes),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_waiting=options.max_waiting,
        admission_headroom=options.admission_headroom,
        enable_prefix_caching=options.enable_prefix_caching,
        num_threads=options.num_threads,
        step_timeout_s=options.step_timeout,
        startup_timeout_s=options.startup_timeout,
        record=_record_directory(options.record),
        record_max_bytes=_size("--record-max-bytes", options.record_max_bytes) or 0,
        vocab_size=model.vocab_size,
        simulated_cost=options.simulated_cost,
        simulated_real_time=options.simulated_real_time,
        log_level=options.log_level,
    )
    served = ServedModel(
        names=options.served_model_name or (options.model or EMBEDDED_MODEL,),
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        eos_token_ids=generation.eos_token_ids or model.eos_token_ids,
        vocab_size=model.vocab_size,
        root=str(directory) if _is_directory(options.model) else str(options.model),
        checkpoint=fingerprint(directory),
        dtype=_computes_in(instance),
        defaults=generation.sampling,
        content_format=options.chat_template_content_format,
        seed=options.seed,
    )
    return Plan(instance, served, model.architecture)


def _is_directory(model: str | None) -> bool:
    """Not a name on the hub."""
    return model is None or model == EMBEDDED_MODEL or Path(model).expanduser().is_dir()


def _tokenizer_directory(name: str | None, model: Path) -> Path:
    path = model if name is None else Path(name).expanduser()
    if not path.is_dir():
        raise OptionError(f"--tokenizer {name}: no such directory")
    if not has_tokenizer(path):
        raise OptionError(
            f"{str(path)!r} has no tokenizer (tokenizer.json or tokenizer.model); give the directory of one "
            "with --tokenizer"
        )
    return path


def _record_directory(name: str | None) -> str | None:
    """Made here, so that a wrong one is known before anything is loaded."""
    if name is None:
        return None
    path = Path(name).absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--record {name}: cannot make this directory: {error.strerror}") from None
    return str(path)


def _check_ranges(options: ServeOptions) -> None:
    for flag, value, least, most, unit in (
        ("--max-num-seqs", options.max_num_seqs, 1, 1 << 16, "sequences"),
        ("--max-num-batched-tokens", options.max_num_batched_tokens, 1, 1 << 22, "tokens"),
        ("--max-waiting", options.max_waiting, 1, 2**31 - 1, "requests"),
        ("--block-size", options.block_size, 1, 1024, "tokens"),
        ("--tensor-parallel-size", options.tensor_parallel_size, 1, 1024, "processes"),
        ("--num-gpu-blocks-override", options.num_gpu_blocks_override, 1, 2**31 - 1, "blocks"),
        ("--max-model-len", options.max_model_len, 2, 2**31 - 1, "tokens, for prompt and answer,"),
        ("--num-threads", options.num_threads, 1, 1024, "threads"),
        ("--admission-headroom", options.admission_headroom, 0, 2**31 - 1, "tokens"),
        ("--step-timeout", options.step_timeout, 0.01, MAX_SECONDS, "seconds"),
        ("--startup-timeout", options.startup_timeout, 0.01, MAX_SECONDS, "seconds"),
        ("--seed", options.seed, -(2**63), 2**64 - 1, "an integer"),
    ):
        check_range(flag, value, least, most, unit)
    if options.max_num_batched_tokens < options.max_num_seqs:
        raise OptionError(
            f"--max-num-batched-tokens {options.max_num_batched_tokens}: a step needs room for one token of "
            f"each sequence; give at least --max-num-seqs ({options.max_num_seqs}), or lower that"
        )
    if not all(options.served_model_name):
        raise OptionError("--served-model-name: must not be empty")


def _max_model_len(options: ServeOptions, model: ModelConfig) -> int:
    limit = model.max_context
    asked = options.max_model_len
    if asked is None:
        return limit
    if asked > limit:
        raise OptionError(
            f"--max-model-len {asked}: the model's context is {limit} tokens; give at most that"
        )
    return asked


def _check_tensor_parallel(options: ServeOptions, model: ModelConfig) -> None:
    try:
        model.check_tensor_parallel(options.tensor_parallel_size)
    except UnsupportedModel as error:
        raise OptionError(f"--tensor-parallel-size {options.tensor_parallel_size}: {error}") from None


def _device(options: ServeOptions) -> Literal["cpu", "cuda"]:
    if options.device == "auto":
        return "cuda" if Path("/dev/nvidiactl").exists() and _torch_has_cuda() else "cpu"
    return options.device


def _torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA build, without the seconds that importing it takes."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return not version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def _dtype(flag: str, checkpoint: str, device: str) -> Dtype:
    name = _DTYPE_NAMES.get(flag, flag)
    if name not in ("auto", "bfloat16", "float16", "float32"):
        raise OptionError(f"--dtype {flag}: one of auto, bfloat16, float16, float32")
    if name == "auto":
        if device == "cpu" and checkpoint in ("bfloat16", "float16"):
            # Without the instructions, bf16 products fall to a few per cent of fp32's speed.
            name = "bfloat16" if _cpu_has_bf16() else "float32"
        else:
            name = checkpoint
    if name == "float16" and device == "cpu":
        raise OptionError("--dtype float16: not on a CPU; give bfloat16 or float32")
    return name  # type: ignore[return-value]


def _quantization(options: ServeOptions, device: str) -> Literal["int8"] | None:
    if options.quantization is not None:
        if options.executor != "torch":
            raise OptionError(f"--quantization {options.quantization}: the simulated executor has no weights")
        if device != "cpu":
            raise OptionError(
                f"--quantization {options.quantization}: on CPUs only; give --device cpu or leave it away"
            )
    return options.quantization


def _computes_in(instance: InstanceConfig) -> str:
    """What two instances must have in common to continue each other's requests."""
    if instance.executor == "simulated":
        return "simulated"
    return instance.dtype if instance.quantization is None else f"{instance.dtype}+{instance.quantization}"


def _cpu_has_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return bool(re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", flags))


_UNITS = {
    "": 1,
    **{"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12},
    **{"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40},
}
_MAX_BYTES = 1 << 50


def _size(flag: str, text: int | str | None) -> int | None:
    return None if text is None else parse_bytes(flag, text)


def parse_bytes(flag: str, text: int | str) -> int:
    """'4GiB', '512m', '1000000', 1000000 → bytes.  Raises `OptionError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", str(text).strip().lower())
    if not match or match[2] not in _UNITS or not 1 <= float(match[1]) * _UNITS[match[2]] <= _MAX_BYTES:
        raise OptionError(f"{flag} {text}: give a number of bytes up to 1024 TiB, for example 4GiB or 500M")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_cost(text: str | None) -> CostModel:
    """'0.002,1e-5,2e-5,1e-9' → a cost model; missing parts are 0."""
    if text is None:
        return CostModel()
    try:
        parts = [float(part) for part in text.split(",")]
        if len(parts) > 4 or not all(0 <= part <= MAX_SECONDS for part in parts):
            raise ValueError
    except ValueError:
        raise OptionError(
            f"--simulated-cost {text}: give up to four numbers of seconds, such as 0.002,1e-5,2e-5,1e-9"
        ) from None
    return CostModel(*parts)
