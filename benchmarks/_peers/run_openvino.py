"""OpenVINO GenAI with continuous batching: `pip install openvino-genai optimum-intel torch`.

The checkpoint is converted once (`optimum`), weights in 16 bits, or in 8 for int8; the device computes in
bfloat16 where it has the instructions, and chooses the precision of its KV cache itself.
If importing fails with "torchvision::nms does not exist", `pip uninstall torchvision`: text needs none.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

from answering import Complete, NotOffered, Settings, answer


def convert(settings: Settings) -> Path:
    """The directory of the converted model; made the first time."""
    target = Path(settings.converted) / f"openvino-{settings.quantization or settings.dtype}"
    if (target / "openvino_model.xml").exists():
        return target
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    if settings.quantization is None:
        _export(settings, partial)
    else:
        _compress(convert(replace(settings, quantization=None)), partial)
    partial.rename(target)
    return target


def _export(settings: Settings, directory: Path) -> None:
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    main_export(
        _as_llama(settings),
        output=directory,
        task="text-generation-with-past",
        ov_config=OVConfig(dtype="fp16"),
        stateful=True,
    )


def _compress(source: Path, directory: Path) -> None:
    """Weights in 8 bits, a scale a channel; the device quantizes activations when it computes."""
    import nncf
    import openvino

    name = "openvino_model"
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns(f"{name}.*"))
    model = openvino.Core().read_model(source / f"{name}.xml")
    compressed = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
    openvino.save_model(compressed, directory / f"{name}.xml")


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


def load(settings: Settings) -> tuple[str, Complete]:
    import numpy as np
    import openvino
    import openvino_genai

    if settings.quantization not in (None, "int8"):
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

    return openvino_genai.__version__, complete


if __name__ == "__main__":
    answer(load)
