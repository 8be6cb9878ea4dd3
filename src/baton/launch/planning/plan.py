"""From flags to what the processes need: what depends on the checkpoint and the machine is resolved here.

`make_plan` returns a `ServerPlan`: the configuration of one instance, and what the gateway has to know of the
model.  A combination that cannot be served is an `OptionError` with one line that names the flag and the fix.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from baton.gateway.names import VENDORS, read_names
from baton.gateway.served_model import (
    PAIR,
    QWEN3_RERANKER,
    Judge,
    Routing,
    ServedModel,
    Task,
)
from baton.launch.limits import OptionError
from baton.launch.options.engine import EngineOptions
from baton.launch.planning.draft_model import check_mtp, with_draft_model
from baton.launch.planning.instance_config import instance_config
from baton.launch.planning.templates import read_template, read_template_defaults
from baton.model.architectures.adapted import installed
from baton.model.checkpoint.config import ModelConfig, UnsupportedModel
from baton.model.checkpoint.files import check_files, has_tokenizer, read_model_max_length
from baton.model.checkpoint.fingerprint import fingerprint
from baton.model.checkpoint.generation_config import GenerationConfig, read_generation_config
from baton.model.checkpoint.gguf import is_gguf
from baton.model.checkpoint.gguf_config import has_gguf_tokenizer
from baton.model.checkpoint.hub import EMBEDDED_MODEL, resolve_model
from baton.model.checkpoint.sentence_files import (
    read_classifier_tokens,
    read_pooler_config,
    read_sentence_files,
)
from baton.model.description.model import MoeConfig
from baton.protocol.config import Dtype, InstanceConfig
from baton.protocol.params.pooling import Pooling

log = logging.getLogger(__name__)

_DTYPES: dict[str, Dtype] = {
    "half": "float16",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
}


@dataclass(frozen=True)
class ServerPlan:
    """What `make_plan` resolved."""

    instance: InstanceConfig
    served: ServedModel
    architecture: str
    max_restarts: int


def make_plan(options: EngineOptions, *, note_steps: bool = False) -> ServerPlan:
    """Resolves every default.  `note_steps`: somebody may ask for a timeline.

    Raises `OptionError`, or `ModelNotFound` / `UnsupportedModel` / `LoadError` for the model's files.
    """
    if options.kv_cache_dtype != "auto" and options.executor != "torch":
        raise OptionError(
            f"--kv-cache-dtype {options.kv_cache_dtype}: the simulated executor's KV cache holds token ids; "
            "leave it away"
        )
    directory = resolve_model(options.model, revision=options.revision)
    model = ModelConfig.from_directory(directory, options.model_impl)
    tokenizer = _tokenizer_path(options.tokenizer, directory)
    if options.executor == "torch" and not is_gguf(directory):  # (whose header says all that there is)
        check_files(directory)
    tasks, pooling, judge = _pooling(options, directory, model)
    generation = GenerationConfig()
    if "generate" in tasks:  # (else nobody asks how it would be done)
        generation = read_generation_config(
            directory, model.vocab_size, sampling=options.generation_config == "auto"
        )
    max_model_len = _max_model_len(options, model, directory, tokenizer, vectors="generate" not in tasks)
    if options.executor == "torch":
        _check_tensor_parallel(options, model)
    device = _device(options)
    if options.deterministic and device == "cuda" and options.tensor_parallel_size > 1:
        raise OptionError(
            f"--deterministic: with --tensor-parallel-size {options.tensor_parallel_size} NCCL adds up terms "
            "in an order that depends on the step; give one rank, or leave it away"
        )
    _check_attention(options, device)
    adapted = model.implementation == "transformers" and options.executor == "torch"
    if adapted and device != "cpu":
        raise OptionError(
            f"--device {options.device}: {model.architecture} would be computed by transformers, which Baton "
            "has do so on CPUs only; give --device cpu"
        )
    headless = "generate" not in tasks and (judge is None or judge.head)
    instance = instance_config(
        replace(options, device=device),  # (steps overlap on a CUDA device that was found, too)
        model=str(directory),
        headless=headless and options.executor == "torch" and not adapted,
        max_model_len=max_model_len,
        device=device,
        dtype=_dtype(options.dtype, model.dtype, device),
        quantization=_quantization(options, model),
        record=_made("--record", options.record),
        weight_cache=None if options.weight_cache is None else str(Path(options.weight_cache).absolute()),
        vocab_size=model.vocab_size,
        tokenizer_files=str(tokenizer),
        note_steps=note_steps,
    )
    if instance.deterministic and instance.device == "cuda" and instance.speculation is not None:
        raise OptionError(
            "--deterministic: a row with drafts has another kernel beside prompts than in a step of its own; "
            "give --speculation off, or leave it away"
        )
    check_mtp(instance, model, options.model or EMBEDDED_MODEL)
    instance = with_draft_model(
        instance, model.vocab_size, tokenizer, lambda checkpoint: _dtype("auto", checkpoint, device)
    )
    names, aliases = read_names(options.served_model_name)
    served = ServedModel(
        names=names or (options.model or EMBEDDED_MODEL,),
        aliases=aliases if options.served_model_name or "generate" not in tasks else VENDORS,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        eos_token_ids=tuple(dict.fromkeys((*generation.eos_token_ids, *model.eos_token_ids))),
        vocab_size=model.vocab_size,
        root=str(directory) if _is_here(options.model) else str(options.model),
        checkpoint=fingerprint(directory),
        dtype=_computes_in(instance) + ("+transformers" if adapted else ""),
        angles=model.angles(max_model_len) if options.executor == "torch" else "",
        defaults=generation.sampling,
        chat_template=read_template(options.chat_template),
        template_defaults=read_template_defaults(options.default_chat_template_kwargs),
        content_format=options.chat_template_content_format,
        unsupported_content=options.unsupported_content,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        tasks=tasks,
        pooling=pooling,
        dimensions=model.hidden_size if options.executor == "torch" else 0,
        judge=judge,
        labels=model.labels,
        activation=model.activation if pooling.normalize or not model.labels else "identity",
        routing=_routing(options, model),
        max_logprobs=options.max_logprobs,
        seed=options.seed,
    )
    architecture = model.architecture + (f" by transformers {installed()}, slower" if adapted else "")
    return ServerPlan(instance, served, architecture, options.max_restarts)


def _pooling(
    options: EngineOptions, directory: Path, model: ModelConfig
) -> tuple[frozenset[Task], Pooling, Judge | None]:
    """What is served besides texts, or instead of them.  Raises `OptionError` and `UnsupportedModel`."""
    files = None
    if options.runner != "generate" and not is_gguf(directory) and not model.labels:
        files = read_sentence_files(directory)
    tokens = read_classifier_tokens(directory) if not is_gguf(directory) else None
    if options.runner == "generate" and model.labels:
        raise OptionError(
            "--runner generate: this model has a head of scores, and none of tokens; leave it away"
        )
    if options.runner == "generate" and model.reads_only:
        raise OptionError(
            "--runner generate: this model's class has no head of tokens: it gives vectors of texts; leave "
            "it away"
        )
    pools = options.runner == "pooling" or (
        options.runner == "auto" and bool(files or tokens or model.labels or model.reads_only)
    )
    pooling = files.pooling if files is not None else Pooling("last")
    if options.pooler_config is not None:
        try:
            pooling = read_pooler_config(str(options.pooler_config), pooling, model.hidden_size)
        except ValueError as error:
            raise OptionError(f"--pooler-config: {error}") from None
    kind = options.convert
    if kind == "auto":
        kind = "none" if not pools else "classify" if tokens or model.labels else "embed"
    elif kind == "none" and pools:
        raise OptionError("--convert none: with --runner pooling nothing is left to serve; leave it away")
    tasks: set[Task] = set() if pools else {"generate"}
    if kind == "embed":
        tasks |= {"embed", "score"}
    elif model.labels:
        if pooling.kind != "last":
            raise OptionError(
                "--pooler-config: a head of scores reads the last token; leave pooling_type away"
            )
        tasks |= {"classify", "score"} if len(model.labels) == 1 else {"classify"}
        return frozenset(tasks), pooling, PAIR
    elif kind == "classify":
        tasks.add("score")
    if kind != "classify":
        return frozenset(tasks), pooling, None
    judge = QWEN3_RERANKER if tokens is None else replace(QWEN3_RERANKER, no=tokens[0], yes=tokens[1])
    return frozenset(tasks), pooling, judge


def _routing(options: EngineOptions, model: ModelConfig) -> Routing | None:
    """What answers may say of experts, if they may."""
    if not options.enable_return_routed_experts:
        return None
    mixtures = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoeConfig)]
    if not mixtures or options.executor != "torch":
        raise OptionError(
            f"--enable-return-routed-experts: {model.architecture} has no mixture of experts that Baton "
            "routes; leave it away"
        )
    return Routing(len(mixtures), mixtures[0].chosen, mixtures[0].experts)


def _is_here(model: str | None) -> bool:
    """Not a name on the hub."""
    return model is None or model == EMBEDDED_MODEL or Path(model).expanduser().exists()


def _tokenizer_path(name: str | None, model: Path) -> Path:
    path = model if name is None else Path(name).expanduser()
    if is_gguf(path) and path.exists():
        if not has_gguf_tokenizer(path):
            raise OptionError(f"{str(path)!r} has no tokenizer; give the directory of one with --tokenizer")
        return path
    if not path.is_dir():
        raise OptionError(f"--tokenizer {name}: no such directory")
    if not has_tokenizer(path):
        raise OptionError(
            f"{str(path)!r} has no tokenizer (tokenizer.json or tokenizer.model); give the directory of one "
            "with --tokenizer"
        )
    return path


def _made(flag: str, name: str | None) -> str | None:
    """A directory that is made here, so that a wrong one is known before anything is loaded."""
    if name is None:
        return None
    path = Path(name).absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{flag} {name}: cannot make this directory: {error.strerror}") from None
    return str(path)


def _max_model_len(
    options: EngineOptions, model: ModelConfig, directory: Path, tokenizer: Path, *, vectors: bool
) -> int:
    """What was asked for, up to what the positions are made for; else the least that a file says."""
    limit = model.max_context
    asked = options.max_model_len
    if asked is None:
        said = {limit: "config.json"}
        if limit == model.max_position_embeddings:  # (YaRN stretches what a tokenizer's file was written for)
            said |= {read_model_max_length(tokenizer) or limit: "model_max_length of tokenizer_config.json"}
        if vectors and not is_gguf(directory):
            files = read_sentence_files(directory)
            said |= {(files and files.max_length) or limit: "max_seq_length of sentence_bert_config.json"}
        if (least := min(said)) < limit:
            log.info("max_model_len is %d by %s; --max-model-len may be up to %d", least, said[least], limit)
        return max(least, 2)
    if asked > limit:
        raise OptionError(
            f"--max-model-len {asked}: the model's context is {limit} tokens; give at most that"
        )
    return asked


def _check_tensor_parallel(options: EngineOptions, model: ModelConfig) -> None:
    try:
        model.check_tensor_parallel(options.tensor_parallel_size)
    except UnsupportedModel as error:
        raise OptionError(f"--tensor-parallel-size {options.tensor_parallel_size}: {error}") from None


def _check_attention(options: EngineOptions, device: Literal["cpu", "cuda"]) -> None:
    """What else `--attention-backend` asks of a machine or a model, a worker finds out."""
    wanted = options.attention_backend
    if wanted == "auto":
        return
    told = f"--attention-backend {wanted}"
    if options.executor != "torch":
        raise OptionError(f"{told}: the simulated executor computes no attention; leave it away")
    if wanted != "torch" and device != "cuda":
        raise OptionError(f"{told}: it is for CUDA devices; give --device cuda, or leave it away")
    if wanted != "triton" and options.deterministic and device == "cuda":
        raise OptionError(
            f"{told}: there a row's bits depend on what else is in the step; leave one of both "
            "away: it, or --deterministic"
        )


def _device(options: EngineOptions) -> Literal["cpu", "cuda"]:
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
    name = checkpoint if flag == "auto" else flag
    if flag == "auto" and device == "cpu" and checkpoint in ("bfloat16", "float16"):
        # Without the instructions, bf16 products fall to a few per cent of fp32's speed.
        name = "bfloat16" if _cpu_has_bf16() else "float32"
    dtype = _DTYPES[name]
    if dtype == "float16" and device == "cpu":
        raise OptionError(f"--dtype {flag}: not on a CPU; give bfloat16 or float32")
    return dtype


def _quantization(options: EngineOptions, model: ModelConfig) -> Literal["int8", "int4"] | None:
    if options.quantization is not None:
        if model.quantization is not None and not model.quantization.is_of_experts:
            raise OptionError(
                f"--quantization {options.quantization}: this checkpoint is quantized already "
                f"({model.quantization.method}); leave it away"
            )
        if options.executor != "torch":
            raise OptionError(f"--quantization {options.quantization}: the simulated executor has no weights")
    if options.quantize_head not in (None, 16):
        if options.quantization == "int8" and options.quantization_group_size is None:
            raise OptionError(
                f"--quantize-head {options.quantize_head}: has no effect with --quantization int8, which has "
                "the head in 8 bits, unless --quantization-group-size is given"
            )
        if options.executor != "torch":
            raise OptionError(
                f"--quantize-head {options.quantize_head}: the simulated executor has no weights; "
                "leave it away"
            )
    return options.quantization


def _computes_in(instance: InstanceConfig) -> str:
    """What two instances must have in common to continue each other's requests."""
    if instance.executor == "simulated":
        return "simulated"
    found: str = instance.dtype
    if instance.quantization is not None:
        found += f"+{instance.quantization}"
    if instance.quantization is not None and instance.quantization_group_size is not None:
        found += f"/{instance.quantization_group_size}"
    if instance.deterministic and instance.device == "cuda":
        found += "+deterministic"
    if instance.attention_backend == "torch" and instance.device == "cpu":
        found += "+attention_torch"
    if instance.kv_cache_dtype is not None:
        found += f"+kv_{instance.kv_cache_dtype}"
    return found if instance.quantize_head == 16 else f"{found}+head{instance.quantize_head}"


def _cpu_has_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return bool(re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", flags))
