"""Continuous batching over the trained module: no second copy of the weights, nothing to synchronise.

A prompt is computed once, whatever the number of its responses. Responses run in slots; a finished one leaves at
once, a waiting one takes its place, and the running ones stay in slots 0..n-1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.errors import DataError, NumericalError
from gspo.policy.attention import hidden_states
from gspo.policy.causal_lm import CausalPolicy
from gspo.policy.moe.capture import routing_shape
from gspo.policy.moe.replay import RoutingPass, hand_over
from gspo.policy.packed_attention import make_plan, plan_to
from gspo.rollout.base import GenerationRequest, OnFinished, SamplingParams
from gspo.rollout.embedded.decoder import make_decoder
from gspo.rollout.embedded.sampling import choose
from gspo.rollout.embedded.slots import PrefillPlan, SlotCache
from gspo.rollout.embedded.stopping import StopStrings
from gspo.types import Completion, StopReason

#: Prompt tokens computed in one forward, one long prompt excepted.
PREFILL_TOKENS = 2048


class EmbeddedEngine:
    """Samples with ``policy``; the next call uses the weights as they are then."""

    exact = True

    def __init__(self, policy: CausalPolicy, max_slots: int = 256) -> None:
        """max_slots: responses that run at the same time; more wait."""
        if max_slots < 1:
            raise ValueError(f"max_slots is {max_slots}; it must be at least 1")
        self.policy = policy
        self.max_slots = max_slots
        self.policy_version = 0

    def generate(
        self, requests: Sequence[GenerationRequest], params: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[list[Completion]]:
        """Completions by request and seed.

        A log-prob is that of softmax(logits / temperature), float32; greedy reports temperature 1. With
        ``record_routing`` a completion carries the experts that were chosen while it was sampled.
        Raises DataError for an empty prompt or one that leaves no room for max_new_tokens (nothing is cut in
        silence), NumericalError, naming the prompt, for logits that are not finite, and ModelError where routing is to
        be recorded and the model has none.
        """
        _check(requests, params, self.policy.context_length)
        if not any(request.num_samples for request in requests):
            return [[] for _ in requests]
        with torch.no_grad(), evaluation_mode(self.policy):
            return _Generation(self, requests, params, on_finished).run()


@contextmanager
def evaluation_mode(policy: CausalPolicy) -> Iterator[None]:
    """The model in eval mode, and afterwards in the mode it was in."""
    was_training = policy.model.training
    policy.model.eval()
    try:
        yield
    finally:
        policy.model.train(was_training)


def _check(requests: Sequence[GenerationRequest], params: SamplingParams, context: int) -> None:
    for request in requests:
        length = len(request.token_ids)
        if not length:
            raise DataError(f"prompt {request.prompt_id!r} has no tokens; there is nothing to continue")
        if length + params.max_new_tokens > context:
            raise DataError(
                f"prompt {request.prompt_id!r} has {length} tokens; with max_new_tokens = {params.max_new_tokens} it "
                f"needs {length + params.max_new_tokens} positions, and the model's context is {context}: shorten the "
                "prompt (data.max_prompt_tokens) or lower rollout.max_new_tokens"
            )


@dataclass(eq=False)
class _Ready:
    """A computed prompt whose samples wait for slots."""

    request: int
    next_sample: int
    start: int  # of the prompt in the packed row of the plan
    hidden: Tensor  # (H,) state after the prompt, which predicts every sample's first token
    plan: PrefillPlan


class _Generation:
    """The state of one call. Per-slot tensors hold the running rows in 0..num_running-1."""

    def __init__(
        self,
        engine: EmbeddedEngine,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_finished: OnFinished | None,
    ) -> None:
        policy = engine.policy
        num_samples = sum(request.num_samples for request in requests)
        slots, device = min(engine.max_slots, num_samples), policy.device
        limit = max(len(request.token_ids) for request in requests) + params.max_new_tokens
        self.decoder = make_decoder(policy, limit, params.max_new_tokens - 1)
        self.base, self.device = policy.base, device
        self.head = policy.head if self.decoder is None else self.decoder.head
        self.requests, self.params, self.on_finished = requests, params, on_finished
        self.version = engine.policy_version
        self.results: list[list[Completion | None]] = [[None] * request.num_samples for request in requests]
        self.waiting = deque(index for index, request in enumerate(requests) if request.num_samples)
        self.ready: deque[_Ready] = deque()
        self.cache = SlotCache(slots, limit, device)
        self.num_slots, self.num_running, self.longest = slots, 0, 0
        self.stop_ids = torch.tensor(sorted(params.stop_token_ids), dtype=torch.int64, device=device)
        self.stop_strings = StopStrings(params.stop_strings, policy.tokenizer)
        self.token_ids = torch.zeros(slots, params.max_new_tokens, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(slots, params.max_new_tokens, dtype=torch.float32, device=device)
        self.routing_shape = routing_shape(policy) if params.record_routing else None
        self.prompt_routing: dict[int, Tensor] = {}  # by request, (p, L, K)
        #: (slots, max_new_tokens, L, K), entry t: of response token t as an input; made when the first is known
        self.routing: Tensor | None = None
        # request, sample, seed, tokens of the response so far, position of the next token, last token
        self.request, self.sample, self.seed, self.length, self.position, self.last = torch.zeros(
            6, slots, dtype=torch.int64, device=device
        ).unbind(0)

    def run(self) -> list[list[Completion]]:
        while self.num_running or self.ready or self.waiting:
            while self.num_running < self.num_slots and (self.ready or self.waiting):
                if not self.ready:
                    self._prefill()
                self._admit()
            if self.num_running:
                self._decode()
        return [[c for c in row if c is not None] for row in self.results]

    def _prefill(self) -> None:
        """Computes the next prompts in one packed forward."""
        chosen: list[int] = []
        total = 0
        while self.waiting and (not chosen or total + len(self.requests[self.waiting[0]].token_ids) <= PREFILL_TOKENS):
            chosen.append(self.waiting.popleft())
            total += len(self.requests[chosen[-1]].token_ids)
        lengths = torch.tensor([len(self.requests[index].token_ids) for index in chosen])
        ends = torch.cumsum(lengths, 0)
        starts = (ends - lengths).tolist()
        ids = torch.tensor([token for index in chosen for token in self.requests[index].token_ids])
        positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
        packed = plan_to(make_plan(list(zip(starts, lengths.tolist(), strict=True)), [], positions), self.device)
        plan = PrefillPlan(packed)
        routing = self._record()
        hidden = hidden_states(self.base, ids.to(self.device)[None], packed.positions[None], plan, routing)[0]
        last = hidden[(ends - 1).to(self.device)]
        routes = None if routing is None else routing.ids
        for row, index in enumerate(chosen):
            self.ready.append(_Ready(index, 0, starts[row], last[row], plan))
            if routes is not None:
                self.prompt_routing[index] = routes[starts[row] : starts[row] + int(lengths[row])].cpu()

    def _admit(self) -> None:
        """Gives free slots to samples of computed prompts, and samples their first token."""
        first = self.num_running
        states, copies = [], []
        plan = self.ready[0].plan
        while self.ready and self.ready[0].plan is plan and self.num_running < self.num_slots:
            entry = self.ready[0]
            request = self.requests[entry.request]
            number = min(self.num_slots - self.num_running, request.num_samples - entry.next_sample)
            rows = slice(self.num_running, self.num_running + number)
            samples = range(entry.next_sample, entry.next_sample + number)
            self.request[rows] = entry.request
            self.sample[rows] = torch.tensor(list(samples), device=self.device)
            self.seed[rows] = torch.tensor([request.seeds[i] for i in samples], device=self.device)
            self.position[rows] = len(request.token_ids)
            self.length[rows] = 0
            self.longest = max(self.longest, len(request.token_ids))
            states.append(entry.hidden)
            copies.append((entry.start, len(request.token_ids), number))
            self.num_running += number
            entry.next_sample += number
            if entry.next_sample == request.num_samples:
                self.ready.popleft()
        self.cache.admit(first, copies, plan)
        repeats = torch.tensor([number for _, _, number in copies], device=self.device)
        logits = self.head.logits(torch.stack(states)).repeat_interleave(repeats, dim=0)
        self._append(slice(first, self.num_running), logits)

    def _decode(self) -> None:
        """One token for every running row."""
        rows = slice(0, self.num_running)
        self.longest += 1
        positions = self.position[rows].clone()
        self.cache.begin_step(positions, self.longest)
        routing = self._record()
        if self.decoder is None:
            hidden = hidden_states(self.base, self.last[rows, None], positions[:, None], self.cache, routing)[:, 0]
        else:
            if routing is not None:
                hand_over(self.base, routing)
            hidden = self.decoder.step(self.last[rows], positions, self.cache)
        if routing is not None:
            self._keep_routing(rows, routing.ids)
        self.position[rows] += 1
        self._append(rows, self.head.logits(hidden))

    def _record(self) -> RoutingPass | None:
        """What the routers of the next forward shall do: record, or nothing."""
        return None if self.routing_shape is None else RoutingPass(self.routing_shape)

    def _keep_routing(self, rows: slice, ids: Tensor) -> None:
        """Stores the routes (n, L, K) of the running rows' last tokens."""
        if self.routing is None:
            self.routing = ids.new_zeros(*self.token_ids.shape, *ids.shape[1:])
        self.routing[torch.arange(len(ids), device=self.device), self.length[rows] - 1] = ids

    def _routing_of(self, slot: int, request: int, length: int) -> Tensor | None:
        """(p + length - 1, L, K) of a finished response, on the CPU."""
        prompt = self.prompt_routing.get(request)
        if prompt is None or self.routing is None:
            return prompt
        return torch.cat([prompt, self.routing[slot, : length - 1].cpu()])

    def _append(self, rows: slice, logits: Tensor) -> None:
        """Samples a token for the given slots, stores it, and retires the responses that end with it."""
        tokens, logprobs = choose(logits, self.params.temperature, self.seed[rows], self.length[rows])
        place = self.length[rows, None]
        self.token_ids[rows].scatter_(1, place, tokens[:, None])
        self.logprobs[rows].scatter_(1, place, logprobs[:, None])
        self.last[rows] = tokens
        self.length[rows] += 1
        stopped = torch.isin(tokens, self.stop_ids)
        full = self.length[rows] == self.params.max_new_tokens
        matched = self.stop_strings.found(self.token_ids[rows], self.length[rows])
        ended = stopped | full if matched is None else stopped | full | matched
        if not bool(torch.isfinite(logprobs).all()):
            self._refuse_nan(rows, logprobs)
        if bool(ended.any()):
            self._retire(
                rows.start + ended.nonzero()[:, 0], stopped[ended], None if matched is None else matched[ended]
            )

    def _retire(self, slots: Tensor, stopped: Tensor, matched: Tensor | None) -> None:
        """Hands out the completions in the given slots and closes the gaps they leave."""
        jobs = zip(
            slots.tolist(),
            self.request[slots].tolist(),
            self.sample[slots].tolist(),
            self.length[slots].tolist(),
            stopped.tolist(),
            [False] * len(slots) if matched is None else matched.tolist(),
            strict=True,
        )
        for slot, request, sample, length, by_id, by_string in jobs:
            reason = StopReason.EOS if by_id else StopReason.STOP_STRING if by_string else StopReason.LENGTH
            completion = Completion(
                self.token_ids[slot, :length].cpu().clone(),
                self.logprobs[slot, :length].cpu().clone(),
                reason,
                self.version,
                self._routing_of(slot, request, length),
            )
            self.results[request][sample] = completion
            if self.on_finished is not None:
                self.on_finished(request, sample, completion)
        self._close_gaps(slots)

    def _close_gaps(self, freed: Tensor) -> None:
        """Moves the last running rows into freed slots."""
        left = self.num_running - len(freed)
        running = torch.ones(self.num_running, dtype=torch.bool, device=self.device)
        running[freed] = False
        source = left + running[left:].nonzero()[:, 0]
        target = freed[freed < left]
        if len(source):
            self.cache.move(source, target, self.longest)
            for state in (self.request, self.sample, self.seed, self.length, self.position, self.last):
                state[target] = state[source]
            written = int(self.length[source].max())
            for buffer in (self.token_ids, self.logprobs, self.routing):
                if buffer is not None:
                    buffer[target, :written] = buffer[source, :written]
        self.num_running = left
        self.longest = int(self.position[:left].max()) if left else 0

    def _refuse_nan(self, rows: slice, logprobs: Tensor) -> None:
        slot = rows.start + int(torch.isfinite(logprobs).logical_not().nonzero()[0, 0])
        request = self.requests[int(self.request[slot])]
        raise NumericalError(
            f"the policy's logits for prompt {request.prompt_id!r}, sample {int(self.sample[slot])}, response token "
            f"{int(self.length[slot]) - 1} are not finite (policy version {self.version}); "
            "the weights have diverged, go back to an earlier checkpoint or lower the learning rate"
        )
