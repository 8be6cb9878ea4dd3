"""A worker process that writes a line for each step to a file: what it applied and what it ran."""

import sys
import zlib

import msgspec

from baton.worker.main import run_worker
from baton.worker.wiring import WorkerWiring


def main():
    wiring = msgspec.json.decode(sys.argv[1], type=WorkerWiring)
    with open(f"{sys.argv[2]}.{wiring.rank}", "w") as file:

        def observe(applied, batch):
            arrays = (
                batch.slots,
                batch.starts,
                batch.counts,
                batch.tokens,
                batch.samples,
                batch.block_tables,
            )
            digest = 0
            for array in arrays:
                digest = zlib.crc32(array.tobytes(), digest)
            file.write(f"{batch.step} {applied} {digest}\n")

        code = run_worker(wiring, observe)
    sys.exit(code)


if __name__ == "__main__":
    main()
