"""Continuous batching over the trained module: the next call samples with its weights as they are then.

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
from gspo.policy.moe.replay import RoutingPass
from gspo.policy.packed_attention import make_plan, plan_to
from gspo.rollout.base import GenerationRequest, OnFinished, SamplingParams
from gspo.rollout.embedded.decoder import make_decoder
from gspo.rollout.embedded.sampling import choose, uniforms
from gspo.rollout.embedded.slots import Admission, PrefillPlan
from gspo.rollout.embedded.steps import ModelSteps, Steps
from gspo.rollout.embedded.stopping import StopStrings
from gspo.types import Completion, StopReason

#: Prompt tokens computed in one forward, one long prompt excepted.
PREFILL_TOKENS = 2048


@dataclass(frozen=True)
class SlotUse:
    """How full the slots of a call were while samples waited for one: rows over slots, summed over decoding steps."""

    busy: int = 0
    total: int = 0

    @property
    def share(self) -> float:
        """1 if nothing ever waited."""
        return self.busy / self.total if self.total else 1.0


class EmbeddedEngine:
    """Samples with ``policy``; the next call uses the weights as they are then.

    slot_use: of the last call.
    """

    exact = True

    def __init__(self, policy: CausalPolicy, max_slots: int = 256) -> None:
        """max_slots: responses that run at the same time; more wait."""
        if max_slots < 1:
            raise ValueError(f"max_slots is {max_slots}; it must be at least 1")
        self.policy = policy
        self.max_slots = max_slots
        self.policy_version = 0
        self.slot_use = SlotUse()

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
            generation = _Generation(self, requests, params, on_finished)
            completions = generation.run()
            self.slot_use = generation.slot_use
            return completions


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
        self.routing_shape = routing_shape(policy) if params.record_routing else None
        self.steps: Steps = make_decoder(
            policy, slots, limit, params.max_new_tokens - 1, self.routing_shape
        ) or ModelSteps(policy, slots, limit, self.routing_shape)
        self.base, self.device = policy.base, device
        self.requests, self.params, self.on_finished = requests, params, on_finished
        self.version = engine.policy_version
        self.results: list[list[Completion | None]] = [[None] * request.num_samples for request in requests]
        self.waiting = deque(index for index, request in enumerate(requests) if request.num_samples)
        self.ready: deque[_Ready] = deque()
        self.num_slots, self.num_running, self.longest = slots, 0, 0
        self.slot_use = SlotUse()
        self.places = torch.arange(params.max_new_tokens, device=device)
        self.stop_ids = torch.tensor(sorted(params.stop_token_ids), dtype=torch.int64, device=device)
        self.stop_strings = StopStrings(params.stop_strings, policy.tokenizer)
        self.token_ids = torch.zeros(slots, params.max_new_tokens, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(slots, params.max_new_tokens, dtype=torch.float32, device=device)
        self.prompt_routing: dict[int, Tensor] = {}  # by request, (p, L, K)
        #: (slots, max_new_tokens, L, K), entry t: of response token t as an input; made when the first is known
        self.routing: Tensor | None = None
        #: quantile of every token of a response; greedy: None
        self.uniform = torch.zeros_like(self.logprobs, dtype=torch.float64) if params.temperature else None
        # request, sample, tokens of the response so far, position of the next token, last token
        self.request, self.sample, self.length, self.position, self.last = torch.zeros(
            5, slots, dtype=torch.int64, device=device
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
        routing = None if self.routing_shape is None else RoutingPass(self.routing_shape)
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
            if self.uniform is not None:
                seeds = torch.tensor([request.seeds[i] for i in samples], device=self.device)
                self.uniform[rows] = uniforms(seeds[:, None], self.places[None])
            self.position[rows] = len(request.token_ids)
            self.length[rows] = 0
            self.longest = max(self.longest, len(request.token_ids))
            states.append(entry.hidden)
            copies.append(Admission(entry.request, entry.start, len(request.token_ids), number, request.num_samples))
            self.num_running += number
            entry.next_sample += number
            if entry.next_sample == request.num_samples:
                self.ready.popleft()
        self.steps.admit(first, copies, plan)
        repeats = torch.tensor([entry.copies for entry in copies], device=self.device)
        logits = self.steps.first_logits(torch.stack(states)).repeat_interleave(repeats, dim=0)
        self._append(slice(first, self.num_running), logits)

    def _decode(self) -> None:
        """One token for every running row."""
        rows = slice(0, self.num_running)
        if self.ready or self.waiting:
            self.slot_use = SlotUse(self.slot_use.busy + self.num_running, self.slot_use.total + self.num_slots)
        self.longest += 1
        logits, routes = self.steps.step(self.last[rows], self.position[rows].clone(), self.longest)
        if routes is not None:
            self._keep_routing(rows, routes)
        self.position[rows] += 1
        self._append(rows, logits)

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
        place = self.length[rows, None]
        uniform = None if self.uniform is None else self.uniform[rows].gather(1, place)[:, 0]
        tokens, logprobs = choose(logits, self.params.temperature or 1.0, uniform)
        self.token_ids[rows].scatter_(1, place, tokens[:, None])
        self.logprobs[rows].scatter_(1, place, logprobs[:, None])
        self.last[rows] = tokens
        self.length[rows] += 1
        stopped = torch.isin(tokens, self.stop_ids)
        full = self.length[rows] == self.params.max_new_tokens
        matched = self.stop_strings.found(self.token_ids[rows], self.length[rows])
        ended = stopped | full if matched is None else stopped | full | matched
        if not bool((logprobs > -torch.inf).all()):  # false for nan too
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
        self.steps.release(slots, self.length[slots] - 1)
        self._close_gaps(slots)

    def _close_gaps(self, freed: Tensor) -> None:
        """Moves the last running rows into freed slots."""
        left = self.num_running - len(freed)
        running = torch.ones(self.num_running, dtype=torch.bool, device=self.device)
        running[freed] = False
        source = left + running[left:].nonzero()[:, 0]
        target = freed[freed < left]
        if len(source):
            self.steps.move(source, target, self.longest)
            for state in (self.request, self.sample, self.length, self.position, self.last):
                state[target] = state[source]
            written = int(self.length[source].max())
            for buffer in (self.token_ids, self.logprobs, self.routing):
                if buffer is not None:
                    buffer[target, :written] = buffer[source, :written]
            if self.uniform is not None:
                self.uniform[target] = self.uniform[source]
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
