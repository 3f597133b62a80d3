"""A process that owns two vLLM engines, kills one under load, reports what became of it, and waits to be killed."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

from forge_core.data_model import GenerationRequest, SamplingParams
from forge_core.generation.vllm import VLLMGenerator
from tests.generation.conftest import request
from tests.generation.test_vllm_generator import Versions, settings


def main(folder: Path, report: Path) -> None:
    two = settings(gpus=((), ()), sampling_params={"ignore_eos": True}, threads=1)
    generator = VLLMGenerator(Versions(folder / "own"), version=0, settings=two, logs=folder)
    sampling = SamplingParams(max_new_tokens=1000)
    texts = ["12+3", "4+5=", "99:", "0,1,2"]
    requests = [
        GenerationRequest(f"{text}/{seed}", request(text).prompt_ids, seed, sampling)
        for text in texts
        for seed in range(8)
    ]
    results: list = []
    thread = threading.Thread(target=lambda: results.extend(generator.generate(requests)))
    thread.start()
    while len(generator._assigned) < 32:
        time.sleep(0.01)
    assigned = dict(generator._assigned)
    time.sleep(0.3)
    generator._pool.live()[0].group.kill()
    thread.join()
    deadline = time.monotonic() + 90
    while len(generator._pool.live()) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    found = {
        "divided": [list(assigned.values()).count(i) for i in (0, 1)],
        "prompts_apart": sum(len({i for name, i in assigned.items() if name.startswith(f"{t}/")}) > 1 for t in texts),
        "completed": len([c for c in results if len(c.token_ids) == 1000]),
        "restarted": len(generator._pool.live()) == 2,
    }
    report.with_suffix(".tmp").write_text(json.dumps(found))
    report.with_suffix(".tmp").rename(report)
    time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
