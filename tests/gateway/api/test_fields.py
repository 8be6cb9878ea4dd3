"""docs/api.md says of each field of a request what becomes of it: each row is tried."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import pytest

from baton.gateway.anthropic.schemas import CountTokensRequest, MessagesRequest
from baton.gateway.api import fields
from baton.gateway.api.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from baton.gateway.api.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    decode_body,
)
from baton.gateway.errors import BadRequest
from baton.gateway.parsing.choice import Formats
from baton.gateway.reading.conversations import render_conversation
from baton.gateway.responses.schemas import ResponsesRequest
from baton.gateway.text.chat_template import ChatTemplate
from baton.protocol.params.repetition import RepetitionDetection
from baton.protocol.params.sampling_params import FIELDS, RequestOutputKind, SamplingParams
from baton.protocol.params.structured_outputs import StructuredOutputs

TEXT = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
KINDS: dict[str, type[msgspec.Struct]] = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
    "count_tokens": CountTokensRequest,
    "embeddings": EmbeddingRequest,
    "rerank": RerankRequest,
    "score": ScoreRequest,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
}
VLLM = {  # (what its protocol classes declare in 0.33.0, and SamplingParams)
    "chat": """
        messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens
        max_completion_tokens n presence_penalty response_format seed stop stream stream_options
        temperature top_p tools tool_choice reasoning_effort thinking_token_budget include_reasoning
        parallel_tool_calls user use_beam_search top_k min_p repetition_penalty watermarking
        length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
        skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
        prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt
        continue_final_message add_special_tokens documents chat_template chat_template_kwargs
        media_io_kwargs mm_processor_kwargs structured_outputs priority request_id session_id
        return_tokens_as_token_ids return_token_ids return_weight_versions routed_experts_prompt_start
        return_token_offsets return_prompt_text mm_payload return_mm_kwargs cache_salt kv_transfer_params
        ec_transfer_params vllm_xargs repetition_detection stream_interval""",
    "completions": """
        model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop
        stream stream_options suffix temperature top_p user use_beam_search top_k min_p
        repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output
        ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens
        truncation_side allowed_token_ids prompt_logprobs logprob_token_ids bad_words prompt_embeds
        add_special_tokens response_format structured_outputs priority request_id session_id
        return_tokens_as_token_ids return_token_ids return_weight_versions routed_experts_prompt_start
        return_token_offsets mm_payload return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
        vllm_xargs repetition_detection thinking_token_budget stream_interval""",
    "embeddings": """
        model user truncate_prompt_tokens padding truncation_side request_id priority
        mm_processor_kwargs cache_salt input add_special_tokens messages chat_template media_io_kwargs
        encoding_format embed_dtype endianness dimensions use_activation add_generation_prompt
        continue_final_message chat_template_kwargs""",
    "responses": """
        background include input instructions max_output_tokens max_tool_calls metadata model logit_bias
        parallel_tool_calls previous_response_id prompt reasoning include_reasoning service_tier store
        stream temperature text tool_choice tools top_logprobs top_p top_k min_p truncation user
        skip_special_tokens spaces_between_special_tokens include_stop_str_in_output presence_penalty
        frequency_penalty prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier
        watermarking request_id session_id media_io_kwargs mm_processor_kwargs priority mm_payload
        return_mm_kwargs cache_salt enable_response_messages previous_input_messages structured_outputs
        repetition_penalty seed stop stop_token_ids ignore_eos vllm_xargs kv_transfer_params
        ec_transfer_params chat_template_kwargs""",
    "messages": """
        model messages max_tokens metadata output_config thinking stop_sequences stream system temperature
        tool_choice tools top_k top_p mm_payload return_mm_kwargs cache_salt watermarking
        kv_transfer_params ec_transfer_params vllm_xargs chat_template_kwargs""",
    "count_tokens": """
        model messages output_config system thinking tool_choice tools chat_template_kwargs""",
    "rerank": """
        model user truncate_prompt_tokens padding truncation_side request_id priority mm_processor_kwargs
        cache_salt add_special_tokens use_activation max_tokens_per_query max_tokens_per_doc instruction
        chat_template_kwargs query documents top_n""",
    "score": """
        model user truncate_prompt_tokens padding truncation_side request_id priority mm_processor_kwargs
        cache_salt add_special_tokens use_activation max_tokens_per_query max_tokens_per_doc instruction
        chat_template_kwargs text_1 text_2 queries documents""",
    "Python": """
        n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p
        seed stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs
        prompt_logprob_token_ids prompt_logprob_start logprob_token_ids flat_logprobs detokenize
        skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind
        stream_interval skip_clone output_text_buffer_length structured_outputs logit_bias
        allowed_token_ids extra_args bad_words skip_reading_prefix_cache thinking_token_budget
        repetition_detection routed_experts_prompt_start trace_decode_token_ids""",
    "tokenize": """
        model messages prompt add_generation_prompt return_token_strs continue_final_message
        add_special_tokens chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs tools""",
    "detokenize": "model tokens",
}


class Row(NamedTuple):
    route: str
    field: str
    what: str
    example: Any


def rows() -> list[Row]:
    found: list[Row] = []
    routes: list[str] = []
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells[:1] == ["field"]:
            routes = cells[1:-2]
        elif cells and cells[0].startswith("`"):
            examples = cells[-2].strip("`").split(" / ")
            for number, (route, what) in enumerate(zip(routes, cells[1:], strict=False)):
                example = json.loads(examples[min(number, len(examples) - 1)])
                found.append(Row(route, cells[0].strip("`"), what, example))
    return found


ROWS = [row for row in rows() if row.route != "Python"]
PYTHON = [row for row in rows() if row.route == "Python"]


def is_ignored(kind: type[msgspec.Struct], name: str) -> bool:
    found = next(one for one in msgspec.structs.fields(kind) if one.encode_name == name)
    return get_args(found.type)[1:] == get_args(fields.Ignored)[1:]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.route}-{row.field}")
def test_each_row_is_so(row: Row) -> None:
    kind = KINDS[row.route]
    names = {one.encode_name for one in msgspec.structs.fields(kind)}
    body = json.dumps({row.field: row.example}).encode()
    match row.what:
        case "refused":
            with pytest.raises(BadRequest) as caught:
                decode_body(body, kind)
            assert (caught.value.param, caught.value.code) == (row.field, "unsupported_parameter")
            assert decode_body(json.dumps({row.field: None}).encode(), kind)[1] == []
        case "yes" | "ignored":
            assert row.field in names
            decoded, unknown = decode_body(body, kind)
            assert unknown == []
            assert getattr(decoded, row.field) is not None
            assert is_ignored(kind, row.field) == (row.what == "ignored")
        case other:
            assert other == "–"
            assert row.field not in names


@pytest.mark.parametrize("row", PYTHON, ids=lambda row: row.field)
def test_each_parameter_is_so(row: Row) -> None:
    assert row.what == ("yes" if row.field in FIELDS else "refused")
    made = {"structured_outputs": StructuredOutputs, "repetition_detection": RepetitionDetection}.get(
        row.field
    )
    value = made(**row.example) if made is not None else row.example
    if row.field == "output_kind":
        value = RequestOutputKind(value)
    if row.what == "refused":
        with pytest.raises(TypeError, match=row.field):
            SamplingParams(**{row.field: value})
    else:
        assert getattr(SamplingParams(**{"logprobs": 1, row.field: value}), row.field) is not None


@pytest.mark.parametrize("route", [*KINDS, "Python"])
def test_every_field_has_a_row(route: str) -> None:
    """Ours and vLLM's, once each."""
    table = PYTHON if route == "Python" else ROWS
    listed = [row.field for row in table if row.route == route]
    assert len(listed) == len(set(listed))
    told = {row.field for row in table if row.route == route and row.what != "–"}
    kind = KINDS.get(route, SamplingParams)
    ours = {one.encode_name for one in msgspec.structs.fields(kind)} | set(getattr(kind, "UNSUPPORTED", ()))
    assert ours | set(VLLM[route].split()) <= told


def test_documents_come_to_the_template() -> None:
    request = ChatRequest(documents=[{"title": "a", "text": "b"}])
    template = ChatTemplate("{{ documents | tojson }}{{ messages[0].content }}")
    text, _ = render_conversation(request, [{"role": "user", "content": "hi"}], template, Formats(), {})
    assert text == '[{"title": "a", "text": "b"}]hi'
