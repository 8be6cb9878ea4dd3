"""`baton serve`, whose model says what a script says: `python -m tests.agents.scripted serve MODEL …`.

An embedded model of a few million parameters knows nothing of agents' tools, so each answer is bound to the
text that stands next in the script ($AGENTS_SCRIPT), by the same masks that keep schemas.  All else is `baton
serve` as it is: HTTP, reading of requests, templates, engine, worker, masks, parsing of calls, events.

The script is a list of `Task`s.  A request whose prompt has the text of a task gets the step behind those
that stand in the prompt behind that text.  Requests beside it (for a title, say) get a short text; what asks
for a form of its answer keeps that.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

import baton
from baton.cli.main import app
from baton.gateway.generation.generator import Generator
from baton.grammar.compiling import compile_structure
from baton.grammar.description import Structure, Text

ASIDE = "A small task"
THOUGHT = "I take the next step.\n</think>\n"
CONTEXT = 262_144
"""Tokens: agents' tools alone take tens of thousands of this vocabulary."""


class Task(msgspec.Struct, frozen=True):
    task: str
    """Stands in the user's text, and nowhere else."""
    steps: list[str]
    """What the model says, one after the other, in its own format of calls."""
    calls: bool = True
    """Whether the steps call tools, which the requests then offer."""


def next_text(script: list[Task], prompt: str) -> str:
    """What is said next in the conversation that the prompt holds.

    Prompts are of baton-tiny's chat template: ChatML, with `<tools>` where tools are offered.
    """
    for task in script:
        _, is_there, after = prompt.rpartition(task.task)
        if not is_there or (task.calls and "<tools>\n" not in prompt):
            continue
        turns = after.split("<|im_start|>assistant\n")[1:-1]
        # (Without tools programs put turns of their own between.)
        said = len(turns) if task.calls else sum(turn.startswith(tuple(task.steps)) for turn in turns)
        return task.steps[said] if said < len(task.steps) else "There is nothing left to do."
    return ASIDE


def follow(script: list[Task]) -> None:
    """Binds the answers of this process's gateway to the script."""
    start = Generator.start

    def scripted(self: Generator, prompts: Any, params: Any, *, grammar: str = "", **options: Any) -> Any:
        prompt = self.tokenizer.decode(list(prompts[0]), skip_special_tokens=False)
        if not grammar or "<tools>\n" in prompt:
            text = next_text(script, prompt)
            thinks = prompt.rstrip().endswith("<think>")
            content = Text(THOUGHT + text if thinks else text)
            grammar = compile_structure(Structure(content), self.tokenizer.special_names)
            params = params.replace(temperature=0.0)
        return start(self, prompts, params, grammar=grammar, **options)

    Generator.start = scripted  # type: ignore[method-assign]


def make_checkpoint(directory: Path) -> None:
    """One layer of random weights with baton-tiny's tokenizer, template and context enough for an agent."""
    assets = Path(baton.__file__).parent / "assets" / "baton-tiny"
    shutil.copytree(assets, directory, ignore=shutil.ignore_patterns("model.safetensors"))
    config = json.loads((assets / "config.json").read_text())
    config |= {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "max_window_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config["max_position_embeddings"] = CONTEXT
    (directory / "config.json").write_text(json.dumps(config))
    about = json.loads((assets / "tokenizer_config.json").read_text()) | {"model_max_length": CONTEXT}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    generator = torch.Generator().manual_seed(1)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.05).bfloat16()

    layer = {
        "self_attn.q_proj": weight(64, 64),
        "self_attn.k_proj": weight(32, 64),
        "self_attn.v_proj": weight(32, 64),
        "self_attn.o_proj": weight(64, 64),
        "self_attn.q_norm": torch.ones(32).bfloat16(),
        "self_attn.k_norm": torch.ones(32).bfloat16(),
        "mlp.gate_proj": weight(64, 64),
        "mlp.up_proj": weight(64, 64),
        "mlp.down_proj": weight(64, 64),
        "input_layernorm": torch.ones(64).bfloat16(),
        "post_attention_layernorm": torch.ones(64).bfloat16(),
    }
    tensors = {f"model.layers.0.{name}.weight": tensor for name, tensor in layer.items()}
    tensors["model.embed_tokens.weight"] = weight(1024, 64)
    tensors["model.norm.weight"] = torch.ones(64).bfloat16()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    follow(msgspec.json.decode(Path(os.environ["AGENTS_SCRIPT"]).read_bytes(), type=list[Task]))
    app(prog_name="baton")
