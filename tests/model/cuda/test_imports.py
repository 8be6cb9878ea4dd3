"""The CPU path imports nothing of Triton, which is installed here: said of a process that serves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
WORKER = """
import sys
from baton.executor.torch_executor import TorchExecutor
from baton.launch.planning.instance_config import instance_config
from baton.model.checkpoint.hub import EMBEDDED_MODEL, resolve_model
from baton.protocol.params.sampling import Sampling
import baton.worker.main, baton.engine.shell.loop, baton.launch.server
from tests.executor.driver import Driver

sizes = dict(max_model_len=64, num_blocks=20, max_num_seqs=2, num_threads=1)
config = instance_config(model=str(resolve_model(EMBEDDED_MODEL)), **sizes)
driver = Driver(TorchExecutor.from_config(config, 0, ""))
request = driver.add([1, 2, 3, 4], max_tokens=3, sampling=Sampling(seed=1, temperature=0.9, top_p=0.8))
driver.run()
assert len(request.tokens) == 3
loaded = {name.partition(".")[0] for name in sys.modules} | {name[:16] for name in sys.modules}
print(sorted(loaded & {"triton", "baton.model.cuda"}))
"""


def test_a_worker_on_a_cpu_imports_no_triton():
    done = subprocess.run([sys.executable, "-c", WORKER], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "[]"


def test_who_imports_the_kernels_imports_triton():
    """The test above looks for what there would be."""
    script = "import sys, baton.model.attention.triton_backend; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["True"], done.stderr[-3000:]
