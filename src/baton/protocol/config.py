"""The configuration of an instance, resolved once by `launch` and handed to each of its processes."""

from __future__ import annotations

from typing import Literal

import msgspec

from baton.protocol.weights import Weights

Dtype = Literal["bfloat16", "float16", "float32"]


class CostModel(msgspec.Struct, frozen=True):
    """What a simulated step takes: base + the sum of the parts, in seconds."""

    base: float = 0.0
    per_prefill_token: float = 0.0
    per_decode_sequence: float = 0.0
    per_kv_token: float = 0.0
    """For each token of context that a row reads."""


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokens are drafted, so that a step can confirm several of them (`drafting/base.py`)."""

    method: Literal["auto", "ngram", "suffix", "draft", "mtp", "planted"]
    """`planted`: by one that knows the answers and errs on purpose, for the simulator and benchmarks."""
    num_speculative_tokens: int = 15
    """Drafts of a slot in a step, at most; the engine gives a slot blocks for so many tokens more."""
    prompt_lookup_min: int = 2
    """Of `ngram` and `auto`: tokens that must be found again, at least."""
    prompt_lookup_max: int = 16
    suffix_decoding_max_tree_depth: int = 24
    """Of `suffix` and `auto`: tokens of a match that is told from a longer one."""
    suffix_decoding_max_cached_requests: int | None = None
    """Answers that are kept for other requests of the same salt; 0: none; None: 10000 with `suffix`, none
    with `auto`."""
    suffix_decoding_max_cached_bytes: int = 64 << 20
    """Of memory for them."""
    suffix_decoding_max_spec_factor: float = 1.0
    """Of `suffix`: drafts for each token of the match, at most."""
    suffix_decoding_min_token_prob: float = 0.1
    """Of `suffix`: drafts end before the share of what was found that goes on so is less."""
    model: str = ""
    """Of `draft`: the checkpoint of the draft model."""
    dtype: Dtype | None = None
    """Of `draft`: what the draft model computes in; None: as the instance."""
    by_cost: bool = False
    """Of `draft` and `mtp`: how many tokens are drafted is chosen by what that costs and gives."""
    planted_right: float = 1.0
    """Of `planted`: how many of its drafts are right."""


class Nodes(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts of an instance."""

    count: int = 1
    listen: str = ""
    """Where relays of other hosts reach the leader's, `tcp://HOST:PORT`."""
    host: str = "127.0.0.1"
    """The address of this host at which its ranks meet those of the others."""
    timeout_s: float = 10.0
    """A host that is silent for so long is lost, and the instance with it."""
    model: str | None = None
    """The model as it was given, for the other hosts; None: the embedded one."""
    revision: str | None = None
    checkpoint: str = ""
    """Its fingerprint, which must be the same on each host; "": not known."""


ONE_HOST = Nodes()


class InstanceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the engine and the workers of one instance need to know.

    Sizes are in tokens unless the name says bytes or blocks.  What a flag sets has no default here but None,
    "not given": the default of a flag stands with the flag (`launch/options/`), and
    `launch/planning/instance_config.py` makes a configuration from flags.
    """

    model: str
    """Directory of the checkpoint (config.json, *.safetensors), or "" with the simulated executor."""
    model_impl: Literal["auto", "baton", "transformers"]
    """Whose code computes the model; auto: Baton's, for families that it has."""
    max_model_len: int
    executor: Literal["torch", "simulated"]
    device: Literal["cpu", "cuda"]
    headless: bool = False
    """Nobody asks for tokens: an output head is not read, and a checkpoint may lack it."""
    dtype: Dtype
    """Of activations; also of weights, unless these are quantized, and of the KV cache, unless it is."""
    kv_cache_dtype: Literal["int8"] | None = None
    """int8: integers, and a scale for each position and KV head; None: as `dtype`."""
    quantization: Literal["int8", "int4"] | None = None
    """Of a checkpoint in floating point, while it is loaded."""
    quantization_group_size: int | None
    """Inputs that share a scale, at most; None: with int8 those of an output share one."""
    quantize_head: int
    """Bits of the output head; 16: as the checkpoint is."""
    tensor_parallel_size: int
    block_size: int
    num_blocks: int | None = None
    """KV blocks of the pool; None: as many as `kv_cache_memory_bytes` hold."""
    kv_cache_memory_bytes: int | None = None
    """Over all ranks of the instance; None: chosen by the worker from what is free."""
    memory_shares: int = 1
    """So many instances share the machine: the memory that a worker chooses by itself is divided by it."""
    gpu_memory_utilization: float
    """Of a CUDA device's memory, for weights, activations and KV cache; unless the cache's size is given."""
    attention_backend: Literal["auto", "triton", "flashinfer", "torch"]
    """What computes the model's attention; auto: Baton's kernels for the device."""
    enforce_eager: bool
    """Launch each step's operations one by one, also on a CUDA device."""
    deterministic: bool
    """No result depends on what else is in the step, also on a CUDA device."""
    max_num_seqs: int
    max_num_batched_tokens: int
    auto_step_tokens: bool
    """How many tokens of whose prompts a step computes is chosen by what steps take
    (`worker/slots/composition.py`), up to `max_num_batched_tokens`; else as many as fit."""
    itl_target_s: float | None = None
    """The time to the next token of a stream that a step with prompts keeps to, if chosen so; None: by the
    time of steps without."""
    ttft_target_s: float | None = None
    """A prompt that would miss this time to its first token is cut less; None: there is no such time."""
    max_waiting: int
    """Requests that may wait for admission; the next one is rejected with `queue_full`."""
    admission_headroom: int | None = None
    """Tokens of growth of everything that runs, for which an admission leaves room; None: adapts."""
    enable_prefix_caching: bool
    speculation: Speculation | None = None
    """None: each step gives a slot one token."""
    overlap_steps: bool
    """The executor is one step late (`executor/base.py`): a step is launched before the last one's tokens are
    read."""
    num_threads: int | None = None
    """Compute threads of one worker; None: the cores divided among the ranks."""
    step_timeout_s: float
    """Requests run and no report came for so long: the instance fails."""
    startup_timeout_s: float
    """Loading the model takes longer, at the start or at run time: the instance fails."""
    vocab_size: int = 0
    """Only for the simulated executor."""
    tokenizer_files: str = ""
    """Directory or file of the tokenizer, from which the launcher makes `vocabulary`; "": there is none."""
    vocabulary: str = ""
    """File with a `grammar.vocabulary.Vocabulary`, for constrained requests; "": none, and these fail.
    It may not be there at once."""
    simulated_cost: CostModel = CostModel()
    simulated_real_time: bool = True
    simulated_layers: int = 1
    """Of the simulated KV pool; with the two below they give it the shape of a model's."""
    simulated_kv_heads: int = 1
    simulated_tile_bytes: int = 0
    """0: as few as hold the tokens."""
    command_ring_bytes: int = 1 << 20
    report_ring_bytes: int = 1 << 20
    weight_images: str = ""
    """Socket of the launcher's keeper of weight images (`launch/instances/image_keeper.py`); "": none, and
    each worker has its own copy of the weights."""
    weight_cache: str | None = None
    """Directory of weight images as files; None: none are read or written."""
    weight_cache_verify: bool
    """Compare the checksums of a file's tensors before it is used."""
    weights: Weights = Weights()
    """What `update_weights` put in place before this start; its name is in `InstanceSource.weights`."""
    name: str = "instance-0"
    """What people and the gateway call the instance; unique in its cluster."""
    peer_endpoint: str = ""
    """Where the engine listens for other engines (`ipc://…`, `tcp://host:0`); "": no hand-over."""
    transfer: Literal["auto", "shared_memory", "tcp", "nixl"]
    """How pages are fetched; auto: shared memory on one host, else TCP; NIXL for pools in device memory."""
    transfer_host: str = "127.0.0.1"
    """Address under which the page server of a worker can be reached by other hosts."""
    transfer_encryption: bool
    """Encrypt what travels over a network, if the cluster has a secret."""
    transfer_checksums: bool
    """Compare a checksum of each page after copying."""
    max_preparing: int
    """Requests for which the engine may be asking or holding another one's reservation before it has admitted
    them itself."""
    reserve_timeout_s: float = 1.0
    """A decode instance that has not answered `Reserve` for so long is passed over."""
    credit_wait_s: float = 2.0
    """A request that every decode instance refused waits so long for credit, then decodes where it is."""
    lease_s: float
    """How long pages stay for another instance that says nothing; D renews each third of it."""
    load_interval_s: float = 0.05
    """`Load` is sent at most so often; 0: never."""
    record: str | None = None
    """Directory for recordings of all that the engine reads; None: nothing is recorded."""
    record_max_bytes: int
    """Of all recordings in that directory together; a recording ends when it is reached."""
    note_steps: bool = False
    """Say in `Load` when each rank ran which steps (`step_notes.py`)."""
    log_level: str
    log_format: str
    """`text` or `json`."""
    nodes: Nodes = ONE_HOST

    @property
    def ranks_per_host(self) -> int:
        return self.tensor_parallel_size // self.nodes.count
