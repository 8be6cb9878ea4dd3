"""OpenVINO GenAI with continuous batching: `pip install openvino-genai optimum-intel nncf torch`.

The checkpoint is converted once (`optimum`), weights in 16 bits; for int8 in 8, a scale a channel; for int4
in 4 with zero points, in groups of 128 unless `quantization_group_size` says otherwise, embedding and head
in 8 bits, as `optimum-cli export openvino --weight-format int4` has them without data.  The device computes
in bfloat16 where it has the instructions, quantizes activations as it likes, and chooses the precision of its
KV cache itself.
If importing fails with "torchvision::nms does not exist", `pip uninstall torchvision`: text needs none.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from answering import Loaded, NotOffered, Settings, answer, split

MODEL = "openvino_model"


def convert(settings: Settings) -> Path:
    """The directory of the converted model; made the first time."""
    target = Path(settings.converted) / directory_name(settings)
    if not (target / f"{MODEL}.xml").exists():
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        _export(settings, partial)
        partial.rename(target)
    return target


def directory_name(settings: Settings) -> str:
    """Of the converted model, below the directory of what was converted."""
    name = f"openvino-{settings.quantization or settings.dtype}"
    return f"{name}-g{_group(settings)}" if settings.quantization == "int4" else name


def _group(settings: Settings) -> int:
    return settings.quantization_group_size or 128


def _export(settings: Settings, directory: Path) -> None:
    """What `optimum-cli export openvino --weight-format …` does.

    It saves 16 bits, reads them and saves them quantized; here they are quantized before they are saved,
    straight from the mapped checkpoint, so that a model need not fit into memory or twice onto the disk.
    """
    import nncf
    from optimum.exporters.openvino import convert as exporter
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig, OVWeightQuantizationConfig

    modes = {"int8": nncf.CompressWeightsMode.INT8_SYM, "int4": nncf.CompressWeightsMode.INT4_ASYM}
    mode = modes.get(str(settings.quantization))
    groups = {"group_size": _group(settings), "ratio": 1.0} if settings.quantization == "int4" else {}
    told = OVWeightQuantizationConfig(
        bits=4 if groups else 8, sym=not groups, group_size=_group(settings) if groups else -1
    )
    save = exporter._save_model

    def save_quantized(model: Any, *args: Any, **others: Any) -> None:
        save(nncf.compress_weights(model, mode=mode, **groups), *args, **others)

    if mode is not None:
        exporter._save_model = save_quantized
    try:
        main_export(
            _as_llama(settings),
            output=directory,
            task="text-generation-with-past",
            ov_config=OVConfig(dtype="fp16") if mode is None else OVConfig(quantization_config=told),
            stateful=True,
        )
    finally:
        exporter._save_model = save


def _as_llama(settings: Settings) -> str:
    """ERNIE 4.5 is Llama with other pairs in its rotary embedding.

    The exporter does not know it, so it gets the same tensors under Llama's name: the same work, other
    tokens.
    """
    source = Path(settings.model)
    config = json.loads((source / "config.json").read_text())
    if config["model_type"] != "ernie4_5":
        return settings.model
    copy = Path(settings.converted) / "as-llama"
    copy.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name != "config.json" and not (copy / file.name).exists():
            os.symlink(file.resolve(), copy / file.name)
    changed = config | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (copy / "config.json").write_text(json.dumps(changed))
    return str(copy)


def _weight_bytes(directory: Path) -> dict[str, int]:
    """Of codes, scales and zero points."""
    import openvino

    constants = [
        (op.get_friendly_name(), op.get_byte_size())
        for op in openvino.Core().read_model(directory / f"{MODEL}.xml").get_ops()
        if op.get_type_name() == "Constant"
    ]
    return split(constants)


def load(settings: Settings) -> Loaded:
    import numpy as np
    import openvino
    import openvino_genai

    if settings.quantization not in (None, "int8", "int4"):
        raise NotOffered(f"has no {settings.quantization}")
    directory = convert(settings)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = max(1, settings.kv_cache_bytes >> 30)
    scheduler.max_num_seqs = settings.max_num_seqs
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": settings.threads}
    if settings.dtype == "float32":
        properties["INFERENCE_PRECISION_HINT"] = "f32"
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(directory), scheduler, "CPU", properties)

    def complete(prompts: list[list[int]], output_len: int) -> int:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = output_len
        config.ignore_eos = True
        config.do_sample = False
        tensors = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        results = pipeline.generate(tensors, [config] * len(tensors))
        return sum(len(result.m_generation_ids[0]) for result in results)

    return Loaded(openvino_genai.__version__, complete, _weight_bytes(directory))


if __name__ == "__main__":
    answer(load)
