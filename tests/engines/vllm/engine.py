"""A real vLLM engine in a process of its own: told what to do in JSON lines on stdin, it answers on the descriptor ENGINE_REPLIES.

The engine's core runs in this very process, so that its blocks can be looked at.
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np


class Engine:
    """One engine, made from keyword arguments of vLLM's LLM."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**arguments)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.asked = 0

    def ask(self, prompts: list[dict[str, Any]], max_tokens: int, dump: str | None = None) -> list[dict[str, Any]]:
        """Greedy answers to prompts that are asked at once; `dump` gets the KV of the first one's whole blocks."""
        from vllm import SamplingParams, TokensPrompt

        names: list[str] = []
        answers: dict[str, dict[str, Any]] = {}
        started = time.perf_counter()
        for prompt in prompts:
            self.asked += 1
            name = f"request-{self.asked}"
            given = TokensPrompt(prompt_token_ids=prompt["tokens"])
            if prompt.get("salt"):
                given["cache_salt"] = prompt["salt"]
            self.engine.add_request(name, given, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
            names.append(name)
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                tokens = list(output.outputs[0].token_ids)
                if not tokens:
                    continue
                first = answers.setdefault(output.request_id, {"ttft": now})
                first |= {"tokens": tokens, "cached": output.num_cached_tokens, "seconds": now, "reason": output.outputs[0].finish_reason}
                if dump is not None and output.request_id == names[0]:
                    np.save(dump, self.blocks(len(prompts[0]["tokens"])))
                    dump = None
        return [answers[name] for name in names]

    def blocks(self, tokens: int) -> "np.ndarray[Any, Any]":
        """The whole blocks of the running request, (pages, layers, bytes), from the tensors that its layers compute with."""
        import torch

        scheduler = self.core.scheduler
        (name,) = [request.request_id for request in scheduler.running]
        (ids,) = scheduler.kv_cache_manager.get_block_ids(name)
        pages = tokens // scheduler.block_size
        layers = self.engine.vllm_config.compilation_config.static_forward_context
        caches = [layer.kv_cache for layer in layers.values() if getattr(layer, "kv_cache", None) is not None]
        rows = [cache.view(torch.uint8)[ids[:pages]].reshape(pages, -1).numpy() for cache in caches]
        return np.stack(rows, axis=1)

    def forget(self) -> bool:
        """Drop the engine's own prefix cache."""
        return bool(self.llm.reset_prefix_cache())


def main() -> None:
    """Do what is asked until stdin ends."""
    replies = os.fdopen(int(os.environ["ENGINE_REPLIES"]), "w", buffering=1)
    engine = Engine(json.loads(sys.stdin.readline()))
    print(json.dumps("ready"), file=replies)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(engine, name)(**arguments)), file=replies)


if __name__ == "__main__":
    main()
