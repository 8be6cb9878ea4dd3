"""Flags: one declaration, four sources, and errors that name a flag as the user wrote it."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from baton import LLM
from baton.cli.main import app
from baton.gateway.access import Access
from baton.gateway.http.bodies import DEFAULT_LIMIT_BYTES
from baton.gateway.sharing import SharingOptions
from baton.launch.arguments import choose_arguments
from baton.launch.limits import OptionError
from baton.launch.options import (
    EngineOptions,
    HttpOptions,
    RightsOptions,
    ServeOptions,
    UserOptions,
    flags_of,
)
from baton.launch.options.document import COMMAND, document
from baton.launch.options.flag import HIDDEN
from baton.launch.options.sources import Chosen, choose
from baton.launch.planning.instance_config import instance_config
from baton.launch.planning.plan import make_plan
from baton.launch.server import make_access, make_sharing
from baton.model.checkpoint.hub import resolve_model
from baton.protocol.config import InstanceConfig, Speculation

DOCS = Path(__file__).parents[2] / "docs" / "flags.md"


def served(given: dict[str, Any] | None = None, **environment: str) -> Chosen[ServeOptions]:
    return choose(ServeOptions, given or {}, environment=environment)


def written(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


# -- each source, and which goes first


EXAMPLES: list[tuple[str, str, Any, Any]] = [
    ("max_num_seqs", "17", 17, 17),
    ("kv_lease", "1.5", 1.5, 1.5),
    ("kv_cache_memory_bytes", "4MiB", "4MiB", 4 << 20),
    ("dtype", "float32", "float32", "float32"),
    ("fair_queuing", "off", False, False),
    ("salt_by_key", "true", True, True),
    ("tokenizer", "some/where", "some/where", "some/where"),
]


@pytest.mark.parametrize(("name", "text", "value", "expected"), EXAMPLES)
def test_a_value_is_the_same_from_everywhere(name, text, value, expected, tmp_path):
    option = name.replace("_", "-")
    shown = {True: "true", False: "false"}.get(
        value, value if isinstance(value, int | float) else f'"{value}"'
    )
    yaml = written(tmp_path, "a.yaml", f"{option}: {shown}\n")
    toml = written(tmp_path, "a.toml", f"{name} = {shown}\n")
    for chosen, source in (
        (served({name: value if isinstance(value, bool) else text}), "command line"),
        (served(**{f"BATON_{name.upper()}": text}), "environment"),
        (served({"config": yaml}), "config file"),
        (served({"config": toml}), "config file"),
        (served(BATON_CONFIG=yaml), "config file"),
    ):
        assert getattr(chosen.options, name) == expected
        assert chosen.origins[name].source == source
    if name in {one.name for one in flags_of(EngineOptions)}:
        assert getattr(choose_arguments({name: value}).options, name) == expected


def test_several_values(tmp_path):
    path = written(tmp_path, "a.yaml", "served-model-name: [a, b c]\napi_key: k\nallowed-host:\n  - x\n")
    chosen = served({"config": path}, BATON_ALLOWED_HOST="y z")
    options = chosen.options
    assert (options.served_model_name, options.api_key) == (("a", "b c"), ("k",))
    assert options.allowed_host == ("y", "z"), "the environment goes before the file"
    assert served({"allowed_host": ["q r"]}, BATON_ALLOWED_HOST="y").options.allowed_host == ("q r",)
    assert choose_arguments({"served_model_name": "one"}).options.served_model_name == ("one",)


def test_command_line_before_environment_before_file_before_default(tmp_path):
    path = written(tmp_path, "a.yaml", "max-num-seqs: 3\nmax-waiting: 3\nprefill: 3\n")
    given = {"config": path, "max_num_seqs": "1", "decode": None}
    chosen = served(given, BATON_MAX_NUM_SEQS="2", BATON_MAX_WAITING="2")
    options = chosen.options
    assert (options.max_num_seqs, options.max_waiting, options.prefill, options.decode) == (1, 2, 3, 0)
    assert chosen.given("max_num_seqs", "command line")
    assert chosen.given("prefill")
    assert not chosen.given("decode")
    assert served({"config": path}, BATON_CONFIG="/no/such.yaml").options.prefill == 3


def test_a_program_s_argument_goes_before_the_environment(monkeypatch, tmp_path):
    path = written(tmp_path, "a.yaml", "max-num-seqs: 3\nport: 1\nblock-size: 8\n")
    monkeypatch.setenv("BATON_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("BATON_MAX_MODEL_LEN", "64")
    options = choose_arguments({"max_num_seqs": 1, "config": Path(path), "max_model_len": None}).options
    assert (options.max_num_seqs, options.max_model_len, options.block_size) == (1, 64, 8)


# -- errors


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-num-seq: 4", "max-num-seq: no such flag; did you mean max-num-seqs?"),
        ("max_num_seq: 4", "max_num_seq: no such flag; did you mean max_num_seqs?"),
        ("config: x.yaml", "config: no such flag"),
        ("no-fair-queuing: true", "no-fair-queuing: no such flag; did you mean fair-queuing?"),
        ("max_num_seqs: 0", "max_num_seqs 0: give sequences from 1 to 65536"),
        ("max-num-seqs: many", "max-num-seqs many: give sequences from 1 to 65536, an integer"),
        ("max-num-seqs: 1.5", "max-num-seqs 1.5: give sequences from 1 to 65536, an integer"),
        ("max-num-seqs: true", "max-num-seqs True: give sequences"),
        ("revision: 12345", "revision 12345: give a text"),
        ("dtype: float8", "dtype float8: give one of auto, bfloat16"),
        ("dtype: {a: b}", "dtype: a table; every flag is a key of its own"),
        ("fair-queuing: maybe", "fair-queuing maybe: give true or false"),
        ("served-model-name: [1]", "served-model-name [1]: give texts"),
        ("api-key: 12345", f"api-key {HIDDEN}: give texts"),
        ("record-max-bytes: lots", "record-max-bytes lots: give a number of bytes"),
        ("max-num-seqs: 4\nmax_num_seqs: 4", "stands there twice"),
        ("prefill: 1\nprefill: 2", "is not YAML: line 2: prefill stands there twice"),
        ("a: [", "is not YAML"),
        ("- a", "give flags and their values"),
        ("1: 2", "1: no such flag"),
        ("max-num-batched-tokens: 8", "max-num-batched-tokens 8: a step needs room .* --max-num-seqs"),
        ("max-num-seqs: 99\nmax-num-batched-tokens: 8", "give at least max-num-seqs in .*a.yaml \\(99\\)"),
    ],
)
def test_a_wrong_file(tmp_path, text, words):
    path = written(tmp_path, "a.yaml", text)
    with pytest.raises(
        OptionError, match=words.replace("(hidden)", r"\(hidden\)").replace("[1]", r"\[1\]")
    ) as error:
        served({"config": path})
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)
    assert "12345:" not in str(error.value) or "revision" in text


def test_files_that_cannot_be_read(tmp_path):
    for path, words in (
        ("/no/such.yaml", "cannot be read: No such file"),
        (str(tmp_path), "a config file is YAML or TOML"),
        (written(tmp_path, "a.ini", ""), "a config file is YAML or TOML"),
        (written(tmp_path, "a.toml", "a ="), "is not TOML"),
        (written(tmp_path, "big.yaml", "#" * (2 << 20)), "larger than"),
        (written(tmp_path, "deep.yaml", "a: " + "[" * 5000), "is not YAML"),
    ):
        with pytest.raises(OptionError, match=words) as error:
            served({"config": path})
        assert str(error.value).startswith(path)
    (tmp_path / "latin.yaml").write_bytes(b"model: \xe9")
    with pytest.raises(OptionError, match="is not UTF-8"):
        served({"config": str(tmp_path / "latin.yaml")})
    empty = written(tmp_path, "empty.yaml", "# nothing\nmax-num-seqs:\n")
    assert served({"config": empty}).options == ServeOptions(config=empty)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"BATON_MAX_NUM_SEQS": "0"}, "BATON_MAX_NUM_SEQS=0: give sequences from 1"),
        ({"BATON_MAX_NUM_SEQS": "x"}, "BATON_MAX_NUM_SEQS=x: give sequences from 1"),
        ({"BATON_KV_LEASE": "nan"}, "BATON_KV_LEASE=nan: give seconds"),
        ({"BATON_SALT_BY_KEY": "maybe"}, "BATON_SALT_BY_KEY=maybe: give true or false"),
        ({"BATON_API_KEY": ""}, "BATON_API_KEY: an empty key would let everybody in"),
        ({"BATON_ADMIN_KEY": "  "}, "BATON_ADMIN_KEY: an empty key would let everybody in"),
        ({"BATON_CONFIG": "/no/such.yaml"}, "/no/such.yaml: cannot be read"),
        ({"BATON_MAX_NUM_BATCHED_TOKENS": "8"}, "^BATON_MAX_NUM_BATCHED_TOKENS=8: .*at least --max-num-seqs"),
    ],
)
def test_a_wrong_variable(variables, words):
    with pytest.raises(OptionError, match=words):
        served(**variables)


def test_variables_that_are_not_ours():
    chosen = served(BATON_MAX_NUM_SEQ="3", BATON_SPIN_US="3", PATH="x", BATON_PREFILL="")
    assert chosen.remarks == (
        "BATON_MAX_NUM_SEQ in the environment: no such flag; did you mean BATON_MAX_NUM_SEQS?",
    )
    kubernetes = {  # of services called baton and baton-decode
        "BATON_PORT": "tcp://10.0.0.1:8000",
        "BATON_SERVICE_HOST": "10.0.0.1",
        "BATON_SERVICE_PORT_HTTP": "8000",
        "BATON_PORT_8000_TCP_ADDR": "10.0.0.1",
        "BATON_DECODE_PORT": "tcp://10.0.0.2:8000",
        "BATON_DECODE_SERVICE_PORT": "8000",
    }
    chosen = served(**kubernetes)
    assert (chosen.options, chosen.remarks) == (ServeOptions(), ())


def test_the_command_line_and_arguments():
    with pytest.raises(OptionError, match=r"^--max-num-seqs 0: give sequences from 1 to 65536$"):
        served({"max_num_seqs": "0"})
    with pytest.raises(OptionError, match=r"^max_num_seqs=0: give sequences from 1 to 65536$"):
        choose_arguments({"max_num_seqs": 0})
    with pytest.raises(OptionError, match=r"^max_num_batched_tokens=8: .* at least max_num_seqs \(256\)"):
        choose_arguments({"max_num_batched_tokens": 8})
    with pytest.raises(OptionError, match=r"^max_num_seq: no such argument; did you mean max_num_seqs"):
        choose_arguments({"max_num_seq": 8})
    with pytest.raises(OptionError, match=r"^port: LLM has no such argument; it is a flag of `baton serve`"):
        choose_arguments({"port": 8})
    chosen = served({"fair_weights": "x"}, BATON_FAIR_QUEUING="0")
    with (
        pytest.raises(OptionError, match=r"^--fair-weights x: not with BATON_FAIR_QUEUING=false;"),
        chosen.spelled(),
    ):
        raise OptionError("--fair-weights x: not with --no-fair-queuing; drop one")


def test_the_command_ends_with_one_line(tmp_path, monkeypatch):
    path = written(tmp_path, "a.yaml", "max-num-seqs: 0\n")
    for arguments, words in (
        (["--config", path], f"error: {path}: max-num-seqs 0: give sequences from 1 to 65536\n"),
        (["--max-num-seqs", "x"], "error: --max-num-seqs x: give sequences from 1 to 65536, an integer\n"),
        (
            ["--min-priority", "x"],
            "error: --min-priority x: give an integer from -2147483648 to 2147483647\n",
        ),
        (
            ["--api-key", ""],
            "error: --api-key: an empty key would let everybody in; leave it out or give a real one\n",
        ),
    ):
        result = CliRunner().invoke(app, ["serve", *arguments])
        assert (result.exit_code, result.output) == (2, words)
    monkeypatch.setenv("BATON_DTYPE", "float8")
    result = CliRunner().invoke(app, ["generate", "x"])
    assert result.exit_code == 2
    assert result.output.startswith("error: BATON_DTYPE=float8: give one of ")


# -- one declaration


def test_defaults_are_the_same_everywhere():
    """The dataclass, the command line with nothing on it, an empty environment, and `LLM`'s signature."""
    chosen = served()
    assert chosen.options == ServeOptions()
    assert (chosen.origins, chosen.remarks) == ({}, ())
    parameters = inspect.signature(LLM).parameters
    assert list(parameters) == [
        one.name for one in sorted(flags_of(EngineOptions), key=lambda one: one.name != "model")
    ]
    for one in flags_of(EngineOptions):
        assert parameters[one.name].default == one.default_in(quiet=True)
    differ = [one.name for one in flags_of(ServeOptions) if one.default_in(quiet=True) != one.default]
    assert differ == ["max_waiting", "log_level"]
    assert choose_arguments({}).options.max_num_seqs == chosen.options.max_num_seqs == 256


def test_int8_is_in_groups_if_a_size_is_given() -> None:
    alone = make_plan(EngineOptions(quantization="int8"))
    assert (alone.instance.quantization_group_size, alone.instance.quantize_head) == (None, 16)
    grouped = make_plan(EngineOptions(quantization="int8", quantization_group_size=32))
    assert (grouped.instance.quantization_group_size, grouped.instance.quantize_head) == (32, 8)
    four = make_plan(EngineOptions(quantization="int4", quantize_head=4)).instance
    assert (four.quantization_group_size, four.quantize_head) == (64, 4)
    assert make_plan(EngineOptions(quantization="int4", quantize_head=6)).instance.quantize_head == 6
    with pytest.raises(OptionError, match="unless --quantization-group-size is given"):
        make_plan(EngineOptions(quantization="int8", quantize_head=4))


def test_which_angles_longrope_uses_is_told(tmp_path: Path) -> None:
    """So that instances on different sides of the border do not continue each other's requests."""
    for file in resolve_model(None).iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = tmp_path / "config.json"
    raw = json.loads(config.read_text()) | {"architectures": ["Phi3ForCausalLM"]}
    config.unlink()
    half = raw["hidden_size"] // raw["num_attention_heads"] // 2
    factors = {"short_factor": [1.0] * half, "long_factor": [2.0] * half}
    raw |= {"max_position_embeddings": 512, "original_max_position_embeddings": 128}
    config.write_text(json.dumps(raw | {"rope_parameters": None, "head_dim": 2 * half, "rope_scaling": None}))
    assert make_plan(EngineOptions(model=str(tmp_path))).served.angles == ""
    raw["rope_scaling"] = {"type": "longrope", **factors}
    config.write_text(json.dumps(raw | {"rope_parameters": None, "head_dim": 2 * half}))
    for length, angles in ((None, "long"), (129, "long"), (128, "short")):
        plan = make_plan(EngineOptions(model=str(tmp_path), max_model_len=length))
        assert plan.served.angles == angles


def test_what_flags_set_has_no_other_default():
    fields = {one.name: one for one in msgspec.structs.fields(InstanceConfig)}
    renamed = {"num_blocks": "num_gpu_blocks_override", "lease_s": "kv_lease"}
    flags = {one.name for one in flags_of(ServeOptions)}
    theirs = [
        one
        for name, one in fields.items()
        if {name, name.removesuffix("_s"), renamed.get(name)} & flags and name not in ("model", "name")
    ]
    assert len(theirs) > 20
    for one in theirs:
        given = one.name in (
            "simulated_cost",
            "tokenizer",
            "transfer_host",
            "nodes",
        )  # (made of several flags, or of none)
        assert given or one.default in (msgspec.NODEFAULT, None), one.name
    config = make_plan(EngineOptions()).instance
    assert (
        config.max_num_seqs == instance_config(max_model_len=8).max_num_seqs == EngineOptions().max_num_seqs
    )
    # The gateway's own parts, as tests make them, are as a server's without flags.
    access = make_access(RightsOptions())
    assert replace(access, host_name="localhost") == Access()
    assert make_sharing(UserOptions(), access) == SharingOptions()
    assert HttpOptions().max_body_memory == DEFAULT_LIMIT_BYTES


def test_every_flag_says_what_it_is():
    for one in flags_of(ServeOptions):
        assert one.section, one
        assert one.declared.help.endswith("."), one
        assert one.default not in (None, ()) or one.declared.unset, (
            f"{one.option}: `unset` says what None means"
        )
        if {int, float} & set(one.kinds) and not one.declared.size:
            assert one.declared.least is not None, one
            assert one.declared.most is not None, one
            assert one.declared.unit, one


def test_the_document_is_current():
    assert DOCS.read_text() == document(), f"run: {COMMAND}"


def test_secrets_are_not_shown():
    chosen = served({"api_key": ["geheim"]}, BATON_ADMIN_KEY="streng geheim")
    assert chosen.options.admin_key == ("streng", "geheim")
    shown = chosen.as_dict()
    assert shown["flags"]["api_key"] == shown["flags"]["admin_key"] == HIDDEN
    assert served().as_dict()["flags"]["api_key"] == ()
    assert shown["given"] == {"api_key": "command line", "admin_key": "environment (BATON_ADMIN_KEY)"}
    assert "geheim" not in repr(chosen.options) + str(shown)


def test_the_declarations_import_nothing_slow():
    code = "import sys, baton.cli.main; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "numpy", "msgspec", "yaml", "transformers", "zmq"} & set(loaded)


# -- how much a step computes


def test_how_much_a_step_computes_is_chosen_unless_a_number_is_given():
    plan = make_plan(ServeOptions()).instance
    assert (plan.auto_step_tokens, plan.max_num_batched_tokens) == (True, 2048)
    many = make_plan(ServeOptions(max_num_seqs=5000)).instance
    assert (many.auto_step_tokens, many.max_num_batched_tokens) == (True, 5000)
    fixed = make_plan(ServeOptions(max_num_batched_tokens=300)).instance
    assert (fixed.auto_step_tokens, fixed.max_num_batched_tokens) == (False, 300)
    aimed = make_plan(ServeOptions(itl_target=50, ttft_target=1500.0)).instance
    assert (aimed.itl_target_s, aimed.ttft_target_s) == (0.05, 1.5)


@pytest.mark.parametrize("name", ["itl_target", "ttft_target"])
def test_targets_are_for_steps_that_are_chosen(name):
    with pytest.raises(OptionError, match=rf"^--{name.replace('_', '-')} 50: has no effect .* give auto"):
        ServeOptions(max_num_batched_tokens=512, **{name: 50})


@pytest.mark.parametrize(
    ("options", "overlaps"),
    [
        ({}, False),
        ({"device": "cuda"}, True),
        ({"device": "cuda", "speculation": "off"}, True),
        ({"device": "cuda", "speculation": "ngram"}, False),
        ({"device": "cuda", "overlap_steps": "off"}, False),
        ({"executor": "simulated"}, False),
        ({"executor": "simulated", "overlap_steps": "on"}, True),
    ],
)
def test_steps_overlap_on_a_gpu_and_have_no_drafts_then(options, overlaps):
    found = instance_config(EngineOptions(**options), max_model_len=64)
    assert found.overlap_steps == overlaps
    assert (found.speculation is None) == (overlaps or options.get("speculation") == "off")


def test_a_device_that_was_found_overlaps_steps_as_one_that_was_asked_for(monkeypatch):
    assert not make_plan(EngineOptions()).instance.overlap_steps
    monkeypatch.setattr("baton.launch.planning.plan._device", lambda options: "cuda")
    found = make_plan(EngineOptions()).instance
    assert (found.device, found.overlap_steps, found.speculation) == ("cuda", True, None)
    assert not make_plan(EngineOptions(speculation="ngram")).instance.overlap_steps


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "only with --device cuda or --executor simulated"),
        ({"device": "cuda", "speculation": "ngram"}, "leave --speculation or --overlap-steps away"),
    ],
)
def test_steps_that_cannot_overlap(options, problem):
    with pytest.raises(OptionError, match=rf"^--overlap-steps on: .*{problem}"):
        instance_config(EngineOptions(overlap_steps="on", **options), max_model_len=64)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"speculation": "off"}, None),
        ({}, ("auto", 15, 2, 16)),
        ({"speculation": "auto"}, ("auto", 15, 2, 16)),
        ({"speculative_config": '{"method": "ngram"}'}, ("ngram", 15, 2, 16)),
        (
            {
                "speculative_config": '{"method": "ngram", "num_speculative_tokens": 5, '
                '"prompt_lookup_max": 1}'
            },
            ("ngram", 5, 1, 1),
        ),
        ({"speculative_config": '{"method": "ngram", "prompt_lookup_min": 20}'}, ("ngram", 15, 20, 20)),
        (
            {"speculative_config": '{"method": "draft_model", "model": "x", "num_speculative_tokens": 5}'},
            ("draft", 5, 2, 16),
        ),
        (
            {"speculative_config": '{"method": "draft", "model": "x", "draft_tensor_parallel_size": 1}'},
            ("draft", 7, 2, 16),
        ),
        ({"speculative_config": '{"model": "x"}'}, ("draft", 7, 2, 16)),
        ({"speculation": "mtp"}, ("mtp", 7, 2, 16)),
        ({"speculative_config": '{"method": "mtp", "num_speculative_tokens": 1}'}, ("mtp", 1, 2, 16)),
        ({"speculative_config": '{"method": "ernie_mtp"}'}, ("mtp", 7, 2, 16)),
    ],
)
def test_speculation_of_an_instance(options, told):
    found = instance_config(EngineOptions(**options), max_model_len=64).speculation
    if told is None:
        assert found is None
    else:
        numbers = found.num_speculative_tokens, found.prompt_lookup_min, found.prompt_lookup_max
        assert (found.method, *numbers) == told
        assert found.model == ("x" if found.method == "draft" else "")
        given = "num_speculative_tokens" in options.get("speculative_config", "")
        assert found.by_cost == (found.method in ("draft", "mtp") and not given)


def test_suffix_options_are_vllms():
    found = instance_config(EngineOptions(speculation="suffix"), max_model_len=64).speculation
    assert found == Speculation(
        method="suffix",
        suffix_decoding_max_tree_depth=24,
        suffix_decoding_max_cached_requests=None,
        suffix_decoding_max_spec_factor=1.0,
        suffix_decoding_min_token_prob=0.1,
    )
    given = {
        "method": "suffix",
        "num_speculative_tokens": 32,
        "suffix_decoding_max_tree_depth": 64,
        "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_max_cached_bytes": 1 << 22,
        "suffix_decoding_max_spec_factor": 2,
        "suffix_decoding_min_token_prob": 0.25,
    }
    options = EngineOptions(speculative_config=given)
    assert instance_config(options, max_model_len=64).speculation == Speculation(**given)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"speculative_config": '{"method": "eagle"}'}, "eagle.*give a JSON object of method"),
        (
            {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 0}'},
            "num_speculative_tokens 0: give a number",
        ),
        ({"speculative_config": '{"method": "ngram", "model": "x"}'}, "model"),
        (
            {"speculative_config": '{"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}'},
            "prompt_lookup_min 5 is above prompt_lookup_max 4",
        ),
        ({"speculative_config": "ngram"}, "--speculative-config.*JSON"),
        (
            {"speculative_config": {"method": "suffix", "prompt_lookup_max": 4}},
            "prompt_lookup_max is of method auto or ngram, not of suffix",
        ),
        (
            {"speculative_config": {"method": "ngram", "suffix_decoding_max_tree_depth": 24}},
            "suffix_decoding_max_tree_depth is of method auto or suffix, not of ngram",
        ),
        (
            {"speculative_config": {"method": "suffix", "suffix_decoding_max_tree_depth": 1}},
            "max_tree_depth 1: give a number of tokens from 2 to 64",
        ),
        (
            {"speculative_config": {"method": "suffix", "suffix_decoding_max_cached_requests": 0.5}},
            "max_cached_requests 0.5: give a number of answers from 0 to 1000000",
        ),
        (
            {"speculative_config": {"method": "suffix", "suffix_decoding_min_token_prob": 1.5}},
            "min_token_prob 1.5: give a number from 0 to 1",
        ),
        ({"speculative_config": '{"method": "draft_model"}'}, "model: method draft_model needs a directory"),
        ({"speculative_config": '{"model": 3}'}, "model: method draft_model needs a directory"),
        (
            {"speculative_config": '{"model": "x", "draft_tensor_parallel_size": 2}'},
            "draft_tensor_parallel_size 2: the draft model is whole on rank 0",
        ),
        (
            {"speculative_config": '{"model": "x", "prompt_lookup_max": 3}'},
            "'prompt_lookup_max' is not of method draft_model",
        ),
        ({"speculative_config": '{"model": "x", "num_speculative_tokens": 65}'}, "from 1 to 64"),
        (
            {"speculative_config": '{"method": "mtp", "model": "x"}'},
            "a layer of the model itself; leave model",
        ),
        ({"speculative_config": '{"method": "mtp", "prompt_lookup_max": 3}'}, "max' is not of method mtp"),
        (
            {"speculative_config": '{"method": "ernie_mtp", "num_speculative_tokens": 0}'},
            "num_speculative_tokens 0: give a number of tokens from 1 to 64",
        ),
        ({"speculation": "draft"}, "--speculation draft: which model"),
        ({"speculative_config": '{"method": "ngram"}', "speculation": "auto"}, "leave one away"),
    ],
)
def test_speculation_that_there_is_not(options, problem):
    with pytest.raises(OptionError, match=problem):
        EngineOptions(**options)


def test_an_object_is_given_as_such_or_as_its_text(tmp_path):
    """As vLLM's `LLM(speculative_config={...})`; in a config file it is a table."""
    told = {"method": "ngram", "num_speculative_tokens": 5}
    as_text = '{"method": "ngram", "num_speculative_tokens": 5}'
    toml = '[speculative_config]\nmethod = "ngram"\nnum_speculative_tokens = 5\n'
    yaml = "speculative-config: {method: ngram, num_speculative_tokens: 5}"
    for options in (
        EngineOptions(speculative_config=told),
        EngineOptions(speculative_config=as_text),
        choose_arguments({"speculative_config": told}).options,
        choose_arguments({"config": written(tmp_path, "a.yaml", yaml)}).options,
        choose_arguments({"config": written(tmp_path, "a.toml", toml)}).options,
    ):
        assert options.speculative_config == as_text
        found = instance_config(options, max_model_len=64).speculation
        assert found is not None
        assert (found.method, found.num_speculative_tokens) == ("ngram", 5)
    switches = EngineOptions(default_chat_template_kwargs={"enable_thinking": False})
    assert switches.default_chat_template_kwargs == '{"enable_thinking": false}'


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"method": "eagle"}, r'speculative_config=\{"method": "eagle"\}: method .eagle. is not among'),
        ({"method": "ngram", "prompt_lookup_max": 0}, "prompt_lookup_max 0: give a number"),
        ({"method": {1, 2}}, "give a JSON object"),
        (["ngram"], "give a JSON object"),
        (5, "give a JSON object"),
    ],
)
def test_an_object_that_there_is_not(value, problem):
    with pytest.raises(OptionError, match=problem):
        choose_arguments({"speculative_config": value})
