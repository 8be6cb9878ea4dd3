"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.gateway.api.schemas import CompletionRequest
from baton.gateway.errors import BadRequest
from baton.gateway.generation.costs import fill_logprobs
from baton.gateway.generation.generation import SUBMITTED_AT_ONCE
from baton.gateway.http.context import Gateway, check_room, check_whole, identity, stream_options
from baton.gateway.http.responses import GenerationResponse
from baton.gateway.reading.prompts import Prompt, encode
from baton.gateway.reading.truncation import truncated
from baton.gateway.rendering.completion import CompletionOptions, CompletionRenderer
from baton.gateway.rendering.formats import TokenNames
from baton.gateway.rendering.formats import encode as encode_json
from baton.gateway.rendering.prompts import rendered
from baton.protocol.params.sampling_params import SamplingParams, make_params


def completion_routes(gateway: Gateway) -> list[Route]:
    async def completions(request: Request) -> Response:
        arrived = time.monotonic()
        body, found = await gateway.read_prompted(request, "completion")
        model = gateway.model_name(body.model)
        options = stream_options(body)
        who = identity(gateway, request, body)
        _check(body)
        params = _params(gateway, body)
        gateway.client.check_ready()
        grammar, field = await gateway.grammar(found)
        prompts = encode(
            found,
            gateway.tokenizer,
            add_special_tokens=body.add_special_tokens is not False,
        )
        prompts = _truncated(gateway, body, prompts)
        if len(prompts) > SUBMITTED_AT_ONCE:
            await asyncio.sleep(0)  # reading that many was a turn's work, and so is what follows
        longest = max(len(prompt.ids) for prompt in prompts)
        check_room(body.max_tokens, "max_tokens", longest, gateway.served.max_model_len, "prompt")
        generation = await gateway.start(
            [prompt.ids for prompt in prompts],
            params,
            **who,
            drop_output=body.max_tokens == 0,
            patient=not body.stream,
            arrived=arrived,
            grammar=grammar,
            grammar_field=field,
            timed=bool(body.timings),
            progress=bool(body.stream and body.return_progress),
        )
        shape = CompletionOptions(
            model=model,
            n=params.n,
            echo=bool(body.echo),
            logprobs=body.logprobs and (len(body.logprob_token_ids or ()) or body.logprobs),
            prompt_logprobs=body.prompt_logprobs,
            skip_special_tokens=params.skip_special_tokens,
            token_ids=bool(body.return_token_ids),
            routed_experts=params.return_routed_experts,
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
            timings=bool(body.timings),
        )
        names = TokenNames(gateway.tokenizer, bool(body.return_tokens_as_token_ids))
        renderer = CompletionRenderer(generation, prompts, shape, names)
        return GenerationResponse(
            generation, renderer, stream=bool(body.stream), progress=bool(body.return_progress)
        )

    async def render(request: Request) -> Response:
        """The prompts, as they would be completed."""
        body, found = await gateway.read_prompted(request, "completion")
        model = gateway.model_name(body.model)
        _check(body)
        params = _params(gateway, body)
        prompts = encode(found, gateway.tokenizer, add_special_tokens=body.add_special_tokens is not False)
        prompts = _truncated(gateway, body, prompts)
        limit = gateway.served.max_model_len
        check_room(body.max_tokens, "max_tokens", max(len(one.ids) for one in prompts), limit, "prompt")
        request_id = body.request_id or request.state.request_id
        answers = []
        for number, prompt in enumerate(prompts):
            answers.append(
                rendered(
                    prompt,
                    params,
                    request_id=request_id if len(prompts) == 1 else f"{request_id}-{number}",
                    model=model,
                    max_model_len=limit,
                    stream=bool(body.stream),
                )
            )
            await asyncio.sleep(0)
        return Response(encode_json(answers), media_type="application/json")

    return [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/completions/render", render, methods=["POST"]),
    ]


def _truncated(gateway: Gateway, body: CompletionRequest, prompts: list[Prompt]) -> list[Prompt]:
    return list(
        truncated(
            prompts,
            body.truncate_prompt_tokens,
            body.truncation_side,
            gateway.tokenizer,
            limit=gateway.served.max_model_len,
            answer=16 if body.max_tokens is None else body.max_tokens,
            special=body.add_special_tokens is not False,
        )
    )


def _check(body: CompletionRequest) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise BadRequest(
            f"best_of: {body.best_of} is not supported; leave it out or give the value of n",
            param="best_of",
            code="unsupported_parameter",
        )
    check_whole(body)
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise BadRequest(
            "max_tokens: 0 generates nothing; give at least 1, or set echo to score the prompt",
            param="max_tokens",
        )


def _params(gateway: Gateway, body: CompletionRequest) -> SamplingParams:
    """With `echo`, `logprobs` are wanted of the prompt too."""
    fill_logprobs(body, gateway.served, "logprobs", "prompt_logprobs")
    given = body.sampling()
    given["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None:
        given["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    if body.max_tokens == 0:
        given.update(max_tokens=1, min_tokens=0)
    return make_params(gateway.served.defaults, given, max_tokens=16)
