"""Prometheus metrics of one server, in vLLM's names with the prefix `baton:`.

A `Metrics` owns its registry, so that two servers in one process (tests, say) share nothing.  What the
gateway sees is counted as it happens; what only an engine knows comes from its statistics, which the
caller fetches when it is scraped and passes to `render`: a scrape without them has the rest.  What concerns
one instance has the label `instance`; a sum over it is the server's.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from baton.observe.handovers import Losses
from baton.observe.instances import EngineStats, InstanceSample
from baton.observe.memory import Memory
from baton.observe.series import Buckets, Tallies, Tally

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MAX_KEYS = 100
"""API keys that metrics tell apart."""
_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"})
"""Others are one."""

_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_LATENCY = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_QUEUE = (0.001, 0.005, 0.01, 0.05, *_LATENCY[1:])
_CHOICES = (1, 2, 5, 10, 20, 50, 100)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """Counters and histograms of one server, all with the label `model_name`."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._engine = EngineStats(model_name)
        self.registry.register(self._engine)
        ProcessCollector(registry=self.registry)  # of the gateway: CPU, memory, descriptors, start
        self._model_name = model_name
        self._prompt_tokens = self._tally("prompt_tokens", "Prompt tokens of requests that were served.")
        self._prompt_cached = self._tally(
            "prompt_tokens_cached", "Of the prompt tokens, those found in a prefix cache."
        )
        self._prompt_sources = Tallies(
            model_name,
            "prompt_tokens_by_source",
            "Prompt tokens of sequences that ended: local_compute or local_cache_hit.",
            ("source",),
            [("local_compute",), ("local_cache_hit",)],
        )
        self.registry.register(self._prompt_sources)
        self._generation_tokens = self._tally("generation_tokens", "Generated tokens.")
        self._success = Tallies(
            model_name,
            "request_success",
            "Sequences by how they ended: stop, length, abort or error.",
            ("finished_reason",),
            [("stop",), ("length",), ("abort",), ("error",)],
        )
        self.registry.register(self._success)
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to first token.", _TTFT)
        self._itl = self._histogram("inter_token_latency_seconds", "Between two chunks of tokens.", _ITL)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _LATENCY)
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to admission.", _QUEUE)
        self._inference = self._histogram(
            "request_inference_time_seconds", "From admission to the last token.", _LATENCY
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From admission to the first token.", _LATENCY
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", _LATENCY
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "From the first token to the last, over the tokens after the first.",
            _ITL,
        )
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a sequence that were computed: not found in a prefix cache.",
            _TOKENS,
        )
        self._longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of the longest choice of a request.", _TOKENS
        )
        self._params_n = self._histogram("request_params_n", "Choices that a request asks for.", _CHOICES)
        self._params_max_tokens = self._histogram(
            "request_params_max_tokens", "Tokens that a sequence may have, given or by default.", _TOKENS
        )
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens a sequence.", _TOKENS)
        self._request_generation = self._histogram(
            "request_generation_tokens", "Generated tokens a sequence.", _TOKENS
        )
        self._keys: set[str] = set()
        self._key_tokens = Tallies(
            model_name,
            "key_tokens",
            "Tokens of sequences that ended, by id of the API key; *: all further keys.",
            ("key", "kind"),
        )
        self.registry.register(self._key_tokens)
        self._http = Tallies(
            model_name,
            "http_requests",
            "HTTP requests by route and status.",
            ("method", "route", "status"),
        )
        self.registry.register(self._http)
        self._refused = Tallies(
            model_name,
            "member_refusals",
            "Requests for members of the cluster that were refused, by the error's code.",
            ("code",),
            [("another_secret",), ("replayed",), ("clocks_differ",), ("another_body",)],
        )
        self.registry.register(self._refused)
        self._noted = Tallies(
            model_name,
            "unsupported_content",
            "Parts of conversations that the model does not read, by kind; arguments: no JSON object.",
            ("kind",),
            [("image",), ("audio",), ("video",), ("file",), ("other",), ("arguments",)],
        )
        self.registry.register(self._noted)

    def first_tokens(self, count: int, prompt: int, seconds: float) -> None:
        """The first tokens of a sequence came, so long after the request."""
        self._ttft.observe(seconds)
        self._prompt_tokens.value += prompt
        self._generation_tokens.value += count

    def more_tokens(self, count: int, seconds: float) -> None:
        """Further ones came, so long after those before them."""
        self._itl.observe(seconds)
        self._generation_tokens.value += count

    def all_tokens(self, count: int, seconds: float) -> None:
        """Further ones came within so long, not watched one by one: what lay between them on average."""
        self._itl.observe(seconds / count)
        self._generation_tokens.value += count

    def finished(
        self,
        reason: str,
        *,
        seconds: float,
        prompt: int,
        generated: int,
        max_tokens: int | None = None,
        queued_s: float | None = None,
        first_s: float | None = None,
        decode_s: float = 0.0,
        cached: int | None = None,
        key: str = "",
        count: int = 1,
    ) -> None:
        """One sequence ended.  `queued_s`: from arrival to admission, `first_s`: from arrival to the first
        token, None where that is not known; `decode_s`: from there to the last one.  `cached`: prompt tokens
        from a prefix cache, None where that is not known.  `key`: the id of the API key it came with, if it
        was submitted at all.  `count`: so many sequences that never ran, with
        prompts of this length, ended like that."""
        if key not in self._keys and len(self._keys) >= MAX_KEYS:
            key = "*"
        self._keys.add(key)
        self._key_tokens.add((key, "prompt"), prompt * count)
        self._key_tokens.add((key, "generation"), generated)
        self._success.add((reason,), count)
        self._e2e.observe(seconds, count)
        self._request_prompt.observe(prompt, count)
        self._request_generation.observe(generated, count)
        if max_tokens is not None:
            self._params_max_tokens.observe(max_tokens)
        if cached is not None:
            self._computed.observe(prompt - cached)
            self._prompt_cached.value += cached
            self._prompt_sources.add(("local_compute",), prompt - cached)
            self._prompt_sources.add(("local_cache_hit",), cached)
        if first_s is not None:
            self._decode.observe(decode_s)
            if generated > 1:
                self._per_token.observe(decode_s / (generated - 1))
        if queued_s is not None:
            self._queue.observe(queued_s)
            if first_s is not None:
                prefill_s = max(first_s - queued_s, 0.0)
                self._prefill.observe(prefill_s)
                self._inference.observe(prefill_s + decode_s)

    def choices(self, n: int, longest: int = 0) -> None:
        """One request ended, that asked for so many choices; the longest got so many tokens."""
        self._params_n.observe(n)
        if longest:
            self._longest.observe(longest)

    def http_request(self, method: str, route: str, status: int) -> None:
        self._http.add((method if method in _METHODS else "other", route, str(status)), 1)

    def totals(self) -> dict[str, int]:
        """Since the start: tokens of prompts that were served, generated ones, sequences that ended."""
        return {
            "prompt_tokens": int(self._prompt_tokens.value),
            "generated_tokens": int(self._generation_tokens.value),
            "ended": int(self._success.total),
        }

    def content_noted(self, counts: Mapping[str, int]) -> None:
        """Parts of a conversation that the model does not read: kind → how many."""
        for kind, count in counts.items():
            self._noted.add((kind,), count)

    def member_refused(self, code: str) -> None:
        self._refused.add((code,), 1)

    def render(
        self,
        instances: Mapping[str, InstanceSample],
        *,
        handed_over: int,
        continued: int,
        held: int = 0,
        losses: Losses | None = None,
        memory: Mapping[str, Memory] | None = None,
    ) -> bytes:
        """The exposition.  `handed_over`: requests that another instance decodes than prefilled them;
        `continued`: times that a request went on after the loss of its instance; `held`: requests that wait
        for the end of a pause that is about to begin; `memory`: of processes by their names."""
        self._engine.losses = Losses() if losses is None else losses
        self._engine.memory = memory or {}
        self._engine.held = held
        self._engine.instances = instances
        self._engine.totals = {"requests_handed_over": handed_over, "requests_continued": continued}
        return bytes(generate_latest(self.registry))

    def _tally(self, name: str, text: str) -> Tally:
        tally = Tally(self._model_name, name, text)
        self.registry.register(tally)
        return tally

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Buckets:
        histogram = Buckets(self._model_name, name, text, bounds)
        self.registry.register(histogram)
        return histogram


__all__ = ["CONTENT_TYPE", "MAX_KEYS", "InstanceSample", "Metrics"]
