"""Headers of GGUF files: what is damaged or not served is found before a worker starts, in one line."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from baton.model.checkpoint.config import ModelConfig
from baton.model.checkpoint.files import LoadError
from baton.model.checkpoint.fingerprint import fingerprint
from baton.model.checkpoint.generation_config import read_generation_config
from baton.model.checkpoint.gguf import Strings, read_gguf
from baton.model.description.fields import UnsupportedModel
from tests.model.gguf_files import GGUFWriter, gguf

GGML_QUANT_SIZES, GGMLQuantizationType = gguf.GGML_QUANT_SIZES, gguf.GGMLQuantizationType

NUMBERS = {
    "block_count": 1,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
}


def write(path: Path, arch: str = "llama", change=lambda writer: None, without: str = "") -> Path:
    writer = GGUFWriter(path, arch)
    for key, value in NUMBERS.items():
        if key != without:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    change(writer)
    writer.add_tensor("token_embd.weight", np.ones((40, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write(tmp_path / "model.gguf")


def refusal(path: Path, kind: type[ValueError] = LoadError) -> str:
    with pytest.raises(kind) as error:
        ModelConfig.from_directory(path)
    assert "\n" not in str(error.value)
    assert path.name in str(error.value)
    return str(error.value)


def test_a_header_is_what_the_reference_reads(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_token_list(["a", "ü", "\u2581b"])
        writer.add_token_types([1, 3, 1])
        writer.add_token_scores([0.5, -1.0, 2.0])
        writer.add_chat_template("{{ messages }}\n" * 100)
        writer.add_bool("llama.odd", True)
        writer.add_array("llama.empty", [1.5])

    path = write(tmp_path / "model.gguf", change=change)
    found, reference = read_gguf(path), gguf.GGUFReader(path)
    for key, value in found.metadata.items():
        expected = reference.fields[key].contents()
        assert (value.read() if isinstance(value, Strings) else value) == expected, key
    (tensor,) = reference.tensors
    mine = found.tensors["token_embd.weight"]
    assert (mine.offset, mine.nbytes, mine.kind) == (tensor.data_offset, tensor.n_bytes, "F32")
    assert mine.shape == tuple(reversed(tensor.shape.tolist()))


def test_every_file_that_was_cut_short_is_refused(whole: Path) -> None:
    data = whole.read_bytes()
    for length in (*range(0, 700, 7), len(data) - 1):
        whole.write_bytes(data[:length])
        assert "cut short" in refusal(whole) or "empty" in refusal(whole)


@pytest.mark.parametrize("seed", range(3))
def test_damaged_bytes_are_errors_of_one_line(whole: Path, seed: int) -> None:
    data = bytearray(whole.read_bytes())
    header = read_gguf(whole).headers[whole]
    rng = np.random.default_rng(seed)
    for _ in range(300):
        wrong = bytearray(data)
        for place in rng.integers(0, header, 3):
            wrong[place] = rng.integers(0, 256)
        whole.write_bytes(wrong)
        said = ""
        try:
            ModelConfig.from_directory(whole)
        except ValueError as error:
            said = str(error)
        assert "\n" not in said


def test_what_is_no_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"<html>not found</html>" * 10)
    assert "is no GGUF file" in refusal(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(100))
    assert "of version 1" in refusal(path, UnsupportedModel)
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(100))
    assert "big-endian" in refusal(path, UnsupportedModel)
    path.unlink()
    with pytest.raises(LoadError, match="No such file"):
        ModelConfig.from_directory(path)


def test_a_length_beyond_the_file_costs_nothing(whole: Path) -> None:
    data = bytearray(whole.read_bytes())
    data[16:24] = struct.pack("<Q", 1 << 62)  # so many metadata
    whole.write_bytes(data)
    refusal(whole)


@pytest.mark.parametrize("kind", ["IQ4_XS", "TQ1_0", "Q2_K", "Q3_K", "NVFP4", "IQ4_NL"])
def test_types_that_are_not_served_are_named(tmp_path: Path, kind: str) -> None:
    def change(writer: GGUFWriter) -> None:
        number = GGMLQuantizationType[kind]
        writer.add_tensor(
            "blk.0.ffn_up.weight", np.zeros((4, GGML_QUANT_SIZES[number][1]), np.uint8), raw_dtype=number
        )

    said = refusal(write(tmp_path / "model.gguf", change=change), UnsupportedModel)
    assert f"'blk.0.ffn_up.weight' is {kind}; of GGUF Baton serves F32, F16, BF16, Q4_0" in said


@pytest.mark.parametrize(
    ("arch", "change", "without", "says"),
    [
        (
            "falcon",
            None,
            "",
            "is a 'falcon'; of GGUF Baton serves: llama, qwen2, qwen3, qwen2vl, qwen3vl, qwen3vlmoe",
        ),
        ("llama", lambda w: w.add_expert_count(8), "", "with experts"),
        ("llama", None, "block_count", "its metadata has no 'llama.block_count'"),
        ("llama", lambda w: w.add_value_length(32), "", "attention.value_length 32, with heads of 16"),
        ("llama", lambda w: w.add_rope_dimension_count(8), "", "rope.dimension_count 8"),
        ("llama", lambda w: w.add_string("llama.rope.scaling.type", "longrope"), "", "'longrope'"),
        ("llama", lambda w: w.add_array("llama.attention.head_count_kv", [1, 2]), "", "head_count_kv"),
        ("qwen3", lambda w: w.add_sliding_window(128), "", "sliding_window 128"),
        ("qwen3moe", lambda w: w.add_expert_weights_scale(2.5), "", "qwen3moe.expert_weights_scale 2.5"),
    ],
)
def test_models_that_are_not_served(tmp_path: Path, arch: str, change, without: str, says: str) -> None:
    path = write(tmp_path / "model.gguf", arch, change or (lambda writer: None), without)
    assert says in refusal(path, UnsupportedModel)


def test_wrong_rotary_factors(tmp_path: Path) -> None:
    for factors in (np.ones(4, np.float32), np.array([1, 1, 1, np.nan, 1, 1, 1, 1], np.float32)):
        path = write(
            tmp_path / f"model{len(factors)}.gguf",
            change=lambda w, f=factors: w.add_tensor("rope_freqs.weight", f),
        )
        assert "rope_freqs.weight" in refusal(path)


def test_generation_defaults_and_ends(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.7)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_eos_token_id(3)
        writer.add_eot_token_id(5)
        writer.add_token_list(["a", "b", "<|im_end|>", "</s>", "<|endoftext|>", "x"])
        writer.add_token_types([1, 1, 3, 3, 1, 3])

    found = read_generation_config(write(tmp_path / "model.gguf", change=change), 40)
    assert found.sampling == {"temperature": 0.7, "top_k": 20}
    assert found.eos_token_ids == (3, 5, 2, 4)  # (whatever kind a converter has written)


@pytest.mark.parametrize("kind", [1, 3, 4])
@pytest.mark.parametrize("name", ["<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "[EOT]"])
def test_ends_by_name_are_of_any_kind(tmp_path: Path, name: str, kind: int) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_eos_token_id(0)
        writer.add_token_list(["</s>", "a", name])
        writer.add_token_types([3, 1, kind])

    assert read_generation_config(write(tmp_path / "model.gguf", change=change), 40).eos_token_ids == (0, 2)


@pytest.mark.parametrize(
    ("tokens", "kinds", "ends"),
    [
        (
            ["<|end|>", "<|return|>", "<|call|>"],
            [3, 3, 3],
            (1, 2),
        ),  # gpt-oss: the end of a message, not of all
        (["<|end|>", "<|return|>"], [3, 3], (0, 1)),
        (["<|end|>", "<|calls|>", "<|flush|>"], [3, 3, 3], (1, 2)),
        (["</s>", "<|im_end|>"], [4, 3], (1,)),  # a tag of HTML
        (["</s>", "<|im_end|>"], [3, 3], (0, 1)),
        (["</s>", "<|tool_response>"], [3, 3], (1,)),
    ],
)
def test_ends_by_name_beside_others(
    tmp_path: Path, tokens: list[str], kinds: list[int], ends: tuple[int, ...]
) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)

    assert read_generation_config(write(tmp_path / "model.gguf", change=change), 40).eos_token_ids == ends


def test_each_field_of_the_metadata_names_an_end(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_eos_token_id(1)
        writer.add_eot_token_id(2)
        writer.add_eom_token_id(3)

    assert read_generation_config(write(tmp_path / "model.gguf", change=change), 40).eos_token_ids == (
        1,
        2,
        3,
    )


def test_fingerprints_tell_weights_apart_and_not_names(whole: Path) -> None:
    first = fingerprint(whole)
    other = whole.with_name("other.gguf")
    other.write_bytes(whole.read_bytes())
    assert fingerprint(other) == first != ""
    data = bytearray(whole.read_bytes())
    data[-4:] = b"abcd"
    whole.write_bytes(data)
    assert fingerprint(whole) not in (first, "")


def test_headers_are_read_without_torch(whole: Path) -> None:
    code = (
        "import sys; from baton.model.checkpoint.config import ModelConfig; "
        f"ModelConfig.from_directory({str(whole)!r}); sys.exit(bool({{'torch', 'numpy'}} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
