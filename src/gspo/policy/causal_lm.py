"""The policy: a transformers causal LM with its tokenizer, ready to sample and to be trained packed."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gspo.errors import DataError, ModelError
from gspo.policy.attention import ATTENTION, hidden_states, probe_packing, register_attention
from gspo.policy.embedding import share_embedding_gradient
from gspo.policy.fused import fuse_modules
from gspo.policy.native import keep_freed_memory
from gspo.policy.packed_attention import make_plan, plan_to
from gspo.policy.projection import LogitHead, head_of
from gspo.policy.tiny import tiny_model

Dtype = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True, eq=False)
class CausalPolicy:
    """A causal LM that is sampled from and trained; one module does both.

    It has no dropout: a log-prob must be the same function of the weights wherever it is computed.
    """

    model: Any  # transformers.PreTrainedModel with an output head
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    stop_token_ids: frozenset[int]  # sampling one of these ends a response

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def base(self) -> nn.Module:
        """The model without its output head."""
        return self.model.base_model

    @property
    def head(self) -> LogitHead:
        """The output head; reads the weights as they are now."""
        return head_of(self.model)

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and response together."""
        config = self.model.config.get_text_config()
        for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
            if getattr(config, name, None):
                return int(getattr(config, name))
        return int(self.tokenizer.model_max_length)

    @property
    def num_parameters(self) -> int:
        """Every parameter once, tied ones too."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def check_length(self, num_tokens: int) -> None:
        """Raises DataError for a sequence longer than the context."""
        if num_tokens > self.context_length:
            raise DataError(
                f"a sequence of {num_tokens} tokens does not fit into the model's context of "
                f"{self.context_length}; shorten the prompt or lower rollout.max_new_tokens"
            )

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes a plain Hugging Face directory: safetensors, configs, tokenizer and chat template."""
        with _quiet():
            self.model.save_pretrained(directory)
            self.tokenizer.save_pretrained(directory)


def load_policy(
    path: str | os.PathLike[str] | None = None,
    gguf_file: str | None = None,
    tiny: str | None = None,
    tiny_config: Mapping[str, Any] | None = None,
    dtype: Dtype = "float32",
    device: str | torch.device = "auto",
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    seed: int = 0,
) -> CausalPolicy:
    """Loads a Hugging Face directory, hub name or GGUF file, or builds a tiny model with random weights.

    Exactly one of ``path`` and ``tiny``. Before it returns, the model has passed the probes: packed sequences do
    not see each other, and our output head gives the model's own logits.
    Raises ModelError, in one sentence, for anything that is not such a model.
    """
    if (path is None) == (tiny is None):
        raise ModelError("give either model.path or model.tiny")
    register_attention()
    spare_libraries()
    if tiny is not None:
        model, tokenizer = tiny_model(tiny, tiny_config, seed)
        model = model.to(getattr(torch, dtype))
    else:
        assert path is not None
        model, tokenizer = _from_pretrained(os.fspath(path), gguf_file, getattr(torch, dtype), trust_remote_code)
    return prepare_policy(model, tokenizer, device, gradient_checkpointing)


@functools.cache
def spare_libraries() -> None:
    """Once: whatever has been imported by now stays, so the garbage collector need not look through it again.

    Torch and transformers make some 350,000 objects; a full collection of them takes a tenth of a second, as long as a
    third of a rollout of a small model, and comes every few seconds.
    """
    gc.freeze()


def prepare_policy(
    model: Any, tokenizer: Any, device: str | torch.device = "auto", gradient_checkpointing: bool = False
) -> CausalPolicy:
    """Makes a policy of a loaded model and tokenizer. Raises ModelError if the model fails a probe."""
    register_attention()
    model.to(_device(device))
    try:
        model.set_attn_implementation(ATTENTION)
    except ValueError as error:
        raise ModelError(f"{type(model).__name__} cannot take another attention function: {error}") from error
    choose_experts(model)
    remove_dropout(model)
    fuse_modules(model)
    if next(model.parameters()).device.type == "cpu":
        keep_freed_memory()
        share_embedding_gradient(model)
    if gradient_checkpointing:
        _recompute_activations(model)
    model.train()
    policy = CausalPolicy(model, tokenizer, stop_token_ids(model, tokenizer))
    probe_packing(policy)
    probe_head(policy)
    return policy


def _recompute_activations(model: Any) -> None:
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.2x
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def remove_dropout(model: nn.Module) -> None:
    """Sets every dropout and routing noise of the model to 0."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "jitter_noise"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def choose_experts(model: Any) -> None:
    """Sets how the experts of a mixture are computed; see docs/decisions/0024.

    ``grouped_mm`` unless it cannot run: it needs row strides that are multiples of 16 bytes in every projection, and
    knows no float64.
    """
    experts = [module for module in model.modules() if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj")]
    weights = [w for m in experts for w in (m.gate_up_proj, m.down_proj) if isinstance(w, Tensor) and w.dim() == 3]
    if not weights:
        return
    aligned = all(size * weight.element_size() % 16 == 0 for weight in weights for size in weight.shape[1:])
    grouped = aligned and weights[0].dtype != torch.float64
    model.set_experts_implementation("grouped_mm" if grouped else "eager")


@torch.no_grad()
def probe_head(policy: CausalPolicy) -> None:
    """Compares our logits with the model's own. Raises ModelError if this family does more after its layers."""
    ids = (torch.arange(6, device=policy.device) % policy.vocab_size)[None]
    positions = torch.arange(6)
    plan = plan_to(make_plan([(0, 6)], [], positions), policy.device)
    was_training = policy.model.training
    policy.model.eval()
    try:
        ours = policy.head.logits(hidden_states(policy.base, ids, positions[None].to(policy.device), plan)[0])
        theirs = policy.model(input_ids=ids, use_cache=False).logits[0].to(ours.dtype)
    finally:
        policy.model.train(was_training)
    error = float((ours - theirs).abs().max()) / (float(theirs.abs().max()) + 1e-6)
    bound = 1e-3 if policy.head.weight.dtype in (torch.float32, torch.float64) else 5e-2
    if not error < bound:
        raise ModelError(
            f"{type(policy.model).__name__} does more than one linear layer between hidden states and logits "
            f"(relative difference {error:.1e}); use another model"
        )


def stop_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end a response: all end-of-text ids of model and tokenizer, and the chat template's end of turn."""
    ids: set[int] = set()
    for owner in (model.generation_config, model.config, tokenizer):
        value = getattr(owner, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or ())
    turn_end = _end_of_turn(tokenizer)
    if turn_end is not None:
        ids.add(turn_end)
    return frozenset(ids)


def _end_of_turn(tokenizer: Any) -> int | None:
    """The special token that the chat template puts after an assistant's message."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    from jinja2 import TemplateError

    marker = "0123456789"
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": marker}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, ValueError, TypeError, KeyError):
        return None  # a template for something other than user and assistant; prompts will say so
    rest = text.rpartition(marker)[2].lstrip()
    special = {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    found = [token for token in special if token and rest.startswith(token)]
    return special[max(found, key=len)] if found else None


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f'device {str(device)!r} cannot be used here ({_first_line(error)}); try "auto"') from error
    return chosen


def _from_pretrained(path: str, gguf_file: str | None, dtype: torch.dtype, trust: bool) -> tuple[Any, Any]:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _check_path(path, gguf_file)
    options: dict[str, Any] = {"trust_remote_code": trust}
    if gguf_file is not None:
        _need_gguf()
        options["gguf_file"] = gguf_file
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(path, **options)
            # Weights of any other form are pickles.
            safe = {} if gguf_file is not None else {"use_safetensors": True}
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, output_loading_info=True, **options, **safe
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise ModelError(_not_a_model(path, error)) from error
    model, info = loaded
    missing = sorted(info.get("missing_keys") or ())
    if missing:
        raise ModelError(f"{path} lacks {len(missing)} weights of a {type(model).__name__}, e.g. {missing[0]}")
    return (_unquantized(model) if gguf_file is not None else model), tokenizer


def _check_path(path: str, gguf_file: str | None) -> None:
    """Refuses what looks like a local path and is no model directory, so that the network is never asked about it."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        needed = gguf_file or "config.json"
        if not (directory / needed).is_file():
            found = ", ".join(sorted(entry.name for entry in directory.iterdir())[:5]) or "nothing"
            raise ModelError(f"{path} is not a model directory: it has no {needed} (it has {found})")
        return
    if directory.exists():
        raise ModelError(f"{path} is a file; model.path is a model directory (for GGUF, also set model.gguf_file)")
    hub_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", path)
    if hub_name is None or Path(path).parts[0] in os.listdir():
        raise ModelError(f"the model directory {path} does not exist")


def _not_a_model(path: str, error: Exception) -> str:
    if Path(path).expanduser().is_dir():
        return f"{path} cannot be loaded as a causal language model: {_first_line(error)}"
    return (
        f"{path} is neither a local directory nor a model that the hub could deliver: {_first_line(error)}; "
        "download it first and give its directory"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _need_gguf() -> None:
    from importlib.util import find_spec

    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            raise ModelError(f"a GGUF file needs the {package} package; install it with: pip install 'gspo[gguf]'")


def _unquantized(model: Any) -> Any:
    """A plain model with the same weights: a model from GGUF is flagged quantized and refuses to train or be saved."""
    config = copy.deepcopy(model.config)
    for name in ("quantization_config", "_pre_quantization_dtype"):
        with contextlib.suppress(AttributeError):
            delattr(config, name)
    with torch.random.fork_rng(devices=[]):  # its first weights are random, and are overwritten
        plain = type(model)._from_config(config, dtype=model.dtype)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.tie_weights()
    return plain


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no advice from transformers while it loads or saves."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
