"""Flags of an instance: its model, its memory, how it computes, what it writes down."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

from baton.gateway.names import read_names
from baton.gateway.parsing.formats import CALLS, THINKS, check_call_name, check_think_name
from baton.launch.limits import MAX_SECONDS, OptionError
from baton.launch.options.flag import JsonObject, Options, flag
from baton.launch.options.record import RecordOptions
from baton.launch.options.speculation import SpeculationOptions
from baton.protocol.params.limits import MAX_LOGPROBS

MANY = 1 << 30
"""Of requests: the queue of a program's own instance has no end."""


def cost_parts(text: str) -> list[float]:
    """'0.002,1e-5' → the parts of the cost of a simulated step.  Raises `ValueError` with what to give."""
    try:
        parts = [float(part) for part in text.split(",")]
        if len(parts) > 4 or not all(0 <= part <= MAX_SECONDS for part in parts):
            raise ValueError
    except ValueError:
        raise ValueError("give up to four numbers of seconds, such as 0.002,1e-5,2e-5,1e-9") from None
    return parts


def _check_group_size(size: int | None) -> None:
    if size not in (None, 32, 64, 128):
        raise ValueError("give 32, 64 or 128")


def _check_head_bits(bits: int | None) -> None:
    if bits not in (None, 4, 6, 8, 16):
        raise ValueError("give 4, 6, 8 or 16")


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Options):
    title: ClassVar[str] = "Configuration"

    config: str | None = flag(
        None,
        "YAML or TOML file with any of these flags. Environment variables (BATON_FLAG) go before it, and "
        "the command line before both.",
        metavar="FILE",
        unset="none",
    )


@dataclass(frozen=True)
class ModelOptions(Options):
    title: ClassVar[str] = "Model"

    model: str | None = flag(
        None,
        "Directory of a checkpoint, a GGUF file, or a name on the model hub (OWNER/NAME, "
        "OWNER/NAME:Q4_K_M for a GGUF file there).",
        unset="the embedded model",
    )
    _: KW_ONLY
    tokenizer: str | None = flag(
        None, "Directory of the tokenizer, or a GGUF file with one.", unset="the model's"
    )
    revision: str | None = flag(None, "Branch, tag or commit on the hub.", unset="the newest")
    served_model_name: tuple[str, ...] = flag(
        (),
        "Names that clients use. `*` in one stands for any text (claude-*), and NAME=OTHER answers as OTHER, "
        "one of the others; without it answers say the name that was asked for. Repeatable.",
        unset="MODEL, and claude-* for texts",
        check=read_names,
    )
    model_impl: Literal["auto", "baton", "transformers"] = flag(
        "auto",
        "Whose code computes the model. baton: Baton's own; transformers: its class in the library "
        "transformers, on Baton's KV cache and with its products, slower. auto: Baton's for families that it "
        "has.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32", "half", "float"] = flag(
        "auto", "Of weights and activations. auto: the checkpoint's, or float32 on a CPU without bf16."
    )
    quantization: Literal["int8", "int4"] | None = flag(
        None,
        "Of a checkpoint in floating point, while it is loaded. int8: weights and activations of all "
        "products in 8 bits; int4: weights in 4 bits, v in 6, with a scale and a zero point for each group.",
        unset="as the checkpoint is",
    )
    quantization_group_size: int | None = flag(
        None,
        "Inputs that share a scale, with --quantization: 32, 64 or 128. Fewer are more accurate, and larger.",
        least=32,
        most=128,
        unit="inputs",
        unset="64 with int4; all inputs of an output with int8",
        check=_check_group_size,
    )
    quantize_head: int | None = flag(
        None,
        "Bits of the output head and the embedding: 4, 6 or 8; 16: as in the checkpoint.",
        least=4,
        most=16,
        unit="bits",
        unset="8 with --quantization, else as the checkpoint is",
        check=_check_head_bits,
    )
    max_model_len: int | None = flag(
        None,
        "Longest prompt + output, in tokens.",
        least=2,
        most=2**31 - 1,
        unit="tokens, for prompt and answer,",
        unset="the model's",
    )
    generation_config: Literal["auto", "baton"] = flag(
        "auto", "auto: sampling defaults from the model's generation_config.json; baton: neutral ones."
    )
    chat_template: str | None = flag(
        None,
        "File with a chat template (Jinja) instead of the model's, or the template itself.",
        metavar="FILE",
        unset="the model's",
    )
    default_chat_template_kwargs: str | JsonObject | None = flag(
        None,
        "JSON object of the chat template's own switches, such as '{\"enable_thinking\": false}'; those "
        "of a request's chat_template_kwargs go before them.",
        metavar="JSON",
        unset="none",
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = flag(
        "auto",
        "How text parts come to the chat template: joined, or as OpenAI's list; auto: as it reads them.",
    )
    unsupported_content: Literal["note", "refuse"] = flag(
        "note", "Images, sound and files in conversations: a short text in their place, or an error."
    )
    tool_call_parser: str = flag(
        "auto",
        f"How the model writes calls of tools: {', '.join(CALLS)}, or another name that vLLM has for one of "
        "these; hf: the checkpoint's response_template is run; none: calls are text. auto: as its "
        "response_template shows, else its chat template.",
        check=check_call_name,
        metavar="NAME",
    )
    reasoning_parser: str = flag(
        "auto",
        f"How the model writes reasoning: {', '.join(THINKS)}, or another name that vLLM has for one of "
        "these; hf: the checkpoint's response_template is run; none: it is part of the answer. auto: as its "
        "response_template shows, else its chat template.",
        check=check_think_name,
        metavar="NAME",
    )
    runner: Literal["auto", "generate", "pooling"] = flag(
        "auto",
        "generate: the model answers with texts; pooling: with vectors of texts, or scores. auto: pooling "
        "for a checkpoint with modules.json (of sentence-transformers), else generate.",
    )
    convert: Literal["auto", "none", "embed", "classify"] = flag(
        "auto",
        "What vectors or scores are made of. embed: a vector of each text; classify: the checkpoint's own "
        "head of scores (…ForSequenceClassification), else how much likelier the model thinks yes than "
        "no, of a query and a document (Qwen3-Reranker). With --runner generate it is served beside texts. "
        "auto: with --runner pooling what the checkpoint says, else embed.",
    )
    pooler_config: str | JsonObject | None = flag(
        None,
        "JSON: pooling_type (LAST, MEAN or CLS), normalize, dimensions: how a vector is made of a text.",
        metavar="JSON",
        unset="the checkpoint's 1_Pooling/config.json, or the last token, normalized",
    )
    enable_return_routed_experts: bool = flag(
        False,
        "Answers say which experts of a mixture each token went to, if the request asks for it "
        "(`return_routed_experts`), for trainers that replay it. `LLM` has it in every answer.",
    )
    max_logprobs: int = flag(
        MAX_LOGPROBS,
        "Log-probabilities of each token that a request may ask for (`logprobs`, `top_logprobs`, "
        "`prompt_logprobs`). -1: of the whole vocabulary; what that costs is in docs/api.md.",
        least=-1,
        most=2**31 - 1,
        unit="tokens",
    )
    seed: int | None = flag(
        None,
        "Makes requests without a seed reproducible.",
        least=-(2**63),
        most=2**64 - 1,
        unit="an integer",
        unset="a random one for each request",
    )


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Options):
    title: ClassVar[str] = "Memory and batching"

    max_num_seqs: int = flag(256, "Sequences in one step at most.", least=1, most=1 << 16, unit="sequences")
    max_num_batched_tokens: int | Literal["auto"] = flag(
        "auto",
        "Tokens in one step at most (chunked prefill). auto: how much of whose prompts a step computes "
        "follows what steps take here, up to 2048.",
        least=1,
        most=1 << 22,
        unit="tokens",
    )
    itl_target: float | None = flag(
        None,
        "Milliseconds from one token of a stream to its next that steps with prompts keep to, with "
        "--max-num-batched-tokens auto.",
        least=0.01,
        most=MAX_SECONDS,
        unit="milliseconds",
        unset="8 times the shortest step, 3 times a step without prompts, or 10 ms, whichever is longest",
    )
    ttft_target: float | None = flag(
        None,
        "Milliseconds to the first token: a prompt that would miss them by what streams beside it are "
        "spared is computed sooner, with --max-num-batched-tokens auto.",
        least=0.01,
        most=MAX_SECONDS,
        unit="milliseconds",
        unset="none",
    )
    max_waiting: int = flag(
        1024,
        "Requests that may queue for admission; of one more, the worst is answered 429.",
        least=1,
        most=2**31 - 1,
        unit="requests",
        quiet=MANY,
    )
    block_size: int = flag(32, "Tokens in one KV block.", least=1, most=1024, unit="tokens")
    kv_cache_memory_bytes: int | str | None = flag(
        None, "Size of the KV cache, such as 4GiB.", size=True, unset="by free memory", metavar="SIZE"
    )
    gpu_memory_utilization: float = flag(
        0.9,
        "Share of a CUDA device's memory for weights, activations and the KV cache, which has what the "
        "others leave; unless its size is given. On a CPU it says nothing.",
        least=0.01,
        most=1.0,
        unit="a share",
    )
    kv_cache_dtype: Literal["auto", "int8"] = flag(
        "auto",
        "Of keys and values in the KV cache. auto: as --dtype; int8: 8 bits and a scale for each position "
        "and KV head, about half of bfloat16's memory and transfers.",
    )
    num_gpu_blocks_override: int | None = flag(
        None,
        "KV blocks, on any device, instead of a size.",
        least=1,
        most=2**31 - 1,
        unit="blocks",
        unset="by size",
    )
    admission_headroom: int | None = flag(
        None,
        "Tokens that everything running can still grow by when a request is admitted; 0 admits whatever fits "
        "now.",
        least=0,
        most=2**31 - 1,
        unit="tokens",
        unset="learnt from preemptions",
    )
    enable_prefix_caching: bool = flag(True, "Share the KV of common prompt beginnings.")

    def check(self) -> None:
        for name in ("itl_target", "ttft_target"):
            if getattr(self, name) is not None and self.max_num_batched_tokens != "auto":
                option = f"--{name.replace('_', '-')}"
                raise OptionError(
                    f"{option} {getattr(self, name):g}: has no effect with --max-num-batched-tokens "
                    f"{self.max_num_batched_tokens}; give auto there, or leave {option} away"
                )
        if self.max_num_batched_tokens != "auto" and self.max_num_batched_tokens < self.max_num_seqs:
            raise OptionError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens}: a step needs room for one token of "
                f"each sequence; give at least --max-num-seqs ({self.max_num_seqs}), or lower that"
            )


@dataclass(frozen=True, kw_only=True)
class WeightOptions(Options):
    title: ClassVar[str] = "Weights"

    weight_cache: str | None = flag(
        None,
        "Keep packed weights in this directory: the next start maps them instead of packing them again.",
        metavar="DIRECTORY",
        unset="they are packed at every start",
    )
    weight_cache_verify: bool = flag(
        True,
        "Compare the checksums of all tensors of a cached image before it is used: some tenths of a second "
        "for each gigabyte.",
    )


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions(Options):
    title: ClassVar[str] = "Execution"

    tensor_parallel_size: int = flag(
        1,
        "Worker processes that share each layer.",
        least=1,
        most=1024,
        unit="processes",
        short="-tp",
    )
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "Where the model runs.")
    attention_backend: Literal["auto", "triton", "flashinfer", "torch"] = flag(
        "auto",
        "What computes attention. triton: Baton's kernels for CUDA devices; flashinfer: the library "
        "FlashInfer there, where it is installed; torch: PyTorch, slower. auto: Baton's own kernels for the "
        "device, as a draft model's attention always is.",
    )
    enforce_eager: bool = flag(
        False,
        "On a CUDA device, launch each operation of a step by itself instead of replaying decode steps as "
        "CUDA graphs: slower, for finding faults.",
    )
    deterministic: bool = flag(
        False,
        "A token's bits do not depend on what else is in its step: on a CUDA device all products are made by "
        "one tile of Baton's kernel, slower than cuBLAS, for any number of rows, and there are no drafts; "
        "how a prompt is cut may still show in last bits there. On a CPU it is always so, cuts too.",
    )
    num_threads: int | None = flag(
        None,
        "Compute threads of a worker.",
        least=1,
        most=1024,
        unit="threads",
        unset="the physical cores that this process may use, divided among all workers",
    )
    executor: Literal["torch", "simulated"] = flag(
        "torch", "simulated: no model is computed, tokens are a hash of the KV cache's content."
    )
    overlap_steps: Literal["auto", "off", "on"] = flag(
        "auto",
        "on: a step is launched before the last one's tokens are read, with --device cuda or --executor "
        "simulated, and no step has drafts; auto: on a CUDA device, unless --speculation is given.",
    )
    simulated_cost: str | None = flag(
        None,
        "Seconds of a simulated step: base,prefill token,decode sequence,KV token.",
        check=lambda text: text is None or cost_parts(text),
        unset="none",
    )
    step_timeout: float = flag(
        120.0,
        "Seconds without a step report, while requests run, after which the instance is restarted.",
        least=0.01,
        most=MAX_SECONDS,
        unit="seconds",
    )
    startup_timeout: float = flag(
        600.0,
        "Seconds that loading the model may take, at the start and in /update_weights.",
        least=0.01,
        most=MAX_SECONDS,
        unit="seconds",
    )
    max_restarts: int = flag(
        5,
        "Restarts in a row of an instance that keeps dying.",
        least=0,
        most=10**6,
        unit="a number",
    )


@dataclass(frozen=True)
class EngineOptions(
    SourceOptions,
    ModelOptions,
    MemoryOptions,
    WeightOptions,
    ExecutionOptions,
    SpeculationOptions,
    RecordOptions,
):
    """Every flag of one instance: the arguments of `LLM`."""
